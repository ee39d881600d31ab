"""A tokenizer gives the ids of the text and no others."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from corpora import TEXTS, Opened, bpe, fault, section, write, write_tokenizer  # noqa: F401 (bpe is a fixture)

from meshtrain import panics
from meshtrain.data.cache import token_cache
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
    assert "set data.bos_token to the token that begins every document, e.g. one of its special tokens: <mine>" in fault(
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


def beside(folder, special=("<|endoftext|>", "<|im_end|>"), plain=(), **contents):
    """A byte-level tokenizer.json of these tokens with files beside it: name -> object."""
    path = write_tokenizer(folder / "tokenizer.json", special)
    made = tokenizers.Tokenizer.from_file(path)
    made.add_tokens(list(plain))
    made.post_processor = tokenizers.processors.ByteLevel()
    made.save(path)
    for name, value in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return path


def token(content, **properties):
    return dict(content=content, lstrip=False, rstrip=False, normalized=False, single_word=False, special=True) | properties


@pytest.mark.parametrize("contents, told, added", [
    (dict(tokenizer_config=dict(added_tokens_decoder={"N": token("<|x|>"), "N+1": token("<y>", special=False)})),
     "<|x|> (N), <y> (N+1) added from tokenizer_config.json", ["<|x|>", "<y>"]),
    (dict(added_tokens={"<|x|>": "N", "<y>": "N+1"}, tokenizer_config=dict(eos_token="<|x|>")),
     "added from added_tokens.json", ["<|x|>", "<y>"]),
    (dict(special_tokens_map=dict(pad_token="<pad>", additional_special_tokens=["<|x|>"])),
     "<pad> (N), <|x|> (N+1) added from special_tokens_map.json", ["<pad>", "<|x|>"]),
    (dict(tokenizer_config=dict(extra_special_tokens={"image_token": "<|x|>"})), "added from tokenizer_config.json",
     ["<|x|>"]),
    (dict(tokenizer_config=dict(added_tokens_decoder={}), special_tokens_map=dict(pad_token="<pad>")), "", []),
    (dict(tokenizer_config=dict(added_tokens_decoder={"1": token("<|im_end|>", special=False)})),
     "tokenizer_config.json redefines <|im_end|> (1)", []),
    (dict(tokenizer_config=dict(added_tokens_decoder={"7": token("<|im_end|>")})),
     "<|im_end|> (tokenizer_config.json: 7; tokenizer.json: 1)", []),
    (dict(special_tokens_map=dict(eos_token=token("<|im_end|>", normalized=True, rstrip=True))), "", []),
    (dict(tokenizer_config=dict(added_tokens_decoder={"1": token("<|im_end|>")}, eos_token="<|im_end|>")), "", [])])
def test_tokens_that_only_files_beside_a_tokenizer_add_have_the_ids_of_transformers(contents, told, added, tmp_path):
    """The ids are those of AutoTokenizer of transformers 5.24, tried on such folders."""
    size = tokenizers.Tokenizer.from_file(beside(tmp_path)).get_vocab_size()
    number = lambda text: text.replace("N+1", str(size + 1)).replace("N", str(size))
    contents = json.loads(number(json.dumps(contents)))
    if "added_tokens" in contents:
        contents["added_tokens"] = {name: int(id) for name, id in contents["added_tokens"].items()}
    path = beside(tmp_path, **contents)
    published, reader = tokenizer.open_published(path), tokenizer.open_file(path)
    for i, name in enumerate(added):
        assert published.encode(f"a {name}b")[2] == size + i
    special = [name for name in added if name != "<y>"]
    assert all(size <= id for name in special for id in [reader.library.token_to_id(name)])
    assert all(max(ids) < size for ids in map(np.ndarray.tolist, reader.encode([f"a {name}b" for name in special])))
    (tmp_path / "alone").mkdir()
    alone = tokenizer.open_file(shutil.copy(path, tmp_path / "alone"))
    assert (reader.key != alone.key) == (bool(added) or "redefines" in told)
    assert number(told) in "; ".join(reader.notes) and (bool(reader.notes) == bool(told))
    assert published.notes == reader.notes or "data.tokenizer" in str(reader.notes)


@pytest.mark.parametrize("contents, told", [
    (dict(tokenizer_config=dict(added_tokens_decoder={"900": token("<|x|>")})), "adds '<|x|>' with the id 900"),
    (dict(added_tokens={"<|x|>": 900}), "added_tokens.json next to it adds '<|x|>' with the id 900"),
    (dict(added_tokens={"<|x|>": "9"}), "has the id \"9\", which is not a whole number"),
    (dict(tokenizer_config=["a"]), "is not a JSON object")])
def test_tokens_beside_a_tokenizer_that_cannot_be_had_are_refused(contents, told, tmp_path):
    with pytest.raises(ValueError, match=re.escape(told)):
        tokenizer.open_published(beside(tmp_path, **contents))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        tokenizer.open_published(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("contents, found, told", [
    (dict(tokenizer_config=dict(bos_token="<|im_end|>")), "<|im_end|>", ""),
    (dict(special_tokens_map=dict(bos_token=token("<|im_end|>"))), "<|im_end|>", ""),
    (dict(config=dict(model_type="llama", bos_token_id=1)), "<|im_end|>", ""),
    (dict(config=dict(model_type="gemma3", text_config=dict(bos_token_id=1))), "<|im_end|>", ""),
    (dict(config=dict(bos_token_id=1)), "<|endoftext|>", ""),        # of no model
    (dict(tokenizer_config=dict(bos_token=None), config=dict(model_type="llama", bos_token_id=None)), "<|endoftext|>",
     ""),
    (dict(tokenizer_config=dict(bos_token="<|im_end|>"), config=dict(model_type="llama", bos_token_id=0)), "<|im_end|>",
     "config.json has the bos_token_id 0 (<|endoftext|>)"),
    (dict(tokenizer_config=dict(bos_token="<|endoftext|>"), special_tokens_map=dict(bos_token="<|im_end|>")),
     "<|im_end|>", "special_tokens_map.json has the bos_token <|im_end|>, but tokenizer_config.json has <|endoftext|>"),
    (dict(tokenizer_config=dict(bos_token="<|im_end|>", added_tokens_decoder={}), special_tokens_map=dict(
        bos_token="<|endoftext|>")), "<|im_end|>", ""),
    (dict(tokenizer_config=dict(bos_token="<s>")), "<s>", "")])
def test_the_separator_is_the_one_that_the_files_beside_name_and_never_comes_from_text(contents, found, told, tmp_path):
    path = beside(tmp_path, plain=["<s>", "</s>"], **contents)
    reader = tokenizer.open_file(path)
    assert reader.library.id_to_token(reader.bos) == found and told in "; ".join(reader.notes)
    assert tokenizer.find_separator(path) in (None, reader.bos)
    assert reader.bos not in reader.encode(["the <s>cat</s> <|im_end|>"])[0].tolist()


def test_another_chat_template_in_a_second_file_is_told(tmp_path):
    for inside, told in (("{{ 1 }}", False), ("{{ 2 }}", True), ([{"name": "default", "template": "{{ 2 }}"}], True), (
            [{"name": "tools", "template": "{{ 2 }}"}], False), (None, False)):
        path = beside(tmp_path, tokenizer_config={"chat_template": inside})
        (tmp_path / "chat_template.jinja").write_text("{{ 1 }}\n")
        assert [("have different chat templates" in note) for note in tokenizer.open_file(
            path).notes] == [True] * told


def write_backtracking(path: Path) -> str:
    """A tokenizer whose pattern no engine matches in time against many letters x: the library panics."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i - 32 for i in range(32, 127)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    library.add_special_tokens(["<s>"])
    path.parent.mkdir(exist_ok=True)
    path.write_text(library.to_str())
    return str(path)


