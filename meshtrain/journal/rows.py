"""Reader and appender of a run's logs, which are files of JSON lines. The reader streams from either end.

A run of a month writes a million metrics rows, so a log is never read into memory as a whole: a resume reads from the
end back to its step, and a report reads only a sample of the lines of a long log (`sample`). Lines that are no rows
(empty lines, lines cut off by a power failure, notes of the user, rows of other versions) are skipped.
"""
from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshtrain import files
from meshtrain.run import contents, say

NAME = contents.METRICS
BLOCK_BYTES = 1 << 18           # read at once
MOST_LINE_BYTES = 1 << 22       # longer lines are no rows; a row with three numbers per expert layer has a few thousand
Row = dict[str, Any]
# Keys whose values, if a row has them, are numbers or null.
NUMBERS = ("loss", "val_loss", "val_loss_ema", "grad_norm", "learning_rate", "tokens", "step_time_s", "tokens_per_s",
           "mfu", "data_wait_s", "checkpoint_wait_s", "elapsed_s", "goodput", "time", "memory_bytes", "expert_load_max",
           "expert_load_entropy", "reward", "val_reward", "answer_tokens", "entropy", "mismatch_max")


class Line(NamedTuple):
    """A line of the file. start: the line's offset. end: the offset after its newline. row: None if the line is no row.
    empty: whether it has only white space."""
    start: int
    end: int
    row: Row | None
    empty: bool


class Log:
    """An iterable of the rows of a log; `reversed` iterates backward. Each loop reads the file again.

    is_row: returns whether a JSON object is a row of this log. Text after the last newline is still being written and
    is no row. A missing file has no rows.
    """

    def __init__(self, path: str | os.PathLike, is_row: Callable[[Row], bool]):
        self.path, self.is_row = Path(path), is_row

    def read(self) -> list[Row]:
        """Return all rows of a short log. Print how many non-empty lines are no rows."""
        lines = list(self.lines())
        if others := sum(line.row is None and not line.empty for line in lines):
            say.err(f"{self.path}: this version cannot read {others} of its lines and leaves them out")
        return [line.row for line in lines if line.row is not None]

    def __iter__(self) -> Iterator[Row]:
        return (line.row for line in self.lines() if line.row is not None)

    def __reversed__(self) -> Iterator[Row]:
        return (line.row for line in self.lines_reversed() if line.row is not None)

    def lines(self, ranges: Iterable[tuple[int, int | None]] = ((0, None),)) -> Iterator[Line]:
        """Yield every line, including those that are no rows. Raises: OSError if the file cannot be read.

        ranges: offsets (first, stop) increasing; lines that begin in one are yielded. None: the end of the file.
        """
        with self._open() as file:
            for first, stop in ranges:
                end = first
                if first:
                    file.seek(first - 1)
                    end += _read_line(file)[1] - 1
                while stop is None or end < stop:
                    text, length, whole = _read_line(file)
                    if not whole:
                        break
                    start, end = end, end + length
                    yield self._line(start, end, text)

    def find(self, texts: Sequence[bytes]) -> list[int]:
        """Return the offsets of the lines that contain one of the texts, in increasing order. Parses nothing, so it
        reads about a gigabyte a second. Raises: OSError if the file cannot be read."""
        starts, at, rest = set[int](), 0, b""
        with self._open() as file:
            while block := file.read(BLOCK_BYTES):
                block = rest + block
                for text in texts:
                    found = block.find(text)
                    while found >= 0:
                        starts.add(at + block.rfind(b"\n", 0, found) + 1)
                        line_end = block.find(b"\n", found)
                        found = block.find(text, line_end) if line_end >= 0 else -1
                done = block.rfind(b"\n") + 1 if len(block) <= MOST_LINE_BYTES + BLOCK_BYTES else len(block)
                at, rest = at + done, block[done:]
        return sorted(starts)

    def lines_reversed(self) -> Iterator[Line]:
        """Yield every line from the last one back, as `lines`. Raises: OSError if the file cannot be read."""
        with self._open() as file:
            at = end = file.seek(0, os.SEEK_END)
            # rest: the end of a line whose begin is in an earlier block; at first, the text after the last newline
            rest, dropped, torn = b"", 0, True
            while at:
                size = min(BLOCK_BYTES, at)
                at -= size
                file.seek(at)
                first, *lines = (file.read(size) + rest).split(b"\n")
                for text in reversed(lines):
                    start = end - len(text) - dropped - (not torn)
                    if not torn:
                        yield self._line(start, end, None if dropped else text)
                    end, dropped, torn = start, 0, False
                rest = first
                if len(rest) > MOST_LINE_BYTES:
                    rest, dropped = b"", dropped + len(rest)
            if not torn and end:
                yield self._line(0, end, None if dropped else rest)

    @contextlib.contextmanager
    def _open(self):
        try:
            file = files.patiently(lambda: open(self.path, "rb"))
        except FileNotFoundError:
            file = open(os.devnull, "rb")
        with file:
            yield file

    def size(self) -> int:
        """Return the bytes of the file now; 0 if it is missing. Raises: OSError."""
        with self._open() as file:
            return file.seek(0, os.SEEK_END)

    def _line(self, start: int, end: int, text: bytes | None) -> Line:
        """Parse a line. text: None for a line that is too long for a row."""
        row = None
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            row = json.loads(text)
        return Line(start, end, row if isinstance(row, dict) and self.is_row(row) else None,
                    text is not None and not text.strip())


