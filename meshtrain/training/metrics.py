"""metrics.jsonl: one JSON object per line and step, written so that a killed run loses at most the line it was writing.

Floats are not rounded, so two runs can be compared bit for bit; a number that is not finite becomes null, which JSON can hold.
It must not know which keys a row has.
"""

import json
import math
import os
import pathlib
from typing import Any


class MetricsWriter:
    """Appends rows to the file at `path`. In a run of several processes only one may have it.

    An existing file is continued: call `truncate_after` first, with 0 for a fresh start, or a torn last line would be
    glued to the next row.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row and flushes it. Values: numbers, also numpy's and jax's scalars, bools, strings, None."""
        self._file.write(json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drops the rows after `step` and a torn last line: a resumed run writes them again. Old file or new one, never a mix."""
        self._file.close()
        kept = [json.dumps(row) + "\n" for row in read(self.path) if row["step"] <= step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, without a last line that was torn off.

    Raises: ValueError for a broken line before the last: that is no interrupted write.
    """
    *lines, torn = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    del torn  # what follows the last newline: nothing, or a line whose writing was cut
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {line[:80]!r}; remove it to go on") from error
    return rows


def _plain(value):
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
