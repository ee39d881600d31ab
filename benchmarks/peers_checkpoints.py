"""python benchmarks/peers_checkpoints.py [DIRECTORY]: checkpoints of one host beside plain orbax and beside `cp`, in turns.

A state on eight simulated devices (fsdp 8) is saved by meshtrain's Checkpoints, by orbax's StandardCheckpointer and by
`cp -r` of what meshtrain wrote. The first two restore it on data 2 × fsdp 4. A save ends when every file is synced. The
order of turns alternates, and ratios are of pairs: seconds of the other over seconds of meshtrain, with the smallest and
the largest. meshtrain also writes checksums, and a resume verifies them. DIRECTORY: where a run.dir would be; default:
a temporary one. Prints the tables of benchmarks/peers.md.
"""
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
DEVICES = 8
if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import machine, words
from meshtrain import files
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore

ROUNDS = 4                  # the first warms up and is not counted
SIZES = (10e6, 100e6, 1.2e9)
MATRICES = 20               # of a state: two thirds of them are the optimizer's
OURS, ORBAX, CP = "meshtrain", "plain orbax", "cp -r"
Seconds = tuple[float, float]       # wall, CPU of this process and its children


def draw(nbytes: float, mesh: Mesh) -> dict:
    """Return a state of random float32 matrices, split by rows over fsdp."""
    rng, columns = np.random.default_rng(0), 512
    rows = max(1, round(nbytes / MATRICES / 4 / columns / DEVICES)) * DEVICES
    leaves = {f"w{i}": jax.device_put(rng.random((rows, columns), np.float32), NamedSharding(mesh, P("fsdp")))
              for i in range(MATRICES)}
    return {"params": dict(list(leaves.items())[::3]),
            "opt_state": {name: leaf for i, (name, leaf) in enumerate(leaves.items()) if i % 3}}


def describe(state: dict, mesh: Mesh) -> dict:
    """Return what to restore: the same arrays, split over the mesh's fsdp."""
    place = NamedSharding(mesh, P("fsdp"))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)


def sync(place: Path) -> None:
    """Sync the files below a directory, and no others: the machine may have other users."""
    for path in (place, *place.rglob("*")):
        files.sync(path)


def time_action(action: Callable[[], object]) -> tuple[Seconds, object]:
    """Return (the seconds of an action, what it returned)."""
    start, before = time.perf_counter(), os.times()
    done = action()
    return (time.perf_counter() - start, sum(os.times()[:4]) - sum(before[:4])), done


def measure(directory: Path, nbytes: float, rounds: int = ROUNDS) -> dict[str, dict[str, list[Seconds]]]:
    """Return "save" and "restore" -> contender -> seconds of each round but the first. Raises: AssertionError if a
    restored state differs."""
    devices = np.array(jax.devices()[:DEVICES])
    state = draw(nbytes, Mesh(devices.reshape(1, -1), ("data", "fsdp")))
    wanted = describe(state, Mesh(devices.reshape(2, -1), ("data", "fsdp")))
    plain, turns = ocp.StandardCheckpointer(), []
    with Checkpoints(DirectoryStore(directory / "ours")) as ours:        # no contender removes older ones
        for number in range(1, rounds + 1):
            own, theirs, copy = directory / "ours" / str(number), directory / f"orbax{number}", directory / "copy"

            def save_ours() -> None:
                ours.save(number, state, {})
                ours.wait()

            def save_plain() -> None:
                plain.save(theirs, state)
                plain.wait_until_finished()
                sync(theirs)

            def run_cp() -> None:
                subprocess.run(["cp", "-r", own, copy], check=True)
                sync(copy)
            saves = {OURS: save_ours, ORBAX: save_plain}
            reads = {OURS: lambda: jax.block_until_ready(ours.restore(number, wanted)),
                     ORBAX: lambda: jax.block_until_ready(plain.restore(theirs, wanted))}
            turn: dict[str, dict[str, Seconds]] = {"save": {}, "restore": {}}
            for name in list(saves)[::1 if number % 2 else -1]:
                turn["save"][name], _ = time_action(saves[name])
            turn["save"][CP], _ = time_action(run_cp)
            for name in list(reads)[::1 if number % 2 else -1]:
                turn["restore"][name], read = time_action(reads[name])
                assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()),
                                                        read, state))), f"{name} restored another state"
            turn["restore"][CP] = turn["save"][CP]
            turns.append(turn)
            for place in (own, theirs, copy):
                shutil.rmtree(place)
    return {kind: {name: [turn[kind][name] for turn in turns[1:]] for name in (OURS, ORBAX, CP)}
            for kind in ("save", "restore")}


def spread(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the ratio of pairs: the median with the smallest and the largest."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return f"**{statistics.median(ratios):.2f}** [{min(ratios):.2f}, {max(ratios):.2f}]"


def tell(results: Mapping[float, dict]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| state | | " + " | ".join(f"{name}, s" for name in (OURS, ORBAX, CP))
             + " | orbax ÷ meshtrain, seconds | orbax ÷ meshtrain, CPU seconds | cp ÷ meshtrain, seconds |",
             "|" + " --- |" * 8]
    for nbytes, kinds in results.items():
        for kind, turns in kinds.items():
            walls, cpus = ({name: [taken[i] for taken in turns[name]] for name in turns} for i in (0, 1))
            cells = [f"{nbytes / 1e6:,.0f} MB", kind,
                     *(f"{statistics.median(walls[name]):.3g}" for name in (OURS, ORBAX, CP)),
                     spread(walls[OURS], walls[ORBAX]), spread(cpus[OURS], cpus[ORBAX]), spread(walls[OURS], walls[CP])]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _directory(text: str) -> str:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = words.Parser(__doc__ or "")
    parser.add_argument("directory", nargs="?", metavar="DIRECTORY", type=_directory)
    results = {}
    for nbytes in SIZES:
        with tempfile.TemporaryDirectory(dir=parser.parse_args(argv).directory) as directory:
            results[nbytes] = measure(Path(directory), nbytes)
        print("\n".join(tell({nbytes: results[nbytes]})), file=sys.stderr, flush=True)
    print(machine.line("", "jax", "orbax-checkpoint"))
    print(f"Eight simulated devices, {ROUNDS - 1} pairs.\n")
    print("\n".join(tell(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
