"""Chooses how dense MLPs are computed: by XLA's matmuls or by the fused kernels of `kernels.mosaic_mlp`."""
from __future__ import annotations

from meshtrain import pattern
from meshtrain.choices.setting import Choice, Refusal, Setting
from meshtrain.kernels import mosaic, mosaic_mlp
from meshtrain.kernels.activations import SLOPES
from meshtrain.model.fused_mlp import FusedMLP
from meshtrain.sharding.rules import GATHERED


def choose(setting: Setting) -> Choice[FusedMLP | None]:
    """Choose the fused kernels, or None for XLA's matmuls.

    Raises: Refusal if model.mlp is "mosaic" and the kernels do not support the run.
    """
    model = setting.run.model
    if model.mlp != "mosaic":       # "auto": XLA, until both are compared on a GPU (`python -m benchmarks.gpu`)
        return Choice(None)
    if reasons := _against(setting):
        raise Refusal(f'model.mlp="mosaic" cannot serve this run: {"; ".join(reasons)}; use "auto" or "xla"')
    num_sms = setting.gpu and setting.gpu.num_sms
    assert num_sms, "the kernels run on GPUs of the hardware table"
    return Choice(FusedMLP(model.activation, num_sms), (
        "MLPs: activation fused into the matmuls, Mosaic kernels (model.mlp=mosaic)",))


def _against(setting: Setting) -> list[str]:
    """Return the reasons why the kernels do not support this run; empty if they do."""
    run, layout, model = setting.run, setting.layout, setting.run.model
    if setting.platform == "cpu" or not mosaic.runs_on(setting.gpu):
        return [f"the kernels need Hopper's wgmma (h100, h200, gh200), which {setting.gpu_name or setting.platform} "
                "does not have"]

    def shards(logical: str) -> int:
        return layout.num_shards(layout.mesh_axes("activations", logical))
    tokens = run.data.global_batch // run.training.microbatches * run.data.seq_len
    tokens //= layout.num_shards(layout.batch_axes) * shards("seq")
    wrong = {
        "no layer has a dense MLP": not pattern.share(model, mlps="d"),
        f'they compute {", ".join(SLOPES)}, not model.activation="{model.activation}"': model.activation not in SLOPES,
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
