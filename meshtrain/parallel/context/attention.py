"""Chooses a run's attention: an engine on each device and, if sequences are split over `context`, a method.

`ring` rotates keys and values. `gather` all-gathers them. `ulysses` splits heads instead of tokens. Each is a module
with `order` (of the tokens over the devices), `forward` and `backward`. Both passes are explicit: jax differentiates
neither.
"""
from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshtrain import hardware, pattern
from meshtrain.config.sections import Model, Run
from meshtrain.kernels import blockwise, cudnn, mosaic, pallas, tiles
from meshtrain.kernels.engine import CAUSAL, Engine, Expansion, Mask, Output, Scores
from meshtrain.names import PADDING
from meshtrain.parallel.context import gather, ring, ulysses
from meshtrain.parallel.context.latents import LatentMethod
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.mesh import automatic_axes
from meshtrain.sharding.rules import Layout

METHODS: dict[str, ModuleType] = {"ring": ring, "gather": gather, "ulysses": ulysses}
GPU_PLATFORMS = ("gpu", "cuda")
LABELS = {"cudnn": "cuDNN's kernel", "pallas": "Pallas kernels that skip blocks outside documents",
          "mosaic": "Mosaic kernels for Hopper that skip blocks outside documents",
          "blockwise": "blockwise XLA engine"}
# The engines in the order in which "auto" tries them; it takes the first that can serve the run. On an H200 mosaic is
# correct, faster than pallas and as fast as cuDNN (benchmarks/gpu.md), with jax mosaic.AUTO_SINCE or later.
AUTO = ("cudnn", "mosaic", "pallas", "blockwise")


def attend(method, layout, q_BTNH, k_BSKH, v_BSKV, segments_BT, mask: Mask = CAUSAL, sinks_N=None):
    """Return attention [B, T, N, V] within segments and the mask.

    N query heads are a multiple of the K key/value heads.

    method: forward(layout, mask, q, k, v, segments) -> o, lse and backward(layout, mask, q, k, v, segments, o, lse, do)
    -> dq, dk, dv. sinks_N: one score per head that takes part in the softmax and has no value.
    """
    return _attend(method, layout, mask, False, (q_BTNH, k_BSKH, v_BSKV, segments_BT), sinks_N)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _attend(method, layout, mask, bounded, operands, sinks_N):
    """Return the output; if `bounded`, (the output, an upper bound of each head's scores [N]).

    operands: queries first, segments last. The bound of a head is the largest log-sum-exp, without sinks, of its real
    tokens, but at least 0. It is an upper bound, because a token's log-sum-exp is at least its largest score. It is not
    differentiated.
    """
    return _attend_forward(method, layout, mask, bounded, operands, sinks_N)[0]


def _attend_forward(method, layout, mask, bounded, operands, sinks_N):
    o_BTNV, lse_BTN = method.forward(layout, mask, *operands)
    if bounded:     # over devices, an all-reduce of N numbers
        real_BT1 = operands[-1][..., None] != PADDING
        bound_N = jnp.max(jnp.where(real_BT1, lse_BTN, 0.0), (0, 1), initial=0.0)
    if sinks_N is not None:
        # The sink is a further key with value 0. The backward of a method needs only o and lse over all keys, including
        # the sink.
        sinks_N = sinks_N.astype(jnp.float32)
        o_BTNV = o_BTNV * jax.nn.sigmoid(lse_BTN - sinks_N)[..., None]
        lse_BTN = jnp.logaddexp(lse_BTN, sinks_N)
    # Named, so that selective remat saves o and lse and the backward does not repeat the forward.
    o_BTNV = checkpoint_name(o_BTNV.astype(operands[0].dtype), "attention_o")
    lse_BTN = checkpoint_name(lse_BTN, "attention_lse")
    return (o_BTNV, bound_N) if bounded else o_BTNV, (operands, sinks_N, o_BTNV, lse_BTN)


def _attend_backward(method, layout, mask, bounded, saved, do_BTNV):
    operands, sinks_N, o_BTNV, lse_BTN = saved
    do_BTNV = do_BTNV[0] if bounded else do_BTNV
    grads = method.backward(layout, mask, *operands, o_BTNV, lse_BTN, do_BTNV)
    dsinks_N = None
    if sinks_N is not None:
        along_BTN = jnp.sum(do_BTNV.astype(jnp.float32) * o_BTNV.astype(jnp.float32), -1)
        dsinks_N = -jnp.sum(jnp.exp(sinks_N - lse_BTN) * along_BTN, (0, 1))
    # Gradients of weights stay float32, as in `layers.project`.
    grads = (*(grad.astype(x.dtype) for grad, x in zip(grads[:3], operands)), *grads[3:], None)
    return grads, dsinks_N


