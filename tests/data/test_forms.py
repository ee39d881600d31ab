"""Rows as the data sets of other trainers have them: Alpaca's keys, axolotl's `train`, and those that are no conversation:
whole dialogues as texts, and answers with a label."""
import json
import re

import pytest
from corpora import Opened, fault
from hypothesis import given, settings
from hypothesis import strategies as st
from test_messages import ANSWER, ASK, chats

from meshtrain.data.documents import conversations
from meshtrain.data.documents.conversations import parse, parse_pair

ROW = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
HH = "\n\nHuman: why?\n\nAssistant: the cat sat"


def test_alpaca_rows_are_a_question_and_an_answer():
    def asked(row) -> str:
        found = parse(row)
        assert [message["role"] for message in found.messages] == ["user", "assistant"]
        assert found.trained == [True, True] and found.messages[1]["content"] == "3"
        return found.messages[0]["content"]
    assert asked(ROW) == "Add.\n\n1 and 2"
    assert [asked(ROW | {"input": given}) for given in ("", None)] == ["Add.", "Add."]
    assert asked({"instruction": "Add.", "output": "3", "text": "Below is an instruction", "history": []}) == "Add."
    assert asked(ROW | {"instruction": ""}) == "1 and 2"
    assert parse(ROW | {"system": "be brief"}).messages[0] == {"role": "system", "content": "be brief"}
    assert parse(ROW | {"messages": [ASK, ANSWER]}).messages == [ASK, ANSWER]


def test_a_row_of_alpaca_is_rendered_as_its_messages(tmp_path):
    plain = [{"messages": [{"role": "user", "content": "Add.\n\n1 and 2"}, {"role": "assistant", "content": "3"}]}]
    wanted = Opened(chats(tmp_path, plain), tmp_path).ids()
    assert Opened(chats(tmp_path, [ROW]), tmp_path).ids() == wanted


# (source, line, what the one message must contain)
WRONG = [
    ("chat", ROW | {"output": 3}, "has 3 in 'output', which is not text; give a string"),
    ("chat", ROW | {"input": ["1"]}, "has [\"1\"] in 'input', which is not text"),
    ("chat", ROW | {"instruction": "", "input": ""}, "has neither an instruction nor an input; remove it"),
    ("chat", ROW | {"history": [["a", "b"]]}, "has earlier turns in 'history', [[\"a\", \"b\"]], which are not read"),
    ("chat", {"instruction": "Add.", "response": "3"}, "is not a conversation (its keys: 'instruction', 'response')"),
    ("chat", {"prompt": "a", "completion": "b", "label": True}, "has the label true, as rows for KTO have"),
    ("chat", {"prompt": "a", "completion": "b", "label": 0}, "has the label 0, as rows for KTO have"),
    ("chat", ROW | {"kto_tag": False}, "keep the rows whose kto_tag is true, without this key, or make pairs"),
    ("preferences", {"prompt": "a", "completion": "b", "label": False}, "has the label false, as rows for KTO have"),
    ("chat", {"chosen": HH, "rejected": HH + "!"}, 'is a pair of answers (its keys: chosen, rejected), not a '
                                                   'conversation; set data.source="preferences"'),
    ("preferences", {"chosen": HH, "rejected": HH + "!"}, "has a whole dialogue as the text of 'chosen', \"Human: … "),
    ("preferences", {"prompt": "\n\nHuman: why?\n\nAssistant:", "chosen": "a", "rejected": "b"},
     "has a whole dialogue as the text of 'prompt'"),
    ("chat", {"prompt": "\n\nHuman: why?\n\nAssistant:", "completion": "a"}, "give its turns as messages, e.g. \"prompt\""),
    ("chat", {"messages": [ASK, ANSWER | {"train": 1}]}, "has train=1; use true to learn the message, or false to use it"),
    ("chat", {"messages": [ASK, ANSWER | {"weight": "0"}]}, 'has weight="0"; use 1 or true to learn the message'),
    ("chat", {"messages": [ASK, ANSWER | {"weight": 1, "train": False}]},
     "message 1 (from 0) has weight 1 and train false, which contradict each other; keep one of them"),
    ("chat", {"messages": [ASK, ANSWER | {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}]},
     "message 1 (from 0) has train_detail, spans of characters to learn, which are not read; remove it"),
    ("chat", {"messages": [ASK | {"train": True}, ANSWER]},
     "message 0 (from 0) has train true, but its role is user, and only the assistant's messages are learned"),
]


