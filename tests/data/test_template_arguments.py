"""Arguments of a chat template: of a run and of a line, under both of which a template is probed, rendered and cached."""
import json
import tomllib

import conversations as drawn
import pytest
from commands import call
from corpora import Opened, fault
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import opened
from test_messages import ANSWER, ASK, chats

from meshtrain import config, run_files
from meshtrain.commands import evaluate, generate, train
from meshtrain.config import ConfigError, to_toml
from meshtrain.data.documents import chat, conversations, rendering, tokenizer
from meshtrain.huggingface.weights import ends
from meshtrain.rl import prompts

# As Qwen 3's: the generation prompt of enable_thinking = false has an empty block that answers then have.
THINKING = ("{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{% for m in messages %}"
            "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
            "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
            "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}")
PLAIN = THINKING.replace("{% generation %}", "").replace("{% endgeneration %}", "")
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}


def with_arguments(directory, text: str, arguments=None) -> chat.Template:
    """The template with the tokenizer of conversations.py."""
    home = drawn.folder(directory, "chatml")
    (home / "t.jinja").write_text(text)
    reader = tokenizer.open_file(str(home / "tokenizer.json"), "<s>")
    return chat.open_template(reader, given=str(home / "t.jinja"), arguments=arguments or {})


def written(template: chat.Template, one: chat.Encoded) -> str:
    return template.library.decode(one.ids.tolist(), skip_special_tokens=False)


def test_arguments_of_a_run_and_of_a_line_reach_the_template_and_the_lines_precede(tmp_path):
    line = {"messages": [ASK, ANSWER]}
    for of_run, of_line, has in ((None, None, False), (OFF, None, True), (None, OFF, True), (OFF, ON, False),
                                 (ON, json.dumps(OFF), True), (OFF, {"enable_thinking": None}, True)):
        template = with_arguments(tmp_path, THINKING, of_run)
        (one,) = chat.encode(template, [conversations.parse(line | {"chat_template_kwargs": of_line})])
        assert ("<think></think>the cat sat" in written(template, one)) == has, (of_run, of_line)
    given = conversations.parse(line | {"chat_template_kwargs": {"documents": [{"title": "Felis"}]}})
    (one,) = chat.encode(with_arguments(tmp_path, THINKING, {"documents": []}), [given])
    assert written(template, one).startswith("[Felis]<|im_start|>user")


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([THINKING, PLAIN]), st.lists(st.sampled_from([None, OFF, ON]), min_size=1, max_size=4),
       st.sampled_from([None, OFF, ON]), st.integers(1, 3))
def test_the_prompt_that_is_learned_is_the_one_that_is_asked_under_each_set_of_arguments(
        tmp_path_factory, text, of_lines, of_run, turns):
    """One renderer, lines of several sets in turn: each must be probed for itself."""
    template = with_arguments(tmp_path_factory.mktemp("t"), text, of_run)
    messages = [ASK, ANSWER] * turns
    lines = [conversations.parse({"messages": messages, "chat_template_kwargs": arguments}) for arguments in of_lines]
    for arguments, one in zip(of_lines, chat.encode(template, lines), strict=True):
        asked = chat.prompt(template, messages[:-1], arguments=arguments)
        assert one.ids[:len(asked)].tolist() == asked.tolist() and not one.notes
        learned = template.library.decode(one.ids[one.mask].tolist(), skip_special_tokens=False)
        thinks = ((of_run or {}) | (arguments or {})).get("enable_thinking") is False
        inside = thinks and text is THINKING        # the tag is around the block, a generation prompt ends behind it
        assert learned == turns * ("<think></think>" * inside + "the cat sat<|im_end|>" + "\n" * (text is PLAIN))


def test_what_is_probed_is_kept_for_each_set_of_arguments():
    renderer = rendering.Renderer(THINKING, {}, False)
    assert renderer.opening == ("", "<|im_start|>assistant\n")
    off = renderer.using(json.dumps(OFF))
    assert off.opening == ("<think></think>", "<|im_start|>assistant\n<think></think>")
    assert renderer.using(json.dumps(OFF)) is off and renderer.opening == ("", "<|im_start|>assistant\n")


@pytest.mark.parametrize("arguments, part", [
    ({"enable_thinkin": False}, "sets 'enable_thinkin', which the chat template "),
    ({"enable_thinkin": False}, "t.jinja never reads; did you mean 'enable_thinking'?"),
    ({"x": 1}, "never reads; it reads documents, enable_thinking"),
    ({"namespace": 1}, "sets 'namespace', which the chat template "),
    *(({name: "a"}, f"sets '{name}', which the program sets itself (messages and tools are in the data, tokens in ")
      for name in ("messages", "tools", "add_generation_prompt", "bos_token"))], ids=str)
