"""Chooses the engine of a run's attention, and checks that attention can be computed as the layout splits it."""
from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from functools import partial

import jax

from meshtrain import pattern
from meshtrain.choices.setting import Choice, Refusal, Setting
from meshtrain.config.sections import Run
from meshtrain.kernels import blockwise, cudnn, mosaic, pallas, tiles
from meshtrain.kernels.engine import Engine, Scores
from meshtrain.parallel.context.attention import METHODS, RunAttention, value_dim
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.rules import Layout

LABELS = {"cudnn": "cuDNN's kernel", "pallas": "Pallas kernels that skip blocks outside documents",
          "mosaic": "Mosaic kernels for Hopper that skip blocks outside documents",
          "blockwise": "blockwise XLA engine"}
# The engines in the order in which "auto" tries them; it takes the first that can serve the run. On an H200 mosaic is
# correct, faster than pallas and as fast as cuDNN (benchmarks/gpu.md), with jax mosaic.AUTO_SINCE or later.
AUTO = ("cudnn", "mosaic", "pallas", "blockwise")


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


def choose(setting: Setting) -> Choice[RunAttention]:
    """Choose the attention of a run. Raises: Refusal if model.attention names an engine that cannot serve the run."""
    run, name = setting.run, engine(setting)
    method = METHODS[run.context.method] if setting.layout.sizes[AXIS] > 1 else None
    attention = RunAttention(functools.cache(partial(_engine_of, name.value, setting)), method, run.data.document_mask)
    return Choice(attention, name.why)


def engine(setting: Setting) -> Choice[str]:
    """Choose the name of the engine. Without a window no line tells the choice of "auto" on CPUs.

    Raises: Refusal if model.attention names an engine that cannot serve the run.
    """
    asked = setting.run.model.attention
    against = {"cudnn": _against_cudnn(setting), "pallas": _against_pallas(setting),
               "mosaic": _against_mosaic(setting), "blockwise": []}
    _check_asked(asked, against)
    mosaic_is_compared = True
    if setting.installed:
        against["cudnn"] += _without_cudnn()
        _check_asked(asked, against)
        mosaic_is_compared = jax.__version_info__ >= mosaic.AUTO_SINCE
    able = [name for name in AUTO if not against[name] and (name != "mosaic" or mosaic_is_compared)]
    name = able[0] if asked == "auto" else asked
    return Choice(name, _why(setting, name, against))


def _check_asked(asked: str, against: Mapping[str, list[str]]) -> None:
    if reasons := against.get(asked):
        able = " or ".join(f'"{other}"' for other in ("auto", *against) if not against.get(other))
        raise Refusal(f'model.attention="{asked}" cannot serve this run: {"; ".join(reasons)}; use {able}')


def _why(setting: Setting, name: str, against: Mapping[str, list[str]]) -> tuple[str, ...]:
    run, asked = setting.run, setting.run.model.attention
    if not (setting.on_gpus or asked != "auto" or window(run)):
        return ()
    if asked != "auto":
        reasons = [f"model.attention={asked}"]
    elif not setting.on_gpus:
        reasons = []
    elif name == "blockwise":
        reasons = [*dict.fromkeys(against["cudnn"] + against["pallas"])]
    else:
        reasons = against["cudnn"][:1]
    wide = _list_pallas_heads(run) if name == "mosaic" else ""
    label = LABELS[name] + (f" ({wide})" if wide else "") + _window_of(run)
    return (f"attention: {label}" + (f", because {'; '.join(reasons)}" if reasons else ""),)


def _window_of(run: Run) -> str:
    """Return the window for the user's line; "" if all layers attend to all earlier tokens."""
    within, count = window(run), sum(kind.mixer in pattern.WINDOWED for kind in pattern.kinds(run.model))
    if not within:
        return ""
    return f", window {within:,}" + (f" in {count} layers of {run.model.num_layers}" * (count < run.model.num_layers))


