"""Each source gives the documents it was given, no more and no fewer; the token cache is whole, fresh or built again."""

import gzip
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from meshtrain import config
from meshtrain.data import formats, sources, token_cache, token_files, tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ["the cat sat on the mat", "", "zwei\nZeilen\r\n", "naïve — 猫 🐈\x00", "<|endoftext|> is text here", "the mat\n"]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
WRITERS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"]


@pytest.fixture(scope="session")
def bpe(tmp_path_factory) -> str:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def write_tokenizer(path: Path, special=("<|endoftext|>",), corpus=TEXTS) -> str:
    """A tiny BPE over bytes, which asks for all that documents must not get: truncation, padding, separators of its own."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False))
    if special:
        made.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(path))
    return str(path)


def write(path: Path, texts, field: str = "text") -> Path:
    """One file of any format, told by its name; a .txt file is one document."""
    rows = [json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    lines = "".join(row + "\n" for row in rows).encode()
    if path.name.endswith(".jsonl"):
        path.write_bytes(lines)
    elif path.name.endswith(".gz"):
        half = lines.find(b"\n") + 1  # two members, as concatenated files have
        path.write_bytes(gzip.compress(lines[:half], 1) + gzip.compress(lines[half:], 1))
    elif path.name.endswith(".zst"):
        half = lines.find(b"\n") + 1
        packer = zstandard.ZstdCompressor(level=1)
        path.write_bytes(packer.compress(lines[:half]) + packer.compress(lines[half:]))
    elif path.name.endswith(".parquet"):
        pq.write_table(pa.table({"id": range(len(texts)), field: pa.array(texts, pa.string())}), path, row_group_size=2)
    else:
        (text,) = texts
        path.write_bytes(text.encode())
    return path


def write_tokens(path: Path, documents, dtype=np.uint16) -> Path:
    np.save(path, np.concatenate([np.array(ids, dtype) for ids in documents] or [np.zeros(0, dtype)]))
    np.save(token_files.ends_path(str(path)), np.cumsum([len(ids) for ids in documents], dtype=np.int64))
    return path


def section(paths=(), source="", **keys) -> config.Data:
    if not source:
        name = str(paths[0])
        source = next(kind for kind, part in {"jsonl": ".jsonl", "parquet": ".parquet", "tokens": ".npy", "text": ""}.items()
                      if part in name)
    return config.Data(source=source, paths=[str(path) for path in paths], **keys)


class Opened:
    """A corpus, what was told while it was opened (`built`: that files are tokenized), and its documents as text."""

    def __init__(self, data: config.Data, fallback: Path, vocab_size: int = 512):
        lines = []
        self.corpus = sources.open_corpus(data, vocab_size=vocab_size, cache_dir=fallback, tell=lines.append)
        self.built = [line for line in lines if line.startswith("token cache: tokenizing")]
        self.told = [line for line in lines if line not in self.built]

    def ids(self, k: int = 0):
        source = self.corpus.sources[k]
        return [np.asarray(source.read(d, 0, int(n))).tolist() for d, n in enumerate(source.lengths)]

    def texts(self, k: int = 0):
        return [self.corpus.tokenizer.decode(ids) for ids in self.ids(k)]


def fault(data: config.Data, fallback: Path, vocab_size: int = 512) -> str:
    with pytest.raises(ValueError) as caught:
        sources.open_corpus(data, vocab_size=vocab_size, cache_dir=fallback, tell=lambda line: None)
    message = str(caught.value)
    assert "\n" not in message and re.search(r"; ", message), message
    return message


# ---- the documents that were given -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(files=st.lists(st.lists(UNICODE, min_size=1, max_size=5), min_size=1, max_size=3), own=st.booleans())
def test_a_source_gives_exactly_the_documents_it_was_given_in_the_order_of_the_files(kind, files, own, bpe):
    if kind == "txt":
        files = [[text] for texts in files for text in texts]
    with tempfile.TemporaryDirectory() as root:
        paths = [write(Path(root) / f"{i:03}.{kind}", texts) for i, texts in enumerate(files)]
        given_texts = [text for texts in files for text in texts]
        data = section([f"{root}/*.{kind}"], "text" if kind == "txt" else kind.partition(".")[0],
                       tokenizer=bpe if own else "bytes", cache=f"{root}/cache")
        if not any(given_texts):
            assert "are empty" in fault(data, Path(root))
            return
        opened = Opened(data, Path(root))
        assert opened.texts() == given_texts
        assert opened.told == []
        assert len(paths) == len(files)
        # Any part of any document, and from the cache as from the first time.
        again = Opened(data, Path(root))
        source = again.corpus.sources[0]
        for document, ids in enumerate(opened.ids()):
            middle = len(ids) // 2
            assert np.asarray(source.read(document, middle, len(ids))).tolist() == ids[middle:]
            assert np.asarray(source.read(document, 0, middle)).tolist() == ids[:middle]


@settings(max_examples=25, deadline=None)
@given(files=st.lists(st.lists(st.lists(st.integers(0, 70000)), max_size=4), min_size=1, max_size=3))
def test_token_files_give_exactly_their_documents(files):
    with tempfile.TemporaryDirectory() as root:
        for i, documents in enumerate(files):
            dtype = np.uint16 if max([0, *sum(documents, [])]) < 1 << 16 else np.uint32
            write_tokens(Path(root) / f"{i}.tokens.npy", documents, dtype)
        data = section([f"{root}/*.tokens.npy"], bos_token="70001")
        expected = [ids for documents in files for ids in documents]
        if not any(expected):
            assert "are empty" in fault(data, Path(root), 70002)
            return
        opened = Opened(data, Path(root), vocab_size=70002)
        assert opened.ids() == expected
        assert (opened.corpus.tokenizer.bos, opened.corpus.tokenizer.vocab_size) == (70001, 70002)


def test_a_document_longer_than_a_piece_is_one_document(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_CHARS", 8)
    texts = ["\n".join(TEXTS) * 3, "x" * 100, "é" * 8, "12345678", "1234567\n"]
    for kind in ("jsonl", "parquet"):
        opened = Opened(section([write(tmp_path / f"a.{kind}", texts)], tokenizer=bpe), tmp_path)
        assert opened.texts() == texts
    paths = [write(tmp_path / f"{i}.txt", [text]) for i, text in enumerate(texts)]
    assert Opened(section(paths, tokenizer=bpe), tmp_path).texts() == texts


def test_many_small_texts_share_parts_of_the_cache_and_stay_documents(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(token_cache, "TEXT_PART_BYTES", 30)
    paths = [write(tmp_path / f"{i:02}.txt", [f"text number {i}"]) for i in range(20)]
    opened = Opened(section(paths, tokenizer=bpe), tmp_path)
    assert opened.texts() == [f"text number {i}" for i in range(20)]
    assert 1 < len(list(tmp_path.glob(".meshtrain/*/*.tokens.npy"))) < 20
    paths[7].write_text("another text")
    again = Opened(section(paths, tokenizer=bpe), tmp_path)
    assert again.texts()[6:9] == ["text number 6", "another text", "text number 8"]
    assert len(again.told) == 1 and "has changed" in again.told[0]  # one part, not all


def test_blank_lines_are_no_documents_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b", "text2": null}')
    assert Opened(section([path]), tmp_path).texts() == ["a", "b"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_kind_of_string_column_is_read(kind, tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body.raw": pa.array(["a", "b", "a"]).cast(kind)}), path)
    assert Opened(section([path], field="body.raw"), tmp_path).texts() == ["a", "b", "a"]


def test_a_mixture_opens_every_source_with_its_weight(tmp_path, bpe):
    texts, lines = write(tmp_path / "a.txt", ["plain"]), write(tmp_path / "b.jsonl", TEXTS, field="body")
    ids = write_tokens(tmp_path / "c.tokens.npy", [[5, 6], [7]])
    run = config.load(["--data.source", "mixture", "--data.tokenizer", bpe, "--data.mixture",
                       f'[{{source="text", paths=["{texts}"], weight=2}}, {{source="tokens", paths=["{ids}"]}},'
                       f' {{source="jsonl", paths=["{lines}"], field="body", weight=0.5}}]'])
    opened = Opened(run.data, tmp_path)
    assert opened.corpus.weights == (2.0, 1.0, 0.5)
    assert opened.texts(0) == ["plain"]
    assert opened.ids(1) == [[5, 6], [7]]
    assert opened.texts(2) == TEXTS


def test_the_fingerprint_tells_lengths_weights_sources_and_tokenizers_apart(tmp_path, bpe):
    a, b, c = (write(tmp_path / f"{name}.jsonl", texts) for name, texts in
               [("a", ["one", "three"]), ("b", ["one"]), ("c", ["three"])])
    same = write(tmp_path / "d.jsonl", ["two", "seven"])

    def mixture(*weights):
        return config.Data(source="mixture", mixture=[{"source": "jsonl", "paths": [str(path)], "weight": weight}
                                                      for path, weight in zip((b, c), weights)])

    def fingerprint(data):
        return Opened(data, tmp_path).corpus.fingerprint

    assert fingerprint(section([a])) == fingerprint(section([same])) == fingerprint(section([b, c]))
    different = [section([a]), section([b]), section([a], tokenizer=bpe), mixture(1, 2), mixture(2, 1)]
    assert len({fingerprint(data) for data in different}) == len(different)


def test_text_and_the_standard_library_as_bytes_need_no_cache(tmp_path):
    opened = Opened(section([write(tmp_path / "a.txt", ["é\r\n"])]), tmp_path / "fallback")
    assert opened.ids() == [[0xC3, 0xA9, 13, 10]]
    assert (opened.corpus.weights, opened.corpus.tokenizer.bos, opened.corpus.tokenizer.vocab_size) == ((1.0,), 256, 257)
    assert Opened(config.Data(), tmp_path / "fallback").corpus.sources[0].lengths.sum() > 1e6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_file_gives_the_librarys_ids_and_nothing_else(tmp_path, bpe):
    plain = tokenizers.Tokenizer.from_file(bpe)
    plain.no_truncation(), plain.no_padding()
    opened = Opened(section([write(tmp_path / "a.jsonl", TEXTS)], tokenizer=bpe), tmp_path)
    for text, ids in zip(TEXTS, opened.ids()):
        if "<|" not in text:
            assert ids == plain.encode(text, add_special_tokens=False).ids
    reader = opened.corpus.tokenizer
    assert (reader.bos, reader.vocab_size) == (plain.token_to_id("<|endoftext|>"), plain.get_vocab_size())
    # The separator's name in a text is text: no document can forge a beginning.
    assert all(reader.bos not in ids for ids in opened.ids())
    ids = reader.encode(["the mat"])[0].tolist()
    assert reader.decode([reader.bos, *ids, -1, reader.vocab_size, 511]) == "the mat"


def test_bytes_and_bare_ids_decode_without_separators_and_padding():
    assert tokenizer.Bytes().decode([256, 72, 105, -1, 300]) == "Hi"
    assert tokenizer.Bytes().decode([0xC3]) == "\ufffd"
    assert tokenizer.Ids(vocab_size=1000, bos=7).decode([7, 5, -1, 999, 1000]) == "5 999"


@pytest.mark.parametrize("special, bos_token, found", [
    (["<s>", "</s>"], "", "<s>"), (["x", "<|begin_of_text|>", "<|endoftext|>"], "", "<|begin_of_text|>"),
    (["[BOS]"], "", "[BOS]"), (["<s>", "<mine>"], "<mine>", "<mine>")])
def test_the_separator_is_found_or_named(special, bos_token, found, tmp_path):
    path = write_tokenizer(tmp_path / "t.json", special)
    assert tokenizer.open_file(path, bos_token).bos == tokenizers.Tokenizer.from_file(path).token_to_id(found)


def test_a_tokenizer_that_does_not_fit_is_refused_with_the_remedy(tmp_path, bpe):
    lines = write(tmp_path / "a.jsonl", TEXTS)
    size = tokenizers.Tokenizer.from_file(bpe).get_vocab_size()
    assert f"model.vocab_size={size} or more" in fault(section([lines], tokenizer=bpe), tmp_path, vocab_size=size - 1)
    assert Opened(section([lines], tokenizer=bpe), tmp_path, vocab_size=size).texts() == TEXTS
    assert "'<nix>' is not a token" in fault(section([lines], tokenizer=bpe, bos_token="<nix>"), tmp_path)
    nameless = write_tokenizer(tmp_path / "nameless.json", special=["<mine>"])
    assert "data.bos_token, e.g. one of its special tokens: <mine>" in fault(section([lines], tokenizer=nameless), tmp_path)
    assert "is not read" in fault(section([lines], bos_token="<s>"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\x00", b"cos\nsystem\n(S'true'\ntR."])
def test_a_broken_tokenizer_file_is_told(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert "is not a tokenizer.json" in fault(section([write(tmp_path / "a.jsonl", TEXTS)], tokenizer=str(path)), tmp_path)
    assert "No such file" in fault(section([tmp_path / "a.jsonl"], tokenizer=str(tmp_path / "nix.json")), tmp_path)


def test_a_package_that_is_missing_is_named_with_what_installs_it(tmp_path, bpe, monkeypatch):
    cases = {"tokenizers": section([write(tmp_path / "a.jsonl", TEXTS)], tokenizer=bpe),
             "pyarrow": section([write(tmp_path / "a.parquet", TEXTS)]),
             "zstandard": section([write(tmp_path / "a.jsonl.zst", TEXTS)])}
    for module, data in cases.items():
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module, None)
            message = fault(data, tmp_path)
        assert f"needs the package {module}" in message and "pip install -e '.[data]'" in message


# ---- faulty files ----------------------------------------------------------------------------------------------------

GOOD = b'{"text": "fine"}\n'
# (file name, content, what the one message must contain)
FAULTY = [
    ("a.jsonl", GOOD + b'{"text": "x"]\n' + GOOD, ["a.jsonl, line 2: broken JSON (Expecting ',' delimiter, column 13)"]),
    ("a.jsonl", GOOD + b'{"text": "x"\n', ["line 2: broken JSON (Expecting ',' delimiter, column 13)"]),
    ("a.jsonl", GOOD + b"\n" + b"[1]\n", ["a.jsonl, line 3: is not an object"]),
    ("a.jsonl", b'{"body": "x", "b": 1}\n', ["line 1: has no 'text' (its keys: 'body', 'b')", "data.field"]),
    ("a.jsonl", b'{"text": 5}\n', ["line 1: has no string in 'text', but 5"]),
    ("a.jsonl", b'{"text": null}\n', ["line 1: has no string in 'text', but null"]),
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
    ("a.jsonl", b"", ["all 1 files of data.paths are empty", "a.jsonl"]),
    ("a.jsonl.gz", b"", ["are empty"]),
    ("a.jsonl.zst", b"", ["are empty"]),
    ("a.parquet", GOOD, ["a.parquet is not a whole Parquet file", "write it again"]),
    ("a.parquet", b"", ["a.parquet is not a whole Parquet file"]),
    ("a.tokens.npy", b"", ["a.tokens.npy cannot be read as an .npy file"]),
    ("a.tokens.npy", GOOD * 9, ["a.tokens.npy cannot be read as an .npy file"]),
    ("a.npy", GOOD, ["a.npy is not named as a token file; give X.tokens.npy"]),
]


@pytest.mark.parametrize("name, content, parts", FAULTY, ids=[f"{case[0]} {case[2][0][:40]}" for case in FAULTY])
def test_a_faulty_file_is_one_message_that_names_the_place(name, content, parts, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    message = fault(section([path], bos_token="1" if name.endswith("npy") else ""), tmp_path)
    assert all(part in message for part in parts), message
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".npy", ".tmp")]
    assert left == ([name] if name.endswith("npy") else []) or "are empty" in message  # nothing that could be believed


def test_text_that_is_no_utf8_is_refused_by_a_tokenizer_and_taken_as_bytes(tmp_path, bpe):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\nfour \xe9\n")
    assert "a.txt, line 4: is not UTF-8 (invalid continuation byte, byte 5" in fault(section([path], tokenizer=bpe), tmp_path)
    assert Opened(section([path]), tmp_path).ids() == [list(b"one\r\ntwo\n\nfour \xe9\n")]


def test_parquet_without_the_column_or_with_another_kind_or_a_null_is_told(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"], "raw": [b"x"]}), path)
    assert "no column 'text'; set data.field to one of id, body, raw" in fault(section([path]), tmp_path)
    message = fault(section([path], field="id"), tmp_path)
    assert "no strings in column 'id', but int64; set data.field to one of body" in message
    assert "no strings in column 'raw', but binary" in fault(section([path], field="raw"), tmp_path)
    pq.write_table(pa.table({"text": ["a", "b", None]}), path, row_group_size=2)
    assert "a.parquet, row 2 (from 0): is null" in fault(section([path]), tmp_path)
    broken = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")])
    pq.write_table(pa.table({"text": broken}), path)
    assert "a.parquet, row 1 (from 0): is not UTF-8" in fault(section([path]), tmp_path)
    pq.write_table(pa.table({"text": ["some text " * 50] * 50}), path, compression=None, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    assert "is not a whole Parquet file" in fault(section([path]), tmp_path)


def test_an_empty_file_among_others_is_told_and_empty_texts_are_documents(tmp_path, bpe):
    full, empty = write(tmp_path / "a.jsonl", ["x", ""]), tmp_path / "b.jsonl"
    empty.write_bytes(b"\n")
    opened = Opened(section([full, empty]), tmp_path)
    assert opened.texts() == ["x", ""]
    assert len(opened.told) == 1 and "1 of 2 files hold no document" in opened.told[0] and "b.jsonl" in opened.told[0]
    texts = [write(tmp_path / "c.txt", [""]), write(tmp_path / "d.txt", ["x"])]
    assert Opened(section(texts, tokenizer=bpe), tmp_path).texts() == ["", "x"]
    assert "are empty" in fault(section(texts[:1], tokenizer=bpe), tmp_path)


# (tokens, ends, what the one message must contain)
WRONG_TOKENS = [
    (np.zeros(4, np.int64), [4], "int64 [4], and token ids are one dimension of uint16, uint32 or int32"),
    (np.zeros(4, ">u2"), [4], ">u2 [4]"),
    (np.zeros((2, 2), np.uint16), [4], "uint16 [2, 2]"),
    (np.zeros(4, np.uint16), np.array([4], np.int32), "int32 [1], and the ends of documents are one dimension of int64"),
    (np.zeros(4, np.uint16), [3, 2, 4], "document 1 (from 0) ends at 2, before it begins at 3"),
    (np.zeros(4, np.uint16), [-1, 4], "document 0 (from 0) ends at -1"),
    (np.zeros(4, np.uint16), [2, 5], "the last document ends at 5, and a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), [2, 3], "the last document ends at 3, and a.tokens.npy has 4 tokens"),
    (np.zeros(4, np.uint16), None, "a.ends.npy is missing"),
    (np.array([{}], object), [1], "cannot be read as an .npy file"),
]


@pytest.mark.parametrize("tokens, ends, part", WRONG_TOKENS, ids=[case[2][:40] for case in WRONG_TOKENS])
def test_a_wrong_token_file_is_told(tokens, ends, part, tmp_path):
    np.save(tmp_path / "a.tokens.npy", tokens, allow_pickle=True)
    if ends is not None:
        np.save(tmp_path / "a.ends.npy", ends)
    assert part in fault(section([tmp_path / "a.tokens.npy"], bos_token="1"), tmp_path)


def test_an_id_beyond_the_vocabulary_is_told_with_file_document_and_id_and_the_scan_remembered(tmp_path, monkeypatch):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2], [], [3, 600, 700]], np.uint32)
    data = section([path], bos_token="0")
    for _ in range(2):
        message = fault(data, tmp_path)
        assert "a.tokens.npy: document 2 (from 0) holds the id 600, and model.vocab_size=512" in message
        assert "model.vocab_size=701 or more" in message
        Opened(data, tmp_path, vocab_size=701)
    with monkeypatch.context() as unread:
        unread.setattr(token_cache, "_Progress", None)  # a scan would need it
        Opened(data, tmp_path, vocab_size=701)
    write_tokens(path, [[1, 2], [800]], np.uint32)
    assert "document 1 (from 0) holds the id 800" in fault(data, tmp_path, vocab_size=701)
    assert "data.bos_token='900' is beyond model.vocab_size=701" in fault(section([path], bos_token="900"), tmp_path, 701)
    for bos_token in ("", "<s>", "-1"):
        assert "give its id" in fault(section([path], bos_token=bos_token), tmp_path)


@pytest.mark.parametrize("kind", WRITERS)
def test_files_that_cannot_be_read_are_told_together(kind, tmp_path, bpe):
    for name in ("a", "b"):
        (tmp_path / f"{name}.{kind}").symlink_to(tmp_path / f"nowhere {name}")
    with pytest.raises(ValueError) as caught:
        Opened(section([tmp_path / f"*.{kind}"], "text" if kind == "txt" else "", tokenizer=bpe), tmp_path)
    told = str(caught.value).splitlines()
    assert len(told) == 2 and all("cannot be read: No such file" in line for line in told)


def test_faults_of_all_sources_of_a_mixture_are_told_together(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{")
    data = config.Data(source="mixture", mixture=[
        {"source": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}, {"source": "text", "paths": ["nowhere/*.txt"]}])
    with pytest.raises(ValueError) as caught:
        sources.open_corpus(data, vocab_size=512, cache_dir=tmp_path)
    first, second = str(caught.value).splitlines()
    assert "a.jsonl, line 1" in first and "data.mixture[1].paths: 'nowhere/*.txt' matches no file" in second


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """The files that are tokenized from now on."""
    read, names = formats.read, []

    def count(format, path, field):
        names.append(Path(path).name)
        return read(format, path, field)

    monkeypatch.setattr(formats, "read", count)
    return names


def cache_file(root: Path, pattern: str) -> Path:
    (path,) = root.glob(f".meshtrain/*/{pattern}")
    return path


def test_files_are_tokenized_once_and_again_only_where_their_content_changed(tmp_path, counted):
    a, b = write(tmp_path / "a.jsonl", ["one", "two"]), write(tmp_path / "b.jsonl", ["three"])
    data = section([tmp_path / "*.jsonl"])
    assert Opened(data, tmp_path).texts() == Opened(data, tmp_path).texts() == ["one", "two", "three"]
    assert counted == ["a.jsonl", "b.jsonl"]

    os.utime(a, ns=(5, 5))  # touched
    assert Opened(data, tmp_path).told == [] and counted == ["a.jsonl", "b.jsonl"]
    assert json.loads(cache_file(tmp_path, "a.jsonl-*.json").read_text())["inputs"][0]["mtime_ns"] == 5

    write(b, ["seven"])  # of one length: only the content tells
    write(tmp_path / "c.jsonl", ["new"])
    opened = Opened(data, tmp_path)
    assert opened.texts() == ["one", "two", "seven", "new"]
    assert counted[2:] == ["b.jsonl", "c.jsonl"]
    assert len(opened.told) == 1 and "b.jsonl: the file has changed" in opened.told[0]


def test_another_field_or_tokenizer_has_a_cache_of_its_own(tmp_path, counted, bpe):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "body": "two"}\n')
    other = write_tokenizer(tmp_path / "other.json", corpus=["two two"])
    keys = [{}, {"field": "body"}, {"tokenizer": bpe}, {"tokenizer": other}]
    for _ in range(2):
        assert [Opened(section([path], **key), tmp_path).texts() for key in keys] == [["one"], ["two"], ["one"], ["one"]]
    assert len(counted) == 4
    moved = shutil.copy(bpe, tmp_path / "same.json")  # a tokenizer is its content
    Opened(section([path], tokenizer=str(moved)), tmp_path)
    assert len(counted) == 4


def test_a_corpus_that_was_moved_keeps_its_cache(tmp_path, counted):
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "a.jsonl", TEXTS)
    Opened(section([tmp_path / "old" / "a.jsonl"]), tmp_path)
    (tmp_path / "old").rename(tmp_path / "new")
    assert Opened(section([tmp_path / "new" / "a.jsonl"]), tmp_path).texts() == TEXTS
    assert counted == ["a.jsonl"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(which=st.sampled_from(["*.tokens.npy", "*.ends.npy", "*[0-9a-f].json"]), where=st.floats(0, 1, exclude_max=True),
       bit=st.integers(0, 7), truncate=st.booleans())
def test_a_damaged_cache_is_noticed_told_and_built_again(which, where, bit, truncate, tmp_path_factory):
    root = tmp_path_factory.mktemp("damage")
    data = section([write(root / "a.jsonl", TEXTS)])
    Opened(data, root)
    path = cache_file(root, which)
    stat, content = path.stat(), bytearray(path.read_bytes())
    place = int(where * len(content))
    if truncate:
        del content[place:]
    else:
        content[place] ^= 1 << bit
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk leaves it
    opened = Opened(data, root)
    assert opened.texts() == TEXTS
    data_begins = 0 if which.endswith("json") else 128
    if truncate or (place >= data_begins and not which.endswith("json")):
        assert len(opened.told) == 1 and "tokenizing again" in opened.told[0]
    assert Opened(data, root).told == []


def test_a_missing_file_of_a_part_is_built_again(tmp_path):
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    for pattern in ("*.tokens.npy", "*.ends.npy", "*.json"):
        Opened(data, tmp_path)
        cache_file(tmp_path, pattern).unlink()
        assert Opened(data, tmp_path).texts() == TEXTS


def test_a_directory_that_cannot_be_written_is_told_once_and_the_run_directory_used(tmp_path, counted):
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    (tmp_path / ".meshtrain").write_text("a file, so nobody can make the directory, not even root")
    opened = Opened(data, tmp_path / "run" / "cache")
    assert opened.texts() == TEXTS
    assert len(opened.told) == 1 and "cannot be written" in opened.told[0] and "run/cache" in opened.told[0]
    assert Opened(data, tmp_path / "run" / "cache").texts() == TEXTS and counted == ["a.jsonl"]
    (tmp_path / "run2").write_text("")
    assert "set data.cache" in fault(data, tmp_path / "run2" / "cache")
    named = section([tmp_path / "a.jsonl"], cache=str(tmp_path / "named"))
    assert Opened(named, tmp_path / "run2" / "cache").told == []
    assert list((tmp_path / "named").glob("*/*.tokens.npy"))


def test_the_standard_library_is_never_written_into(tmp_path, bpe, monkeypatch):
    library = tmp_path / "python3"
    library.mkdir()
    write(library / "a.txt", ["x = 1\n"]).rename(library / "a.py")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(library))
    opened = Opened(config.Data(tokenizer=bpe), tmp_path / "cache")
    assert opened.texts() == ["x = 1\n"]
    assert [path.name for path in library.iterdir()] == ["a.py"]


CHILD = """
import json, sys, time
from pathlib import Path
from meshtrain import config
from meshtrain.data import sources, tokenizer
root, stop_at = Path(sys.argv[1]), sys.argv[2]
encode = tokenizer.Bytes.encode
def wait(self, texts):
    while stop_at in texts and not (root / "go").exists():
        time.sleep(0.01)
    return encode(self, texts)
