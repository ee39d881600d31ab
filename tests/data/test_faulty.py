"""data.faulty = "leave out": faulty lines of conversations are left out, counted and told, and nothing else is."""
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import Opened, fault
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages import ANSWER, ASK, chats

from meshtrain import config, run_files
from meshtrain.config import ConfigError
from meshtrain.data import sources
from meshtrain.data.documents import chat, conversations
from meshtrain.data.documents.faulty import FIRST, LeftOut

GOOD = {"messages": [ASK, ANSWER]}
# A faulty line -> a part of its reason.
FAULTY = {
    "{": "broken JSON", "[1]": "is not an object", '{"text": "x"}': "is not a conversation",
    json.dumps({"messages": [ASK, {**ANSWER, "content": "<|im_end|>"}]}): "which is a special token",
    json.dumps({"messages": [ASK]}): "has no answer of the assistant to learn",
    json.dumps({"messages": [ASK, ANSWER], "chat_template_kwargs": {"x": 1}}): "never reads",
    json.dumps({"prompt": "a", "completion": "b", "label": False}): "rows for KTO",
}


def numbered(i: int) -> dict:
    return {"messages": [ASK, {**ANSWER, "content": f"the cat {i}"}]}


def of_lines(directory, lines, name: str = "chat.jsonl", **keys) -> config.Data:
    data = chats(directory, [], **({"source": keys.pop("source")} if "source" in keys else {}))
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (directory / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return data.model_copy(update={"paths": (str(directory / name),), "faulty": "leave out", **keys})


def test_faulty_lines_are_left_out_counted_and_told_at_every_start(tmp_path):
    lines = [line for i, bad in enumerate(FAULTY) for line in (numbered(i), bad)]
    wanted = Opened(of_lines(tmp_path, [numbered(i) for i in range(len(FAULTY))], "good.jsonl"), tmp_path)
    assert wanted.corpus.lines_left_out == 0 and not any("faulty" in line for line in wanted.told)
    data, path = of_lines(tmp_path, lines), tmp_path / "chat.jsonl"
    first, again = Opened(data, tmp_path), Opened(data, tmp_path)
    assert first.built and not again.built
    for opened in (first, again):
        assert opened.ids() == wanted.ids() and opened.corpus.lines_left_out == 7
        head, *told = opened.told
        assert head == 'data.paths: 7 of 14 lines are faulty and left out (data.faulty="leave out"):'
        assert [line.startswith(f"{path}, line {2 * i + 2}: ") for i, line in enumerate(told)] == [True] * 7
        assert all(part in line for part, line in zip(FAULTY.values(), told, strict=True)), told
    stop = fault(data.model_copy(update={"faulty": "stop"}), tmp_path)
    assert f"{path}, line 2: broken JSON" in stop       # another key, another cache


@settings(deadline=None, max_examples=12)
@given(st.lists(st.none() | st.sampled_from(list(FAULTY)), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_the_other_lines_are_as_without_the_faulty_ones_whatever_the_batches(tmp_path_factory, drawn_lines, size, pairs):
    """And what is told are the first eight, in the order of the file."""
    directory = tmp_path_factory.mktemp("faulty")
    def line(i: int) -> dict:
        return numbered(i) if not pairs else {"prompt": "why?", "chosen": f"cat {i}", "rejected": f"mat {i}"}
    lines = [bad or line(i) for i, bad in enumerate(drawn_lines)]
    keys = {"source": "preferences"} if pairs else {}
    data = of_lines(directory, lines, **keys)
    bad = [i + 1 for i, one in enumerate(lines) if isinstance(one, str)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversations, "BATCH_LINES", size)
        patch.setattr(chat, "BATCH", 3)
        if len(bad) == len(lines):
            assert f"all {len(bad)} lines are faulty" in fault(data, directory)
            return
        found = Opened(data, directory)
    assert found.ids() == Opened(of_lines(directory, [one for one in lines if isinstance(one, dict)], "b.jsonl", **keys),
                                 directory).ids()
    told = [line for line in found.told if f"{directory / 'chat.jsonl'}, line" in line]
    assert [int(line.split(", line ")[1].split(":")[0]) for line in told] == bad[:FIRST]
    assert found.corpus.lines_left_out == len(bad)


def test_each_source_of_a_mixture_is_told_by_its_own_key(tmp_path):
    of_lines(tmp_path, [GOOD, "{", "{"], "held.jsonl")
    data = of_lines(tmp_path, ["{", GOOD])
    part = {"source": "chat", "paths": list(data.paths), "validation_paths": [str(tmp_path / "held.jsonl")]}
    data = config.Data(**dict(data) | {"source": "mixture", "paths": (), "mixture": [part], "template_arguments": {}})
    opened = Opened(data, tmp_path)
    assert [line.partition(" lines")[0] for line in opened.told if "faulty and" in line] == [
        "data.mixture[0].paths: 1 of 2", "data.mixture[0].validation_paths: 2 of 3"]
    assert opened.corpus.lines_left_out == 3


def with_template(data: config.Data, directory, text: str) -> config.Data:
    (directory / "chatml" / "t.jinja").write_text(text)
    return data.model_copy(update={"chat_template": str(directory / "chatml" / "t.jinja")})


TURNS = ("{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% if 'bad' in m.content %}BAD{% endif %}"
         "{% endgeneration %}{% endfor %}")


def sick(count: int, of: int, seed: int = 0) -> list[dict]:
    """`count` conversations that the template fails for, among `of`."""
    bad = set(random.Random(seed).sample(range(of), count))
    return [{"messages": [ASK, {**ANSWER, "content": "bad"}]} if i in bad else numbered(i) for i in range(of)]


@pytest.mark.parametrize("failing", ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ m.content * 10 ** 9 }}",
                                     "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"])
