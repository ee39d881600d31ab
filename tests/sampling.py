"""Random draws by the commit's hash, so that each commit tries others; and the marks of a grid's cells."""
import functools
import random
import subprocess
import zlib
from pathlib import Path

import pytest


GRID = (pytest.mark.long, pytest.mark.cell)      # a cell of a grid: `pytest --long -m cell`


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
