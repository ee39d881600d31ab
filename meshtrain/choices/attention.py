"""Chooses the engine of a run's attention, and checks that attention can be computed as the layout splits it."""
from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax

from meshtrain import pattern
from meshtrain.choices.setting import Choice, Place, Refusal, Setting
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


class Heads(NamedTuple):
    """The heads of one kind of layer. value_dim: width of values; head_dim: width of queries and keys."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, eq=False)
class Need:
    """What attention must support, in a run or for a caller's own arrays.

    dtype: the dtype of queries, keys and values. heads: one entry per kind of layer. method: one of METHODS. window:
    number of tokens that a token attends to; 0: the whole sequence. documents: whether a row can have several
    documents. latents: whether keys and values are computed from latents. asked: an engine's name, or "auto".
    """
    dtype: str
    heads: tuple[Heads, ...]
    seq_len: int
    method: str
    window: int = 0
    softcap: float = 0.0
    documents: bool = True
    latents: bool = False
    deterministic: bool = False
    asked: str = "auto"


def need_of(run: Run) -> Need:
    """Return what a run needs. Its messages name keys of run files."""
    model, present = run.model, pattern.present(run.model)
    sections = [model.of(letter) for letter, row in pattern.MIXERS.items() if row.attends and letter in present]
    heads = [Heads(cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, value_dim(cfg)) for cfg in sections]
    windows = [model.of(letter).window for letter in present if pattern.mixer(letter).windowed]
    return Need(model.compute_dtype, tuple(dict.fromkeys(heads)), run.data.seq_len, run.context.method,
                max((within for within in windows if within < run.data.seq_len), default=0), model.score_softcap,
                run.data.document_mask, bool(model.latent.kv_dim), run.training.deterministic, model.attention)


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot split a run's sequences as its rules say; empty if there are none."""
    return find_problems(need_of(run), layout)


