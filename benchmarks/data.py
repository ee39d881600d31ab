"""python benchmarks/data.py: tokens per second of the data loader, and the cost of opening 10^8 documents.

There are four sources of documents with about 1,000 tokens: text (one file each), a memory-mapped uint16 token file,
the same tokens in 1,000 files, and a mixture of one part text and three parts tokens. Only Packed.iterate runs: there
is no step and no device. The limit is the memory bandwidth of the copy: the bytes of a batch's arrays at the rate of
np.copyto between arrays that no cache holds. Whole documents (data.packing) are the same tokens, and no document is
cut.

The index is a file with the ends of 10^8 documents (0.8 GB, memory-mapped, in the page cache). The documents are long
enough for 10^10 sequences, and 0.1% of them are held out. Their tokens do not exist; a read returns zeros. A separate
process opens the index, makes its first batch, and then makes single sequences at random positions and in order. Its
own memory is RssAnon. A second measurement has documents of 500 tokens, of which none is cut; it counts the documents
of the first windows. Writes benchmarks/data.md.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np

from benchmarks import words
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.data.batches.packing import Packing
from meshtrain.data.documents import contracts
from meshtrain.data.documents.contracts import Source
from meshtrain.data.files import token_files

BATCH_TOKENS = 1 << 17
DOCUMENT_TOKENS = 1000          # mean; exponentially distributed, at least 1
TOKEN_DOCUMENTS, TEXT_FILES = 60_000, 10_000
COPY_BYTES = 1 << 28
ROUNDS, ROUND_S = 7, 0.7
SEQ_LENS, PREFETCH = (256, 4096), (0, 2)
MANY_FILES = 1000
INDEX_DOCUMENTS, INDEX_TOKENS = 10**8, 410_000      # number of documents, and their mean tokens
# For whole documents: the mean tokens of a document, and the number of documents that are counted.
WHOLE_TOKENS, WHOLE_COUNTED = 500, 2 * 10**6


class Index:
    """A Source without tokens. Only the ends of its documents are in a file."""

    def __init__(self, path: str):
        self._ends = np.load(path, mmap_mode="r").view(np.ndarray)
        self.num_documents = len(self._ends)
        self._zeros = np.zeros(1 << 20, np.uint16)

    @functools.cached_property
    def totals(self) -> np.ndarray:
        return contracts.totals(self.num_documents, self.ends)

    def ends(self, documents: np.ndarray) -> np.ndarray:
        return self._ends[documents]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._zeros[:stop - start]


class Short(Index):
    """The same documents, with a mean of WHOLE_TOKENS tokens."""

    def ends(self, documents: np.ndarray) -> np.ndarray:
        return self._ends[documents] // (INDEX_TOKENS // WHOLE_TOKENS)


def write_index(path: str) -> None:
    random, step, total = np.random.default_rng(0), 1 << 22, 0
    ends = np.lib.format.open_memmap(path, "w+", np.int64, (INDEX_DOCUMENTS,))
    some = random.exponential(INDEX_TOKENS, step).astype(np.int64)      # drawn once, because their order is irrelevant
    for first in range(0, INDEX_DOCUMENTS, step):
        part = np.cumsum(some[:INDEX_DOCUMENTS - first]) + total
        ends[first:first + len(part)], total = part, int(part[-1])


def own_memory() -> int:
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))


def measure_index(path: str, seq_len: int, results) -> None:
    """Measure in a separate process: seconds to the first batch, bytes, and seconds of a sequence at a random position
    and of the next one."""
    before, clock, cpu = own_memory(), time.perf_counter(), time.process_time()
    packed = packing.pack([Index(path)], [1.0], Packing(0, seq_len, 1, seed=0, eos=0, validation_fraction=0.001), [""])
    packed.batch(0)
    opened = time.perf_counter() - clock, time.process_time() - cpu
    count = packed.train[0].tokens_per_epoch // seq_len
    anywhere = np.random.default_rng(0).integers(0, count, 200).tolist()
    times = []
    for numbers in (anywhere, range(2000)):
        clock, cpu = time.perf_counter(), time.process_time()
        for n in numbers:
            packed.batch(n)
        times.append(((time.perf_counter() - clock) / len(numbers), (time.process_time() - cpu) / len(numbers)))
    results.put((count, opened, own_memory() - before, *times))


def measure_whole(path: str, seq_len: int, counted: int, results) -> None:
    """Measure in a separate process: seconds to the first batch, to count documents, and for 2000 sequences; bytes."""
    before, clock, cpu = own_memory(), time.perf_counter(), time.process_time()
    packed = packing.pack([Short(path)], [1.0], Packing(0, seq_len, 1, seed=0, eos=0, packing="whole"), [""])
    times = []
    for work in (lambda: packed.batch(0), lambda: packed.train[0].has(counted * WHOLE_TOKENS // seq_len),
                 lambda: all(packed.batch(n) for n in range(2000))):
        work()
        times.append((time.perf_counter() - clock, time.process_time() - cpu))
        clock, cpu = time.perf_counter(), time.process_time()
    results.put((*times, own_memory() - before))


def in_a_process(measure, *given) -> tuple:
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=measure, args=(*given, results))
    process.start()
    found = results.get(timeout=600)
    process.join()
    return found


def index_rows(folder: str) -> str:
    path = str(Path(folder) / "index.npy")
    write_index(path)
    count, opened, memory, anywhere, following = in_a_process(measure_index, path, 4096)
    begun, counted, next_whole, memory_whole = in_a_process(measure_whole, path, 4096, WHOLE_COUNTED)
    return f"""| of {INDEX_DOCUMENTS:,} documents, {count:,} sequences of 4,096 | wall time | CPU time | goal |
