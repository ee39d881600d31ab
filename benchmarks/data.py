"""python benchmarks/data.py: how many tokens a second the loader makes, beside what copying its batches would take.

Sources of documents of some 1,000 tokens: text (a file each), a memory-mapped uint16 token file, and a mixture of one part of
that text and three of the tokens. Nothing but Data.iterate runs: no step, no device. The limit is the memory bandwidth of the
copy: the bytes of a batch's arrays at the rate of np.copyto between arrays that no cache holds. Writes benchmarks/data.md.
"""
from __future__ import annotations

import contextlib
import datetime
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

from meshtrain.data import packing, sources, token_files

BATCH_TOKENS = 1 << 17
DOCUMENT_TOKENS = 1000          # on average; exponentially distributed, at least 1
TOKEN_DOCUMENTS, TEXT_FILES = 60_000, 10_000
COPY_BYTES = 1 << 28
ROUNDS, ROUND_S = 7, 0.7
SEQ_LENS, PREFETCH = (256, 4096), (0, 2)


def make_sources(folder: Path) -> tuple[sources.Source, sources.Source]:
    random = np.random.default_rng(0)
    lengths = 1 + random.exponential(DOCUMENT_TOKENS, TOKEN_DOCUMENTS).astype(np.int64)
    ids = str(folder / f"ids{token_files.TOKENS}")
    np.save(ids, random.integers(0, 50_000, lengths.sum(), np.uint16))
    np.save(token_files.ends_path(ids), np.cumsum(lengths))
    paths = []
    for i, length in enumerate(1 + random.exponential(DOCUMENT_TOKENS, TEXT_FILES).astype(int)):
        paths.append(str(folder / f"{i}.txt"))
        Path(paths[-1]).write_bytes(random.bytes(length))
    return sources.open_files(paths), token_files.TokenFiles((token_files.open_pair(ids),))


def tokens_per_s(step, tokens: int) -> tuple[float, float]:
    """(per second of the clock, per second of CPU in all threads), medians of the rounds."""
    rates = []
    step()
    for _ in range(ROUNDS):
        clock, cpu, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - clock < ROUND_S:
            step()
            steps += 1
        rates.append((steps * tokens / (time.perf_counter() - clock), steps * tokens / (time.process_time() - cpu)))
    return tuple(map(statistics.median, zip(*rates)))


def copy_bytes_per_s() -> tuple[float, float]:
    """Bytes copied per second of the clock and of CPU, one thread, from memory to memory that is already there."""
    source, target = (np.ones(COPY_BYTES, np.uint8) for _ in range(2))
    return tokens_per_s(lambda: np.copyto(target, source), COPY_BYTES)


def main() -> None:
    lines = []
    _, copied = copy_bytes_per_s()
    with tempfile.TemporaryDirectory() as folder:
        text, ids = make_sources(Path(folder))
        for seq_len in SEQ_LENS:
            packs = {name: packing.pack(parts, weights, bos=50_000, seq_len=seq_len, global_batch=BATCH_TOKENS // seq_len, seed=0)
                     for name, parts, weights in (("text files", [text], [1]), ("uint16 tokens", [ids], [1]),
                                                  ("mixture 1 : 3", [text, ids], [1, 3]))}
            width = sum(array.nbytes for array in packs["uint16 tokens"].batch(0).values()) / BATCH_TOKENS
            limit = copied / width
            for name, packed in packs.items():
                for prefetch in PREFETCH:
                    with contextlib.closing(packed.iterate(0, prefetch=prefetch)) as batches:
                        clock, cpu = tokens_per_s(lambda: next(batches), BATCH_TOKENS)
                    lines.append(f"| {name} | {seq_len:,} | {prefetch} | {clock / 1e6:.1f} M | {cpu / 1e6:.1f} M | "
                                 f"{limit / 1e6:.0f} M | {cpu / limit:.0%} |")
                    print(lines[-1], flush=True)
    models = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    (ROOT / "benchmarks" / "data.md").write_text(f"""# The loader

Written by `python benchmarks/data.py`; what is measured, and how, stands there.

{datetime.date.today()} · {os.cpu_count()} CPU cores ({models[0] if models else platform.machine()}) \
· Python {platform.python_version()} · numpy {version("numpy")} · grain {version("grain")}

Batches of {BATCH_TOKENS:,} tokens, documents of {DOCUMENT_TOKENS:,} on average. The limit is one thread that copies the \
{width:.0f} bytes which a token takes in a batch from memory to memory, {copied / 1e9:.1f} GB per CPU second. The load average \
was {os.getloadavg()[0]:.0f}: a shared machine slows the clock's rates, tokens per CPU second do not see it.

| source | seq_len | prefetched | tokens/s | tokens per CPU second | limit | of the limit |
|---|---|---|---|---|---|---|
""" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
