"""Messages reach the chat template in one form, whatever the data set's own: with nulls of a table, strings of JSON,
and rows of Parquet and Arrow."""
import json

import conversations as drawn
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import Opened, fault
from test_chat import opened
from test_formats import write_arrow

from meshtrain import config
from meshtrain.commands import generate
from meshtrain.config import ConfigError
from meshtrain.data.documents import chat, conversations
from meshtrain.data.documents.conversations import parse, parse_pair
from meshtrain.rl import prompts

ASK, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "the cat sat"}
NULLS = {"tool_calls": None, "tool_call_id": None, "name": None}
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments, **more) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function, **more}]}


CALLED = call({"city": "Oslo"}) | {"content": ""}
# (a line, another that means the same)
ALIKE = [
    ({"messages": [json.dumps(ASK), json.dumps(ANSWER | NULLS)]}, {"messages": [ASK, ANSWER]}),
    ({"messages": [ASK | NULLS, ANSWER | NULLS], "prompt": None, "tools": None}, {"messages": [ASK, ANSWER]}),
    ({"messages": [ASK, ANSWER | {"tool_calls": []}], "tools": []}, {"messages": [ASK, ANSWER]}),
    ({"messages": json.dumps([ASK, ANSWER])}, {"messages": [ASK, ANSWER]}),
    ({"conversations": json.dumps([{"from": "human", "value": "why?"}, {"from": "gpt", "value": "the cat sat"}])},
     {"messages": [ASK, ANSWER]}),
    ({"conversations": [{"from": "human", "value": "why?", "role": None, "content": None}, ANSWER | {"from": None}]},
     {"messages": [ASK, ANSWER]}),
    ({"messages": [ASK, call('{"city": "Oslo"}', type=None)]}, {"messages": [ASK, CALLED]}),
    ({"messages": [ASK, CALLED | {"tool_calls": json.dumps(CALLED["tool_calls"])}]}, {"messages": [ASK, CALLED]}),
    ({"messages": [ASK, call(None)]}, {"messages": [ASK, call({})]}),
    ({"messages": [ASK, ANSWER | {"function_call": {"name": "f", "arguments": '{"a": null}'}}]},
     {"messages": [ASK, ANSWER | {"function_call": {"name": "f", "arguments": {"a": None}}}]}),
    ({"messages": [ASK, ANSWER], "tools": json.dumps([SCHEMA])}, {"messages": [ASK, ANSWER], "tools": [SCHEMA]}),
    ({"messages": [ASK, ANSWER], "tools": [json.dumps(SCHEMA)]}, {"messages": [ASK, ANSWER], "tools": [SCHEMA]}),
    ({"messages": [ASK, ANSWER], "tools": [{**SCHEMA, "strict": None, "function": {
        **SCHEMA["function"], "parameters": '{"type": "object"}'}}]}, {"messages": [ASK, ANSWER], "tools": [SCHEMA]}),
    ({"messages": [ASK, ANSWER], "tools": "null"}, {"messages": [ASK, ANSWER]}),
]


@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_forms_of_a_line_mean_the_same(number):
    line, plain = ALIKE[number]
    found = parse(json.loads(json.dumps(line)))
    assert found == parse(plain)
    assert all(value is not None for message in found.messages for value in message.values())
    if "messages" in plain:
        pair = {"prompt": line.get("messages") or line["conversations"], "chosen": "a", "rejected": "b"} | {
            name: line[name] for name in ("tools",) if name in line}
        if isinstance(pair["prompt"], list):
            assert [one.tools for one in parse_pair(pair)] == [found.tools] * 2
            assert [one.messages[:-1] for one in parse_pair(pair)] == [found.messages] * 2


def test_arguments_keep_the_nulls_that_a_line_of_json_gives_and_that_is_told(tmp_path):
    given = call({"city": "Oslo", "unit": None, "days": [None]})
    assert parse({"messages": [ASK, given]}).messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "city": "Oslo", "unit": None, "days": [None]}
    told = Opened(chats(tmp_path, [{"messages": [ASK, CALLED]}, *[{"messages": [ASK, given]}] * 2]), tmp_path).told
    assert [line for line in told if "arguments" in line] == [
        f"{tmp_path / 'chat.jsonl'}: in 2 conversations (line 2 first) the arguments of a tool call have a null, and "
        "the model is trained on it; remove these keys if a table with a column for each key added them"]


