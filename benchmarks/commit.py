"""python benchmarks/commit.py [PROCESSES …]: the time until a checkpoint of thousands of processes is complete.

The files are simulated. They are written as orbax writes them: each process has its own store, with its pieces of every
array. The work of each process on its own files is real, one process after the other. So is all that process 0 does
after the last process has finished. PROCESSES: default 64, 512 and 2048. Writes benchmarks/commit.md.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

from benchmarks import machine, words
from meshtrain.checkpoint import commit

COUNTS = (64, 512, 2048)
# For one process: as many arrays as Llama with adamw's moments, the pieces of each array, and the numbers of a piece.
ARRAYS, PIECES, WIDTH = 36, 4, 40
GROUPS = 4                             # groups of a process's pieces: about as many data files as orbax makes


def simulate(place: Path, count: int, handler: ocp.PyTreeCheckpointHandler, arrays: int = ARRAYS) -> dict[
        str, np.ndarray]:
    """Write place/state as `count` processes leave it, each with its rows of every array. Return the whole arrays."""
    whole = {f"w{i:02}": np.random.default_rng(i).random((count * PIECES, WIDTH), np.float32) for i in range(arrays)}
    (place / "state").mkdir(parents=True)
    handler.save(epath.Path(place / "state"),
                 args=ocp.args.PyTreeSave({name: jnp.asarray(x) for name, x in whole.items()}))
    store = place / "state" / "ocdbt.process_0"
    described = (place / "state" / "array_metadatas" / "process_0").read_text()
    described = described.replace(f'"chunk_shape": [{count * PIECES}, {WIDTH}]', f'"chunk_shape": [1, {WIDTH}]')
    forms = json.loads(asyncio.run(_read(store, "w00/.zarray"))) | {"chunks": [1, WIDTH]}
    for left in ("manifest.ocdbt", "d"):
        path = place / "state" / left
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(store)
    for first in range(0, count, 64):
        asyncio.run(_write_stores(place / "state", range(first, min(first + 64, count)),
                                  whole, json.dumps(forms).encode()))
    for index in range(count):
        (place / "state" / "array_metadatas" / f"process_{index}").write_text(described)
    return whole


def _store(path: Path):
    return tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"})


async def _read(path: Path, key: str) -> bytes:
    return (await (await _store(path)).read(key)).value


async def _write_stores(state: Path, indices: range, whole: dict, form: bytes) -> None:
    async def one(index):
        store = await _store(state / f"ocdbt.process_{index}")
        for group in range(GROUPS):
            async with tensorstore.Transaction() as transaction:
                inside = store.with_transaction(transaction)
                for name in list(whole)[group::GROUPS]:
                    await inside.write(f"{name}/.zarray", form)
                    for row in range(index * PIECES, (index + 1) * PIECES):
                        await inside.write(f"{name}/{row}.0", whole[name][row].tobytes())
    await asyncio.gather(*(one(index) for index in indices))


def measure(directory: Path, count: int) -> dict[str, float]:
    handler, place = ocp.PyTreeCheckpointHandler(use_compression=False), directory / str(count)
    simulate(place, count, handler)
    handed, times = [], {}

    def merge(folder):
        began = time.perf_counter()
        handler.finalize(epath.Path(folder))
        times["merge"] = time.perf_counter() - began

    for index in range(count):
        began = time.perf_counter()
        commit.hand_over(place, index)
        handed.append(time.perf_counter() - began)
    began, cpu = time.perf_counter(), time.process_time()
    commit.commit(place, count, "{}", merge)
    total, cpu = time.perf_counter() - began, time.process_time() - cpu
    files = sum(path.is_file() for path in place.rglob("*"))
    shutil.rmtree(place)
    return times | {"own": statistics.median(handed), "commit": total, "cpu": cpu, "files": files, "processes": count}


def report(results: list[dict[str, float]]) -> str:
    rows = {
        "files": lambda r: f"{r['files']:,}",
        "each process, its own files": lambda r: f"{1000 * r['own']:.1f} ms",
        "**process 0, until the checkpoint is complete**": lambda r: f"{r['commit']:.2f} s",
        "  of it orbax, one index of all arrays": lambda r: f"{r['merge']:.2f} s",
        "  of it CPU": lambda r: f"{r['cpu']:.2f} s",
    }
    return "\n".join([
        "# Commits of many processes", "",
        "Written by `python benchmarks/commit.py`. The first lines of this script say what is measured and how.", "",
        machine.line("", "jax", "orbax-checkpoint", "xxhash"), "",
        "| processes | " + " | ".join(f"{r['processes']:,}" for r in results) + " |", "|---|" + "---|" * len(results),
        *(f"| {name} | " + " | ".join(row(r) for r in results) + " |" for name, row in rows.items()), "",
        "Wall seconds on a local disk. On a shared file system, process 0 needs one or two round trips for each file "
        "that it opens. It reads one record per process, in 32 threads. orbax reads its index and the description of "
        "its arrays.", ""])


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no number of processes; use at least 1")
    return int(text)


def main(argv: list[str]) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("processes", nargs="*", type=_count, default=COUNTS, metavar="PROCESSES",
                        help="how many write the checkpoint")
    results = []
    for count in parser.parse_args(argv).processes:
        with tempfile.TemporaryDirectory() as directory:
            results.append(measure(Path(directory), count))
        print({key: round(value, 4) for key, value in results[-1].items()}, flush=True)
    text = report(results)
    (ROOT / "benchmarks/commit.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