_attend.defvjp(_attend_forward, _attend_backward)


@dataclasses.dataclass(frozen=True, eq=False)
class RunAttention:
    """The attention of a run. Its layers may differ in widths and scores.

    engine_of: (head_dim, width of values, scores) -> Engine. method: None without context parallelism. documents:
    whether a row can have several documents.
    """
    engine_of: Callable
    method: ModuleType | None = None
    documents: bool = True

    def __call__(self, layout, *operands, mask: Mask = CAUSAL, scores: Scores = Scores(), sinks_N=None,
                 expansion: Expansion | None = None, bounded: bool = False):
        """Return the same as `attend`; with `bounded`, the same as `_attend`.

        operands: q_BTNH, k_BSKH, v_BSKV, segments_BT. With an expansion: q_BTNH, latents [B, T, C], rotated keys [B, T,
        R], segments_BT.
        """
        q_BTNH, k, v, segments_BT = operands
        mask = mask if self.documents else mask._replace(documents=False)
        if expansion is None:
            engine = self.engine_of(q_BTNH.shape[-1], v.shape[-1], scores)
            method = Local(engine) if self.method is None else ContextParallel(self.method, engine)
            return _attend(method, layout, mask, bounded, operands, sinks_N)
        key, value, *how = expansion
        method = LatentMethod(self.engine_of(q_BTNH.shape[-1], value.shape[-1], scores), self.method, *how)
        return _attend(method, layout, mask, bounded, (q_BTNH, k, v, key, value, segments_BT), sinks_N)


class Local(NamedTuple):
    """The method without context parallelism: one engine on whole sequences."""
    engine: Engine

    def forward(self, layout, mask, *args):
        local = lambda q, k, v, segments: self.engine.forward(q, k, v, segments, segments, mask.within(q.shape[1]))
        return _on_shards(local, not self.engine.partitions, layout, args)

    def backward(self, layout, mask, *args):
        local = lambda q, k, v, segments, *rest: self.engine.backward(
            q, k, v, segments, segments, *rest, mask.within(q.shape[1]))
        return _on_shards(local, not self.engine.partitions, layout, args)


class ContextParallel(NamedTuple):
    """A context-parallel method on global arrays [B, T, …].

    If `context` is already manual (inside a pipeline), the arrays are this device's shards.
    """
    method: ModuleType
    engine: Engine

    def forward(self, layout, mask, *args):
        return _on_shards(partial(self.method.forward, self.engine, mask), self._needs_manual(), layout, args)

    def backward(self, layout, mask, *args):
        local = lambda q, k, v, segments, *out: self.method.backward(
            self.engine, mask, q, k, v, segments, Output(*out))
        return _on_shards(local, self._needs_manual(), layout, args)

    def _needs_manual(self) -> bool:
        return not self.engine.partitions or AXIS in automatic_axes()


def _on_shards(local, needs_manual: bool, layout, args):
    """Call `local` in a shard_map over the layout's specs if axes must be manual, else directly.

    `local` is (q, k, v, segments) -> o, lse or (q, k, v, segments, o, lse, do) -> dq, dk, dv.
    """
    axes = automatic_axes()     # inside a pipeline: tensor, and all of size 1
    if not axes or not needs_manual:
        return local(*args)
    rows, heads, kv = (layout.spec("activations", ("batch", "seq", *axis)) for axis in ((), ("heads",), ("kv_heads",)))
    in_specs = heads, kv, kv, rows, *[heads] * len(args[4:])
    # All automatic axes become manual, including those of size 1. In a partially manual region cuDNN does not compile,
    # and Pallas kernels silently compute all heads on every tensor rank. check_vma only matters for transposition,
    # which is not used.
    return jax.shard_map(local, in_specs=in_specs, out_specs=in_specs[:3] if args[4:] else (heads, heads),
                         axis_names=set(axes), check_vma=False)(*args)


# ---- what a run file asks for ----------------------------------------------------------------------------------------