# (message or tools, what is told)
BROKEN = [
    ({"messages": [ASK, call('{"city": "Os')]}, "messages[1].tool_calls[0] arguments: the string \"{\\\"city\\\": "
                                                "\\\"Os\" is broken JSON (Unterminated string"),
    ({"messages": [ASK, call("Oslo")]}, 'messages[1].tool_calls[0] arguments: "Oslo" is not a JSON object'),
    ({"messages": [ASK, call('"{}"')]}, "is not a JSON object; give an object, or a string that contains one as JSON"),
    ({"messages": [ASK, call(["Oslo"])]}, 'arguments: ["Oslo"] is not a JSON object'),
    ({"messages": [ASK, ANSWER | {"tool_calls": {"name": "f"}}]}, "messages[1].tool_calls is not a list"),
    ({"messages": [ASK, ANSWER | {"tool_calls": ["f"]}]}, 'messages[1].tool_calls[0]: "f" is not a JSON object'),
    ({"messages": [ASK, ANSWER], "tools": '[{"name": '}, "tools: the string"),
    ({"messages": [ASK, ANSWER], "tools": ["weather"]}, 'tools[0]: "weather" is not a JSON object'),
    ({"messages": "[{"}, "messages: the string \"[{\" is broken JSON"),
    ({"messages": None, "text": "x"}, "is not a conversation (its keys: 'text')"),
    ({"messages": [ASK, ANSWER | {"train": "no"}]}, 'message 1 (from 0) has train="no"; use true to learn the message, or false'),
    ({"messages": [ASK, ANSWER | {"train": False}]}, "has no answer of the assistant to learn"),
]


@pytest.mark.parametrize("line, part", BROKEN, ids=[part[:40] for _, part in BROKEN])
def test_a_broken_string_is_one_message_with_its_line(line, part, tmp_path):
    message = fault(chats(tmp_path, [{"messages": [ASK, ANSWER]}] * 2 + [line]), tmp_path)
    assert f"{tmp_path / 'chat.jsonl'}, line 3: " in message and part in message


def test_train_false_is_read_and_not_learned():
    turns = [ASK, ANSWER | {"train": False}, ASK, ANSWER | {"train": True}]
    assert parse({"messages": turns}) == chat.Conversation([ASK, ANSWER] * 2, [True, False, True, True])
    pair = parse_pair({"prompt": [ASK], "chosen": turns[1:], "rejected": [ANSWER | {"content": "no", "weight": 1}]})
    assert [one.trained for one in pair] == [[False, False, True, True], [False, True]]
    with pytest.raises(ValueError, match="no assistant's answer to learn in 'chosen'"):
        parse_pair({"prompt": [ASK], "chosen": turns[1:2], "rejected": [{**ANSWER, "content": "no"}]})


CALLS = ("{% for m in messages %}{% generation %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
         "{{ ARGUMENTS }}{% endfor %}</s>{% endgeneration %}{% endfor %}")


@pytest.mark.parametrize("written", ["'' + c.function.arguments", "c.function.arguments | tojson"])
def test_a_template_that_takes_arguments_as_text_alone_gets_text(written, tmp_path):
    """DeepSeek's add them to a string; others write the object as JSON."""
    template = opened(tmp_path, CALLS.replace("ARGUMENTS", written))
    for arguments in ({"city": "Zürich"}, '{"city":"Zürich"}'):
        (one,) = chat.encode(template, [parse({"messages": [ASK, call(arguments)]})])
        assert template.library.decode(one.ids.tolist(), skip_special_tokens=False) == \
            'userwhy?</s>assistant{"city": "Zürich"}</s>'


def test_tool_calls_that_the_template_does_not_write_are_told(tmp_path):
    data = chats(tmp_path, [{"messages": [ASK, ANSWER]}, {"messages": [ASK, call({"city": "Oslo"})]}])
    template = tmp_path / "chatml" / "chat_template.jinja"
    assert not any("tool calls" in line for line in Opened(data, tmp_path).told)
    template.write_text(template.read_text().replace("m.tool_calls", "[]"))
    (told,) = [line for line in Opened(data, tmp_path).told if "tool calls" in line]
    assert f"in line 2 there are tool calls, which {template} does not render" in told


