"""python benchmarks/peers.py [--part 1|2] [--only NAME …] [--minutes 6]: trainers in turns on one GPU.
python benchmarks/peers.py --compiled [--topology h100:8] [--only NAME …] [--write]: their steps on absent GPUs.

In turns: every trainer has the same Llama, tokens and precision. Each contender is a process. meshtrain and one other
contender run at the same time and take turns of a few steps. The order of turns alternates. Ratios are of pairs of
turns, and each is shown with the smallest and the largest. The model has Llama 3 8B's widths, and as many layers as fit
for two contenders. Part 1 has Hugging Face, part 2 the others. No contender starts if it would end after the minutes.
A contender that could not run is listed with the reason. On a CPU all sizes are tiny. Checks before the timing: the
number of parameters, the loss of step 1, that the loss falls on one batch, and that the loss of a second document is
independent of the first. Exit code 1 if a check fails.

Compiled: seconds by part from the roofline, for programs by the same XLA. Exit code 1 if a ratio to meshtrain has
fallen by 2% from its value in benchmarks/peers.json. --write replaces the values in that file. Nothing is executed.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import machine, words
from benchmarks.contenders import case as cases
from benchmarks.contenders.case import Case
from benchmarks.contenders.processes import SHARE, CheckFailure, Child, Contender, Failure, start

NEAR = 1.0                  # nats between the loss of step 1 and ln V: heads start with scores of variance 0.4 to 1.6
APART = 1e-6                # relative, between losses that must not depend on another document
FALLEN = 0.98               # the loss after `Sizes.falls` steps on one batch, at most this share of the first
LEFT_S = 100                # remaining time of a part in which another contender may start


class Sizes(NamedTuple):
    """How long to measure: pairs of turns, steps of a turn after one that is not counted, steps of the check that the
    loss falls, and seconds of a part."""
    rounds: int = 3
    steps: int = 4
    falls: int = 10
    part_s: float = 360


OURS = {packed: Contender("meshtrain", "ours", 0, packed) for packed in (False, True)}
TORCH = ("torch", "transformers")
TITAN = ("torch", "torchtitan", "tyro", "torchdata", "datasets")
LIGER = "its kernels are Triton's"


def list_contenders(flags: str = "") -> tuple[Contender, ...]:
    """Return the contenders. flags: of XLA, for MaxText on GPUs."""
    return (
        Contender("Hugging Face + torch.compile", "hugging_face", 1, True, needs=TORCH),
        Contender("torchtitan", "titan", 2, True, needs=TITAN, gpu="varlen_attn is FlashAttention's"),
        Contender("Hugging Face + torch.compile", "hugging_face", 1, False, needs=TORCH),
        Contender("MaxText", "max_text", 2, False, needs=("maxtext",), flags=flags),
        Contender("torchtitan", "titan", 2, False, needs=TITAN),
        Contender("Hugging Face + Liger", "hugging_face", 1, False, "liger", (*TORCH, "liger_kernel"), LIGER),
        Contender("plain flax", "plain_flax", 2, False, needs=("flax", "optax")),
        Contender("MaxText, embedding looked up", "max_text", 2, False, "lookup", ("maxtext",), flags=flags))


# Contenders that never run: (name, why).
ABSENT = (
    ("torchtitan 0.3.0", "imports DataParallelMeshDims of torch.distributed.fsdp, which torch 2.11 does not have"),
    ("TransformerEngine for jax", "has no wheel, and its build needs a CUDA toolkit"),
    ("flash-attn", "has no wheel on PyPI"))


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(child: Child, case: Case, folder: Path, sizes: Sizes) -> None:
    """Check a contender. Leaves it after `sizes.falls` steps on the batch that is timed. Raises: CheckFailure."""
    if child.started["params"] != case.num_params:
        raise CheckFailure(f"it has {child.started['params']:,} parameters, and the case {case.num_params:,}")
    if case.packed:
        check_apart(child, folder)
        child.ask("reset")
    child.ask(f"load {folder / name_of(case)}")
    losses = [child.ask("go 1")["losses"][0], child.ask(f"go {sizes.falls}")["losses"][1]]
    if not abs(losses[0] - math.log(case.vocab_size)) < NEAR:
        raise CheckFailure(f"the loss of step 1 is {losses[0]:.3f}, and ln V is {math.log(case.vocab_size):.3f}")
    if not losses[1] < FALLEN * losses[0]:
        raise CheckFailure(f"the loss on one batch goes from {losses[0]:.3f} to {losses[1]:.3f} in {sizes.falls} steps")


def check_apart(child: Child, folder: Path) -> None:
    """Check that the loss does not depend on other documents. Raises: CheckFailure."""
    losses = []
    for half in ("half0.npz", "half1.npz"):
        child.ask("reset")
        child.ask(f"load {folder / half}")
        losses.append(child.ask("go 1")["losses"][0])
    if not abs(losses[0] - losses[1]) <= APART * abs(losses[0]):
        raise CheckFailure(f"the loss of a second document depends on the first: {losses[0]!r} and {losses[1]!r}")


def name_of(case: Case) -> str:
    return f"rows{case.packed}.npz"


def write_batches(case: Case, folder: Path) -> None:
    """Write the batch that is timed and, for packed rows, the two of `check_apart`."""
    from benchmarks import gpu_speed
    count = case.microbatches * case.rows
    starts = np.zeros((count, case.seq_len), bool)
    starts[:, 0] = True
    if case.packed:
        starts = gpu_speed.typical(count, case.seq_len)
        for number, batch in enumerate(cases.halve(case)):
            cases.save(folder / f"half{number}.npz", batch)
    cases.save(folder / name_of(case), cases.draw(case, starts))


# ---- turns -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Turns of meshtrain and another contender. ours, theirs: (seconds, CPU seconds) of a step, turn by turn."""
    contender: Contender
    ours: tuple[tuple[float, float], ...]
    theirs: tuple[tuple[float, float], ...]
    start_s: tuple[float, float]
    read: tuple[Mapping, Mapping]


