"""Each source gives the documents it was given, no more and no fewer."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import TEXTS, UNICODE, WRITERS, Opened, bpe, fault, section, write, write_tokens  # noqa: F401
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshtrain import config, run_files
from meshtrain.data import globs, sources
from meshtrain.data.documents import formats


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(files=st.lists(st.lists(UNICODE, min_size=1, max_size=5), min_size=1, max_size=3), own=st.booleans())
@example(files=[["a"], ["<|endoftext|>"]], own=True)
def test_a_source_gives_exactly_the_documents_it_was_given_in_the_order_of_the_files(kind, files, own, bpe):
    if kind.startswith("txt"):
        files = [[text] for texts in files for text in texts]
    with tempfile.TemporaryDirectory() as root:
        paths = [write(Path(root) / f"{i:03}.{kind}", texts) for i, texts in enumerate(files)]
        given_texts = [text for texts in files for text in texts]
        data = section([f"{root}/*.{kind}"], "text" if kind.startswith("txt") else kind.partition(".")[0],
                       tokenizer=bpe if own else "bytes", cache=f"{root}/cache")
        if not any(given_texts):
            assert "no text in" in fault(data, Path(root))
            return
        opened = Opened(data, Path(root))
        assert opened.texts() == given_texts
        names_told = ["in the text are encoded" in line for line in opened.told]
        assert names_told == [True] * (own and any("<|endoftext|>" in text for text in given_texts))
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
            assert "no text in" in fault(data, Path(root), 70002)
            return
        opened = Opened(data, Path(root), vocab_size=70002)
        assert opened.ids() == expected
        assert (opened.corpus.tokenizer.bos, opened.corpus.tokenizer.vocab_size) == (70001, 70002)


def test_a_document_longer_than_a_piece_is_one_document(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr(formats, "PIECE_CHARS", 8)
    texts = ["\n".join(TEXTS) * 3, "x" * 100, "é" * 8, "12345678", "1234567\n"]
    for kind in ("jsonl", "parquet", "arrow"):
        opened = Opened(section([write(tmp_path / f"a.{kind}", texts)], tokenizer=bpe), tmp_path)
        assert opened.texts() == texts
    paths = [write(tmp_path / f"{i}.txt", [text]) for i, text in enumerate(texts)]
    assert Opened(section(paths, tokenizer=bpe), tmp_path).texts() == texts


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
    run = run_files.load(["--data.source", "mixture", "--data.tokenizer", bpe, "--data.mixture",
                       f'[{{source="text", paths=["{texts}"], weight=2}}, {{source="tokens", paths=["{ids}"]}},'
                       f' {{source="jsonl", paths=["{lines}"], field="body", weight=0.5}}]'])
    opened = Opened(run.data, tmp_path)
    assert opened.corpus.weights == (2.0, 1.0, 0.5)
    assert opened.texts(0) == ["plain"]
    assert opened.ids(1) == [[5, 6], [7]]
    assert opened.texts(2) == TEXTS


def test_the_fingerprint_tells_lengths_sources_and_tokenizers_apart_and_no_weights(tmp_path, bpe):
    a, b, c = (write(tmp_path / f"{name}.jsonl", texts) for name, texts in
               [("a", ["one", "three"]), ("b", ["one"]), ("c", ["three"])])
    same = write(tmp_path / "d.jsonl", ["two", "seven"])

    def mixture(*weights):
        return config.Data(source="mixture", mixture=[{"source": "jsonl", "paths": [str(path)], "weight": weight}
                                                      for path, weight in zip((b, c), weights)])

    def fingerprint(data):
        return Opened(data, tmp_path).corpus.fingerprint

    assert fingerprint(section([a])) == fingerprint(section([same])) == fingerprint(section([b, c]))
    assert fingerprint(mixture(1, 2)) == fingerprint(mixture(2, 1))
    other = write(tmp_path / "e.jsonl", ["one", "seventeen"])
    different = [section([a]), section([b]), section([other]), section([a], tokenizer=bpe), mixture(1, 2)]
    assert len({fingerprint(data) for data in different}) == len(different)


def test_text_and_the_standard_library_as_bytes_need_no_cache(tmp_path):
    opened = Opened(section([write(tmp_path / "a.txt", ["é\r\n"])]), tmp_path / "fallback")
    assert opened.ids() == [[0xC3, 0xA9, 13, 10]]
    assert (opened.corpus.weights, opened.corpus.tokenizer.bos, opened.corpus.tokenizer.vocab_size) == (
        (1.0,), 256, 257)
    assert Opened(config.Data(source="stdlib"), tmp_path / "fallback").corpus.sources[0].totals.sum() > 1e6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_files_come_by_their_names_in_whatever_order_they_are_given_or_found(tmp_path):
    for name in ("c", "a", "d", "b"):
        write(tmp_path / f"{name}.txt", [name])
    for patterns in (["d.txt", "[bc].txt", "a.txt"], ["*.txt"], ["b.txt", "*.txt"]):
        opened = Opened(section([tmp_path / pattern for pattern in patterns]), tmp_path)
        assert opened.texts() == ["a", "b", "c", "d"]


def test_an_empty_file_among_others_is_told_and_empty_texts_are_documents(tmp_path, bpe):
    full, empty = write(tmp_path / "a.jsonl", ["x", ""]), tmp_path / "b.jsonl"
    empty.write_bytes(b"\n")
    opened = Opened(section([full, empty]), tmp_path)
    assert opened.texts() == ["x", ""]
    assert len(opened.told) == 1 and "no document in 1 of 2 files" in opened.told[0] and "b.jsonl" in opened.told[0]
    texts = [write(tmp_path / "c.txt", [""]), write(tmp_path / "d.txt", ["x"])]
    assert Opened(section(texts, tokenizer=bpe), tmp_path).texts() == ["", "x"]
    assert "no text in" in fault(section(texts[:1], tokenizer=bpe), tmp_path)


@pytest.mark.parametrize("kind", WRITERS)
def test_files_that_cannot_be_read_are_told_together(kind, tmp_path, bpe):
    for name in ("a", "b"):
        (tmp_path / f"{name}.{kind}").symlink_to(tmp_path / f"nowhere {name}")
    with pytest.raises(ValueError) as caught:
        Opened(section([tmp_path / f"*.{kind}"], "text" if kind.startswith("txt") else "", tokenizer=bpe), tmp_path)
    told = str(caught.value).splitlines()
    assert len(told) == 2 and all("cannot be read: No such file" in line for line in told)


def test_faults_of_all_sources_of_a_mixture_are_told_together(tmp_path):
    def told(*components):
        data = config.Data(source="mixture",
                           mixture=[{"source": source, "paths": [str(path)]} for source, path in components])
        with pytest.raises(ValueError) as caught:
            sources.open_corpus(data, vocab_size=512, cache_dir=tmp_path)
        return str(caught.value).splitlines()

    (tmp_path / "a.jsonl").write_bytes(b"{")
    (tmp_path / "b.txt.gz").write_bytes(b"{")
    # What cannot be found is told before anything is read.
    first, second = told(("jsonl", tmp_path / "a.jsonl"), ("jsonl", "nowhere/*.jsonl"), ("text", "nowhere/*.txt"))
    assert "data.mixture[1].paths: 'nowhere/*.jsonl'" in first and "data.mixture[2].paths: 'nowhere/*.txt'" in second
    first, second = told(("jsonl", tmp_path / "a.jsonl"), ("text", tmp_path / "b.txt.gz"))
    assert "a.jsonl, line 1" in first and "b.txt.gz" in second


def test_the_standard_library_is_never_written_into(tmp_path, bpe, monkeypatch):
    library = tmp_path / "python3"
    library.mkdir()
    write(library / "a.txt", ["x = 1\n"]).rename(library / "a.py")
    monkeypatch.setattr(globs.sysconfig, "get_path", lambda name: str(library))
    opened = Opened(config.Data(source="stdlib", tokenizer=bpe), tmp_path / "cache")
    assert opened.texts() == ["x = 1\n"]
    assert [path.name for path in library.iterdir()] == ["a.py"]
