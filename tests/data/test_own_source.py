"""Documents that code of a run's own yields are trained on as those of any other source."""
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from corpora import TEXTS, Opened, bpe, fault, section, write  # noqa: F401 (bpe is a fixture)

from meshtrain import config, run_files
from meshtrain.data.batches import packing

CODE = """
import json
from pathlib import Path

def read(path):
    Path("calls").open("a").write(path + "\\n")
    for line in open(path, encoding="utf-8"):
        yield json.loads(line)["text"]

def ids(path):
    return (list(text.encode()) for text in read(path))

def made():
    yield from ([n] * n for n in range(9))

def other():
    yield [1, 2]
    yield [3]
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)


def own(name: str, *paths, **keys) -> config.Data:
    return section(paths, source=f"mine.py:{name}", **keys)


def calls() -> list[str]:
    return Path("calls").read_text().split()


@pytest.mark.parametrize("packed", ["stream", "whole"])
def test_documents_and_batches_are_those_of_a_source_that_reads_the_same(tmp_path, bpe, packed):
    texts = [f"{text} {n}" for n, text in enumerate(TEXTS * 5)]
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        write(tmp_path / f"{name}.jsonl", part)
    write(tmp_path / "more.txt", ["the mat " * 60])
    keys = dict(seq_len=16, global_batch=4, packing=packed, validation_fraction=0.2, tokenizer=bpe)
    mixed = [dict(source="text", paths=["more.txt"], weight=1.0), dict(weight=2.0, paths=["*.jsonl"])]
    taken = {}
    for source in ("jsonl", "mine.py:read"):
        data = config.Data(source=source, paths=["*.jsonl"], **keys)
        mixture = config.Data(mixture=[mixed[0], mixed[1] | dict(source=source)], **keys)
        opened, of_both = Opened(data, tmp_path), Opened(mixture, tmp_path)
        assert opened.texts() == texts == of_both.texts(1)
        batches = [packing.open_batches(one.data, one.corpus, 0) for one in (opened, of_both)]
        resumed = packing.open_batches(mixture, of_both.corpus, 0, batches[1].position(3))
        taken[source] = [one.position(3) for one in batches], [
            *(one.batch(3) for one in batches), *(one.validation[-1].batch(0) for one in batches),
            batches[1].batch(4), resumed.batch(4)]
    (position, of_jsonl), (of_code, by_code) = taken.values()
    assert position == of_code
    for a, b in zip([*of_jsonl, by_code[-1]], [*by_code, by_code[-2]], strict=True):
        assert all((a[name] == b[name]).all() for name in b)


def test_a_function_is_called_once_for_each_file_and_content(tmp_path, bpe):
    a, b = write(tmp_path / "a.jsonl", ["one"]), write(tmp_path / "b.jsonl", ["two", "three"])
    data = own("read", "*.jsonl")
    assert Opened(data, tmp_path).texts() == Opened(data, tmp_path).texts() == ["one", "two", "three"]
    assert calls() == [str(a.name), str(b.name)]
    write(b, ["six"])
    assert Opened(data, tmp_path).texts() == ["one", "six"] and calls()[2:] == ["b.jsonl"]
    Opened(own("read", "*.jsonl", tokenizer=bpe), tmp_path)
    Path("mine.py").write_text(CODE.replace('["text"]', '["text"].upper()'))
    assert Opened(data, tmp_path).texts() == ["ONE", "SIX"] and calls()[5:] == ["a.jsonl", "b.jsonl"]


def test_ids_are_taken_as_they_are_and_need_no_file_and_no_tokenizer(tmp_path):
    write(tmp_path / "a.jsonl", ["one", "", "née"])
    assert Opened(own("ids", "a.jsonl"), tmp_path).texts() == ["one", "", "née"]
    opened = Opened(own("made", bos_token="9"), tmp_path / "cache", vocab_size=10)
    assert opened.ids() == [[n] * n for n in range(9)] and opened.corpus.tokenizer.bos == 9
    assert list((tmp_path / "cache").rglob("mine.py-*.json"))
    both = config.Data(source="mine.py:made", bos_token="9", validation_sources=[dict(source="mine.py:other")])
    assert Opened(both, tmp_path).corpus.curves[0].source.num_documents == 2


def test_other_tokens_of_the_same_lengths_are_other_data(tmp_path):
    opened = []
    for last in ("[3]", "[4]"):
        Path("mine.py").write_text(CODE.replace("[3]", last))
        opened.append(Opened(own("other", bos_token="0"), tmp_path / last, vocab_size=10).corpus)
    assert (opened[0].sources[0].totals == opened[1].sources[0].totals).all()
    assert opened[0].fingerprint != opened[1].fingerprint


WRONG = {
    "return None": "returned a NoneType; give a function of (path)",
    "return 'text'": "returned a str; give a function of (path)",
    "yield 1.5": "is a float; yield a str, or token ids",
    "yield b'text'": "is a bytes; yield a str, or token ids",
    "yield None": "is a NoneType; yield a str, or token ids",
    "yield {'text': 'a'}": "is a dict; yield a str, or token ids",
    "yield [[1, 2], [3]]": "is not a list of ids",
    "yield [[1, 2], [3, 4]]": "has int64[2, 2]; yield a str, or token ids",
    "yield [0.5]": "has float64[1]; yield a str, or token ids",
    "yield [True]": "has bool[1]; yield a str, or token ids",
    "yield [1, 257]": "has the id 257, but data.tokenizer has 0 to 256; yield ids of this tokenizer",
    "yield [-1]": "has the id -1",
    "yield '\\ud83d'": "has half a character",
    "yield open('none').read()": "raised FileNotFoundError in line 3 of wrong.py: [Errno 2]",
    "yield 1 / 0": "raised ZeroDivisionError in line 3 of wrong.py: division by zero; fix the code or the file",
    "raise SystemExit(3)\n    yield": "raised SystemExit in line 3 of wrong.py: 3; fix the code or the file",
    "raise StopIteration\n    yield": "raised RuntimeError: generator raised StopIteration",
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_no_document_is_told_with_its_number(tmp_path, body):
    Path("wrong.py").write_text(f"def read(path):\n    {'yield [65]' if 'yield' in body else 'pass'}\n    {body}\n")
    write(tmp_path / "a.txt", ["text"])
    message = fault(section(["a.txt"], source="wrong.py:read"), tmp_path)
    assert WRONG[body] in message
    assert ("a.txt, document 1 (from 0) of wrong.py:read" in message) == ("yield" in body)


def test_a_source_that_yields_nothing_and_a_text_without_a_tokenizer_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", [])
    assert "no text in 1 file" in fault(own("read", "a.jsonl"), tmp_path)
    write(tmp_path / "a.jsonl", ["text"])
    assert "is text, but with data.bos_token and no data.tokenizer" in fault(
        own("read", "a.jsonl", bos_token="1"), tmp_path)


def test_the_example_of_the_page_is_read_alone_and_in_a_mixture(tmp_path):
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "extend.md").read_text()
    Path("archives.py").write_text(re.search(r"```python\n(# archives.py\n.*?)```", page, re.DOTALL)[1])
    Path("mail").mkdir()
    with zipfile.ZipFile("mail/a.zip", "w") as archive:
        for name, times in (("b", 50), ("c", 5), ("a", 40)):
            archive.writestr(name, f"text {name} " * times)
    mixture = tomllib.loads(re.search(r"\nmixture = .*archives.*\n", page)[0])["mixture"]
    opened = Opened(config.Data(mixture=mixture, seq_len=32, global_batch=4, validation_fraction=0), tmp_path / "cache")
    assert opened.texts() == ["text a " * 40, "text b " * 50]
    assert len(sums := opened.texts(1)) == 20_000 and all(eval(text.replace("=", "==")) for text in sums[:9])
    assert packing.open_batches(opened.data, opened.corpus, 0).batch(0)["tokens"].shape == (4, 32)


@pytest.mark.parametrize("words, told", [
    (["--data.source", "mine.py:reed", "--data.paths", '["a"]'], "mine.py has no reed; did you mean read?"),
    (["--data.source", "jsonn", "--data.paths", '["a"]'], 'did you mean "jsonl"?'),
    (["--data.source", "mine.py:read"], 'data.source="mine.py:read" has no data.paths to read; use e.g.'),
    (["--data.source", "mine.py:made", "--data.paths", '["a"]'], "which takes no argument; leave it out"),
    (["--data.mixture", '[{source = "mine.py:reed", paths = ["a"]}]'], 'data.mixture[0].source="mine.py:reed": mine.py has'),
    (["--data.source", "mine.py:read", "--data.paths", '["a"]', "--data.field", "b"], "is not read by data.source"),
    (["--data.source", "mine.py:read", "--data.paths", '["a"]', "--training.objective", "dpo"], "has none; use data.source"),
])
def test_mistakes_of_the_run_file_are_told_before_the_code_is_executed(words, told):
    with pytest.raises(config.ConfigError) as raised:
        run_files.load(words)
    assert told in str(raised.value) and not Path("calls").exists()


def test_the_digest_of_the_code_is_in_the_run_wherever_a_source_is_named():
    run = run_files.load(["--data.validation_sources", '[{source = "mine.py:other"}]'])
    (line,) = run.run.code
    assert line.startswith("mine.py ") and run.data.validation_sources[0].source == "mine.py:other"