# ---- prompts ---------------------------------------------------------------------------------------------------------

TOOLED = ("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}<{{ m.role }}>"
          "{{ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}"
          "{% endfor %}"
          "{% if add_generation_prompt %}<assistant>{% endif %}")
TALK = [ASK | NULLS, call('{"city": "Oslo"}'), {"role": "tool", "content": "rain"} | NULLS]
WRITTEN = "weather;<user>why?<assistant>Oslo<tool>rain<assistant>"


def read_prompts(path, template):
    data = config.Data(source="prompts", paths=(str(path),), validation_fraction=0.0, chat_template=str(template))
    return prompts.open_prompts(data, vocab_size=257, seed=0, longest=90)[1].prompts


def test_prompts_of_reinforcement_and_of_generate_are_of_the_same_form(tmp_path):
    (tmp_path / "t.jinja").write_text(TOOLED)
    line = {"messages": TALK, "tools": json.dumps([SCHEMA]), "answer": "6"}
    for key in ("messages", "prompt"):
        (tmp_path / "p.jsonl").write_text(json.dumps({key: line["messages"], "tools": line["tools"], "answer": "6"}))
        (found,) = read_prompts(tmp_path / "p.jsonl", tmp_path / "t.jinja")
        assert found.text == WRITTEN and found.line["answer"] == "6"
        (asked,) = generate._lines(str(tmp_path / "p.jsonl"), True)
        assert generate.Talk(opened_bytes(tmp_path), (), ()).prompt(*asked) == found.ids.tolist()
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": TALK, "tools": "["}))
    with pytest.raises(ValueError, match="line 1: tools: the string .* is broken JSON"):
        read_prompts(tmp_path / "p.jsonl", tmp_path / "t.jinja")
    with pytest.raises(ConfigError, match="p.jsonl, line 1: tools: the string .* is broken JSON"):
        generate._lines(str(tmp_path / "p.jsonl"), True)


def opened_bytes(tmp_path) -> chat.Template:
    return chat.open_template(chat.Bytes(), given=str(tmp_path / "t.jinja"))


# ---- rows of tables --------------------------------------------------------------------------------------------------


def chats(directory, values=None, path=None, source: str = "chat") -> config.Data:
    if values is not None:
        path = directory / "chat.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
    home = drawn.folder(directory, "chatml")
    (home / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls %}"
        "{{ c | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    return config.Data(source=source, paths=[str(path)], tokenizer=str(home / "tokenizer.json"), bos_token="<s>",
                       seq_len=48, global_batch=4, validation_fraction=0.0)


def write_table(path, table):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    else:
        write_arrow(path, table, stream="stream" in path.name)
    return path


def large(table: pa.Table) -> pa.Table:
    """As large_list and large_string, roles as a dictionary: other writers' types for the same rows."""
    message = pa.struct([("role", pa.dictionary(pa.int32(), pa.large_string())), ("content", pa.large_string())])
    return table.cast(pa.schema([(name, pa.large_list(message)) for name in table.column_names]))


ROWS = [{"messages": [ASK, {**ANSWER, "content": f"the cat {i} 猫"}]} for i in range(7)]
KINDS = ["a.parquet", "a.stream.arrow", "a.file.arrow"]


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_table_are_the_lines_of_json(name, tmp_path):
    wanted = Opened(chats(tmp_path, ROWS), tmp_path).ids()
    table = pa.Table.from_pylist(ROWS)
    assert len(wanted) == 7
    for made in (table, table.append_column("id", pa.array(range(7))), large(table)):
        assert Opened(chats(tmp_path, path=write_table(tmp_path / name, made)), tmp_path).ids() == wanted
    plain = tmp_path / "train-00000"        # what a table is, its first bytes tell
    plain.write_bytes((tmp_path / name).read_bytes())
    assert Opened(chats(tmp_path, path=plain), tmp_path).ids() == wanted
    again = Opened(chats(tmp_path, path=plain), tmp_path)
    assert not again.built and again.ids() == wanted


