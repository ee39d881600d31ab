"""Streams the documents of a file in order. A document is a text file, a JSON line, or a row of Parquet or Arrow. Rows
of the last three can also be read as objects.

A document comes in pieces of at most some million characters. A JSON line or a value of a table has at most LINE_BYTES,
which bounds the tokenizer's memory for any file. Every fault of a file is a ValueError with file, place and remedy.
This module knows no tokens.
"""
from __future__ import annotations

import codecs
import contextlib
import datetime
import decimal
import io
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, TextIO

from meshtrain import files
from meshtrain.data.documents import compressed
from meshtrain.data.documents.tokenizer import import_extra

# Longer documents are tokenized in pieces, cut at a newline if possible. This bounds memory and time, and loses one
# merge across the cut per million characters.
PIECE_CHARS = 1 << 20
LINE_BYTES = 1 << 28     # maximum of a JSON line, which takes some 6 times its size as text and object
ARROW_MAGIC, ARROW_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
TABLE_BEGINS = {b"PAR1": "parquet", ARROW_MAGIC[:4]: "arrow", ARROW_END[:4]: "arrow"}
# First bytes of files that are no lines of text -> (what they are, what to do).
OTHERS = {b"PAR1": ("a Parquet file", 'set data.source="parquet"'),
          ARROW_MAGIC[:4]: ("an Arrow file", 'set data.source="arrow"'),
          ARROW_END[:4]: ("an Arrow file", 'set data.source="arrow"'),
          b"\x1f\x8b": ("compressed with gzip", "let its name end with .gz"),
          b"\x28\xb5\x2f\xfd": ("compressed with zstd", "let its name end with .zst"),
          b"BZh": ("compressed with bzip2", "compress it with gzip or zstd instead"),
          b"\xfd7zXZ": ("compressed with xz", "compress it with gzip or zstd instead"),
          b"PK\x03\x04": ("a zip archive", "unpack it"),
          b"\xff\xfe": ("UTF-16", "convert it to UTF-8"), b"\xfe\xff": ("UTF-16", "convert it to UTF-8"),
          b"version https://git-lfs": ("a pointer of Git LFS, but the file itself is not here",
                                       "fetch it with git lfs pull")}
TABLE_NAMES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
LeaveOut = Callable[[str, str], None]       # receives (place, message) of a faulty line
ROWS = 64       # rows of a table turned into objects at a time
# Rows of Parquet decoded at a time. A long value that a dictionary holds once is repeated in each row, so a thousand
# rows of a file of 500 bytes can take gigabytes. Compared with a thousand rows at a time, 8 cost 1 us more a row, and
# 1 costs 10 us more.
PARQUET_ROWS = 8


class TextPiece(NamedTuple):
    text: str
    last: bool        # of the document
    position: int     # bytes of the file read so far


def read(format: str, path: str, field: str) -> Iterator[TextPiece]:
    """Yield the documents of a file. format: text, jsonl, parquet or arrow. field: the key or column of the text.
    Raises: ValueError for a faulty file."""
    with reading(path):
        if format == "text":
            yield from read_whole(path)
        elif format == "jsonl":
            yield from read_jsonl(path, field)
        else:
            yield from _read_texts(path, field, BATCHES[format])


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.error_to_raise(error, f"{path} cannot be read", "fix it or take it out of data.paths") from None


def read_whole(path: str) -> Iterator[TextPiece]:
    """Yield the whole file as one document. As in `read_jsonl`, files named .gz or .zst are decompressed."""
    with open(path, "rb") as raw, compressed.decompress(path, raw) as unpacked, \
            io.TextIOWrapper(unpacked, encoding="utf-8", newline="\n") as file:
        try:
            with compressed.reporting(path):
                for text, last in _cut(file):
                    yield TextPiece(text, last, raw.tell())
        except UnicodeDecodeError:
            _check_kind(path)
            line, place, reason = _first_bad_line(path)
            remedy = "decompress" if path.endswith(compressed.SUFFIXES) else "convert"
            raise fault(path, f"line {line}", f"is not UTF-8 ({reason}, byte {place} of the line)",
                        f'{remedy} the file, or use data.tokenizer="bytes"') from None


def read_jsonl(path: str, field: str) -> Iterator[TextPiece]:
    """Yield one document per line, which is an object. Blank lines are skipped."""
    for number, value, position in read_objects(path, f'{{"{field}": "…"}}'):
        for part, last in _cut_text(_text_of(path, number, value, field)):
            yield TextPiece(part, last, position)


