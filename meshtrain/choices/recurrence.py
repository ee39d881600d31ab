"""Chooses how linear attention's recurrence is computed, and checks that the layout can split it."""
from __future__ import annotations

from functools import partial

from meshtrain import hardware, pattern
from meshtrain.choices.setting import GPU_PLATFORMS, Choice, Setting
from meshtrain.config.sections import Run
from meshtrain.kernels import recurrence, recurrence_pallas
from meshtrain.model.execution import LinearAttention
from meshtrain.parallel.context.recurrence import Recurrence, TokenRuns, convolve, recur
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding.rules import Layout


KNOWN = (pattern.ATTENTION, pattern.RECURRENT, "")


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot run the model's recurrent mixers; empty if it can."""
    faults, cp, T, width = [], layout.sizes[AXIS], run.data.seq_len, run.model.linear.conv_width
    if not pattern.has(run.model, pattern.RECURRENT):
        return []
    heads, kv_heads = (layout.mesh_axes("activations", axis) for axis in ("heads", "kv_heads"))
    if heads != kv_heads:
        faults.append(f"{layout.rules.path} [activations] heads = {list(heads)} and kv_heads = {list(kv_heads)}: in "
                      "linear attention a device must hold the key heads of its value heads; give both the same axes")
    chunks = cp * (1 if run.context.method == "ulysses" else 2) if cp > 1 else 1
    if cp > 1 and T // chunks < width - 1:
        faults.append(f"data.seq_len={T} in {chunks} chunks of {T // chunks} tokens is too short for a convolution of "
                      f"{width} taps over mesh.context={cp}; use at least {chunks * (width - 1)}, or a smaller "
                      f"mesh.context")
    return faults


def choose(setting: Setting) -> Choice[LinearAttention | None]:
    """Choose the functions of recurrent mixers; None without them. On CPUs no line reports the choice."""
    run = setting.run
    # mixers of other families may call the functions, with widths of their own
    own = any(pattern.mixer(letter).family not in KNOWN for letter in pattern.present(run.model))
    if not pattern.has(run.model, pattern.RECURRENT) and not own:
        return Choice(None)
    runs = TokenRuns(0) if setting.layout.sizes[AXIS] == 1 else TokenRuns(1 if run.context.method == "ulysses" else 2)
    name = Choice("xla") if own else engine(run, setting.platform, setting.gpu)
    scan = recurrence_pallas.engine() if name.value == "pallas" else recurrence.recurrence
    return Choice(LinearAttention(partial(convolve, runs), partial(recur, Recurrence(scan, runs))), name.why)


def engine(run: Run, platform: str, gpu: hardware.Gpu | None) -> Choice[str]:
    """Choose "pallas" or "xla". The layout has no influence. platform, gpu: as in `Place`."""
    reasons = _against_kernels(run, platform, gpu)
    line = "linear attention: " + (f"XLA, because {'; '.join(reasons)}" if reasons else "Pallas kernels")
    return Choice("xla" if reasons else "pallas", (line,) if platform in GPU_PLATFORMS else ())


def _against_kernels(run: Run, platform: str, gpu: hardware.Gpu | None) -> list[str]:
    """Return the reasons why the Pallas kernels cannot serve this run; empty if they can."""
    reasons, chip = [], gpu.chip if gpu else None
    if platform not in GPU_PLATFORMS:
        reasons.append(f"kernels run on GPUs, not on platform {platform!r}")
    elif chip is None or chip.compute_capability not in recurrence_pallas.COMPILED:
        reasons.append(f"they are not compiled for this GPU ({gpu.name if gpu else 'not in the table of GPUs'})")
    if run.model.compute_dtype != "bfloat16":
        reasons.append(f"kernels take bfloat16, not model.compute_dtype={run.model.compute_dtype}")
    if run.model.attention == "blockwise":
        reasons.append("model.attention=blockwise")
    linear = run.model.linear
    if (width := max(linear.key_dim, linear.value_dim)) > recurrence_pallas.WIDEST:
        reasons.append(f"kernels take heads of a width of at most {recurrence_pallas.WIDEST}, not {width}")
    return reasons