@pytest.mark.parametrize("name", KINDS)
def test_keys_that_a_table_fills_with_nulls_are_absent_also_in_arguments(name, tmp_path):
    lines = [{"messages": [ASK, call({"city": "Oslo"}, type="function")]}, {"messages": [ASK, ANSWER]},
             {"messages": [ASK, call({"days": 3, "where": {"lat": 1.5}}, type="function")]}]
    table = pa.Table.from_pylist(lines)
    assert "days" in str(table.schema) and table.to_pylist() != lines
    found = Opened(chats(tmp_path, path=write_table(tmp_path / name, table)), tmp_path)
    assert found.ids() == Opened(chats(tmp_path, lines), tmp_path).ids()
    assert not any("arguments" in line for line in found.told)


@pytest.mark.parametrize("name", KINDS)
def test_other_forms_and_pairs_and_prompts_are_read_of_tables(name, tmp_path):
    forms = [[{"prompt": "why?", "completion": "the cat sat"}],
             [{"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "the cat sat"}]}],
             [{"messages": json.dumps([ASK, ANSWER])}],
             [{"messages": [ASK, ANSWER], "prompt": None, "completion": None}]]
    wanted = Opened(chats(tmp_path, [{"messages": [ASK, ANSWER]}]), tmp_path).ids()
    for form in forms:
        path = write_table(tmp_path / name, pa.Table.from_pylist(form))
        assert Opened(chats(tmp_path, path=path), tmp_path).ids() == wanted, form
    pairs = [{"chosen": [ASK, ANSWER], "rejected": [ASK, {**ANSWER, "content": f"no {i}"}]} for i in range(5)]
    wanted = Opened(chats(tmp_path, pairs, source="preferences"), tmp_path).ids()
    path = write_table(tmp_path / name, pa.Table.from_pylist(pairs))
    assert Opened(chats(tmp_path, path=path, source="preferences"), tmp_path).ids() == wanted and len(wanted) == 10
    (tmp_path / "t.jinja").write_text(TOOLED)
    path = write_table(tmp_path / name, pa.Table.from_pylist([
        {"prompt": TALK[:1], "answer": "6", "reward_model": {"style": "rule", "truth": None}}] * 2))
    found = read_prompts(path, tmp_path / "t.jinja")
    assert [one.text for one in found] == ["<user>why?<assistant>"] * 2
    assert found[1].place == f"{path}, row 1 (from 0)" and found[1].line["reward_model"] == {"style": "rule"}


@pytest.mark.parametrize("name", KINDS)
def test_a_wrong_row_is_one_message_with_its_number(name, tmp_path):
    put = lambda rows: write_table(tmp_path / name, pa.table(rows))
    told = lambda rows, **keys: fault(chats(tmp_path, path=put(rows), **keys), tmp_path)
    good = [ASK, ANSWER]
    assert f"{name}, row 2 (from 0): has no answer of the assistant" in told({"messages": [good, good, [ASK]]})
    assert f"{name}, row 1 (from 0): is not a conversation" in told({"messages": [good, None]})
    assert f"{name}, row 2 (from 0): messages: the string" in told(
        {"messages": [json.dumps(good), json.dumps(good), "[{"]})
    assert "but none of messages, conversations" in told({"text": ["x"]})
    assert "row 0 (from 0): is not a pair of answers" in told({"messages": [good]}, source="preferences")
    path = put({"prompt": ["a"], "image": [b"\xff"]})
    with pytest.raises(ValueError, match="row 0 .*'image' is bytes, which JSON cannot represent; write such a column as"):
        read_prompts(path, tmp_path / "t.jinja")
    path.write_bytes(path.read_bytes()[:-20])
    assert "is not a whole " in fault(chats(tmp_path, path=path), tmp_path)


def test_the_key_of_a_cache_follows_what_is_made_of_a_line(tmp_path, monkeypatch):
    data = chats(tmp_path, ROWS)
    assert Opened(data, tmp_path).built and not Opened(data, tmp_path).built
    monkeypatch.setattr(conversations, "VERSION", conversations.VERSION + 1)
    assert Opened(data, tmp_path).built