tokenizer.Bytes.encode = wait
corpus = sources.open_corpus(config.Data(source="jsonl", paths=[f"{root}/*.jsonl"]), vocab_size=512, cache_dir=root / "cache")
source = corpus.sources[0]
print(json.dumps([corpus.tokenizer.decode(source.read(d, 0, int(n))) for d, n in enumerate(source.lengths)]))
"""


def start_child(root: Path, stop_at: str) -> subprocess.Popen:
    """A process that opens the corpus, and comes to the document `stop_at` only once the file `go` is there."""
    return subprocess.Popen([sys.executable, "-u", "-c", CHILD, str(root), stop_at], stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_after_kill_9_finished_files_are_kept_and_the_half_written_one_is_done_again(tmp_path, counted):
    for i in range(4):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    child = start_child(tmp_path, stop_at="text 2")
    wait_until(lambda: list(tmp_path.glob(".meshtrain/*/2.jsonl-*.tokens.npy.tmp")))
    child.kill()
    child.communicate()
    assert Opened(section([tmp_path / "*.jsonl"]), tmp_path).texts() == [f"text {i}" for i in range(4)]
    assert counted == ["2.jsonl", "3.jsonl"]
    assert not list(tmp_path.glob(".meshtrain/*/*.tmp"))


def test_two_runs_that_fill_one_cache_take_turns_and_the_second_says_so(tmp_path):
    for i in range(3):
        write(tmp_path / f"{i}.jsonl", [f"text {i}"])
    first = start_child(tmp_path, stop_at="text 1")
    wait_until(lambda: list(tmp_path.glob(".meshtrain/*/1.jsonl-*.tmp")))
    second = start_child(tmp_path, stop_at="")
    said = second.stdout.readline()
    (tmp_path / "go").touch()
    assert "waiting for another run" in said
    outputs = [child.communicate(timeout=60)[0].splitlines() for child in (first, second)]
    assert [json.loads(lines[-1]) for lines in outputs] == [[f"text {i}" for i in range(3)]] * 2
    assert not any("tokenizing" in line for line in outputs[1])


def run_out_of_room(root: str, queue) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails as on a full disk does
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    try:
        Opened(section([Path(root) / "*.jsonl"]), Path(root))
    except ValueError as error:
        queue.put(str(error))
    else:
        queue.put("no error")


def test_a_full_disk_is_told_keeps_what_is_finished_and_leaves_nothing_half(tmp_path, counted):
    texts = [["small"], ["x" * 200_000]]
    for i, some in enumerate(texts):
        write(tmp_path / f"{i}.jsonl", some)
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=run_out_of_room, args=(str(tmp_path), queue))
    child.start()
    message = queue.get(timeout=60)
    child.join()
    assert "cannot be written: File too large; make room" in message and "data.cache" in message
    assert [path.name[0] for path in tmp_path.glob(".meshtrain/*/*.npy*")] == ["0", "0"]
    assert Opened(section([tmp_path / "*.jsonl"]), tmp_path).texts() == [some[0] for some in texts]
    assert counted == ["1.jsonl"]


def test_token_files_that_change_under_a_run_are_noticed_and_descriptors_stay_few(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "MAPS_HELD", 2)
    for i in range(40):
        write_tokens(tmp_path / f"{i:02}.tokens.npy", [[i, i], [i + 1]])
    before = len(os.listdir("/proc/self/fd"))
    source = Opened(section([tmp_path / "*.tokens.npy"], bos_token="0"), tmp_path).corpus.sources[0]
    assert [source.read(2 * i + 1, 0, 1)[0] for i in range(40)] == list(range(1, 41))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    write_tokens(tmp_path / "00.tokens.npy", [[9, 9], [9]])
    with pytest.raises(OSError, match="00.tokens.npy is not the file it was"):
        source.read(0, 0, 1)


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "TELL_SECONDS", 0)
    data = section([write(tmp_path / "a.jsonl", TEXTS)])
    opened = Opened(data, tmp_path)
    assert re.fullmatch(rf"token cache: tokenizing 1 file, 0.0 MB, into {tmp_path}/.meshtrain/jsonl-\w+", *opened.built)
    assert any(re.fullmatch(r"tokenizing 1 file: 100%, [\d.]+ MB/s", line) for line in opened.told)
    assert Opened(data, tmp_path).built == []
