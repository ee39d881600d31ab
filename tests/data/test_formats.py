"""A faulty file is one message that names file, place and remedy."""

import gzip
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpora import Opened, bpe, fault, section, write  # noqa: F401 (bpe is a fixture)

from meshtrain.data.documents import formats

GOOD = b'{"text": "fine"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
# (file name, content, what the one message must contain)
FAULTY = [
    ("a.jsonl", GOOD + b'{"text": "x"]\n' + GOOD,
     ["a.jsonl, line 2: broken JSON (Expecting ',' delimiter, column 13)"]),
    ("a.jsonl", GOOD + b'{"text": "x"\n', ["line 2: broken JSON (Expecting ',' delimiter, column 13)"]),
    ("a.jsonl", GOOD + b"\n" + b"[1]\n", ["a.jsonl, line 3: is not an object"]),
    ("a.jsonl", b'{"body": "x", "b": 1}\n', ["line 1: has no 'text' (its keys: 'body', 'b')", "data.field"]),
    ("a.jsonl", b'{"text": 5}\n', ["line 1: has 5 in 'text', not a string"]),
    ("a.jsonl", b'{"text": null}\n', ["line 1: has null in 'text', not a string"]),
    ("a.jsonl", GOOD + b'{"text": "\xff"}\n', ["line 2: is not UTF-8", "byte 10"]),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', ["line 1: has half a character", "\\ud83d"]),
    ("a.jsonl", b"[" * 100000, ["line 1: JSON that cannot be read"]),
    ("a.jsonl", b'{"n": ' + b"1" * 5000 + b"}", ["line 1: JSON that cannot be read"]),
    ("a.jsonl.gz", GOOD, ["a.jsonl.gz is damaged, or not gzip"]),
    ("a.jsonl.gz", gzip.compress(GOOD * 9)[:-9], ["a.jsonl.gz ends in the middle"]),
    ("a.jsonl.gz", gzip.compress(GOOD * 9)[:-8] + b"12345678", ["a.jsonl.gz is damaged", "CRC"]),
    ("a.jsonl.zst", GOOD, ["a.jsonl.zst is damaged, or not zstd"]),
    ("a.jsonl.zst", zstandard.compress(GOOD * 9)[:-1], ["a.jsonl.zst ends in the middle"]),
    ("a.jsonl.zst", zstandard.compress(GOOD * 9) + b"(", ["a.jsonl.zst ends in the middle"]),
    ("a.txt.gz", GOOD, ["a.txt.gz is damaged, or not gzip", "copy or compress it again"]),
    ("a.txt.gz", gzip.compress(GOOD * 9)[:-9], ["a.txt.gz ends in the middle"]),
    ("a.txt.zst", GOOD, ["a.txt.zst is damaged, or not zstd"]),
    ("a.txt.zst", zstandard.compress(GOOD * 9)[:-1], ["a.txt.zst ends in the middle"]),
    ("a.txt.gz", gzip.compress(b"one\ntwo \xff\n"),
     ["a.txt.gz, line 2: is not UTF-8", "byte 4", "decompress the file"]),
    ("a.txt.gz", b"", ["no text in 1 file"]),
    ("a.arrow", GOOD, ["a.arrow is not a whole Arrow file", "write it again"]),
    ("a.arrow", b"", ["a.arrow is not a whole Arrow file"]),
    ("a.jsonl", b"", ["data.paths: no text in 1 file (", "a.jsonl"]),
    ("a.jsonl.gz", b"", ["no text in 1 file"]),
    ("a.jsonl.zst", b"", ["no text in 1 file"]),
    ("a.parquet", GOOD, ["a.parquet is not a whole Parquet file", "write it again"]),
    ("a.parquet", b"", ["a.parquet is not a whole Parquet file"]),
    ("a.tokens.npy", b"", ["a.tokens.npy cannot be read as an .npy file"]),
    ("a.tokens.npy", GOOD * 9, ["a.tokens.npy cannot be read as an .npy file"]),
    ("a.jsonl", b"PAR1" + b"\xff" * 20 + b"PAR1", ['a.jsonl is a Parquet file; set data.source="parquet"']),
    ("a.jsonl", b"\xff\xff\xff\xff\x10\0\0\0", ['a.jsonl is an Arrow file; set data.source="arrow"']),
    ("a.jsonl", gzip.compress(GOOD), ["a.jsonl is compressed with gzip; let its name end with .gz"]),
    ("a.jsonl", zstandard.compress(GOOD), ["a.jsonl is compressed with zstd; let its name end with .zst"]),
    ("a.jsonl", "{}".encode("utf-16"), ["a.jsonl is UTF-16; convert it to UTF-8"]),
    ("a.jsonl", POINTER, ["a.jsonl is a pointer of Git LFS", "git lfs pull"]),
    ("a.parquet", POINTER, ["a.parquet is a pointer of Git LFS", "git lfs pull"]),
    ("a.arrow", POINTER, ["a.arrow is a pointer of Git LFS", "git lfs pull"]),
    ("a.arrow", b"PAR1" + b"\xff" * 20 + b"PAR1", ['a.arrow is a Parquet file; set data.source="parquet"']),
    ("a.npy", GOOD, ["a.npy is not named like a token file; give X.tokens.npy"]),
]