@pytest.mark.parametrize("source, line, part", WRONG, ids=[part[:40] for *_, part in WRONG])
def test_a_row_that_is_no_conversation_is_one_message_with_its_line(source, line, part, tmp_path):
    good = {"messages": [ASK, ANSWER]} if source == "chat" else {
        "prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "no"}]}
    message = fault(chats(tmp_path, [good] * 2 + [line], source=source), tmp_path)
    assert f"{tmp_path / 'chat.jsonl'}, line 3: " in message and part in message


def test_what_looks_like_a_label_or_a_dialogue_and_is_none_is_read():
    for label in ("math", 2, None, ["a"]):
        assert parse({"prompt": "a", "completion": "b", "label": label}).trained == [False, True]
    assert parse({"prompt": "Human: who?", "completion": "a"}).messages[0]["content"] == "Human: who?"
    assert parse_pair({"prompt": "a", "chosen": "b", "rejected": "c", "label": 1})[0].trained == [False, True]


def test_train_and_weight_that_agree_are_read_and_all_of_a_line_is_learned_only_if_nothing_says_otherwise():
    turns = [ASK | {"train": False}, ANSWER | {"train": True, "weight": 1.0}, ASK, ANSWER | {"train": False, "weight": 0}]
    found = parse({"messages": turns})
    assert found.trained == [False, True, True, False] and found.messages == [ASK, ANSWER] * 2
    assert parse({"messages": [ASK | {"train": True}, ANSWER]}, learn_all=True).trained == [True, True]
    for flags in ({"train": False}, {"weight": 0}):
        with pytest.raises(ValueError, match='but data.loss_on="all" learns every message; remove the key'):
            parse({"messages": [ASK, ANSWER | flags]}, learn_all=True)


WORDS = st.sampled_from(["Add.", "", "3", HH, "Human: a", "\ud800"])
VALUES = st.none() | st.booleans() | st.integers(-1, 2) | WORDS | st.lists(WORDS, max_size=2)
FLAGS = st.fixed_dictionaries({}, optional={"weight": VALUES, "train": VALUES, "train_detail": VALUES})
TURNS = st.lists(st.builds(lambda one, flags: one | flags, st.sampled_from([ASK, ANSWER]), FLAGS), max_size=4)
KEYS = ["instruction", "input", "output", "history", "prompt", "completion", "chosen", "rejected", "label", "kto_tag"]


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from([*KEYS, "messages"]), VALUES | TURNS, max_size=6), st.booleans())
def test_any_row_is_conversations_or_one_fault_and_no_key_of_weights_reaches_the_template(line, learn_all):
    line = json.loads(json.dumps(line))
    for read in (lambda: [parse(line, learn_all)], lambda: parse_pair(line)):
        try:
            found = read()
        except ValueError as error:
            assert re.search("; |Known names", str(error)) and "\n" not in str(error) and len(str(error)) < 400
            continue
        assert not any({"weight", "train", "train_detail"} & message.keys()
                       for one in found for message in one.messages)
        labelled = any(type(line.get(key)) in (bool, int) and line[key] in (0, 1) for key in conversations.LABELS)
        assert not labelled or {"chosen", "rejected"} <= line.keys()
        assert not any("\n\nAssistant:" in message["content"] for one in found for message in one.messages
                       if "instruction" not in line)