@pytest.mark.parametrize("source", ["text", "jsonl", "chat"])
def test_a_tokenizer_that_panics_at_a_text_is_a_mistake(source, tmp_path):
    path = write_backtracking(tmp_path / "t" / "tokenizer.json")
    bad, keys = "x" * 60, {}
    if source == "chat":
        (tmp_path / "t" / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<s>{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}")
        (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": bad}]}) + "\n")
    else:
        write(tmp_path / f"a.{source if source == 'jsonl' else 'txt'}", [bad])
    name = tmp_path / ("a.txt" if source == "text" else "a.jsonl")
    told = fault(section([name], source, tokenizer=path), tmp_path / "run")
    assert "cannot encode the text: Onig: Regex search error" in told and "use a tokenizer" in told, told


def test_a_published_tokenizer_that_panics_at_a_text_is_a_mistake(tmp_path):
    reader = tokenizer.open_published(write_backtracking(tmp_path / "t" / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer.json cannot encode the text: Onig"):
        reader.encode("x" * 60)


def test_only_panics_become_errors():
    class PanicException(BaseException):
        """As pyo3 names it."""
    for raised, caught in ((PanicException("a\nb"), panics.LibraryPanic), (KeyboardInterrupt(), KeyboardInterrupt),
                           (SystemExit(3), SystemExit), (ValueError("c"), ValueError)):
        with pytest.raises(caught) as told, panics.caught():
            raise raised
        assert caught is not panics.LibraryPanic or str(told.value) == "a"


def test_a_separator_that_text_can_hold_is_refused(tmp_path):
    path = beside(tmp_path, plain=["<s>"])
    for name in ("<s>", "Ġthe"):
        with pytest.raises(ValueError, match=f"text can contain the separator '{name}' .* is encoded to its id.*special tokens: <"):
            tokenizer.open_file(path, name)
    # A special token, which the vocabulary holds as a word, too.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "the": 1, "<x>": 2}, unk_token="the"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="text can contain the separator .*'<s>' is encoded to its id, .* as data.bos_token$"):
        tokenizer.open_file(str(tmp_path / "tokenizer.json"))


def test_a_tokenizer_without_chance_gives_the_same_ids_each_time(tmp_path):
    path = Path(beside(tmp_path))
    of_text = tokenizer.open_file(str(path))
    path.write_text(json.dumps((described := json.loads(path.read_text())) | {
        "model": described["model"] | {"dropout": 0.5}}))
    reader = tokenizer.open_file(str(path))
    text = [" ".join(TEXTS)] * 4
    assert len({tuple(ids.tolist()) for ids in reader.encode(text)}) == 1
    assert reader.encode(text)[0].tolist() == of_text.encode(text)[0].tolist()
    assert reader.key != of_text.key and "its dropout of 0.5 is off" in reader.notes[0]      # older caches are not used


def test_the_key_of_a_tokenizer_tells_apart_what_files_beside_it_add(tmp_path):
    keys = []
    for number, name in enumerate(("<|x|>", "<|y|>", "<|x|>")):
        (folder := tmp_path / str(number)).mkdir()
        keys.append(tokenizer.open_file(beside(folder, special_tokens_map=dict(pad_token=name))).key)
    assert keys[0] == keys[2] != keys[1]


def test_ids_above_a_gap_of_the_vocabulary_are_kept_whole_in_the_cache(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 70_000}, unk_token="the"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>"])
    words.save(path := str(tmp_path / "tokenizer.json"))
    assert tokenizer.open_file(path).vocab_size == 70_001
    data = section([write(tmp_path / "a.jsonl", ["the cat"])], tokenizer=path)
    for _ in range(2):
        assert Opened(data, tmp_path, vocab_size=70_001).ids() == [[0, 70_000]]


@pytest.mark.parametrize("add, writes, told", [
    (True, False, "prompts begin with: nothing (tokenizer_config.json requests <|im_end|>, but tokenizer.json"),
    (True, True, ""), (False, False, ""), (None, True, ""), (None, False, ""),
    (False, True, "prompts begin with: <|im_end|> (tokenizer.json writes it, though")])
def test_what_prompts_begin_with_is_told_where_two_files_disagree(add, writes, told, tmp_path):
    path = beside(tmp_path, tokenizer_config=dict(bos_token="<|im_end|>") | ({} if add is None else {
        "add_bos_token": add}))
    made = tokenizers.Tokenizer.from_file(path)
    if writes:
        made.post_processor = tokenizers.processors.TemplateProcessing("<|im_end|> $A", special_tokens=[("<|im_end|>", 1)])
    made.save(path)
    opened = tokenizer.open_published(path)
    assert opened.beginning.startswith(told) and bool(opened.beginning) == bool(told)
    assert (opened.encode("the")[0] == 1) == writes


def test_an_id_beyond_the_vocabulary_is_found_in_every_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_PIECES", 1)
    path = beside(tmp_path, plain=["<y>"])
    size = tokenizers.Tokenizer.from_file(path).get_vocab_size() - 1
    for wrong in range(3):
        texts = ["the <y>" if i == wrong else "the mat" for i in range(3)]
        data = section([write(tmp_path / f"{wrong}.jsonl", texts)], tokenizer=path)
        assert f"document {wrong} (from 0) holds the id {size} (<y>)" in fault(data, tmp_path, vocab_size=size)


@pytest.mark.parametrize("text, refused", [("the cat", False), ("the <y> cat", True)])
def test_an_id_beyond_the_vocabulary_is_a_mistake_only_where_a_text_has_it(text, refused, tmp_path):
    path = beside(tmp_path, plain=["<y>"])
    size = tokenizers.Tokenizer.from_file(path).get_vocab_size() - 1
    data = section([write(tmp_path / "a.jsonl", ["the mat", text])], tokenizer=path)
    if refused:
        message = fault(data, tmp_path, vocab_size=size)
        assert f"a.jsonl: document 1 (from 0) holds the id {size} (<y>)" in message and "leave that text out" in message
        assert message == fault(data, tmp_path, vocab_size=size)       # of the cache, too
    else:
        opened = Opened(data, tmp_path, vocab_size=size)
        assert opened.texts() == ["the mat", text] and any(
            f"note: the tokenizer has ids up to {size}, but model.vocab_size={size}" in line for line in opened.told)
    assert "the separator is 0" not in str(data) and "the separator is" in fault(
        section([tmp_path / "a.jsonl"], tokenizer=path, bos_token="<|im_end|>"), tmp_path, vocab_size=1)
