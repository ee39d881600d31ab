"""Chat templates: masks are those of transformers, what cannot be told is refused, and no template gets out or goes on
for ever."""
import json
import os
import signal
import time
from pathlib import Path

import conversations as drawn
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders

from meshtrain.data.documents import chat, tokenizer
from meshtrain.data.documents.chat import Conversation

ASKED = [{"role": "user", "content": "why?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "the cat sat"}]
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
UNMARKED = ("{% for m in messages %}" + TURN
            + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def opened(tmp_path, text: str = UNMARKED, config=drawn.TOKENS, library=None, **options) -> chat.Template:
    (tmp_path / "tokenizer.json").write_text(library.to_str() if library else (drawn.HOME / "bytes.json").read_text())
    (tmp_path / "chat_template.jinja").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return chat.open_template(tokenizer.open_file(str(tmp_path / "tokenizer.json")), **options)


def learned(template: chat.Template, messages, trained=None) -> str:
    one, = chat.encode(template, [Conversation(messages, trained or [True] * len(messages))])
    return template.library.decode(one.ids[one.mask].tolist(), skip_special_tokens=False)


# Of the 500, a token of transformers' crosses from what stands before an answer into it: " > >" has one for ">▁".
CROSSED = [137]


def test_ids_and_masks_of_500_conversations_are_those_of_transformers(tmp_path):
    templates = {name: chat.open_template(tokenizer.open_file(str(drawn.folder(tmp_path, name) / "tokenizer.json")))
                 for name in drawn.TEMPLATES}
    found, parted = [None] * drawn.COUNT, [None] * drawn.COUNT
    for name, template in templates.items():
        numbers = [number for number in range(drawn.COUNT) if drawn.drawn(number)[0] == name]
        given = [drawn.drawn(number)[1] for number in numbers]
        encoded = chat.encode(template, [Conversation(messages, [True] * len(messages)) for messages in given])
        for number, one in zip(numbers, encoded):
            found[number], parted[number] = drawn.golden(one.ids, one.mask), one.notes
    wanted = (drawn.HOME / "masks.txt").read_text().splitlines()
    assert [number for number, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b] == CROSSED
    assert [number for number, how in enumerate(parted) if how in (("apart",), ("crossed",))] == CROSSED


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
                       match="has no {% generation %}, so the assistant's text cannot be found") as caught:
        chat.encode(template, [Conversation(ANSWERED, [True] * 2), Conversation(ANSWERED + ASKED, [True] * 3)])
    assert caught.value.index == 1
    assert len(chat.encode(template, [Conversation(ANSWERED + ASKED, [True] * 3)], learn_all=True)) == 1
    assert learned(template, ANSWERED + ANSWERED, [False, False, True, True]) == "assistantthe cat sat"


# ---- spans -----------------------------------------------------------------------------------------------------------

MANY = ["😀", "👩‍👩‍👧", "猫", "𠮷", "e\u0301", "क्ष", "🇳🇴", "\u200b"]       # of several tokens, and of several characters
ENDS = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def spaced(name: str):
    """A tokenizer whose characters have several tokens: of bytes, one that takes spaces from its tokens' characters,
    one with a token for two line ends, and one that falls back to bytes."""
    made = tokenizers.Tokenizer.from_file(str(drawn.HOME / ("words.json" if name == "words" else "bytes.json")))
    if name == "lines":     # of GPT-2's: two line ends are one token, unless a character follows them
        value = json.loads(made.to_str())
        value["model"]["vocab"]["ĊĊ"], value["model"]["merges"] = 400, [["Ċ", "Ċ"], *value["model"]["merges"]]
        made = tokenizers.Tokenizer.from_str(json.dumps(value))
    if name == "words":
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if name == "trimmed":
        made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return made


@pytest.mark.parametrize("name", ["bytes", "trimmed", "words"])
def test_what_is_learned_is_the_text_of_the_span_with_every_token_of_its_last_character(name, tmp_path):
    template = opened(tmp_path, ENDS, library=spaced(name))
    for many in MANY:
        for said in (many, f"the cat {many}", f"{many} sat", f"{many}{many}", f" {many} ", f"{many}\n"):
            turns = [{"role": "user", "content": many}, {"role": "assistant", "content": said}] * 2
            assert learned(template, turns) == said * 2, (many, said)
            assert learned(template, turns, [True, False, True, True]) == said


def test_a_token_that_holds_an_end_of_the_span_is_learned_whole(tmp_path):
    text = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    template = opened(tmp_path, text)
    (one,) = chat.encode(template, [Conversation([{"role": "assistant", "content": " the cat"}], [True])])
    assert learned(template, [{"role": "assistant", "content": " the cat"}]) == " the cat"
    (one,) = chat.encode(opened(tmp_path, text.replace("}}:", "}}: ")),
                         [Conversation([{"role": "assistant", "content": "the cat"}], [True])])
    assert template.library.decode(one.ids[one.mask].tolist()) == " the cat", "transformers learns the space's token"


# ---- where prompt and answer part ------------------------------------------------------------------------------------

SAYS = "{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}{{ ' ' if m.role == 'user' else '</s>' }}"
PARTED = {
    "space": "{% for m in messages %}" + SAYS + "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}",
    "lines": "{% for m in messages %}<s>{{ m.role }}\n\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}"
             "<s>assistant\n\n{% endif %}",
    "tag": ENDS,
    "header in the tag": ENDS.replace("{{ '<|im_start|>' + m.role + '\n' }}{% if", "{% if")
                             .replace("{% generation %}", "{% generation %}<|im_start|>assistant{{ '\n' }}")
                             .replace("{% else %}", "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"),
}
OPENINGS = ["the cat", " the cat", "\n\nthe", "猫 the", "  sat", ": the", "\n"]


@pytest.mark.parametrize("learn_all", [False, True])
@pytest.mark.parametrize("name", ["lines", *(pytest.param(name, marks=pytest.mark.full) for name in ("bytes", "words"))])
@pytest.mark.parametrize("text", PARTED)
def test_a_model_is_prompted_with_the_tokens_that_it_learns_behind(text, name, learn_all, tmp_path):
    template = opened(tmp_path, PARTED[text], library=spaced(name))
    parted = set()
    for first in OPENINGS:
        for second in OPENINGS:
            turns = [{"role": "user", "content": second}, {"role": "assistant", "content": first}, *ASKED,
                     {"role": "assistant", "content": second}]
            for trained in ([True] * 4, [False, False, False, True]):
                (one,) = chat.encode(template, [Conversation(turns, trained)], learn_all)
                parted.add(one.notes)
                for count in (1, 3):
                    asked = chat.prompt(template, turns[:count]).tolist()
                    assert one.ids[:len(asked)].tolist() == asked, (first, second)
                    if not learn_all and trained[count]:
                        assert one.mask[len(asked)] and (text == "header in the tag" or not one.mask[len(asked) - 1])
    assert parted <= {(), ("apart",)}
    if (text, name) in (("space", "bytes"), ("lines", "lines")):
        assert parted == {(), ("apart",)}


def test_a_tokenizer_that_writes_a_space_before_each_part_is_told_and_goes_on(tmp_path):
    made = spaced("bytes")
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    template = opened(tmp_path, PARTED["space"], library=made)
    (one,) = chat.encode(template, [Conversation(ANSWERED, [True] * 2)])
    assert one.notes == ("crossed",) and one.mask.any()
    (whole,) = template.library.encode_batch(["USER: why? ASSISTANT: the cat sat</s>"], add_special_tokens=False)
    assert one.ids.tolist() == whole.ids


THINKS = ("{% for m in messages %}{{ '<|header|>' + m.role }}{% if m.role == 'assistant' %}{% if m.reasoning %}"
          "{{ '<think>\n' + m.reasoning }}{% endif %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}"
          "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|header|>assistant<think>{{ '\n' }}{% endif %}")


@pytest.mark.parametrize("said", ["4", "<think>\nno</think>4"])
def test_a_generation_prompt_that_an_answer_does_not_begin_with_is_told_as_such(said, tmp_path):
    """As of R1's distills, which leave reasoning out and open it in the prompt."""
    turns = [*ASKED, {"role": "assistant", "content": said}]
    with pytest.raises(chat.Fault) as caught:
        chat.encode(opened(tmp_path, THINKS), [Conversation(turns, [False, True])])
    assert f"the generation prompt of the chat template is {'<|header|>assistant<think>' + chr(10)!r}, but message 1 " \
           f"(from 0), an answer, does not begin with it" in str(caught.value)
    assert "when others follow" not in str(caught.value)
    thought = [*ASKED, {"role": "assistant", "content": "4", "reasoning": "hm"}]
    assert learned(opened(tmp_path, THINKS), thought, [False, True]) == "hm4</s>"
    tagged = opened(tmp_path, THINKS.replace("{% if m.reasoning %}", "{% generation %}{% if m.reasoning %}")
                                    .replace("{% else %}{{ m", "{% endgeneration %}{% else %}{{ m"))
    left_out = ("elsewhere", *["unreasoned"] * ("</think>" in said))
    for asked, notes in ((turns, left_out), (thought, ()), (turns + thought, left_out)):
        (one,) = chat.encode(tagged, [Conversation(asked, [True] * len(asked))])
        assert one.notes == notes and one.mask.any()


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
    template = opened(tmp_path, "{% if messages | length == 3 %}" + text + "{% endif %}" + UNMARKED)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(chat.Fault, match="was stopped|MiB of memory") as caught:
            chat.encode(template, [Conversation(ANSWERED, [True] * 2), Conversation(ANSWERED + ASKED, [True] * 3)],
                        learn_all=True)
        assert caught.value.index == 1 and time.monotonic() - started < 60
    assert len(chat.encode(template, [Conversation(ANSWERED, [True] * 2)], learn_all=True)[0].ids)


@pytest.mark.parametrize("text", ["{{ 'a' * 3000 }}", "{% generation %}{{ 'a' * 3000 }}{% endgeneration %}"])
def test_a_text_that_is_too_long_is_refused_and_the_next_conversation_is_not(text, tmp_path, monkeypatch):
    """Three hundred million characters would pass the limits of memory and of time."""
    monkeypatch.setattr(chat, "MOST_CHARS", 2000)
    template = opened(tmp_path, "{% if messages | length == 3 %}" + text + "{% endif %}" + UNMARKED)
    for trained in ([True] * 3, [False] * 3):
        with pytest.raises(chat.Fault, match="writes 3,... characters, but the limit is 2,000; fix or remove"):
            chat.encode(template, [Conversation(ANSWERED + ASKED, trained)])
    assert len(chat.encode(template, [Conversation(ANSWERED, [True] * 2)])) == 1


def test_a_renderer_that_escaped_and_replies_without_end_is_ended(tmp_path, monkeypatch):
    template = opened(tmp_path)
    monkeypatch.setattr(chat, "MOST_REPLY_BYTES", 10)
    with pytest.raises(chat.Fault, match="wrote more than 10 bytes and was stopped"):
        chat.encode(template, [Conversation(ASKED, [True])])
    monkeypatch.undo()
    assert len(chat.encode(template, [Conversation(ASKED, [True])])) == 1


def test_a_renderer_has_no_credentials_and_can_write_no_file_and_start_no_process(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "secret-of-the-test")
    template = opened(tmp_path)
    chat.prompt(template, ASKED)
    about = Path(f"/proc/{template._renderer._process.pid}")
    assert "secret-of-the-test" not in (about / "environ").read_text()
    limits = {line[:26].strip(): line[26:].split()[:2] for line in (about / "limits").read_text().splitlines()}
    assert limits["Max file size"] == limits["Max processes"] == limits["Max core file size"] == ["0", "0"]
    assert limits["Max open files"] == ["16", "16"]


def test_a_renderer_that_stands_still_is_ended_and_is_no_fault_of_the_template(tmp_path, monkeypatch):
    """SIGSTOP takes no CPU time, which is all that it is limited in."""
    monkeypatch.setattr(chat, "LONGEST_S", 2.0)
    template = opened(tmp_path)
    # to read, to write
    for asked in ([Conversation(ASKED, [True])], [Conversation([{"role": "user", "content": "x" * 10**6}], [True])]):
        chat.encode(template, [Conversation(ASKED, [True])])
        os.kill(template._renderer._process.pid, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="has not answered for 2 s; it was stopped, or"):
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
    with pytest.raises(ValueError, match="data.chat_template='nowhere' is not a file"):
        chat.open_template(template.tokenizer, given="nowhere")
    (home / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="writes bos_token, and no tokenizer_config.json"):
        chat.open_template(template.tokenizer, given=str(other / "mine.jinja"))


def test_broken_templates_are_told_with_their_line(tmp_path):
    with pytest.raises(ValueError, match="is not valid jinja: line 2: "):
        opened(tmp_path, "{{ bos_token }}\n{% for %}")
    with pytest.raises(chat.Fault, match="refuses it: only users"):
        chat.prompt(opened(tmp_path, "{{ raise_exception('only users') }}"), ASKED)
    (tmp_path / "chat_template.jinja").unlink()
    for value, part in (({"chat_template": [{"name": "rag", "template": ""}]},
                         "the chat templates 'rag', but none named 'default'"),
                        ({"chat_template": 3}, "neither a string nor a list")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(value))
        with pytest.raises(ValueError, match=part):
            chat.open_template(tokenizer.open_file(str(tmp_path / "tokenizer.json")))


def test_training_knows_one_day_and_a_prompt_the_present_one(tmp_path):
    text = "{{ strftime_now('%d %b %Y') if strftime_now is defined }}"
    days = [opened(tmp_path, text, today=today) for today in (False, True)]
    said = [day.library.decode(chat.prompt(day, ASKED).tolist()) for day in days]
    assert said[0] == "26 Jul 2024" != said[1]


def test_the_key_of_a_template_tells_apart_the_tokens_that_it_writes(tmp_path):
    written = "{{ bos_token }}{{ messages[0].content }}"
    keys = [opened(tmp_path, written, config=drawn.TOKENS | {"bos_token": token}).key for token in ("<s>", "</s>", "<s>")]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize("count", [chat.BATCH, chat.BATCH + 2])
def test_a_fault_has_the_number_of_its_conversation_among_all(count, tmp_path):
    template = opened(tmp_path, "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}x")
    said = [[{"role": "user", "content": "no" if i == count - 1 else "yes"}] for i in range(count)]
    with pytest.raises(chat.Fault) as caught:
        chat.encode(template, [Conversation(one, [True]) for one in said], learn_all=True)
    assert caught.value.index == count - 1


def test_bytes_are_a_tokenizer_too(tmp_path):
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}")
    template = chat.open_template(tokenizer.Bytes(), given=str(tmp_path / "mine.jinja"))
    one, = chat.encode(template,
                       [Conversation([{"role": "user", "content": "é"}, {"role": "assistant", "content": "🐈!"}],
                                     [True] * 2)])
    assert bytes(one.ids.tolist()).decode() == "u: é\na: 🐈!\n"
    assert bytes(one.ids[one.mask].tolist()).decode() == "a: 🐈!\n" and one.ids.dtype == np.int32