|---|---|---|---|
| from opening to the first batch | {opened[0] * 1e3:.0f} ms | {opened[1] * 1e3:.0f} ms | 500 ms |
| private memory | {memory / 1e6:.0f} MB | | 50 MB |
| a sequence at a random position | {anywhere[0] * 1e6:.0f} µs | {anywhere[1] * 1e6:.0f} µs | 1,000 µs |
| the next sequence | {following[0] * 1e6:.0f} µs | {following[1] * 1e6:.0f} µs | |

| of as many documents of {WHOLE_TOKENS} tokens, none cut | wall time | CPU time |
|---|---|---|
| from opening to the first batch | {begun[0] * 1e3:.0f} ms | {begun[1] * 1e3:.0f} ms |
| a million documents counted (those before a start, and all for a second epoch) | {counted[0] * 1e6 / WHOLE_COUNTED:.2f} s | \
{counted[1] * 1e6 / WHOLE_COUNTED:.2f} s |
| the next sequence | {next_whole[0] / 2000 * 1e6:.0f} µs | {next_whole[1] / 2000 * 1e6:.0f} µs |
| private memory | {memory_whole / 1e6:.0f} MB | |
"""


def make_sources(folder: Path) -> tuple[Source, Source, Source]:
    random = np.random.default_rng(0)
    lengths = 1 + random.exponential(DOCUMENT_TOKENS, TOKEN_DOCUMENTS).astype(np.int64)
    ids = str(folder / f"ids{token_files.TOKENS}")
    np.save(ids, random.integers(0, 50_000, lengths.sum(), np.uint16))
    np.save(token_files.ends_path(ids), np.cumsum(lengths))
    pairs = []
    for i, some in enumerate(np.array_split(lengths, MANY_FILES)):
        part = str(folder / f"part{i}{token_files.TOKENS}")
        np.save(part, random.integers(0, 50_000, some.sum(), np.uint16))
        np.save(token_files.ends_path(part), np.cumsum(some))
        pairs.append(token_files.open_pair(part))
    paths = []
    for i, length in enumerate(1 + random.exponential(DOCUMENT_TOKENS, TEXT_FILES).astype(int)):
        paths.append(str(folder / f"{i}.txt"))
        Path(paths[-1]).write_bytes(random.bytes(length))
    return sources.open_files(paths), token_files.TokenFiles((token_files.open_pair(ids),)), \
        token_files.TokenFiles(tuple(pairs))


def tokens_per_s(step, tokens: int) -> tuple[float, float]:
    """Return (tokens per wall second, tokens per CPU second of all threads), medians of the rounds."""
    rates = []
    step()
    for _ in range(ROUNDS):
        clock, cpu, steps = time.perf_counter(), time.process_time(), 0
        while not steps or time.perf_counter() - clock < ROUND_S:
            step()
            steps += 1
        rates.append((steps * tokens / (time.perf_counter() - clock), steps * tokens / (time.process_time() - cpu)))
    return tuple(map(statistics.median, zip(*rates)))


def copy_bytes_per_s() -> tuple[float, float]:
    """Return the bytes that one thread copies per wall second and per CPU second, between arrays that are already in
    memory."""
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    return tokens_per_s(lambda: np.copyto(target, source), COPY_BYTES)


def batch_rows(folder: Path, copied: float) -> tuple[list[str], float]:
    """Return (rows of the table, bytes of a token in a batch). copied: bytes per CPU second."""
    lines, (text, ids, many) = [], make_sources(folder)
    for seq_len in SEQ_LENS:
        shape = Packing(50_000, seq_len, BATCH_TOKENS // seq_len, seed=0, eos=50_000)
        packs = {name: packing.pack(parts, weights, shape, [""] * len(parts))
                 for name, parts, weights in (("text files", [text], [1]), ("uint16 tokens", [ids], [1]),
                                              (f"the same in {MANY_FILES:,} files", [many], [1]),
                                              ("mixture 1 : 3", [text, ids], [1, 3]))}
        packs["whole documents of uint16 tokens"] = packing.pack(
            [ids], [1], dataclasses.replace(shape, packing="whole"), [""])
        width = sum(array.nbytes for array in packs["uint16 tokens"].batch(0).values()) / BATCH_TOKENS
        limit = copied / width
        for name, packed in packs.items():
            for prefetch in PREFETCH:
                with contextlib.closing(contracts.iterate(packed, 0, prefetch=prefetch)) as batches:
                    clock, cpu = tokens_per_s(lambda: next(batches), BATCH_TOKENS)
                lines.append(f"| {name} | {seq_len:,} | {prefetch} | {clock / 1e6:.1f} M | {cpu / 1e6:.1f} M | "
                             f"{limit / 1e6:.0f} M | {cpu / limit:.0%} |")
                print(lines[-1], flush=True)
    return lines, width


def main(argv) -> None:
    words.Parser(__doc__).parse_args(argv)
    _, copied = copy_bytes_per_s()
    with tempfile.TemporaryDirectory() as folder:
        index = index_rows(folder)
        print(index, flush=True)
        lines, width = batch_rows(Path(folder), copied)
    models = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    (ROOT / "benchmarks" / "data.md").write_text(f"""# The loader

Written by `python benchmarks/data.py`. The first lines of this script say what is measured and how.

{datetime.date.today()} · {os.cpu_count()} CPU cores ({models[0] if models else platform.machine()}) \
· Python {platform.python_version()} · numpy {version("numpy")} · grain {version("grain")}

Batches of {BATCH_TOKENS:,} tokens, documents of {DOCUMENT_TOKENS:,} tokens on average. A token takes {width:.0f} bytes in a \
batch. The limit is the speed of one thread that copies these bytes from memory to memory: {copied / 1e9:.1f} GB per CPU \
second. The load average was {os.getloadavg()[0]:.0f}. A shared machine lowers tokens/s, but not tokens per CPU second.

| source | seq_len | prefetched | tokens/s | tokens per CPU second | limit | of the limit |
|---|---|---|---|---|---|---|
""" + "\n".join(lines) + f"""

The index, in one process:

{index}""")


if __name__ == "__main__":
    main(sys.argv[1:])