def _engine_of(name: str, setting: Setting, head_dim: int, value_dim: int, scores: Scores) -> Engine:
    """Return the engine of layers with these widths and scores. name: of the run's engine."""
    run, cp = setting.run, setting.layout.sizes[AXIS]
    if name == "cudnn":
        kernel = cudnn.engine(scores)
        assert kernel is not None, "`engine` has looked for cuDNN"
        return kernel
    if name == "mosaic" and mosaic.widths_of(head_dim, value_dim):
        return mosaic.engine(scores)
    if name in ("pallas", "mosaic"):        # `_list_pallas_heads`: layers with wide heads
        sizes = tiles.of(head_dim, setting.gpu_name, bool(scores.softcap), value_dim)
        assert sizes is not None, "`engine` has looked for tiles"
        return pallas.engine(sizes, scores)
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
    windows = [run.model.of(mixer).window for mixer in pattern.WINDOWED if mixer in present]
    return max((within for within in windows if within < run.data.seq_len), default=0)


def _against_kernels(setting: Setting) -> list[str]:
    """Return the reasons why no GPU kernel can serve this run."""
    run, layout, reasons = setting.run, setting.layout, []
    if not setting.on_gpus:
        reasons.append(f"kernels run on GPUs, not on platform {setting.platform!r}")
    if run.model.compute_dtype != "bfloat16":
        reasons.append(f"kernels take bfloat16, not model.compute_dtype={run.model.compute_dtype}")
    heads, kv_heads = (layout.mesh_axes("activations", axis) for axis in ("heads", "kv_heads"))
    if heads != kv_heads and any(cfg.num_kv_heads > 1 for cfg in attending(run)):
        reasons.append(f"{layout.rules.path} [activations] splits heads over {list(heads)} and kv_heads over "
                       f"{list(kv_heads)}")
    return reasons


def _against_cudnn(setting: Setting) -> list[str]:
    """Return the reasons why cuDNN's kernel, if installed, cannot serve this run; empty if it can."""
    run, layout, reasons = setting.run, setting.layout, _against_kernels(setting)
    if setting.gpu_name.startswith("mi"):
        reasons.append(f"cuDNN runs on NVIDIA's GPUs, not on {setting.gpu_name}")
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


def _against_pallas(setting: Setting) -> list[str]:
    """Return the reasons why the Pallas kernels cannot serve this run; empty if they can."""
    reasons, gpu = _against_kernels(setting), setting.gpu_name
    widths = [(cfg.head_dim, value_dim(cfg)) for cfg in attending(setting.run)]
    most = max((max(pair) for pair in widths), default=0)
    if most > (widest := max(tiles.WIDTHS)):
        reasons.append(f"the Pallas kernels take heads of a width of at most {widest}, not {most}")
    elif setting.on_gpus and not all(tiles.of(keys, gpu, value_dim=values) for keys, values in widths):
        reasons.append(f"no tiles are known to fit this GPU ({gpu or 'not in the table of GPUs'})")
    return reasons


def _against_mosaic(setting: Setting) -> list[str]:
    """Return the reasons why the Mosaic kernels cannot serve this run; empty if they can.

    They can also serve a run in which the Pallas kernels compute some heads that are too wide for them.
    """
    if setting.on_gpus and not mosaic.runs_on(setting.gpu):
        return [f"the Mosaic kernels need Hopper's wgmma (h100, h200, gh200), which {setting.gpu_name or 'this GPU'} "
                f"does not have"]
    widths = sorted({(cfg.head_dim, value_dim(cfg)) for cfg in attending(setting.run)})
    if widths and not any(mosaic.widths_of(*pair) for pair in widths):
        most, (keys, values) = " or ".join("{} and {}".format(*pair) for pair in mosaic.BLOCKS), widths[0]
        return [f"the Mosaic kernels take keys and values of a width of at most {most}, not {keys} and {values}"]
    return _against_pallas(setting)


def _list_pallas_heads(run: Run) -> str:
    """Return which heads the Pallas kernels compute in a run with "mosaic"; "" if there are none."""
    wide = sorted({cfg.head_dim for cfg in attending(run) if not mosaic.widths_of(cfg.head_dim, value_dim(cfg))})
    return f"heads of {', '.join(map(str, wide))}: Pallas kernels" if wide else ""


def _has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False