def test_a_template_may_fail_for_one_line_of_a_hundred_and_no_more(failing, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "LIMIT_S", 0.5)
    data = with_template(of_lines(tmp_path, sick(2, 200)), tmp_path, TURNS.replace("BAD", failing))
    found = Opened(data, tmp_path)
    assert len(found.ids()) == 198 and found.corpus.lines_left_out == 2
    assert sum("the chat template" in line for line in found.told) == 2
    data = with_template(of_lines(tmp_path, sick(2, 199)), tmp_path, TURNS.replace("BAD", failing))
    message = fault(data, tmp_path)
    assert "t.jinja fails for 2 of 199 lines, but data.faulty=\"leave out\" is for single lines, at most 1 % of" in message
    assert f"({tmp_path / 'chat.jsonl'}, line " in message


def test_a_template_that_fails_for_most_lines_stops_before_the_end_of_the_file():
    left = LeftOut("a.jsonl", kept=400, count=599, by_template=599, first=[("line 1", "no")])
    left.check("t.jinja", ended=False)
    left.add("line 1000", "no", by_template=True)
    with pytest.raises(ValueError, match="t.jinja fails for 600 of 1,000 lines"):
        left.check("t.jinja", ended=False)
    LeftOut("a.jsonl", kept=9_900, count=100, by_template=100, first=[("line 1", "no")]).check("t.jinja", ended=True)


def test_lines_that_are_faulty_themselves_may_be_many_but_not_all(tmp_path):
    assert len(Opened(of_lines(tmp_path, ["{"] * 9 + [GOOD]), tmp_path).ids()) == 1
    message = fault(of_lines(tmp_path, ["{"] * 3), tmp_path)
    assert "chat.jsonl: all 3 lines are faulty, so data.faulty=\"leave out\" leaves none" in message
    assert "line 1: broken JSON" in message


def test_a_file_that_cannot_be_read_is_no_faulty_line(tmp_path):
    data = of_lines(tmp_path, [GOOD] * 400, "a.jsonl.gz")
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert "a.jsonl.gz" in fault(data, tmp_path)
    data = of_lines(tmp_path, [])
    pq.write_table(pa.Table.from_pylist([GOOD] * 40), tmp_path / "chat.parquet")
    (tmp_path / "chat.parquet").write_bytes((tmp_path / "chat.parquet").read_bytes()[:200])
    assert "is not a whole Parquet file" in fault(
        data.model_copy(update={"paths": (str(tmp_path / "chat.parquet"),)}), tmp_path)
    (tmp_path / "chat.jsonl").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert "compressed with gzip" in fault(data, tmp_path)


def test_rows_of_a_table_are_left_out_by_their_number(tmp_path):
    data = of_lines(tmp_path, [])
    rows = [json.dumps(GOOD["messages"]), "[{", json.dumps(GOOD["messages"]), json.dumps([ASK])]
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet")
    found = Opened(data.model_copy(update={"paths": (str(tmp_path / "a.parquet"),)}), tmp_path)
    assert len(found.ids()) == 2 and [line.partition(": ")[0] for line in found.told[1:]] == [
        f"{tmp_path / 'a.parquet'}, row {row} (from 0)" for row in (1, 3)]


def test_a_pair_goes_as_a_whole_and_a_checks_sample_passes_over_faulty_lines(tmp_path):
    good = {"prompt": "why?", "chosen": "cat", "rejected": "mat"}
    data = of_lines(tmp_path, [good, good | {"rejected": "<|im_end|>"}, good], source="preferences")
    assert len(Opened(data, tmp_path).ids()) == 4
    described = sources.describe(of_lines(tmp_path, ["{", GOOD]), vocab_size=512)
    assert len(sources.sample(described, described.components[0]))


def test_the_key_is_refused_where_no_line_is_a_conversation():
    for source in ('"jsonl"', '"prompts"'):
        with pytest.raises(ConfigError, match='data.faulty="leave out" applies only to conversations'):
            run_files.load(["--data.source", source.strip('"'), "--data.paths", '["x.jsonl"]', "--data.faulty", "leave out",
                            *(["--training.objective", "rl"] if "prompts" in source else [])])
    with pytest.raises(ConfigError, match='data.faulty="skip" is unknown; use "stop" or "leave out"'):
        run_files.load(["--data.source", "chat", "--data.paths", '["x.jsonl"]', "--data.faulty", "skip"])


def test_a_template_that_writes_nothing_to_learn_fails(tmp_path):
    text = ("{% for m in messages %}{{ m.role }}{% if m.content != 'bad' and m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}")
    assert "fails for 2 of 100 lines" in fault(with_template(of_lines(tmp_path, sick(2, 100)), tmp_path, text), tmp_path)