def take_turns(ours: Child, other: Child, sizes: Sizes, until: float) -> list[list[tuple[float, float]]]:
    """Return the turns of both; no new round begins after `until`, of time.monotonic."""
    turns: list[list[tuple[float, float]]] = [[], []]
    for number in range(sizes.rounds):
        if number and time.monotonic() > until:
            break
        for which in ((0, 1), (1, 0))[number % 2]:
            child = (ours, other)[which]
            child.ask("go 1")
            took = child.ask(f"go {sizes.steps}")
            turns[which].append((took["seconds"] / sizes.steps, took["cpu_s"] / sizes.steps))
    return turns


def missing(contender: Contender, on_gpu: bool) -> str:
    """Return why a contender cannot run here; "" if it can."""
    absent = [name for name in contender.needs if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return f"{contender.gpu}, which need a GPU" if contender.gpu and not on_gpu else ""


def run_part(contenders: Sequence[Contender], case: Case, sizes: Sizes, folder: Path, on_gpu: bool
             ) -> tuple[list[Pair], list[tuple[str, str]], list[str]]:
    """Return (pairs, missing contenders with reasons, failed checks). All contenders first import their libraries at
    the same time and then wait. Contenders with the same rows share one process of meshtrain. No contender starts if
    the remaining time is too short for it."""
    begun = time.monotonic()
    absent = [(label(one), reason) for one in contenders if (reason := missing(one, on_gpu))]
    able = [one for one in contenders if not missing(one, on_gpu)]
    pairs, failed = [], []
    with contextlib.ExitStack() as stack:
        children = {}
        for one in (*(OURS[packed] for packed in dict.fromkeys(one.packed for one in able)), *able):
            children[one] = Child(one, case_with(case, one.packed), folder, on_gpu)
            stack.callback(children[one].end)
        for packed in dict.fromkeys(one.packed for one in able):
            this = case_with(case, packed)
            write_batches(this, folder)
            say(f"{label(OURS[packed])} …")
            with start(children[OURS[packed]]) as ours:
                failed += failure_of(ours, this, folder, sizes)
                for one in (one for one in able if one.packed == packed):
                    used_s = time.monotonic() - begun
                    say(f"{used_s:.0f} s: {label(one)} …")
                    if used_s > sizes.part_s - LEFT_S:
                        absent.append((label(one), f"not started: {sizes.part_s:.0f} s a part"))
                        continue
                    try:
                        with start(children[one]) as other:
                            failed += failure_of(other, this, folder, sizes)
                            turns = take_turns(ours, other, sizes, begun + sizes.part_s * 0.9)
                            pairs.append(Pair(one, tuple(turns[0]), tuple(turns[1]), (
                                time_of_start(ours), time_of_start(other)), (ours.ask("read"), other.ask("read"))))
                            say("\n".join(tell(pairs[-1:], this, 0, None)[2:]))
                    except Failure as failure:
                        absent.append((label(one), str(failure)))
                        last = children[one].log.read_text(errors="replace").splitlines()[-20:]
                        say("\n".join([*last, str(failure)]))
    return pairs, absent, failed


def failure_of(child: Child, case: Case, folder: Path, sizes: Sizes) -> list[str]:
    """Return the failures that `check` finds. The contender is timed in any case."""
    try:
        check(child, case, folder, sizes)
    except CheckFailure as failure:
        say(f"{label(child.contender)}: {failure}")
        child.ask(f"load {folder / name_of(case)}")
        return [f"{label(child.contender)}: {failure}"]
    return []


def time_of_start(child: Child) -> float:
    return child.started["ready_s"] + child.first_step_s


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def case_with(case: Case, packed: bool) -> Case:
    return dataclasses.replace(case, packed=packed)


def label(contender: Contender) -> str:
    return f"{contender.name}, {'packed' if contender.packed else 'whole'} rows"


# ---- results ---------------------------------------------------------------------------------------------------------


def spread(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the ratio of pairs: the median with the smallest and the largest."""
    ratios = [b / a for a, b in zip(ours, theirs)]
    return f"**{statistics.median(ratios):.3f}** [{min(ratios):.3f}, {max(ratios):.3f}]"


def tell(pairs: Sequence[Pair], case: Case, flops: float, peak: float | None) -> list[str]:
    """Return the rows of a table. flops: of the model in a step. peak: FLOP/s of the GPU; None on a CPU."""
    header = ("contender", "rows", "ms a step", "÷ meshtrain, seconds", "÷ meshtrain, CPU seconds", "tokens/s", "MFU",
              "predicted, ms", "peak, GiB", "s to the first step", "settings")
    rows = [header, ("---",) * len(header)]
    seen = collections.Counter()
    for pair in pairs:
        sides = [(OURS[pair.contender.packed], pair.ours, 0)] * (not seen[pair.contender.packed])
        seen[pair.contender.packed] += 1
        for one, turns, which in (*sides, (pair.contender, pair.theirs, 1)):
            step_s, read = statistics.median(wall for wall, _ in turns), pair.read[which]
            walls, cpus = ((spread([t[k] for t in pair.ours], [t[k] for t in turns]) if which else "1") for k in (0, 1))
            predicted = read["predicted_s"]
            rows.append((one.name, "packed" if one.packed else "whole", f"{1e3 * step_s:.4g}", walls, cpus,
                         f"{case.tokens / step_s:,.0f}", f"{flops / step_s / peak:.1%}" if peak else "–",
                         f"{1e3 * predicted:.4g}" if predicted else "–",
                         f"{read['peak_bytes'] / 2**30:.1f}" if read["peak_bytes"] else "–",
                         f"{pair.start_s[which]:.0f}", read["settings"]))
    return ["| " + " | ".join(row) + " |" for row in rows]


def versions() -> list[str]:
    names = ("jax", "flax", "optax", "maxtext", "torch", "transformers", "liger-kernel", "torchtitan")
    found = {name: importlib.metadata.version(name) for name in names if is_installed(name)}
    return [f"{name} {version}" for name, version in found.items()]


def is_installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


# ---- commands --------------------------------------------------------------------------------------------------------

TINY = Case(vocab_size=512, embed_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384,
            rope_theta=1e4, norm_eps=1e-5, seq_len=128, microbatches=2, rows=4, dtype="float32", packed=False)
TINY_SIZES = Sizes(rounds=4, steps=3, falls=10)


def fit(hbm_bytes: float) -> tuple[int, int]:
    """Return (layers, tokens of a row) of Llama 3 8B's widths that fit for each of two contenders: 18 bytes a parameter
    with its copy in bfloat16, 10 bytes a logit, and 34 bytes × 2 widths per token and layer without checkpointing."""
    from benchmarks import peers_compiled
    for seq_len in (8192, 4096, 2048):
        one, two = (peers_compiled.case_of(4, 1, num_layers=n, seq_len=seq_len) for n in (1, 2))
        layer = 18 * (two.num_params - one.num_params) + 68 * one.embed_dim * seq_len
        rest = 18 * (2 * one.num_params - two.num_params) + 10 * one.vocab_size * seq_len + 2 * 2**30
        layers = int((SHARE * hbm_bytes - rest) // layer)
        if layers >= 2:
            return layers, seq_len
    raise Failure(f"a GPU of {hbm_bytes / 2**30:.0f} GiB cannot hold two contenders")


def find_gpu() -> str:
    """Return the name of the GPU by nvidia-smi; "" if there is none. This process must not allocate the GPU's
    memory."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True,
                              text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def run_turns(parts: Sequence[int], only: Sequence[str], minutes: float) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"         # of this process, which only generates rows
    from benchmarks import peers_compiled
    from benchmarks.contenders import max_text
    from meshtrain import hardware
    device = find_gpu()
    gpu = hardware.from_device_kind(device) if device else None
    if device and (gpu is None or not gpu.hbm_bytes):
        print(f"error: the memory of {device!r} is not in the hardware table (meshtrain/hardware.py)", file=sys.stderr)
        return 2
    case, sizes, peak = TINY, TINY_SIZES, None
    if gpu is not None and gpu.hbm_bytes:
        layers, seq_len = fit(gpu.hbm_bytes)
        case = peers_compiled.case_of(4, 1, num_layers=layers, seq_len=seq_len)
        sizes, peak = Sizes(), gpu.peak(case.dtype)
    sizes = sizes._replace(part_s=60 * minutes)
    contenders = [one for one in list_contenders(max_text.FLAGS)
                  if one.part in parts and (not only or one.name in only)]
    with tempfile.TemporaryDirectory() as folder:
        pairs, absent, failed = run_part(contenders, case, sizes, Path(folder), gpu is not None)
    print(machine.line(device), "·", " · ".join(versions()))
    print(f"{case.num_layers} layers, {case.num_params:,} parameters, {case.microbatches} × {case.rows} rows of "
          f"{case.seq_len} tokens, {case.dtype}; {sizes.rounds} pairs of {sizes.steps} steps\n")
    print("\n".join(tell(pairs, case, peers_compiled.count_flops(case, 1), peak)))
    print("\nNot run:\n" + "\n".join(f"- {name}: {reason}" for name, reason in (*absent, *ABSENT)))
    for line in failed:
        print(f"CHECK FAILED: {line}", file=sys.stderr)
    return 1 if failed else 0


def run_compiled(topology: str, only: Sequence[str], write: bool) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks import peers_compiled as compiled
    names = (compiled.OURS, compiled.PACKED, *compiled.PEERS)
    found, absent = {}, []
    for name in only or names:
        if reason := compiled.missing(name):
            absent.append(f"- {name}: {reason}")
        else:
            say(f"{name} …")
            found[name] = compiled.price(name, topology)
    print(machine.line("", "jax"), "·", compiled.key_of(topology), "\n")
    print("\n".join(compiled.tell(found)))
    if absent:
        print("\nNot compiled:\n" + "\n".join(absent))
    kept = compiled.read_kept().get(compiled.key_of(topology))
    if write:
        compiled.keep(topology, found)
        return 0
    if kept is None:
        print(f"\nnothing to compare with: peers.json has no {compiled.key_of(topology)}; --write keeps this")
        return 0
    fallen = compiled.compare(kept, {name: one.seconds for name, one in found.items()})
    for line in fallen:
        print(f"FALLEN: {line}", file=sys.stderr)
    return 1 if fallen else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = words.Parser(__doc__ or "")
    parser.add_argument("--part", type=int, choices=(1, 2))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--topology", default="h100:8")
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(argv)
    if given.compiled:
        return run_compiled(given.topology, given.only, given.write)
    return run_turns((given.part,) if given.part else (1, 2), given.only, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