def read_objects(path: str, example: str, leave_out: LeaveOut | None = None) -> Iterator[tuple[int, dict, int]]:
    """Yield (line number, object, bytes of the file read so far) of JSON lines. example: an object, for error messages.
    leave_out: receives each line that is no object, and the line is skipped; None: such a line is an error."""
    with open(path, "rb") as raw, compressed.decompress(path, raw) as lines:
        number = 0
        while True:
            number += 1
            line = _next_line(path, lines, number)
            if not line:
                return
            if line.strip():
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if number == 1 and not line.lstrip(b" \t").startswith(b"{"):
                    _check_kind(path)
                try:
                    value = _parse(path, number, line, example)
                except ValueError as error:
                    if leave_out is None:
                        raise
                    leave_out(f"line {number}", str(error))
                    continue
                yield number, value, raw.tell()


def read_rows(path: str, example: str, columns: Sequence[str] = (),
              leave_out: LeaveOut | None = None) -> Iterator[tuple[str, dict, int]]:
    """Yield (place, object, bytes of the file read so far) of a file's rows: JSON lines, or a table in Parquet or
    Arrow. The first bytes or the name of the file decide which it is.

    A table has no absent keys, so a null in a struct or a column is left out of the object. columns: the columns to
    read from a table; (): all. example, leave_out: as in `read_objects`. Raises: ValueError for a faulty file.
    """
    with open(path, "rb") as file:
        kind = TABLE_BEGINS.get(file.read(4)) or TABLE_NAMES.get(os.path.splitext(path)[1])
    if not kind:
        for number, value, position in read_objects(path, example, leave_out):
            yield f"line {number}", value, position
        return

    def choose(schema) -> list[str]:
        chosen = [name for name in schema.names if not columns or name in columns]
        if not chosen:
            raise fault(path, "", f"has the columns {', '.join(schema.names)}, but none of {', '.join(columns)}",
                        "rename them, or name other files")
        return chosen

    row = 0
    for batch, position in BATCHES[kind](path, choose):
        for first in range(0, len(batch), ROWS):
            for found in _objects(path, batch.slice(first, ROWS), row, leave_out):
                row += 1
                if found is not None:
                    yield _row(row - 1), found, position(row)


def _parquet_batches(path: str, choose: Callable) -> Iterator[tuple]:
    """Yield (record batch with the columns that choose(schema) returns, a function from rows to the position in the
    file)."""
    pyarrow = import_extra("pyarrow", f"the Parquet file {path}")
    parquet = import_extra("pyarrow.parquet", f"the Parquet file {path}")
    size = os.stat(path).st_size
    with _not_whole(path, "Parquet", pyarrow), parquet.ParquetFile(path) as file:
        columns, rows = choose(file.schema_arrow), max(1, file.metadata.num_rows)
        _check_names(path, file.schema_arrow.names, columns)
        for group in range(file.num_row_groups):    # the library reads no nested dictionary across two of them
            count = PARQUET_ROWS if file.metadata.row_group(group).total_byte_size <= LINE_BYTES else 1
            for batch in file.iter_batches(batch_size=count, row_groups=[group], columns=columns):
                yield batch, lambda row: size * row // rows


def _arrow_batches(path: str, choose: Callable) -> Iterator[tuple]:
    """As `_parquet_batches`, for Arrow's IPC format: a stream (as saved by the datasets library) or a file (Feather).
    """
    pyarrow = import_extra("pyarrow", f"the Arrow file {path}")
    ipc = import_extra("pyarrow.ipc", f"the Arrow file {path}")
    with open(path, "rb") as file:
        streamed = file.read(len(ARROW_MAGIC)) != ARROW_MAGIC
        if streamed and file.seek(0, os.SEEK_END) >= len(ARROW_END):
            file.seek(-len(ARROW_END), os.SEEK_END)
            # The library accepts a stream that was truncated between two batches.
            if file.read() != ARROW_END:
                _check_kind(path, "an Arrow file")
                raise ValueError(f"{path} is not a whole Arrow file: the end of the stream is missing; write "
                                 f"it again or take it out of data.paths")
    with _not_whole(path, "Arrow", pyarrow), pyarrow.memory_map(path) as raw:
        file = ipc.open_stream(raw) if streamed else ipc.open_file(raw)
        columns = choose(file.schema)
        _check_names(path, file.schema.names, columns)
        for batch in file if streamed else map(file.get_batch, range(file.num_record_batches)):
            yield batch.select(columns), lambda row: raw.tell()


BATCHES: dict[str, Callable] = {"parquet": _parquet_batches, "arrow": _arrow_batches}


