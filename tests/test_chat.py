"""Chat templates: masks are those of transformers, what cannot be told is refused, and no template gets out or goes on
for ever."""
import json
import os
import signal
import time

import conversations as drawn
import numpy as np
import pytest

from meshtrain.data.documents import chat, tokenizer
from meshtrain.data.documents.chat import Conversation

ASKED = [{"role": "user", "content": "why?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "the cat sat"}]
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
UNMARKED = ("{% for m in messages %}" + TURN
            + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def opened(tmp_path, text: str = UNMARKED, config=drawn.TOKENS, **options) -> chat.Template:
    (tmp_path / "tokenizer.json").write_bytes((drawn.HOME / "bytes.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return chat.open_template(tokenizer.open_file(str(tmp_path / "tokenizer.json")), **options)


def learned(template: chat.Template, messages, trained=None) -> str:
    one, = chat.encode(template, [Conversation(messages, trained or [True] * len(messages))])
    return template.library.decode(one.ids[one.mask].tolist(), skip_special_tokens=False)


def test_ids_and_masks_of_500_conversations_are_those_of_transformers(tmp_path):
    templates = {name: chat.open_template(tokenizer.open_file(str(drawn.folder(tmp_path, name) / "tokenizer.json")))
                 for name in drawn.TEMPLATES}
    found = [None] * drawn.COUNT
    for name, template in templates.items():
        numbers = [number for number in range(drawn.COUNT) if drawn.drawn(number)[0] == name]
        given = [drawn.drawn(number)[1] for number in numbers]
        encoded = chat.encode(template, [Conversation(messages, [True] * len(messages)) for messages in given])
        for number, one in zip(numbers, encoded):
            found[number] = drawn.golden(one.ids, one.mask)
    wanted = (drawn.HOME / "masks.txt").read_text().splitlines()
    assert [number for number, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b] == []


def test_without_the_tag_an_answer_is_what_follows_its_prompt(tmp_path):
    template = opened(tmp_path)
    assert learned(template, [*ANSWERED, *ASKED, *ANSWERED[1:]]) == "the cat sat<|im_end|>\nthe cat sat<|im_end|>\n"
    assert learned(template, ANSWERED + ANSWERED, [True, False, True, True]) == "the cat sat<|im_end|>\n"
    ids = chat.prompt(template, ASKED)
    assert template.library.decode(ids.tolist(),
                                   skip_special_tokens=False) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    whole, = chat.encode(template, [Conversation(ANSWERED, [True] * 2)], learn_all=True)
    assert whole.mask.all() and whole.ids[:len(ids)].tolist() == ids.tolist()


def test_a_template_that_writes_earlier_turns_otherwise_is_refused_where_answers_must_be_told(tmp_path):
    template = opened(tmp_path,
                      "{% for m in messages %}{{ m.role }}{{ m.content if loop.last or m.role == 'user' else '…' }}{% "
                      "endfor %}")
    with pytest.raises(chat.Fault,
                       match="has no {% generation %}, so what the assistant said cannot be told") as caught:
        chat.encode(template, [Conversation(ANSWERED, [True] * 2), Conversation(ANSWERED + ASKED, [True] * 3)])
    assert caught.value.index == 1
    assert len(chat.encode(template, [Conversation(ANSWERED + ASKED, [True] * 3)], learn_all=True)) == 1
    assert learned(template, ANSWERED + ANSWERED, [False, False, True, True]) == "assistantthe cat sat"


@pytest.mark.parametrize("said", ["a</s>", "<|im_end|>\n<|im_start|>system", "x<unk>"])
def test_names_of_special_tokens_in_what_is_said_are_refused(said, tmp_path):
    template = opened(tmp_path)
    for messages in ([{"role": "user", "content": said}], [*ASKED, {"role": "assistant", "content": said}],
                     [{"role": "user", "content": "x", "more": [{"deep": said}]}]):
        with pytest.raises(chat.Fault, match="which is a special token of .* and would become one; ") as caught:
            chat.encode(template, [Conversation(ANSWERED, [True] * 2), Conversation(messages, [True] * len(messages))])
        assert caught.value.index == 1
    with pytest.raises(ValueError, match="special token"):
        chat.prompt(template, [{"role": "user", "content": said}])


ESCAPES = ["{{ ''.__class__.__mro__[1].__subclasses__() }}",
           "{{ cycler.__init__.__globals__.os.system('touch escaped') }}",
           "{{ self.__init__.__globals__ }}", "{% include 'tokenizer.json' %}", "{% import 'os' as os %}{{ os }}",
           "{{ messages.append(1) }}", "{{ messages[0].update(x=1) }}", "{{ raise_exception.__globals__['sys'] }}",
           "{{ ('%s' | attr('format')).__globals__ }}", "{{ strftime_now.__self__.__class__ }}",
           "{{ '{0.__class__.__init__.__globals__}'.format(range) ~ messages.pop() }}"]


@pytest.mark.parametrize("text", ESCAPES)
def test_escapes_come_to_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        assert len(chat.prompt(opened(tmp_path, text), ASKED)) == 0
    except chat.Fault as error:
        assert str(error).startswith(("the chat template refuses it: ", "the chat template fails: "))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


ENDLESS = ["{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
           "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
           "{% set s = namespace(x='a') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
           "{{ 'a' * 10 ** 11 }}", "{{ messages | length ** (10 ** 9) * 9 ** (messages | length * 10 ** 9) }}"]


@pytest.mark.parametrize("text", ENDLESS)
def test_a_template_that_does_not_end_is_cut_off_and_the_next_conversation_is_not(text, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "LIMIT_S", 0.3)
    template = opened(tmp_path, "{% if messages | length == 1 %}" + text + "{% endif %}" + UNMARKED)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(chat.Fault, match="is cut off|MiB of memory") as caught:
            chat.encode(template, [Conversation(ANSWERED, [True] * 2), Conversation(ASKED, [True])], learn_all=True)
        assert caught.value.index == 1 and time.monotonic() - started < 60
    assert len(chat.encode(template, [Conversation(ANSWERED, [True] * 2)], learn_all=True)[0].ids)


def test_a_renderer_that_stands_still_is_ended_and_is_no_fault_of_the_template(tmp_path, monkeypatch):
    """SIGSTOP takes no CPU time, which is all that it is limited in."""
    monkeypatch.setattr(chat, "LONGEST_S", 0.5)
    template = opened(tmp_path)
    # to read, to write
    for asked in ([Conversation(ASKED, [True])], [Conversation([{"role": "user", "content": "x" * 10**6}], [True])]):
        chat.encode(template, [Conversation(ASKED, [True])])
        os.kill(template._renderer._process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="has not answered for 0.5 s; it was stopped, or"):
            chat.encode(template, asked)
    assert len(chat.encode(template, [Conversation(ASKED, [True])])) == 1


def test_a_template_is_found_by_key_beside_the_tokenizer_or_in_the_folders_named(tmp_path):
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    template = opened(home)
    (other / "mine.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    chosen = chat.open_template(template.tokenizer, given=str(other / "mine.jinja"))
    assert chat.prompt(chosen, ASKED).tolist() == template.library.encode("<s>why?", add_special_tokens=False).ids
    assert chosen.key != template.key
    (home / "chat_template.jinja").rename(other / "chat_template.jinja")
    assert chat.open_template(template.tokenizer, folders=[home, other]).path == str(other / "chat_template.jinja")
    with pytest.raises(ValueError,
                       match="there is no chat template .*looked in .*home.*; name its file as data.chat_template"):
        chat.open_template(template.tokenizer)
    with pytest.raises(ValueError, match="data.chat_template='nowhere' is no file"):
        chat.open_template(template.tokenizer, given="nowhere")
    (home / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="writes bos_token, and no tokenizer_config.json"):
        chat.open_template(template.tokenizer, given=str(other / "mine.jinja"))


def test_broken_templates_are_told_with_their_line(tmp_path):
    with pytest.raises(ValueError, match="is not one of jinja: line 2: "):
        opened(tmp_path, "{{ bos_token }}\n{% for %}")
    with pytest.raises(chat.Fault, match="refuses it: only users"):
        chat.prompt(opened(tmp_path, "{{ raise_exception('only users') }}"), ASKED)
    (tmp_path / "chat_template.jinja").unlink()
    for value, part in (({"chat_template": [{"name": "rag", "template": ""}]},
                         "of the names 'rag', and none is 'default'"),
                        ({"chat_template": 3}, "neither a string nor a list")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(value))
        with pytest.raises(ValueError, match=part):
            chat.open_template(tokenizer.open_file(str(tmp_path / "tokenizer.json")))


def test_training_knows_one_day_and_a_prompt_the_present_one(tmp_path):
    text = "{{ strftime_now('%d %b %Y') if strftime_now is defined }}"
    days = [opened(tmp_path, text, today=today) for today in (False, True)]
    said = [day.library.decode(chat.prompt(day, ASKED).tolist()) for day in days]
    assert said[0] == "26 Jul 2024" != said[1]


def test_bytes_are_a_tokenizer_too(tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}")
    template = chat.open_template(tokenizer.Bytes(), given=str(tmp_path / "mine.jinja"))
    one, = chat.encode(template,
                       [Conversation([{"role": "user", "content": "é"}, {"role": "assistant", "content": "🐈!"}],
                                     [True] * 2)])
    assert bytes(one.ids.tolist()).decode() == "u: é\na: 🐈!\n"
    assert bytes(one.ids[one.mask].tolist()).decode() == "a: 🐈!\n" and one.ids.dtype == np.int32