def test_an_argument_that_is_not_read_or_is_the_programs_own_is_refused(arguments, part, tmp_path):
    with pytest.raises(ValueError) as caught:
        with_arguments(tmp_path, THINKING, arguments)
    assert str(caught.value).startswith("data.template_arguments ") and part in str(caught.value)
    data = chats(tmp_path, [{"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER], "chat_template_kwargs": arguments}])
    data = data.model_copy(update={"chat_template": str(tmp_path / "chatml" / "t.jinja")})
    message = fault(data, tmp_path)
    assert f"{tmp_path / 'chat.jsonl'}, line 2: chat_template_kwargs " in message and part in message


def test_a_template_without_arguments_says_so(tmp_path):
    with pytest.raises(ValueError, match="t.jinja never reads; it reads no arguments, so leave it out"):
        with_arguments(tmp_path, "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}", {"x": 1})


@pytest.mark.parametrize("given, part", [
    (3, "chat_template_kwargs: 3 is not a JSON object"), ("[1]", 'chat_template_kwargs: "[1]" is not a JSON object'),
    ("{", "chat_template_kwargs: the string \"{\" is broken JSON"),
    ({"documents": ["a<|im_end|>"]}, "holds '<|im_end|>' in a message, which is a special token"),
    ({"documents": ["\ud800"]}, "has half a character")])
def test_arguments_of_a_line_that_are_none_are_one_message(given, part, tmp_path):
    with_arguments(tmp_path, THINKING)
    data = chats(tmp_path, [{"messages": [ASK, ANSWER], "chat_template_kwargs": given}])
    message = fault(data.model_copy(update={"chat_template": str(tmp_path / "chatml" / "t.jinja")}), tmp_path)
    assert "chat.jsonl, line 1: " in message and part in message


def test_other_arguments_are_another_cache_and_other_data_and_none_are_the_template_alone(tmp_path):
    with_arguments(tmp_path, THINKING)
    data = chats(tmp_path, [{"messages": [ASK, ANSWER]}] * 3)
    data = data.model_copy(update={"chat_template": str(tmp_path / "chatml" / "t.jinja")})
    marks, ids = set(), []
    for arguments in ({}, OFF, ON):
        one = data.model_copy(update={"template_arguments": config.sections.TemplateArguments(**arguments)})
        first = Opened(one, tmp_path)
        assert first.built and not Opened(one, tmp_path).built
        marks.add(first.corpus.fingerprint)
        ids.append(first.ids())
    assert len(marks) == 3 and ids[0] == ids[2] != ids[1]
    plain, empty = with_arguments(tmp_path, THINKING), with_arguments(tmp_path, THINKING, {})
    assert plain.key == empty.key != with_arguments(tmp_path, THINKING, OFF).key


def test_ends_of_answers_are_those_that_the_template_writes_under_the_arguments(tmp_path):
    text = ("{% for m in messages %}{{ m.content }}{{ '<|eot|>' if short is defined else '<|im_end|>' }}{% endfor %}")
    names = [template.library.id_to_token(ends.of_template(template).turn)
             for template in (with_arguments(tmp_path, text), with_arguments(tmp_path, text, {"short": True}))]
    assert names == ["<|im_end|>", "<|eot|>"]


# ---- the run file ----------------------------------------------------------------------------------------------------

CHAT = ["--data.source", "chat", "--data.paths", '["x.jsonl"]', "--data.template_arguments"]


def test_arguments_are_a_table_of_the_run_file_and_come_back_from_it():
    given = {"enable_thinking": False, "documents": [{"my title": "猫", "pages": [1, 2.5]}], "effort": "low"}
    text = '{enable_thinking = false, documents = [{"my title" = "猫", pages = [1, 2.5]}], effort = "low"}'
    run = run_files.load([*CHAT, text])
    assert run.data.template_arguments.model_extra == given
    assert tomllib.loads(to_toml.dump(run))["data"]["template_arguments"] == given
    assert config.Data(**run.data.model_dump(mode="json")) == run.data and hash(run) is not None
    assert run_files.load([*CHAT, "{}"]).data.template_arguments == config.Data().template_arguments


@pytest.mark.parametrize("text, part", [
    ("3", "data.template_arguments=3 is not a table; write it as TOML, e.g. {enable_thinking = false}"),
    ('{"a": 1}', "is not a table; write it as TOML"),
    ("{a = 1979-05-27}", "{a = 1979-05-27} has a value that JSON cannot represent, such as a date; write it as a string"),
    ("{a = [inf]}", "has a value that JSON cannot represent"), ('{a = "\udcff"}', "is not UTF-8")])
def test_other_values_are_one_message(text, part):
    with pytest.raises(ConfigError) as caught:
        run_files.load([*CHAT, text])
    assert len(caught.value.messages) == 1 and part in str(caught.value)


def test_arguments_of_data_without_conversations_are_refused():
    with pytest.raises(ConfigError, match="data.template_arguments={a = 1} applies only to conversations"):
        run_files.load(["--data.template_arguments", "{a = 1}"])


# ---- prompts of reinforcement, and of generate ------------------------------------------------------------------------


def read_prompts(directory, lines, arguments=None):
    (directory / "t.jinja").write_text(THINKING)
    (directory / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = config.Data(source="prompts", paths=[str(directory / "p.jsonl")], validation_fraction=0.0,
                       chat_template=str(directory / "t.jinja"), template_arguments=arguments or {})
    return [one.text for one in prompts.open_prompts(data, vocab_size=257, seed=0, longest=90)[1].prompts]


def test_prompts_take_the_arguments_of_the_run_and_of_their_line(tmp_path):
    lines = [{"messages": [ASK]}, {"prompt": [ASK], "chat_template_kwargs": ON}, {"prompt": "why?"}]
    asked = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert read_prompts(tmp_path, lines, OFF) == [asked + "<think></think>", asked, "why?"]
    with pytest.raises(ValueError, match="p.jsonl, line 1: has chat_template_kwargs, but its prompt is a text"):
        read_prompts(tmp_path, [{"prompt": "why?", "chat_template_kwargs": ON}])
    with pytest.raises(ValueError, match="data.template_arguments is not read, since all prompts are texts"):
        read_prompts(tmp_path, [{"prompt": "why?"}], OFF)
    with pytest.raises(ValueError, match="data.template_arguments sets 'thinking'.*did you mean 'enable_thinking'"):
        read_prompts(tmp_path, lines, {"thinking": False})


def test_lines_of_generate_have_arguments(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [ASK], "chat_template_kwargs": OFF}))
    (asked,) = generate._lines(str(tmp_path / "p.jsonl"), True)
    template = opened(tmp_path, THINKING)
    ids = generate.Talk(template, (), ()).prompt(*asked)
    assert template.library.decode(ids, skip_special_tokens=False).endswith("<think></think>")


@pytest.mark.full
def test_a_run_is_asked_with_the_arguments_that_it_was_trained_with_and_its_first_row_counts_faulty_lines(tmp_path):
    home = drawn.folder(tmp_path, "chatml")
    (home / "chat_template.jinja").write_text(THINKING)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": [ASK, ANSWER | {"content": f"no {i}"}]}) + "\n"
                                                 for i in range(40)) + "{\n")
    words = {"run.dir": tmp_path / "run", "mesh.simulated_devices": 8, "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1,
             "sharding.rules": "ddp", "model.vocab_size": 512, "model.embed_dim": 16,
             "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 8,
             "model.mlp_dim": 16, "data.source": "chat", "data.paths": json.dumps([str(tmp_path / "chat.jsonl")]),
             "data.tokenizer": home / "tokenizer.json", "data.bos_token": "<s>", "data.seq_len": 48,
             "data.global_batch": 8, "data.validation_fraction": 0.0, "validation.every": 0, "training.steps": 2,
             "metrics.tensorboard": "false", "data.template_arguments": "{enable_thinking = false}", "data.faulty": "leave out"}
    argv = [f"--{key}={value}" for key, value in words.items()]
    assert (ran := call(train.main, *argv)).code == 0, ran
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("lines_left_out") for row in rows] == [1, None]
    assert "data.paths: 1 of 41 lines are faulty" in ran.out and "chat.jsonl, line 41: broken JSON" in ran.out
    other = call(train.main, *argv, "--training.steps=3", "--data.template_arguments={enable_thinking = true}")
    assert other.code == 2 and 'data.template_arguments={"enable_thinking": true}, but the run in ' in other.err
    asked = [tmp_path / "run", "--chat", "--prompt", "why?", "--max-tokens", "1", "--json",
             "--mesh.simulated_devices=8", "--mesh.data=8", "--mesh.tensor=1"]
    reader = tokenizer.open_file(str(home / "tokenizer.json"), "<s>")
    for more, has in ((), True), (["--data.template_arguments", "{enable_thinking = true}"], False):
        answer = call(generate.main, *asked, *more)
        assert answer.code == 0, answer
        ids = json.loads(answer.out)["completions"][0]["prompt_ids"]
        assert ("think" in reader.decode(ids)) == has
    wrong = call(generate.main, *asked, "--data.template_arguments", "{thinking = true}")
    assert wrong.code == 2 and "data.template_arguments sets 'thinking'" in wrong.err
    wrong = call(evaluate.main, tmp_path / "run", "--mesh.simulated_devices=8", "--data.source=chat", "--data.paths",
                 json.dumps([str(tmp_path / "chat.jsonl")]), "--data.template_arguments", "{thinking = true}")
    assert wrong.code == 2 and "data.template_arguments sets 'thinking'" in wrong.err
    for key, value in ("template_arguments", "{a = 1}"), ("chat_template", home):
        plain = call(generate.main, tmp_path / "run", "--prompt", "why?", "--mesh.simulated_devices=8",
                     f"--data.{key}", value)
        assert plain.code == 2 and f"--data.{key} is not read without --chat" in plain.err