@pytest.mark.parametrize("name, content, parts", FAULTY, ids=[f"{case[0]} {case[2][0][:40]}" for case in FAULTY])
def test_a_faulty_file_is_one_message_that_names_the_place(name, content, parts, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    message = fault(section([path], bos_token="1" if name.endswith("npy") else ""), tmp_path)
    assert all(part in message for part in parts), message
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".npy", ".tmp")]
    assert left == ([name] if name.endswith("npy") else []) or "no text in" in message  # nothing that could be believed


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_too_long_for_memory_is_told_before_it_is_read(name, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LINE_BYTES", 1 << 16)
    line = b'{"text": "' + b"a" * (LINE_TEXT := (1 << 16) - 13) + b'"}\n'
    assert len(line) == 1 << 16
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": zstandard.compress}[name.rpartition(".")[2]]
    path = tmp_path / name
    path.write_bytes(pack(line))
    assert [len(text) for text in Opened(section([path]), tmp_path).texts()] == [LINE_TEXT]
    path.write_bytes(pack(GOOD + b"a" * (1 << 20)))
    message = fault(section([path]), tmp_path)
    assert f"{name}, line 2: is longer than 65,536 bytes" in message and "divide or remove it" in message
    path.write_bytes(pack(b"a" * (1 << 20)))
    chats = section([path], source="chat", chat_template=template(tmp_path))
    assert f"{name}, line 1: is longer than 65,536 bytes" in fault(chats, tmp_path)


def template(folder) -> str:
    path = folder / "template.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return str(path)


def test_a_character_that_is_none_is_found_in_lines_of_any_length(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_CHARS", 8)
    path = tmp_path / "a.txt"
    for before, line, place in ((b"", 1, 0), ("€".encode() * 9, 1, 27), (b"one\n" + "x€".encode() * 20, 2, 80),
                                (b"aaaaaaa\n", 2, 0)):
        for bad in (b"\xff", b"\xe2\x82", b"\xe2\x82\n"):
            path.write_bytes(before + bad)
            assert f"a.txt, line {line}: is not UTF-8" in (message := fault(section([path], tokenizer=bpe), tmp_path))
            assert f"byte {place} of the line" in message


def write_arrow(path, table, stream=True, rows: int = 2):
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as raw, make(raw, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)
    return path


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_arrow_streams_and_files_give_their_rows(kind, stream, tmp_path):
    texts = ["a", "", "b", "a", "naïve"]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"body": pa.array(texts).cast(kind)}), stream)
    assert Opened(section([path], field="body"), tmp_path).texts() == texts


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_every_row_of_a_long_batch_is_read_with_its_number(name, tmp_path):
    rows = [{"prompt": f"text {i}"} for i in range(2 * formats.ROWS + 7)]
    table = pa.Table.from_pylist(rows)
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        write_arrow(tmp_path / name, table, rows=len(rows))
    places, values, positions = zip(*formats.read_rows(str(tmp_path / name), "{}"))
    assert list(values) == rows and list(places) == [f"row {i} (from 0)" for i in range(len(rows))]
    assert list(positions) == sorted(positions) and positions[-1] <= (tmp_path / name).stat().st_size


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
def test_an_arrow_file_that_was_cut_anywhere_is_told(stream, tmp_path):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": ["some text", "more", "and", "more"]}), stream)
    whole = path.read_bytes()
    for size in range(0, len(whole), 8 if stream else 56):
        path.write_bytes(whole[:size])
        assert "is not a whole Arrow file" in fault(section([path]), tmp_path), size