def token_order(run: Run, sizes: Mapping[str, int]):
    """Return the token at each position of a sequence split over context, int64 [T]; None for the natural order."""
    cp = sizes[AXIS]
    return METHODS[run.context.method].order(run.data.seq_len, cp) if cp > 1 else None


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot split sequences as its rules say; empty if there are none.

    Only AXIS may split sequences. The token order, attention and recurrences over shards, and the manual axes of a
    pipeline assume this. Over another axis each device would treat its shard as a whole sequence.
    """
    cp, rules_file = layout.sizes[AXIS], layout.rules.path
    T, method, faults = run.data.seq_len, run.context.method, []
    seq, residual = (layout.mesh_axes("activations", axis) for axis in ("seq", "residual_seq"))
    if others := [axis for axis in seq if axis != AXIS]:
        split = " and ".join(f"mesh.{axis}={layout.sizes[axis]}" for axis in others)
        faults.append(f"{rules_file} [activations] seq = {list(seq)}: only {AXIS} splits sequences, not {split}; write "
                      f"seq = \"{AXIS}\" and give mesh.{AXIS} these devices, or give {', '.join(others)} to batch")
    if cp == 1:
        return faults
    if not seq:
        faults.append(f"{rules_file} [activations] has no seq = \"{AXIS}\": mesh.{AXIS}={cp} splits every sequence; "
                      f"write seq = \"{AXIS}\", or set mesh.{AXIS} to 1")
    elif seq == (AXIS,) and residual[:1] != (AXIS,):
        faults.append(f"{rules_file} [activations] residual_seq = {list(residual)} does not begin with context, which "
                      f"splits seq; write residual_seq = \"context\", or [\"context\", \"tensor\"]")
    heads, kv_heads = (layout.mesh_axes("activations", axis) for axis in ("heads", "kv_heads"))
    if heads != kv_heads and any(cfg.num_kv_heads > 1 for cfg in attending(run)):
        faults.append(f"{rules_file} [activations] heads = {list(heads)} and kv_heads = {list(kv_heads)}: where "
                      f"sequences are split, a device's query heads need its own key/value heads; give both the same "
                      f"mesh axes")
    chunks = cp if method == "ulysses" else 2 * cp
    num_shards = math.lcm(chunks, layout.num_shards(residual))
    if T % num_shards:
        near = " or ".join(str(n) for n in (T // num_shards * num_shards, -(-T // num_shards) * num_shards) if n)
        what = "mesh.context" if method == "ulysses" else "2 × mesh.context"
        also = f" and over {' × '.join(residual)}" if num_shards > chunks else ""
        faults.append(f"data.seq_len={T} cannot be split into {what} = {chunks} chunks of equal length{also}; use "
                      f"{near}")
    num_shards = layout.num_shards(layout.mesh_axes("activations", "heads"))
    if window(run) and run.model.latent.kv_dim and method != "ulysses":
        faults.append(f'model.window={window(run)} cannot be combined with model.latent and '
                      f'context.method="{method}"; use "ulysses", or mesh.context=1')
    for num_heads in sorted({cfg.num_heads for cfg in attending(run)}):
        if method == "ulysses" and (each := num_heads // num_shards) % cp:
            faults.append(f"context.method=\"ulysses\" splits {each} heads (model.num_heads={num_heads} over tensor "
                          f"{num_shards}) over mesh.context={cp}, which does not divide; use ring or gather, or a "
                          f"mesh.context that divides {each}")
    return faults


def choose(run: Run, layout: Layout, platform: str, gpu: str = "") -> tuple[Callable, str]:
    """Return (the attention function for `model.layers.Execution`, a note on the choice).

    The note is "" on CPUs for model.attention = "auto" without a window. platform: jax's name. gpu: its name in the
    hardware table.

    Raises: ValueError if model.attention names an engine that cannot serve the run.
    """
    asked, cp = run.model.attention, layout.sizes[AXIS]
    against = _against(run, layout, platform, gpu)
    against["cudnn"] += _without_cudnn()
    name = _chosen(asked, against)
    kept = 1 if name in ("mosaic", "pallas") else None
    why = [f"model.attention={asked}"] if asked != "auto" else against["cudnn"][:kept]
    if name == "blockwise" and asked == "auto":
        why = [*dict.fromkeys(why + against["pallas"])]
    if platform not in GPU_PLATFORMS and asked == "auto":
        why = []                # on these platforms no note is printed
    label = LABELS[name] + (f" ({left})" if (left := name == "mosaic" and _left_to_pallas(run)) else "")
    note = f"attention: {label}{_of(run)}" + (f", because {'; '.join(why)}" if why else "")
    made = RunAttention(functools.cache(partial(_engine, name, run, cp, gpu)),
                        METHODS[run.context.method] if cp > 1 else None, run.data.document_mask)
    return made, note if platform in GPU_PLATFORMS or asked != "auto" or window(run) else ""


def engine_name(run: Run, layout: Layout, gpu: str, platform: str = GPU_PLATFORMS[0]) -> str:
    """Return the engine that `choose` takes on these devices with current versions of all software; for cost estimates.

    Raises: ValueError as `choose`.
    """
    return _chosen(run.model.attention, _against(run, layout, platform, gpu), mosaic.AUTO_SINCE)


def _against(run: Run, layout: Layout, platform: str, gpu: str) -> dict[str, list[str]]:
    """Return the reasons why each engine cannot serve this run, regardless of the installed software."""
    return {"cudnn": _against_cudnn(run, layout, platform, gpu), "pallas": _against_pallas(run, layout, platform, gpu),
            "mosaic": _against_mosaic(run, layout, platform, gpu), "blockwise": []}


def _chosen(asked: str, against: Mapping[str, list[str]], version: tuple[int, ...] = jax.__version_info__) -> str:
    """Return the engine to use with this version of jax.

    Raises: ValueError if the requested engine cannot serve the run.
    """
    compared = lambda name: name != "mosaic" or version >= mosaic.AUTO_SINCE
    name = next(name for name in AUTO if not against[name] and compared(name)) if asked == "auto" else asked
    if against[name]:
        able = " or ".join(f'"{other}"' for other in ("auto", *against) if not against.get(other))
        raise ValueError(f'model.attention="{name}" cannot serve this run: {"; ".join(against[name])}; use {able}')
    return name


def _of(run: Run) -> str:
    """Return the window for the note; "" if all layers attend to all earlier tokens."""
    within, count = window(run), sum(kind.mixer in pattern.WINDOWED for kind in pattern.kinds(run.model))
    if not within:
        return ""
    return f", window {within:,}" + (f" in {count} layers of {run.model.num_layers}" * (count < run.model.num_layers))


def _engine(name: str, run: Run, cp: int, gpu: str, head_dim: int, value_dim: int, scores: Scores) -> Engine:
    if name == "cudnn":
        return cudnn.engine(scores)
    if name == "mosaic" and mosaic.widths_of(head_dim, value_dim):
        return mosaic.engine(scores)
    if name in ("pallas", "mosaic"):        # `_left_to_pallas`: layers with wide heads
        return pallas.engine(tiles.of(head_dim, gpu, bool(scores.softcap), value_dim), scores)
    if cp == 1 or run.context.method == "ulysses":
        return blockwise.engine(scores=scores)
    # At least four blocks per chunk, so that the half-masked diagonal blocks are 1/8 of the causal area of two chunks.
    chunk = run.data.seq_len // (2 * cp)
    return blockwise.engine(min(blockwise.BLOCK, max(32, -(-chunk // 4))), scores)


def attending(run: Run) -> list:
    """Return the [model] section of each attention mixer that the run has."""
    present = {kind.mixer for kind in pattern.kinds(run.model)}
    return [run.model.of(mixer) for mixer in pattern.ATTENTION if mixer in present]


def window(run: Run) -> int:
    """Return the number of tokens that a token attends to in layers with a window; 0 if that is the whole sequence.

    With several windows it is the largest.
    """
    present = {kind.mixer for kind in pattern.kinds(run.model)}
    found = [run.model.of(mixer).window for mixer in pattern.WINDOWED if mixer in present]
    return max((within for within in found if within < run.data.seq_len), default=0)


def value_dim(cfg: Model) -> int:
    """Return the width of values of a [model] section."""
    return cfg.latent.kv_dim and cfg.latent.value_dim or cfg.head_dim


def _against_kernels(run: Run, layout: Layout, platform: str) -> list[str]:
    """Return the reasons why no GPU kernel can serve this run."""
    reasons = []
    if platform not in GPU_PLATFORMS:
        reasons.append(f"kernels run on GPUs, not on platform {platform!r}")
    if run.model.compute_dtype != "bfloat16":
        reasons.append(f"kernels take bfloat16, not model.compute_dtype={run.model.compute_dtype}")
    heads, kv_heads = (layout.mesh_axes("activations", axis) for axis in ("heads", "kv_heads"))
    if heads != kv_heads and any(cfg.num_kv_heads > 1 for cfg in attending(run)):
        reasons.append(f"{layout.rules.path} [activations] splits heads over {list(heads)} and kv_heads over "
                       f"{list(kv_heads)}")
    return reasons


def _against_cudnn(run: Run, layout: Layout, platform: str, gpu: str) -> list[str]:
    """Return the reasons why cuDNN's kernel, if installed, cannot serve this run; empty if it can."""
    reasons = _against_kernels(run, layout, platform)
    if gpu.startswith("mi"):
        reasons.append(f"cuDNN runs on NVIDIA's GPUs, not on {gpu}")
    if run.data.document_mask:
        reasons.append("cuDNN's kernel has no document mask (data.document_mask=true)")
    if run.model.score_softcap:
        reasons.append(f"cuDNN's kernel has no softcap (model.score_softcap={run.model.score_softcap})")
    if window(run) and layout.sizes[AXIS] > 1 and run.context.method != "ulysses":
        reasons.append(f'cuDNN\'s kernel has no window over the chunks of context.method="{run.context.method}" '
                       f"(model.window={run.model.window})")
    for head_dim in sorted({cfg.head_dim for cfg in attending(run)}):
        if head_dim % 8 or head_dim > 128:
            reasons.append(f"cuDNN's kernel needs a head_dim that is a multiple of 8 up to 128, not {head_dim}")
    for cfg in attending(run):
        if (width := value_dim(cfg)) != cfg.head_dim:
            reasons.append(f"cuDNN's kernel has values of head_dim={cfg.head_dim}, not of {width} "
                           f"(model.latent.value_dim)")
    if run.training.deterministic:
        reasons.append("cuDNN's backward adds in no fixed order (training.deterministic=true)")
    return reasons


