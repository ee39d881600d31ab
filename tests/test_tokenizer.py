"""A tokenizer gives the ids of the text and no others."""

import sys

import pytest
import tokenizers
from corpora import TEXTS, Opened, bpe, fault, section, write, write_tokenizer  # noqa: F401 (bpe is a fixture)

from meshtrain.data.documents import tokenizer


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
    assert "data.bos_token, e.g. one of its special tokens: <mine>" in fault(
        section([lines], tokenizer=nameless), tmp_path)
    assert "is not read" in fault(section([lines], bos_token="<s>"), tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\x00", b"cos\nsystem\n(S'true'\ntR."])
def test_a_broken_tokenizer_file_is_told(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    assert "is not a tokenizer.json" in fault(
        section([write(tmp_path / "a.jsonl", TEXTS)], tokenizer=str(path)), tmp_path)
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