def test_arrow_without_the_column_or_with_another_kind_or_a_null_is_told(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", pa.table({"id": [1], "body": ["x"]}))
    assert "no column 'text'; set data.field to one of body" in fault(section([path]), tmp_path)
    assert "has int64 in column 'id', not strings; set data.field to one of body" in fault(
        section([path], field="id"), tmp_path)
    write_arrow(path, pa.table({"text": ["a", "b", None]}))
    assert "a.arrow, row 2 (from 0): is null" in fault(section([path]), tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_field_of_a_struct_is_read_and_what_is_told_of_columns_leads_on(name, tmp_path):
    path, told = tmp_path / name, lambda **keys: fault(section([path], **keys), tmp_path)
    put = lambda table: pq.write_table(table, path) if name == "a.parquet" else write_arrow(path, table)
    more = pa.struct([("title", pa.large_string())])
    kind = pa.struct([("text", pa.dictionary(pa.int8(), pa.string())), ("more", more)])
    put(pa.table({"id": [1, 2], "meta": pa.array([{"text": "a", "more": {"title": "b"}},
                                                  {"text": "c", "more": {"title": "d"}}], kind)}))
    assert Opened(section([path], field="meta.text"), tmp_path).texts() == ["a", "c"]
    assert Opened(section([path], field="meta.more.title"), tmp_path).texts() == ["b", "d"]
    for field in ("text", "meta.body", "meta"):
        assert f"in column {field!r}" in (message := told(field=field)) or f"no column {field!r}" in message
        assert message.endswith("set data.field to one of meta.text, meta.more.title")
    put(pa.table({"a.b": ["x"], "a": [{"b": "y"}]}))
    assert Opened(section([path], field="a.b"), tmp_path).texts() == ["x"], "a column's own name comes first"
    put(pa.table({"meta": [{"text": "a"}, None]}))
    assert "row 1 (from 0): is null in column 'meta.text'; drop such rows" in told(field="meta.text")
    put(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))
    assert "has more than one column 'text'; rename all but one" in told()
    put(pa.table({"messages": [[{"role": "user", "content": "x"}]]}))
    assert "no column has strings (its columns: messages)" in told()
    assert 'set data.source="chat" for the conversations in \'messages\'' in told()


def test_text_that_is_no_utf8_is_refused_by_a_tokenizer_and_taken_as_bytes(tmp_path, bpe):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\nfour \xe9\n")
    assert "a.txt, line 4: is not UTF-8 (invalid continuation byte, byte 5" in fault(
        section([path], tokenizer=bpe), tmp_path)
    assert Opened(section([path]), tmp_path).ids() == [list(b"one\r\ntwo\n\nfour \xe9\n")]


@pytest.mark.parametrize("pack, suffix", [(gzip.compress, ".gz"), (zstandard.compress, ".zst")])
def test_bytes_of_a_compressed_text_are_those_of_the_text(pack, suffix, tmp_path):
    (tmp_path / f"a.txt{suffix}").write_bytes(pack("one\ntwo é\n".encode()))
    (tmp_path / "b.txt").write_bytes(b"three")
    opened = Opened(section([tmp_path / f"a.txt{suffix}", tmp_path / "b.txt"]), tmp_path)
    assert opened.ids() == [list("one\ntwo é\n".encode()), list(b"three")]


@pytest.mark.parametrize("first", ["", "x" * 1_000_000], ids=["a small row first", "equal rows"])
@pytest.mark.parametrize("column", ["text", "meta.text", "rows"])
def test_a_parquet_file_takes_the_memory_of_some_rows_however_small_it_is(first, column, tmp_path):
    """A dictionary holds a long value once, and each row may have it."""
    path, most = tmp_path / "a.parquet", 0
    texts = [first] + ["x" * 1_000_000] * 255
    pq.write_table(pa.table({"text": texts} if column != "meta.text" else {"meta": [{"text": one} for one in texts]}),
                   path, compression="zstd")
    del texts
    before, chars = pa.total_allocated_bytes(), 0
    pieces = (len(one["text"]) for _, one, _ in formats.read_rows(str(path), "")) if column == "rows" else (
        len(piece.text) for piece in formats.read("parquet", str(path), column))
    for count in pieces:
        chars, most = chars + count, max(most, pa.total_allocated_bytes() - before)
    assert chars == 255_000_000 + len(first) and os.path.getsize(path) < 10_000 and most < 40_000_000, most


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_value_of_a_table_that_is_too_long_is_told(name, tmp_path, monkeypatch):
    path = write(tmp_path / name, ["short", "long" * 30])
    monkeypatch.setattr(formats, "LINE_BYTES", 100)
    told = fault(section([path]), tmp_path)
    assert f"{name}, row 1 (from 0): has 120 characters in column 'text', but the limit is 100" in told
    with pytest.raises(ValueError, match=r"row 1 \(from 0\): cannot be read: 'text' has 120 characters"):
        list(formats.read_rows(str(path), ""))


def test_parquet_without_the_column_or_with_another_kind_or_a_null_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"], "raw": [b"x"]}), path)
    assert "no column 'text'; set data.field to one of body" in fault(section([path]), tmp_path)
    message = fault(section([path], field="id"), tmp_path)
    assert "has int64 in column 'id', not strings; set data.field to one of body" in message
    assert "has binary in column 'raw', not strings" in fault(section([path], field="raw"), tmp_path)
    pq.write_table(pa.table({"text": ["a", "b", None]}), path, row_group_size=2)
    assert "a.parquet, row 2 (from 0): is null" in fault(section([path]), tmp_path)
    broken = pa.Array.from_buffers(pa.string(), 2,
                                   [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"text": broken}), path)
    assert "a.parquet, row 1 (from 0): is not UTF-8" in fault(section([path]), tmp_path)
    pq.write_table(pa.table({"text": ["some text " * 50] * 50}), path, compression=None, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    assert "is not a whole Parquet file" in fault(section([path]), tmp_path)