def _read_line(file: BinaryIO) -> tuple[bytes | None, int, bool]:
    """Return (a line, its bytes, whether it ends with a newline). The line is None if it is too long for a row."""
    text: bytes | None = file.readline(MOST_LINE_BYTES)
    length, whole = len(text or b""), (text or b"").endswith(b"\n")
    while not whole and (more := file.readline(MOST_LINE_BYTES)):
        text, length, whole = None, length + len(more), more.endswith(b"\n")
    return text, length, whole


class MetricRows(Log):
    """The rows of a metrics file, in step order."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path, _is_of_step)


def _is_of_step(row: Row) -> bool:
    return type(row.get("step")) is int and 0 <= row["step"] < 1 << 63 and all(
        _is_number(row[key]) for key in NUMBERS if key in row)


def is_change(row: Row) -> bool:
    """Return whether a JSON object is a row of changes.jsonl."""
    return type(row.get("step")) is int and isinstance(row.get("key"), str) and {"from", "to"} <= row.keys()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or isinstance(value, int) and abs(value) < 1 << 63


def cut_after(path: Path, step: int) -> None:
    """Cut the rows after `step` and an incomplete last line. A resumed run writes these rows again. Needs no space.

    If lines that are no rows would also be cut, everything after `step` is first copied to another file in the same
    directory, and the copy is reported. Raises: OSError.
    """
    foreign, end = 0, 0
    for line in MetricRows(path).lines_reversed():
        if line.row and line.row["step"] <= step:
            end = line.end
            break
        if line.row is None:
            foreign += not line.empty
    if foreign:
        kept = _copy_aside(path, end)
        say.err(f"{path}: {foreign} of the lines after step {step} are not metrics rows; they are kept in {kept}")
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, end)


def set_aside_after(path: Path, step: int) -> str:
    """Copy everything after the rows up to `step` to a new file in the same directory. Return its name; "" if there are
    no later rows. Raises: OSError."""
    rows = MetricRows(path)
    last = next(reversed(rows), None)
    if last is None or last["step"] <= step:
        return ""
    return _copy_aside(path, next((line.end for line in rows.lines_reversed()
                                   if line.row and line.row["step"] <= step), 0))


def _copy_aside(path: Path, start: int) -> str:
    """Copy all complete lines from offset `start` on to a new file, or none; return its name. Raises: OSError."""
    stem = files.free_name(f"{path.stem}.aside", lambda stem: path.with_name(stem + path.suffix).exists())
    kept = path.with_name(stem + path.suffix)
    temporary = kept.with_name(kept.name + ".tmp")
    end = next((line.end for line in MetricRows(path).lines_reversed()), 0)
    try:
        with open(path, "rb") as source, open(temporary, "wb") as target:
            source.seek(start)
            shutil.copyfileobj(source, target, BLOCK_BYTES)
            target.truncate(max(0, end - start))
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(kept)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return kept.name


class Appended(contextlib.AbstractContextManager):
    """A file to which complete records are appended. Each one is passed to the kernel before `append` returns.

    A record that cannot be written waits in memory. The next `append` opens the file again and writes all waiting
    records in order: after an NFS failover or a Lustre eviction, the old descriptor stays unusable. A partly written
    record is cut off first, so a full disk leaves neither a gap nor an incomplete record. separator: written if the
    file system has lost the end of the file, so that the next record starts on its own line.
    """

    def __init__(self, path: Path, separator: bytes = b""):
        self.path, self.separator = path, separator
        self._waiting: collections.deque[bytes] = collections.deque()
        self._file: io.FileIO | None = None
        self._end, self._warned = -1, False     # end: offset after the last record; -1: never opened

    def append(self, record: bytes) -> None:
        self._waiting.append(record)
        self._flush()

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._flush()
        if self._waiting:
            say.err(f"{self.path} is incomplete: its last {sum(map(len, self._waiting)):,} bytes could not be written; "
                    f"check its file system before you start the run again")
        self._leave()

    def _flush(self) -> None:
        try:
            while self._waiting:
                if self._file is None:
                    self._file = self._open()
                left = self._waiting[0]
                while left:
                    left = left[self._file.write(left):]
                self._end += len(self._waiting.popleft())
        except OSError as error:
            self._leave()
            if not self._warned:
                say.err(f"{self.path} cannot be written: {error.strerror}; training continues, and the rows wait in "
                        f"memory until writing succeeds")
            self._warned = True

    def _open(self) -> io.FileIO:
        file = open(self.path, "ab", buffering=0)   # a buffered file does not report how much a full disk accepted
        try:
            size = os.fstat(file.fileno()).st_size
            if size > self._end >= 0:
                os.ftruncate(file.fileno(), self._end)
            elif size < self._end:
                say.err(f"{self.path}: its file system has lost {self._end - size:,} bytes that were written; training "
                        f"continues")
                self._end = size + file.write(self.separator)
            else:
                self._end = size
        except OSError:
            file.close()
            raise
        return file

    def _leave(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(OSError):      # the error behind it is reported elsewhere
            if file is not None:
                file.close()