@contextlib.contextmanager
def _not_whole(path: str, what: str, pyarrow) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and not files.is_mistake(error):
            raise       # reported by `reading`
        reason = str(error).splitlines()[0].rstrip(".")
        _check_kind(path, f"a{'n' * (what == 'Arrow')} {what} file")
        if isinstance(error, pyarrow.ArrowNotImplementedError):
            raise ValueError(f"{path} cannot be read by pyarrow {pyarrow.__version__}: {reason}; write it again with "
                             f"types that pyarrow reads") from None
        raise ValueError(f"{path} is not a whole {what} file: {reason}; write it again or take it out of "
                         f"data.paths") from None


def _read_texts(path: str, field: str, batches: Callable) -> Iterator[TextPiece]:
    """Yield one document per row: the text in a column, or in a struct's field, e.g. "meta.text". A null is an error,
    as in JSON lines, because it must not be dropped silently."""
    names: list[str] = []

    def choose(schema) -> list[str]:
        names[:] = _find_column(path, schema, field)
        return names[:1]

    row = 0
    for batch, position in batches(path, choose):
        column = batch.column(0)
        for name in names[1:]:
            column = import_extra("pyarrow.compute", f"the file {path}").struct_field(column, name)
        for value in column:
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                raise fault(path, _row(row), f"is not UTF-8 ({error.reason})", "fix the row") from None
            if text is None:
                raise fault(path, _row(row), f"is null in column {field!r}", "drop such rows, or write empty strings")
            if len(text) > LINE_BYTES:
                raise fault(path, _row(row), f"has {len(text):,} characters in column {field!r}, but the limit is "
                            f"{LINE_BYTES:,}", "divide it into several rows")
            row += 1
            for part, last in _cut_text(text):
                yield TextPiece(part, last, position(row))


def _row(number: int) -> str:
    return f"row {number} (from 0)"


def _find_column(path: str, schema, field: str) -> list[str]:
    """Return the names that lead to a column of strings: the name of a column, then the names of fields of structs.
    Raises: ValueError."""
    types = import_extra("pyarrow", f"the file {path}").types
    strings: dict[str, list[str]] = {}
    every: dict[str, tuple[list[str], Any]] = {}

    def look(names: list[str], kind) -> None:
        plain = kind.value_type if types.is_dictionary(kind) else kind
        every.setdefault(".".join(names), (names, kind))
        if types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain):
            strings.setdefault(".".join(names), names)
        for inner in (kind.field(i) for i in range(kind.num_fields)) if types.is_struct(kind) else ():
            look([*names, inner.name], inner.type)

    for column in schema:
        look([column.name], column.type)
    if field in strings:
        return strings[field]
    what = (f"has {str(every[field][1])[:80]} in column {field!r}, not strings" if field in every else
            f"has no column {field!r}")
    talks = [name for name in ("messages", "conversations", "prompt", "chosen") if name in schema.names
             and not types.is_string(schema.field(name).type)]
    if strings:
        raise fault(path, "", what, f"set data.field to one of {', '.join(strings)}"
                    + (f', or data.source="chat" for the conversations in {talks[0]!r}' if talks else ""))
    raise fault(path, "", f"{what}, and no column has strings (its columns: {', '.join(schema.names) or 'none'})",
                f'set data.source="chat" for the conversations in {talks[0]!r}, or "prompts" or "preferences"'
                if talks else "write the text as strings")


def _objects(path: str, rows, first: int, leave_out: LeaveOut | None = None) -> list[dict | None]:
    """Return the rows of a record batch as objects, None for one that is left out. first: number of its first row."""
    try:
        return [_plain(value, "") for value in rows.to_pylist()]
    except (ValueError, OverflowError, TypeError) as error:     # UnicodeDecodeError too
        if len(rows) > 1:       # find the faulty row
            return [_objects(path, rows.slice(i, 1), first + i, leave_out)[0] for i in range(len(rows))]
        found = fault(path, _row(first), f"is not UTF-8 ({error.reason})", "fix the row") if isinstance(
            error, UnicodeDecodeError) else fault(path, _row(first), f"cannot be read: {str(error)[:200]}",
                                                  "write such a column as text, or leave it out")
        if leave_out is None:
            raise found from None
        leave_out(_row(first), str(found))
        return [None]


def _plain(value, name: str):
    """Return a value of a table as a JSON value, without nulls of structs. name: for errors. Raises: ValueError."""
    if isinstance(value, dict):
        return {key: _plain(inner, f"{name}.{key}" if name else key)
                for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):       # a map
            return {str(key): _plain(inner, f"{name}.{key}") for key, inner in value if inner is not None}
        return [_plain(inner, name) for inner in value]
    if isinstance(value, str) and len(value) > LINE_BYTES:
        raise ValueError(f"{name!r} has {len(value):,} characters, but the limit is {LINE_BYTES:,}")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (decimal.Decimal, uuid.UUID, datetime.timedelta)):
        return str(value)
    raise ValueError(f"{name!r} is {type(value).__name__}, which JSON cannot represent")


