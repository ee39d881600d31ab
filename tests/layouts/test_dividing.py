"""Texts are divided into documents at data.split_at, and names of special tokens in them are told."""

import numpy as np
import pytest
from corpora import Opened, bpe, section, write, write_tokenizer  # noqa: F401 (bpe is a fixture)
from hypothesis import example, given
from hypothesis import strategies as st

from meshtrain import config, run_files
from meshtrain.config import unused
from meshtrain.data.documents import dividing, formats
from meshtrain.data.documents.formats import TextPiece

END = "<|endoftext|>"


def documents(pieces) -> list[str]:
    found = [""]
    for piece in pieces:
        found[-1] += piece.text
        found += [""] * piece.last
    assert found.pop() == "", "the last piece is the last of its document"
    return found


@given(texts=st.lists(st.lists(st.text("ab \n<>", max_size=9), min_size=1, max_size=5), max_size=4),
       marker=st.sampled_from(["<>", "aab", "a", "\n", " \n ", "<<>", "abab"]))
@example(texts=[["a<", ">b"]], marker="<>")
@example(texts=[["", " a", "", "a", "b"]], marker="aab")
def test_documents_are_the_parts_between_markers_wherever_a_file_is_cut(texts, marker):
    pieces = [TextPiece(part, i == len(parts) - 1, 0) for parts in texts for i, part in enumerate(parts)]
    counts = []
    wanted = [one for parts in texts for one in "".join(parts).split(marker)]
    assert documents(dividing.divide(iter(pieces), marker, counts.append)) == [one for one in wanted if one.strip()]
    assert sum(counts) == sum("".join(parts).count(marker) for parts in texts)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "txt", "txt.zst"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_source_of_texts_is_divided_and_found_again(kind, tokenizer, tmp_path, bpe):  # noqa: F811
    texts = [f"one{END}\ntwo 猫 {END}{END} \n{END}three"] + ([f"{END}", f"four{END}"] if "txt" not in kind else [])
    wanted = ["one", "\ntwo 猫 ", "three", "four"][:4 if "txt" not in kind else 3]
    data = section([write(tmp_path / f"a.{kind}", texts)], split_at=END, tokenizer="bytes" if tokenizer == "bytes" else bpe)
    opened = Opened(data, tmp_path)
    assert opened.texts() == wanted and opened.told == [] and opened.built
    opened = Opened(data, tmp_path)
    assert opened.texts() == wanted and not opened.built
    for marker, count in (("two", len(texts) + 1), ("", len(texts))):
        assert len(Opened(data.model_copy(update={"split_at": marker}), tmp_path).ids()) == count, "another cache"


def test_neighbouring_files_and_other_parts_keep_their_documents(tmp_path, bpe):  # noqa: F811
    texts = {"a.txt": f"one{END}two", "b.txt": "three", "c.txt": "", "d.txt": f"four{END}"}
    for i, (name, text) in enumerate(texts.items()):
        write(tmp_path / name, [text])
        opened = Opened(section([tmp_path / "*.txt"], tokenizer=bpe, split_at=END), tmp_path)
        assert opened.texts() == ["one", "two", "three", "four"][:i + 2 - (i > 1)]
    source = opened.corpus.sources[0]
    assert source.ends(np.arange(4)).tolist() == np.cumsum([len(one) for one in opened.ids()]).tolist()


def test_documents_longer_than_a_piece_are_cut_and_divided_alike(tmp_path, monkeypatch, bpe):  # noqa: F811
    monkeypatch.setattr(formats, "PIECE_CHARS", 7)
    text = END.join(["the cat sat on the mat\n" * 3, "x" * 40, "   ", "mat"])
    opened = Opened(section([write(tmp_path / "a.txt", [text])], tokenizer=bpe, split_at=END), tmp_path)
    assert opened.texts() == [one for one in text.split(END) if one.strip()]


def test_names_of_special_tokens_in_texts_are_told_once_with_what_divides_there(tmp_path):
    reader = write_tokenizer(tmp_path / "t.json", special=(END, "<|pad|>", "<s>", "[a]", "!"))
    write(tmp_path / "a.txt", [f"one{END}two{END}! <s>[A]"])
    write(tmp_path / "b.txt", [f"three{END} <|pad|"])
    data = section([tmp_path / "*.txt"], tokenizer=reader)
    (told,) = Opened(data, tmp_path).told
    assert told == (f"{tmp_path}/a.txt and 1 other file: 3 × '{END}', 1 × '<s>' in the text are encoded as ordinary "
                    f'characters; data.split_at = "{END}" divides documents there')
    assert Opened(data, tmp_path).told == []
    (told,) = Opened(data.model_copy(update={"split_at": END}), tmp_path).told
    assert told.startswith(f"{tmp_path}/a.txt: 1 × '<s>' in the text") and told.endswith(f"divided only at '{END}'")


def test_of_two_names_the_longer_is_counted(tmp_path):
    reader = write_tokenizer(tmp_path / "t.json", special=(END, "<|im", "<|im_end|>"))
    (told,) = Opened(section([write(tmp_path / "a.txt", ["one<|im_end|>two<|im_end|> <|im"])], tokenizer=reader),
                     tmp_path).told
    assert "2 × '<|im_end|>', 1 × '<|im' in the text are encoded" in told


def test_a_marker_that_no_file_has_is_told(tmp_path, bpe):  # noqa: F811
    write(tmp_path / "a.txt", [f"one{END}two"])
    data = section([tmp_path / "a.txt"], tokenizer=bpe, split_at="<|endoftxt|>")
    told = Opened(data, tmp_path).told
    assert len(told) == 2 and "data.split_at='<|endoftxt|>' occurs nowhere in 1 tokenized file;" in told[1]
    assert f"1 × '{END}' in the text are encoded" in told[0]


def test_a_mixture_divides_its_texts_and_leaves_token_files_alone(tmp_path, bpe):  # noqa: F811
    write(tmp_path / "a.txt", [f"one{END}two"])
    np.save(tmp_path / "x.tokens.npy", np.arange(1, 9, dtype=np.uint16))
    np.save(tmp_path / "x.ends.npy", np.array([8]))
    parts = [config.sections.Component(source="text", paths=[str(tmp_path / "a.txt")]),
             config.sections.Component(source="tokens", paths=[str(tmp_path / "x.tokens.npy")])]
    opened = Opened(config.Data(source="mixture", mixture=parts, tokenizer=bpe, split_at=END), tmp_path)
    assert opened.texts(0) == ["one", "two"] and len(opened.ids(1)) == 1


@pytest.mark.parametrize("words, has", [
    (["--data.source=text", "--data.paths=a.txt"], True), (["--data.source=stdlib"], False),
    (["--data.source=chat", "--data.paths=a.jsonl", "--data.packing=whole"], False)])
def test_a_marker_without_a_text_to_divide_has_no_effect_and_is_told(words, has):
    words = [word.replace("=a", '=["a').replace("txt", 'txt"]').replace("jsonl", 'jsonl"]') for word in words]
    run = run_files.load([*words, "--data.split_at", END])
    assert [line for line in unused.messages(run) if "data.split_at" in line] == [] if has else [
        f'data.split_at="{END}" has no effect here; it needs data.source="text", "jsonl", "parquet" or "arrow"']
