"""Chooses how dense MLPs are computed: by XLA's matmuls or by the fused kernels of `kernels.mosaic_mlp`.

XLA has no partitioning rule for the kernels, so they run in a `shard_map` over all mesh axes.
"""
from __future__ import annotations

from typing import NamedTuple

from meshtrain import hardware, pattern
from meshtrain.config.sections import Run
from meshtrain.kernels import mosaic, mosaic_mlp
from meshtrain.kernels.activations import SLOPES
from meshtrain.sharding.mesh import on_shards
from meshtrain.sharding.rules import GATHERED, Layout

AUTO = "xla"        # what model.mlp = "auto" selects until both are compared on a GPU (`python -m benchmarks.gpu`)


class FusedMLP(NamedTuple):
    """The fused kernels with one activation.

    programs: the GPU's number of multiprocessors. interpret: see `warpgroups.Call`.
    """
    activation: str
    programs: int
    interpret: object = False

    def fits(self, num_hidden: int) -> bool:
        """Whether the kernels support this mlp_dim; the other sizes were checked by `choose`."""
        return num_hidden % mosaic_mlp.COLUMNS == 0

    def forward(self, layout: Layout, x_BTD, gate_DF, up_DF):
        """Return gate, up and h = act(gate) · up, each [B, T, F]. gate_DF, up_DF: the gathered weights."""
        def local(x_BTD, gate_DF, up_DF):
            found = mosaic_mlp.forward(_rows(x_BTD), gate_DF, up_DF, self.activation, self.programs, self.interpret)
            return tuple(y.reshape(*x_BTD.shape[:2], -1) for y in found)
        of_x, of_y, of_w = _specs(layout)
        return on_shards(local, (of_x, of_w, of_w), (of_y,) * 3)(x_BTD, gate_DF, up_DF)

    def backward(self, layout: Layout, dy_BTD, down_FD, gate_BTF, up_BTF):
        """Return the gradients of gate and up, and h again, each [B, T, F]. down_FD: the gathered weight."""
        def local(dy_BTD, down_FD, gate_BTF, up_BTF):
            found = mosaic_mlp.backward(_rows(dy_BTD), down_FD.T, _rows(gate_BTF), _rows(up_BTF), self.activation,
                                        self.programs, self.interpret)
            return tuple(y.reshape(gate_BTF.shape) for y in found)
        of_x, of_y, _ = _specs(layout)
        of_down = layout.spec(GATHERED, ("mlp", "embed"))
        return on_shards(local, (of_x, of_down, of_y, of_y), (of_y,) * 3)(dy_BTD, down_FD, gate_BTF, up_BTF)


def _rows(a):
    return a.reshape(-1, a.shape[-1])


def _specs(layout: Layout):
    """PartitionSpecs of x, of the hidden activations, and of the gate and up weights."""
    x, hidden = (layout.spec("activations", ("batch", "seq", last)) for last in (None, "mlp"))
    return x, hidden, layout.spec(GATHERED, ("embed", "mlp"))


def choose(run: Run, layout: Layout, platform: str, gpu: hardware.Gpu | None) -> FusedMLP | None:
    """Return the fused kernels for this run, or None for XLA's matmuls.

    Raises: ValueError if model.mlp is "mosaic" and the kernels do not support the run.
    """
    asked = run.model.mlp
    if (AUTO if asked == "auto" else asked) != "mosaic":
        return None
    if reasons := _against(run, layout, platform, gpu):
        if asked == "auto":
            return None
        raise ValueError(f'model.mlp="mosaic" cannot serve this run: {"; ".join(reasons)}; use "auto" or "xla"')
    assert gpu is not None and gpu.num_sms is not None
    return FusedMLP(run.model.activation, gpu.num_sms)


def note(run: Run, chosen: FusedMLP | None) -> str:
    """Return the line that is printed at the start; empty for XLA's matmuls."""
    return chosen and f"MLPs: activation fused into the matmuls, Mosaic kernels (model.mlp={run.model.mlp})" or ""


def _against(run: Run, layout: Layout, platform: str, gpu: hardware.Gpu | None) -> list[str]:
    """Return the reasons why the kernels do not support this run; empty if they do."""
    model, shards = run.model, lambda logical: layout.num_shards(layout.mesh_axes("activations", logical))
    if platform == "cpu" or not mosaic.runs_on(gpu):
        return [f"the kernels need Hopper's wgmma (h100, h200, gh200), which {gpu.name if gpu else platform} does not "
                "have"]
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    tokens //= layout.num_shards(layout.batch_axes) * shards("seq")
    wrong = {
        "no layer has a dense MLP": not any(kind.mlp == "d" for kind in pattern.kinds(model)),
        f'they have no model.activation="{model.activation}" ({", ".join(SLOPES)})': model.activation not in SLOPES,
        f'they multiply in bfloat16, not model.compute_dtype="{model.compute_dtype}"':
            model.compute_dtype != "bfloat16",
        'they multiply in bfloat16, not model.matmul_dtype="float8"': model.matmul_dtype == "float8",
        "they add no bias (model.mlp_bias)": model.mlp_bias,
        "they train no adapters (lora.rank)": run.lora.rank > 0,
        "the rules split an MLP's matmuls over devices":
            shards("mlp") > 1 or any(layout.spec(GATHERED, ("embed", "mlp"))),
        f"a device has {tokens:,} tokens of a microbatch, model.embed_dim={model.embed_dim} and model.mlp_dim="
        f"{model.mlp_dim}, which must be multiples of {mosaic_mlp.TILE}, {mosaic_mlp.STEP} and {mosaic_mlp.COLUMNS}":
            not mosaic_mlp.fits(tokens, model.mlp_dim, model.embed_dim)}
    return [reason for reason, holds in wrong.items() if holds]
