"""python benchmarks/checkpoint.py [DIRECTORY]: the cost of a checkpoint to a run, compared with the speed of the disk.

There are two states. One belongs to the model in benchmarks/step.toml (params and adamw's moments), whose training step
is timed too. The other has 1 GB. Each is saved several times. Each time is compared with plain writes and reads of a
file with the same number of random bytes, in the same directory and in turns. DIRECTORY (default: a temporary one) is
where the run.dir of a run would be: on a local disk or in the cluster's file system. Writes benchmarks/checkpoint.md.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, words
from meshtrain import assembly, config, run_files
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore

ROUNDS = 4
EVERY = config.Run().checkpoint.every
GB = 1e9


def timed(action) -> float:
    """Return the wall seconds of an action. Earlier writes are synced first, so that no action pays for the dirty pages
    of another."""
    os.sync()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def forget(directory: Path) -> None:
    """Drop the files from the page cache, as after a reboot or on another host. Files on a disk need no root for
    this."""
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_write(path: Path, data: np.ndarray) -> None:
    with open(path, "wb", buffering=0) as file:
        left = memoryview(data).cast("B")
        while left:
            left = left[file.write(left[:1 << 26]):]
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(directory: Path, state) -> dict[str, float]:
    """Return medians over ROUNDS: the seconds of each checkpoint operation and of the same operation on a plain
    file."""
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    data = np.random.default_rng(0).random(nbytes // 4, np.float32)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    runs: list[dict[str, float]] = []
    with Checkpoints(DirectoryStore(directory / "checkpoints"), keep=1) as checkpoints:
        for step in range(1, ROUNDS + 2):
            once = {}

            def write() -> float:
                return timed(lambda: plain_write(directory / "plain", data))
            if step % 2:                    # alternate: the disk's cache may favour the first or the last
                once["write"] = write()
            os.sync()
            start = time.perf_counter()
            once["blocked"] = checkpoints.save(step, state, {})
            checkpoints.wait()
            once["saved"] = time.perf_counter() - start
            if not step % 2:
                once["write"] = write()
            place = directory / "checkpoints" / str(step)
            once["verify"] = timed(checkpoints.newest)
            once["restore"] = timed(lambda: jax.block_until_ready(checkpoints.restore(step, abstract)))
            forget(place)
            once["verify_cold"] = timed(checkpoints.newest)
            forget(place)
            once["restore_cold"] = timed(lambda: jax.block_until_ready(checkpoints.restore(step, abstract)))
            once["read"] = timed(lambda: plain_read(directory / "plain"))
            forget(directory)
            once["read_cold"] = timed(lambda: plain_read(directory / "plain"))
            once["on_disk"] = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            (directory / "plain").unlink()
            runs.append(once)
    once = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}     # without the warm-up
    copies = [timed(lambda: jax.tree.map(lambda x: np.array(jax.device_get(x)), state)) for _ in range(ROUNDS)]
    return once | {"bytes": nbytes, "copy": statistics.median(copies)}


def model() -> tuple[object, float]:
    """Return (a random state of the model in benchmarks/step.toml, the seconds of its training step)."""
    run = run_files.load([str(ROOT / "benchmarks/step.toml"), "--sharding.rules", str(ROOT / "sharding_rules/ddp.toml")])
    made = assembly.assemble(run, jax.devices()[:1])
    rng = np.random.default_rng(0)
    with jax.set_mesh(made.mesh):
        step = made.program.compile()
        state = made.program.initialize()
        shape = (run.data.global_batch, run.data.seq_len)
        zeros = {name: np.zeros(shape if name != "sequence" else shape[:1], np.int32)
                 for name in made.program.step.batch}
        zeros |= {"tokens": rng.integers(0, 256, shape, np.int32), "targets": rng.integers(0, 256, shape, np.int32)}
        times = []
        for _ in range(4):
            start = time.perf_counter()
            state, metrics = step(state, made.program.place(zeros))
            jax.block_until_ready(state)
            times.append(time.perf_counter() - start)
    return state, statistics.median(times[1:])


def large() -> object:
    """Return 1 GB of random numbers, in matrices with the shapes of an 83M-parameter transformer with adamw's
    moments."""
    keys = jax.random.split(jax.random.key(0), 20)
    return {f"w{i}": jax.random.normal(key, (3125, 4000), jnp.float32) for i, key in enumerate(keys)}


def report(results: dict[str, dict[str, float]]) -> str:
    device = jax.devices()[0].device_kind
    lines = [
        "# Checkpoints", "",
        "Written by `python benchmarks/checkpoint.py`. The first lines of this script say what is measured and how.", "",
        machine.line("" if device == "cpu" else device, "jax", "orbax-checkpoint", "xxhash"), "",
        f"Wall seconds, because the work of a disk is not CPU time. Medians of {ROUNDS}, in turns; before each turn, "
        f"all earlier writes are on the disk.", "",
        "| | " + " | ".join(results) + " |", "|---|" + "---|" * len(results),
    ]  # fmt: skip

    def rate(name: str) -> Callable[[Mapping], str]:
        return lambda r: f"{r[name]:.2f} s, {r['bytes'] / r[name] / GB:.2f} GB/s"
    table = {
        "state": lambda r: f"{r['bytes'] / 1e6:,.1f} MB",
        "on disk": lambda r: f"{r['on_disk'] / 1e6:,.1f} MB",
        "**time that the step waits, per save**": rate("blocked"),
        "  bare copy to the host": rate("copy"),
        f"**share of the run at checkpoint.every = {EVERY}**": lambda r: f"{r['blocked'] / EVERY / r['step']:.3%} of "
                                                                         f"steps of {r['step']:.2f} s",
        "complete on disk, checksums verified and synced": rate("saved"),
        "  plain file written and synced": rate("write"),
        "checksums verified, files in memory": rate("verify"),
        "  plain file read, in memory": rate("read"),
        "restored, files in memory": rate("restore"),
        "checksums verified, from disk": rate("verify_cold"),
        "restored, from disk": rate("restore_cold"),
        "  plain file read, from disk": rate("read_cold"),
    }  # fmt: skip
    lines += [f"| {name} | " + " | ".join(row(r) for r in results.values()) + " |" for name, row in table.items()]
    lines += ["",
              "GB/s: bytes of the state per second. A resume first verifies a checkpoint and then restores it; the "
              "restore finds the files in memory. On a CPU the arrays are already in the host's memory, so a save does "
              "not wait for a copy."]
    return "\n".join([*lines, ""])


def _directory(text: str) -> str:
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return text


def main(argv: list[str]) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("directory", nargs="?", metavar="DIRECTORY", type=_directory,
                        help="where a run's directory would be")
    parent = parser.parse_args(argv).directory
    results = {}
    for name, state, step_s in (("model of step.toml", *model()), ("1 GB, steps of 1 s", large(), 1.0)):
        with tempfile.TemporaryDirectory(dir=parent) as directory:
            results[name] = measure(Path(directory), state) | {"step": step_s}
        print(name, {key: round(value, 4) for key, value in results[name].items()}, flush=True)
    text = report(results)
    (ROOT / "benchmarks/checkpoint.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