def find_problems(need: Need, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot split sequences as its rules say; empty if there are none.

    Only AXIS may split sequences. The token order, attention and recurrences over shards, and the manual axes of a
    pipeline assume this. Over another axis each device would treat its shard as a whole sequence.
    """
    cp, rules_file = layout.sizes[AXIS], layout.rules.path
    T, method, faults = need.seq_len, need.method, []
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
    if heads != kv_heads and any(of.num_kv_heads > 1 for of in need.heads):
        faults.append(f"{rules_file} [activations] heads = {list(heads)} and kv_heads = {list(kv_heads)}: if sequences "
                      "are split, each device must hold the key/value heads of its query heads; give both the same "
                      "mesh axes")
    chunks = cp if method == "ulysses" else 2 * cp
    num_shards = math.lcm(chunks, layout.num_shards(residual))
    if T % num_shards:
        near = " or ".join(str(n) for n in (T // num_shards * num_shards, -(-T // num_shards) * num_shards) if n)
        what = "mesh.context" if method == "ulysses" else "2 × mesh.context"
        also = f" and over {' × '.join(residual)}" if num_shards > chunks else ""
        faults.append(f"data.seq_len={T} cannot be split into {what} = {chunks} chunks of equal length{also}; use "
                      f"{near}")
    num_shards = layout.num_shards(layout.mesh_axes("activations", "heads"))
    if need.window and need.latents and method != "ulysses":
        faults.append(f'model.window={need.window} cannot be combined with model.latent and '
                      f'context.method="{method}"; use "ulysses", or mesh.context=1')
    for num_heads in sorted({of.num_heads for of in need.heads}):
        if method == "ulysses" and (each := num_heads // num_shards) % cp:
            faults.append(f"context.method=\"ulysses\" splits {each} heads (model.num_heads={num_heads} over tensor "
                          f"{num_shards}) over mesh.context={cp}, which does not divide; use ring or gather, or a "
                          f"mesh.context that divides {each}")
    return faults


def choose(setting: Setting) -> Choice[RunAttention]:
    """Choose the attention of a run. Raises: Refusal if model.attention names an engine that cannot serve the run."""
    name = engine(setting, need := need_of(setting.run))
    return Choice(build(name.value, need, setting), name.why)


def build(name: str, need: Need, place: Place) -> RunAttention:
    """Return the attention that meets a need with the engine of this name."""
    method = METHODS[need.method] if place.layout.sizes[AXIS] > 1 else None
    return RunAttention(functools.cache(partial(_engine_of, name, need, place)), method, need.documents)


def engine(setting: Setting, need: Need) -> Choice[str]:
    """Choose the name of the engine. need: what the run needs. On CPUs, a run without windows prints no line about
    "auto".

    Raises: Refusal if model.attention names an engine that cannot serve the run.
    """
    name, reasons = choose_engine(need, setting)
    return Choice(name, _why(setting, need, name, reasons))


def choose_engine(need: Need, place: Place) -> tuple[str, list[str]]:
    """Return (the name of the engine, the reasons why a faster one cannot serve this; empty on CPUs).

    Raises: Refusal if `need` names an engine that cannot serve it.
    """
    against = {"cudnn": _against_cudnn(need, place), "pallas": _against_pallas(need, place),
               "mosaic": _against_mosaic(need, place), "blockwise": []}
    _check_asked(need.asked, against)
    mosaic_is_compared = True
    if place.installed:
        against["cudnn"] += _without_cudnn()
        _check_asked(need.asked, against)
        mosaic_is_compared = jax.__version_info__ >= mosaic.AUTO_SINCE
    able = [name for name in AUTO if not against[name] and (name != "mosaic" or mosaic_is_compared)]
    name = able[0] if need.asked == "auto" else need.asked
    if not place.on_gpus:
        return name, []
    return name, [*dict.fromkeys(against["cudnn"] + against["pallas"])] if name == "blockwise" else against["cudnn"][:1]


def _check_asked(asked: str, against: Mapping[str, list[str]]) -> None:
    if reasons := against.get(asked):
        able = " or ".join(f'"{other}"' for other in ("auto", *against) if not against.get(other))
        raise Refusal(f'model.attention="{asked}" cannot serve this run: {"; ".join(reasons)}; use {able}')


def _why(setting: Setting, need: Need, name: str, reasons: list[str]) -> tuple[str, ...]:
    if not (setting.on_gpus or need.asked != "auto" or need.window):
        return ()
    if need.asked != "auto":
        reasons = [f"model.attention={need.asked}"]
    label = LABELS[name]
    wide = sorted({of.head_dim for of in need.heads if not mosaic.widths_of(of.head_dim, of.value_dim)})
    if name == "mosaic" and wide:
        label += f" (heads of {', '.join(map(str, wide))}: Pallas kernels)"
    label += _window_of(setting.run, need.window)
    return (f"attention: {label}" + (f", because {'; '.join(reasons)}" if reasons else ""),)


def _window_of(run: Run, within: int) -> str:
    """Return the window for the user's line; "" if all layers attend to all earlier tokens."""
    if not within:
        return ""
    count = sum(pattern.mixer(kind.mixer).windowed for kind in pattern.kinds(run.model))
    return f", window {within:,}" + (f" in {count} of {run.model.num_layers} layers" * (count < run.model.num_layers))


def _engine_of(name: str, need: Need, place: Place, head_dim: int, value_dim: int, scores: Scores) -> Engine:
    """Return the engine of layers with these widths and scores. name: what `choose_engine` chose for all layers."""
    cp = place.layout.sizes[AXIS]
    if name == "cudnn":
        kernel = cudnn.engine(scores)
        assert kernel is not None, "`choose_engine` has looked for cuDNN"
        return kernel
    if name == "mosaic" and mosaic.widths_of(head_dim, value_dim):
        return mosaic.engine(scores)
    if name in ("pallas", "mosaic"):        # with "mosaic": layers with wide heads
        sizes = tiles.of(head_dim, place.gpu_name, bool(scores.softcap), value_dim)
        assert sizes is not None, "`choose_engine` has looked for tiles"
        return pallas.engine(sizes, scores)
    if cp == 1 or need.method == "ulysses":
        return blockwise.engine(scores=scores)
    # At least four blocks per chunk, so that the half-masked diagonal blocks are 1/8 of the causal area of two chunks.
    chunk = need.seq_len // (2 * cp)
    return blockwise.engine(min(blockwise.BLOCK, max(32, -(-chunk // 4))), scores)


def _against_kernels(need: Need, place: Place) -> list[str]:
    """Return the reasons why no GPU kernel can serve this."""
    layout, reasons = place.layout, []
    if not place.on_gpus:
        reasons.append(f"kernels run on GPUs, not on platform {place.platform!r}")
    if need.dtype != "bfloat16":
        reasons.append(f"kernels take bfloat16, not model.compute_dtype={need.dtype}")
    heads, kv_heads = (layout.mesh_axes("activations", axis) for axis in ("heads", "kv_heads"))
    if heads != kv_heads and any(of.num_kv_heads > 1 for of in need.heads):
        reasons.append(f"{layout.rules.path} [activations] splits heads over {list(heads)} and kv_heads over "
                       f"{list(kv_heads)}")
    return reasons


def _against_cudnn(need: Need, place: Place) -> list[str]:
    """Return the reasons why cuDNN's kernel, if installed, cannot serve this; empty if it can."""
    reasons = _against_kernels(need, place)
    if place.gpu_name.startswith("mi"):
        reasons.append(f"cuDNN runs on NVIDIA's GPUs, not on {place.gpu_name}")
    if need.documents:
        reasons.append("cuDNN's kernel has no document mask (data.document_mask=true)")
    if need.softcap:
        reasons.append(f"cuDNN's kernel has no softcap (model.score_softcap={need.softcap})")
    if need.window and place.layout.sizes[AXIS] > 1 and need.method != "ulysses":
        reasons.append(f'cuDNN\'s kernel has no window over the chunks of context.method="{need.method}" '
                       f"(model.window={need.window})")
    for head_dim in sorted({of.head_dim for of in need.heads}):
        if head_dim % 8 or head_dim > 128:
            reasons.append(f"cuDNN's kernel needs a head_dim that is a multiple of 8 up to 128, not {head_dim}")
    for of in need.heads:
        if of.value_dim != of.head_dim:
            reasons.append(f"cuDNN's kernel has values of head_dim={of.head_dim}, not of {of.value_dim} "
                           f"(model.latent.value_dim)")
    if need.deterministic:
        reasons.append("cuDNN's backward adds in no fixed order (training.deterministic=true)")
    return reasons


def _without_cudnn() -> list[str]:
    """Return the reasons why cuDNN's kernel is unavailable here; empty if it is available."""
    if not _has_cudnn():
        return ["the cuDNN library is not installed (extra 'gpu')"]
    return ["this version of jax does not offer cuDNN's blocks"] if cudnn.engine() is None else []


def _against_pallas(need: Need, place: Place) -> list[str]:
    """Return the reasons why the Pallas kernels cannot serve this; empty if they can."""
    reasons, gpu = _against_kernels(need, place), place.gpu_name
    widths = [(of.head_dim, of.value_dim) for of in need.heads]
    most = max((max(pair) for pair in widths), default=0)
    if most > (widest := max(tiles.WIDTHS)):
        reasons.append(f"the Pallas kernels take heads of a width of at most {widest}, not {most}")
    elif place.on_gpus and not all(tiles.of(keys, gpu, value_dim=values) for keys, values in widths):
        reasons.append(f"no tiles are known to fit this GPU ({gpu or 'not in the table of GPUs'})")
    return reasons


def _against_mosaic(need: Need, place: Place) -> list[str]:
    """Return the reasons why the Mosaic kernels cannot serve this; empty if they can.

    They can also serve a run in which the Pallas kernels compute some heads that are too wide for them.
    """
    if place.on_gpus and not mosaic.runs_on(place.gpu):
        return [f"the Mosaic kernels need Hopper's wgmma (h100, h200, gh200), which {place.gpu_name or 'this GPU'} "
                f"does not have"]
    widths = sorted({(of.head_dim, of.value_dim) for of in need.heads})
    if widths and not any(mosaic.widths_of(*pair) for pair in widths):
        most, (keys, values) = " or ".join("{} and {}".format(*pair) for pair in mosaic.BLOCKS), widths[0]
        return [f"the Mosaic kernels take keys and values of a width of at most {most}, not {keys} and {values}"]
    return _against_pallas(need, place)


def _has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False
