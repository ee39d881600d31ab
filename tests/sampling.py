"""Which cells of a grid a run of the suite takes: chosen by the commit's hash, so that each commit tries others."""
import functools
import random
import subprocess
import zlib
from pathlib import Path

import pytest


GRID = (pytest.mark.slow, pytest.mark.grid)      # a cell of a grid: a few of each file run in every run of the suite


@functools.cache
def commit() -> str:
    """The hash of the commit that is tested; "no commit" outside a checkout."""
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent,
                               capture_output=True, text=True, timeout=10)
        return asked.stdout.strip() or "no commit"
    except OSError:
        return "no commit"


def generator(what: str) -> random.Random:
    """A generator of its own for each use."""
    return random.Random(zlib.crc32(f"{commit()} {what}".encode()))
