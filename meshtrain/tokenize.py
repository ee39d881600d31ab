"""python -m meshtrain.tokenize RUN.toml [--section.key value …] [--verify] [--processes I/N]: makes a run's token
cache.

Training with the same run file then finds everything built. Without GPUs and without jax. Any number of processes may
work side by side, on this host or others: each takes what nobody has. With --processes I/N, or under a launcher,
process I (from 0) takes only every N-th part, and the cache is whole when all of them are done. --verify reads the
whole cache and compares checksums: what is damaged is built again.
Exit codes: 0 done · 2 the user's mistake, one message · 75 stopped on request, what is finished is kept · 1 anything
else.
"""
from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain import config
from meshtrain.cluster import find
from meshtrain.config import ConfigError
from meshtrain.data import sources
from meshtrain.data.cache import parts
from meshtrain.data.files import token_files
from meshtrain.files import FileSystemError
from meshtrain.huggingface import folder
from meshtrain.run import say

DONE, FAILED, USER_ERROR, STOPPED = 0, 1, 2, 75
USAGE = "python -m meshtrain.tokenize [RUN.toml] [--section.key value ...] [--verify] [--processes I/N]"


def main(argv: Sequence[str]) -> int:
    stop = _listen()
    try:
        asked = config.split(argv, USAGE, {"processes": "0/4"}, ("verify",))
        if asked.faults:
            raise ConfigError(*asked.faults)
        share = _share(asked.last("processes"))
        run = config.load(asked.names + asked.keys, USAGE)
        if share is None:
            # Without GPUs, so that they need not divide among the processes.
            cluster = find.cluster(run.distributed, os.environ | {"CUDA_VISIBLE_DEVICES": ""})
            share = (cluster.index, cluster.count) if cluster else (0, 1)
        with config.user_errors():
            described = sources.describe(run.data, vocab_size=run.model.vocab_size,
                                         folders=folder.companions_of(run.run.dir, run.checkpoint.init_from))
            job = parts.Job(say.out, lambda: bool(stop), "verify" in asked.flags, share)
            opened = described.open(Path(run.run.dir) / sources.CACHE, job)
        for component, source in zip(described.components, opened):
            say.out(f"{component.where}: {_sum_up(source)}")
        return DONE
    except ConfigError as error:
        say.err(f"error: {error}")
        return USER_ERROR
    except FileSystemError as error:
        say.err(f"error: {error}; what is finished is kept")
        return FAILED
    except parts.Stopped:
        say.err(f"stopped by {signal.Signals(stop[0]).name}; what is finished is kept, the same command goes on from "
                f"there")
        return STOPPED


def _sum_up(source: sources.Source | None) -> str:
    if source is None:
        return "this process's share is done; others have parts to do still"
    if isinstance(source, token_files.TokenFiles):
        pairs = source.pairs
        tokens, documents = (sum(getattr(pair, name) for pair in pairs) for name in ("num_tokens", "num_documents"))
        return f"{tokens:,} tokens, {documents:,} documents, {len(pairs):,} part{'s' * (len(pairs) > 1)}; all built"
    return "bytes are the tokens; nothing to do"


def _share(text: str | None) -> tuple[int, int] | None:
    """(which process, of how many) of I/N. Raises: ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise ConfigError(f"--processes {text} is not I/N; give which process this is, from 0, of how many, e.g. 0/4")
    return int(match[1]), int(match[2])


def _listen() -> list[int]:
    """The signals that asked for a stop, as they come. The first is noted, and heard between two batches; the second is
    obeyed at once."""
    heard: list[int] = []

    def note(number: int, frame) -> None:
        heard.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:    # nohup
            signal.signal(number, note)
    return heard


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
