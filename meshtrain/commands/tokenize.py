"""Builds a run's token cache: python -m meshtrain.tokenize RUN.toml.

Training with the same run file then uses this cache. Needs neither GPUs nor jax. Any number of processes may work at
the same time, on one host or several; each takes parts that no other process has taken. Under a launcher, process I
(from 0) of N takes only every N-th part, as with --processes I/N; the cache is complete when all of them are done.
Exit codes: 0 done · 1 any other failure · 2 a mistake in the settings · 75 stopped on request, finished parts are kept.
"""
from __future__ import annotations

import os
import signal

from meshtrain import config, run_files
from meshtrain.cluster import find
from meshtrain.data import sources
from meshtrain.data.cache import parts
from meshtrain.data.files import token_files
from meshtrain.files import FileSystemError
from meshtrain.run import command, say, stops
from meshtrain.storage import mirror, model_folder
from meshtrain.units import amount


def _share(text: str) -> tuple[int, int]:
    """Return (I, N) of the text I/N. Raises: ValueError."""
    index, _, count = text.partition("/")
    if not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise ValueError("is not I/N; give the index of this process, from 0, and the number of processes, e.g. 0/4")
    return int(index), int(count)


COMMAND = config.Command("meshtrain.tokenize", {
    "verify": config.Option("read the whole cache, compare checksums, and build damaged parts again"),
    "processes": config.Option("take only every N-th part, as process I from 0", "I/N", "0/4", _share),
}, "[RUN.toml]", (0, 1))


@command.entry(COMMAND, __doc__)
def main(asked: config.Arguments) -> int:
    stop = _listen()
    try:
        share, run = asked["processes"], run_files.load(asked.names + asked.keys)
        if share is None:
            # GPUs are hidden, so that their number need not be divisible by the number of processes.
            cluster = find.cluster(run.distributed, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
            share = (cluster.index, cluster.count) if cluster else (0, 1)
        with config.user_errors():
            described = sources.describe(run.data, vocab_size=run.model.vocab_size,
                                         folders=model_folder.companion_folders(run.run.dir, run.checkpoint.init_from))
            job = parts.Job(say.out, lambda: bool(stop), asked["verify"], share,
                            say.live if say.is_live() else None)
            opened = described.open(mirror.directory(run.run.dir) / sources.CACHE, job)
        for component, source in zip(described.components, opened):
            say.out(f"{component.where}: {_sum_up(source)}")
        return 0
    except FileSystemError as error:
        raise FileSystemError(f"{error}; finished parts are kept") from error
    except parts.Stopped:
        say.err(f"stopped by {signal.Signals(stop[0]).name}; finished work is kept; run the same command again to "
                f"resume")
        return stops.STOPPED


def _sum_up(source: sources.Source | None) -> str:
    if source is None:
        return "this process's share is done; other processes still have parts to do"
    if isinstance(source, token_files.TokenFiles):
        pairs = source.pairs
        tokens, documents = (sum(getattr(pair, name) for pair in pairs) for name in ("num_tokens", "num_documents"))
        return f"{amount(tokens, 'token')}, {amount(documents, 'document')}, {amount(len(pairs), 'part')}; all built"
    return "the tokens are bytes, so there is nothing to tokenize"


def _listen() -> list[int]:
    """Install handlers for stop signals. Return the list of received signals. The first signal stops the command
    between two batches, the second ends it at once."""
    heard: list[int] = []

    def note(number: int, frame) -> None:
        heard.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in stops.stop_signals():
        signal.signal(number, note)
    return heard