def _without_cudnn() -> list[str]:
    """Return the reasons why cuDNN's kernel is unavailable here; empty if it is available."""
    if not _has_cudnn():
        return ["the cuDNN library is not installed (extra 'gpu')"]
    return ["this version of jax does not offer cuDNN's blocks"] if cudnn.engine() is None else []


def _against_pallas(run: Run, layout: Layout, platform: str, gpu: str) -> list[str]:
    """Return the reasons why the Pallas kernels cannot serve this run; empty if they can."""
    reasons = _against_kernels(run, layout, platform)
    widths = [(cfg.head_dim, value_dim(cfg)) for cfg in attending(run)]
    most = max((max(pair) for pair in widths), default=0)
    if most > (widest := max(tiles.WIDTHS)):
        reasons.append(f"the Pallas kernels take heads of a width of at most {widest}, not {most}")
    elif platform in GPU_PLATFORMS and not all(tiles.of(keys, gpu, value_dim=values) for keys, values in widths):
        reasons.append(f"no tiles are known to fit this GPU ({gpu or 'not in the table of GPUs'})")
    return reasons


def _against_mosaic(run: Run, layout: Layout, platform: str, gpu: str) -> list[str]:
    """Return the reasons why the Mosaic kernels cannot serve this run; empty if they can.

    They can also serve a run in which the Pallas kernels compute some heads that are too wide for them.
    """
    if platform in GPU_PLATFORMS and not mosaic.runs_on(hardware.GPUS.get(gpu)):
        return [f"the Mosaic kernels need Hopper's wgmma (h100, h200, gh200), which {gpu or 'this GPU'} does not have"]
    widths = sorted({(cfg.head_dim, value_dim(cfg)) for cfg in attending(run)})
    if widths and not any(mosaic.widths_of(*pair) for pair in widths):
        most, (keys, values) = " or ".join("{} and {}".format(*pair) for pair in mosaic.BLOCKS), widths[0]
        return [f"the Mosaic kernels take keys and values of a width of at most {most}, not {keys} and {values}"]
    return _against_pallas(run, layout, platform, gpu)


def _left_to_pallas(run: Run) -> str:
    """Return a note on the heads that the Pallas kernels compute in a run with "mosaic"; "" if there are none."""
    wide = sorted({cfg.head_dim for cfg in attending(run) if not mosaic.widths_of(cfg.head_dim, value_dim(cfg))})
    return f"heads of {', '.join(map(str, wide))}: Pallas kernels" if wide else ""


def _has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False
