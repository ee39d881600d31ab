"""Prompts of data.source = "prompts"."""
import json

import numpy as np
import pytest

from meshtrain.config.sections import Data
from meshtrain.data import sources
from meshtrain.rl import prompts

LINES = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(7)]


def opened(tmp_path, lines=LINES, **keys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    longest = keys.pop("longest", 20)
    data = Data(source="prompts", paths=(str(path),), **{"validation_fraction": 0.0, "seq_len": 32, **keys})
    return prompts.open_prompts(data, vocab_size=257, seed=3, longest=longest)


def test_epochs_hold_every_prompt_once_in_orders_of_their_own(tmp_path):
    _, found = opened(tmp_path)
    drawn = [one.line["prompt"] for one in found.draw(0, 21)]
    epochs = [drawn[i:i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == sorted(line["prompt"] for line in LINES) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert [one.line["prompt"] for one in found.draw(5, 4)] == drawn[5:9], "a function of the number alone"


def test_a_prompt_begins_with_the_separator_and_keeps_its_line(tmp_path):
    _, found = opened(tmp_path)
    one = next(one for one in found.prompts if one.line["prompt"] == "3+3=")
    assert one.ids.tolist() == [256, *b"3+3="] and one.ids.dtype == np.int32
    assert one.text == "3+3=" and one.line["answer"] == "6" and one.place.endswith("prompts.jsonl, line 4")


def test_held_out_prompts_are_not_drawn(tmp_path):
    _, found = opened(tmp_path, validation_fraction=0.3)
    held, trained = ({one.text for one in part} for part in (found.held, found.draw(0, 50)))
    assert len(held) == 2 and len(trained) == 5 and not held & trained


def test_the_fingerprint_follows_what_the_reward_reads(tmp_path):
    before, _ = opened(tmp_path)
    after, _ = opened(tmp_path, [*LINES[:-1], LINES[-1] | {"answer": "another"}])
    again, _ = opened(tmp_path)
    assert before.fingerprint == again.fingerprint != after.fingerprint


@pytest.mark.parametrize("lines, keys, told", [
    ([{"text": "3+3="}], {}, 'line 1: has no text in "prompt" and no "messages" (its keys: \'text\')'),
    ([{"prompt": 3}], {}, 'line 1: has no text in "prompt"'),
    ([{"prompt": "\ud800"}], {}, "line 1: has half a character"),
    ([{"messages": [{"role": "assistant", "content": "3"}]}], {}, "line 1: ends with an answer of the assistant"),
    ([{"messages": [{"role": "user", "content": "3"}]}], {}, "line 1: there is no chat template"),
    ([], {}, "are empty; give prompts"),
    ([{"prompt": "0123456789"}], {"longest": 10}, "1 prompt longer than the 10 tokens that data.seq_len=32 leaves"),
])
def test_mistakes_are_told_with_their_line(tmp_path, lines, keys, told):
    with pytest.raises(ValueError) as error:
        opened(tmp_path, lines, **keys)
    assert told in str(error.value)


def test_files_to_validate_on_are_not_trained_on(tmp_path):
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ValueError, match="is also training data"):
        opened(tmp_path, validation_paths=(str(path),))


def test_messages_are_written_by_the_chat_template_up_to_the_answer(tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                        "{% if add_generation_prompt %}<assistant>{% endif %}", encoding="utf-8")
    _, found = opened(tmp_path, [{"messages": [{"role": "user", "content": "3+3"}], "answer": "6"}],
                      chat_template=str(template), longest=30)
    assert found.prompts[0].ids.tolist() == list(b"<user>3+3<assistant>") and found.prompts[0].line["answer"] == "6"


def test_prompts_are_no_documents(tmp_path):
    with pytest.raises(ValueError, match="has no documents to tokenize"):
        sources.describe(Data(source="prompts", paths=("prompts.jsonl",)), vocab_size=257)