def fault(path: str, place: str, what: str, remedy: str = "") -> ValueError:
    """Return the error for a place ("": the whole file) in a file."""
    return ValueError(f"{f'{path}, {place}:' if place else path} {what}{remedy and '; '}{remedy}")


def _check_kind(path: str, expected: str = "") -> None:
    """Check the first bytes of a file. Raises: ValueError if the bytes belong to a file that is neither text nor
    `expected`."""
    with open(path, "rb") as file:
        begin = file.read(32)
    for first, (what, remedy) in OTHERS.items():
        if begin.startswith(first) and what != expected and not path.endswith(compressed.SUFFIXES):
            raise fault(path, "", f"is {what}", remedy)


def _check_names(path: str, names: Sequence[str], chosen: Sequence[str]) -> None:
    """Check the columns that are read. Raises: ValueError if two columns of a table have the same name."""
    if twice := [name for name in chosen if list(names).count(name) > 1]:
        raise fault(path, "", f"has more than one column {twice[0]!r}", "rename all but one")


def _parse(path: str, number: int, line: bytes, example: str) -> dict:
    place = f"line {number}"
    try:
        value = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        raise fault(path, place, f"is not UTF-8 ({error.reason}, byte {error.start} of the line)",
                    "convert the file") from None
    except json.JSONDecodeError as error:
        raise fault(path, place, f"broken JSON ({error.msg}, column {error.colno})", "fix or remove the line") from None
    except (ValueError, RecursionError) as error:    # thousands of digits, or of nested brackets
        raise fault(path, place, f"JSON that cannot be read ({error})", "fix or remove the line") from None
    if not isinstance(value, dict):
        raise fault(path, place, "is not an object", f"write one a line, e.g. {example}")
    return value


def _text_of(path: str, number: int, value: dict, field: str) -> str:
    place = f"line {number}"
    if field not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "none"
        raise fault(path, place, f"has no {field!r} (its keys: {keys})", "set data.field to the key of the text")
    text = value[field]
    if not isinstance(text, str):
        raise fault(path, place, f"has {json.dumps(text)[:40]} in {field!r}, not a string", "fix or remove the line")
    _check_characters(path, place, text, f" in {field!r}")
    return text


def _check_characters(path: str, place: str, text: str, where: str = "") -> None:
    """Check that a text can be written as UTF-8. where: the key or column, for the message. Raises: ValueError."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise fault(path, place, f"has half a character{where} (\\u{ord(text[error.start]):04x}, a lone surrogate)",
                        "fix or remove it") from None


def pieces_of(path: str, place: str, text: str) -> Iterator[TextPiece]:
    """Yield a document that is in memory. The position in the file is unknown and given as 0. Raises: ValueError."""
    _check_characters(path, place, text)
    for part, last in _cut_text(text):
        yield TextPiece(part, last, 0)


def _next_line(path: str, lines: BinaryIO, number: int) -> bytes:
    with compressed.reporting(path, f" (after line {number - 1})"):
        line = lines.readline(LINE_BYTES + 1)
    if len(line) > LINE_BYTES:
        raise fault(path, f"line {number}",
                    f"is longer than {LINE_BYTES:,} bytes, the limit of a JSON line, which is held in memory",
                    "divide or remove it; documents of this length belong in a text or Parquet file")
    return line


def _cut_text(text: str) -> Iterator[tuple[str, bool]]:
    return iter([(text, True)]) if len(text) <= PIECE_CHARS else _cut(io.StringIO(text, newline="\n"))


def _cut(file: TextIO) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether it is the last); at least one."""
    piece = file.read(PIECE_CHARS)
    while True:
        piece += file.readline(PIECE_CHARS) if piece else ""
        following = file.read(PIECE_CHARS)
        yield piece, not following
        if not following:
            return
        piece = following


def _first_bad_line(path: str) -> tuple[int, int, str]:
    """Return (line number, byte in it, reason) for a file that is not UTF-8. Lines may have any length."""
    number, place, decoder = 1, 0, codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as raw, compressed.decompress(path, raw) as file:
        while True:
            piece, kept = file.readline(PIECE_CHARS), len(decoder.getstate()[0])
            try:
                decoder.decode(piece, final=not piece or piece.endswith(b"\n"))
            except UnicodeDecodeError as error:
                return number, place - kept + error.start, error.reason
            if not piece:
                raise AssertionError(f"{path} has changed while it was read")
            number, place = (number + 1, 0) if piece.endswith(b"\n") else (number, place + len(piece))
