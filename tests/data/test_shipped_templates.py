"""Shipped chat templates write what the families' own write, keep every turn whole, and are chosen by name."""
import json
import re
from pathlib import Path

import conversations as drawn
import jinja2
import pytest
import template_goldens as goldens
import tokenizers
from commands import call, in_a_directory_of_its_own, refused  # noqa: F401
from corpora import fault
from test_messages import ANSWER, ASK, CALLED as CALLING, SCHEMA, chats

from meshtrain import run_files, shipped, trained
from meshtrain.commands import check, generate, train
from meshtrain.data import sources
from meshtrain.data.documents import chat, tokenizer
from meshtrain.data.documents.rendering import Renderer
from meshtrain.huggingface.weights import ends, export

NAMES = sorted(shipped.names("chat_templates"))
HOME = shipped.locate_shipped("chat_templates")
# As Qwen3's own: a block in the last answer, and reasoning there alone.
OWN = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last and m.role == 'assistant' %}"
       "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
       "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
THOUGHT = ANSWER | {"reasoning_content": "hm, a mat"}


def renderer(name: str) -> Renderer:
    return Renderer((HOME / f"{name}.jinja").read_text(), goldens.TOKENS, False)


def reader_with(directory: Path, *names: str) -> tokenizer.TokenizerFile:
    """A tokenizer whose special tokens are these."""
    library = tokenizers.Tokenizer.from_file(str(drawn.HOME / "bytes.json"))
    library.add_special_tokens(list(names))
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(drawn.TOKENS))
    return tokenizer.open_file(str(directory / "tokenizer.json"), "<s>")


def written_by(name: str) -> list[str]:
    return list(dict.fromkeys(chat.TOKEN.findall((HOME / f"{name}.jinja").read_text())))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_template_writes_what_the_familys_own_writes_and_marks_what_follows_its_prompts(name):
    """Texts, spans and prompts of 150 conversations, whose hashes are those of the family's template."""
    lines = [line.split(" ", 2) for line in goldens.FILE.read_text().splitlines() if line.startswith(f"{name} ")]
    assert len(lines) == goldens.COUNT
    shipped_one = renderer(name)
    for _, number, wanted in lines:
        messages, tools = goldens.draw(name, int(number))
        written = shipped_one.spans(messages, tools, [True] * len(messages))
        prompts = [shipped_one.whole(messages[:at], tools, True).text
                   for at, message in enumerate(messages) if message["role"] == "assistant"]
        assert goldens.golden(written.text, written.spans, prompts) == wanted, number


def test_every_golden_is_of_a_shipped_template_and_every_template_has_goldens():
    named = {line.split()[0] for line in goldens.FILE.read_text().splitlines() if not line.startswith("#")}
    assert sorted(named) == NAMES


def test_reasoning_of_every_turn_is_written_and_learned():
    messages = [ASK, THOUGHT, ASK, ANSWER | {"content": "<think>\nwell\n</think>\n\nyes"}, ASK, ANSWER]
    written = renderer("qwen3").spans(messages, None, [True] * 6)
    assert [written.text[begin:end] for begin, end in written.spans] == [
        "<think>\nhm, a mat\n</think>\n\nthe cat sat<|im_end|>\n", "<think>\nwell\n</think>\n\nyes<|im_end|>\n",
        "<think>\n\n</think>\n\nthe cat sat<|im_end|>\n"]
    said = "<think>\nhm\n</think>\n\nyes"
    written = renderer("deepseek-r1-distill").spans([ASK, ANSWER | {"content": said}] * 2, None, [True] * 4)
    assert written.text == f"<s><｜User｜>why?<｜Assistant｜>{said}<｜end▁of▁sentence｜><｜User｜>why?<｜Assistant｜>{said}" \
                           "<｜end▁of▁sentence｜>"
    assert [written.text[begin:end] for begin, end in written.spans] == [said + "<｜end▁of▁sentence｜>"] * 2
    assert not written.elsewhere and len(written.begins) == 2


THINK = "<think>hm, a mat</think>"


@pytest.mark.parametrize("name, first, second", [
    ("glm4.5", f"\n{THINK}\nthe cat sat<|user|>", "\n<think></think>\nthe cat sat<|user|>"),
    ("glm4.7", f"{THINK}the cat sat<|user|>", "</think>the cat sat<|user|>"),
    ("deepseek-v3.1", f"{THINK}the cat sat<｜end▁of▁sentence｜>", "</think>the cat sat<｜end▁of▁sentence｜>"),
    ("gpt-oss", "<|channel|>analysis<|message|>hm, a mat<|end|><|start|>assistant<|channel|>final<|message|>the cat sat",
     "<|channel|>final<|message|>the cat sat<|return|>"),
    ("mistral", "[THINK]hm, a mat[/THINK]the cat sat</s>", "the cat sat</s>")])
def test_reasoning_of_an_earlier_answer_is_learned(name, first, second):
    written = renderer(name).spans([ASK, THOUGHT, ASK, ANSWER], None, [True] * 4)
    assert [written.text[begin:end] for begin, end in written.spans] == [first, second]
    assert not renderer(name).leaves_reasoning_out([ASK, THOUGHT, ASK, ANSWER], None, written)


def test_glm_ends_an_answer_with_the_token_of_what_follows_and_stops_at_it(tmp_path):
    called = renderer("glm4.7").spans([ASK, CALLING, {"role": "tool", "content": "x"}, ANSWER], None, [True] * 4)
    assert [called.text[:end].rpartition("<")[2] for _, end in called.spans] == ["|observation|>", "|user|>"]
    reader = reader_with(tmp_path, *written_by("glm4.5"))
    template = chat.open_template(reader, given="glm4.5")
    found = ends.of_template(template)
    assert reader.library.token_to_id("<|user|>") == found.turn and not ends._is_not_learned(template, found.turn)


def test_arguments_of_a_template_change_what_it_writes():
    asked = {name: renderer(name).using(arguments).whole([ASK], None, True).text for name, arguments in (
        ("glm4.5", '{"enable_thinking": false}'), ("glm4.7", '{"enable_thinking": false}'),
        ("deepseek-v3.1", '{"thinking": true}'),
        ("gpt-oss", '{"reasoning_effort": "low", "model_identity": "You are X."}'), ("llama3.1", '{"date_string": "today"}'))}
    assert asked["glm4.5"] == "[gMASK]<sop><|user|>\nwhy?/nothink<|assistant|>\n<think></think>"
    assert asked["glm4.7"] == "[gMASK]<sop><|user|>why?<|assistant|></think>"
    assert asked["deepseek-v3.1"] == "<s><｜User｜>why?<｜Assistant｜><think>"
    assert "<|message|>You are X.\n" in asked["gpt-oss"] and "\n\nReasoning: low\n\n#" in asked["gpt-oss"]
    assert "\nToday Date: today\n\n" in asked["llama3.1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_is_the_same_whatever_follows(name):
    """What a prompt of a conversation is, the conversation goes on with: RL and generate ask what was learned."""
    one = renderer(name)
    for number in range(40):
        messages, tools = goldens.draw(name, 1000 + number)
        whole = one.render(messages, tools, False)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = re.sub(r"(<think>\n?|</think>)$", "", one.render(messages[:at], tools, True))
                answered = one.render(messages[:at + 1], tools, False).removesuffix("<|return|>")
                assert whole.startswith(asked) and whole.startswith(answered)


def test_without_thinking_an_answer_is_asked_behind_the_empty_block_that_it_has():
    one = renderer("qwen3").using('{"enable_thinking": false}')
    written = one.spans([ASK, ANSWER] * 2, None, [True] * 4)
    asked = one.whole([ASK], None, True).text
    assert asked.endswith("assistant\n<think>\n\n</think>\n\n") and written.text.startswith(asked)
    assert written.begins[0] == len(asked) and len(written.begins) == 2


@pytest.mark.parametrize("name, messages, tools, part", [
    ("chatml", [ASK, CALLING], None, "no form for tool calls"),
    ("chatml", [ASK, {"role": "tool", "content": "x"}], None, "ChatML has the roles system, user and assistant"),
    ("qwen2.5", [{"role": "developer", "content": "x"}, ASK], None, "Qwen2.5 has the roles system, user, assistant"),
    ("qwen3", [{"role": "developer", "content": "x"}, ASK], None, "Qwen3 has the roles system, user, assistant and tool"),
    *[case for name in goldens.LLAMA for case in (
        (name, [ASK, CALLING | {"content": "so"}], None, "a text or one tool call"),
        (name, [ANSWER, ASK], [SCHEMA], "so the user's message must be first"),
        (name, [ASK, CALLING | {"tool_calls": CALLING["tool_calls"] * 2}], None, "not several calls"))],
    ("deepseek-r1-distill", [ASK, THOUGHT], None, "an answer of DeepSeek-R1-Distill is one text"),
    ("deepseek-r1-distill", [ASK], [SCHEMA], "no form for tools"),
    ("deepseek-r1-distill", [{"role": "system", "content": "x"}] * 2 + [ASK], None, "has one system message"),
    ("deepseek-r1-distill", [ASK, {"role": "ipython", "content": "x"}], None, "the roles system, user and assistant"),
    ("deepseek-v3.1", [ASK], [SCHEMA], "no form for tools; describe them in the system message"),
    ("deepseek-v3.1", [ASK, {"role": "system", "content": "x"}], None, "has one system message, the first one"),
    ("deepseek-v3.1", [ASK, CALLING | {"reasoning_content": "x"}], None, "reasons in answers to the user alone"),
    ("deepseek-v3.1", [ASK, CALLING, {"role": "tool", "content": "x"}, THOUGHT], None, "and not before tool calls"),
    ("deepseek-v3.1", [{"role": "developer", "content": "x"}], None, "DeepSeek-V3.1 has the roles"),
    *[case for name in goldens.GLM for case in (
        (name, [ASK, ANSWER, ANSWER], None, "an answer of GLM is followed by a user message"),
        (name, [ASK, CALLING, ASK], None, "one with tool calls by results"),
        (name, [{"role": "developer", "content": "x"}], None, "GLM has the roles"))],
    ("gpt-oss", [ASK, CALLING | {"tool_calls": CALLING["tool_calls"] * 2}], None, "has one tool call"),
    ("gpt-oss", [ASK, CALLING | {"content": "x", "thinking": "y"}], None, "either reasoning or content"),
    ("gpt-oss", [ASK, ANSWER, {"role": "tool", "content": "x"}], None, "a result of a tool must follow its call"),
    ("gpt-oss", [ASK, {"role": "system", "content": "x"}], None, "system or developer in front"),
    ("mistral", [ASK, ASK], None, "must alternate in Mistral"),
    ("mistral", [ASK, ANSWER | {"content": ""}], None, "an answer of Mistral has a text or tool calls"),
    ("mistral", [ASK, ANSWER, {"role": "system", "content": "x"}], None, "and system for the first message")])
def test_what_a_family_has_no_form_for_is_refused(name, messages, tools, part):
    with pytest.raises(jinja2.TemplateError, match=re.escape(part)):
        renderer(name).whole(messages, tools, False)


def test_what_a_template_refuses_is_told_with_its_reason(tmp_path):
    template = chat.open_template(reader_with(tmp_path, *written_by("chatml")), given="chatml")
    with pytest.raises(chat.Fault, match="the chat template refuses it: ChatML has no form for tools"):
        chat.encode(template, [chat.Conversation([ASK], [True], [SCHEMA])])


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_a_name_is_the_shipped_one_unless_something_here_has_it_too(tmp_path):
    assert shipped.path_of("qwen3", "chat_templates") == "chat_templates/qwen3.jinja"
    Path("qwen3").mkdir()
    assert shipped.path_of("qwen3", "chat_templates") == "qwen3" and shipped.path_of("x.jinja", "chat_templates") == "x.jinja"


def test_a_name_is_the_shipped_template_wherever_the_run_goes_on_and_a_file_of_the_name_is_told(tmp_path):
    words = ["--data.source", "chat", "--data.paths", '["x.jsonl"]', "--data.chat_template"]
    named = run_files.load([*words, "qwen3"]).data.chat_template
    assert named == run_files.load([*words, named]).data.chat_template == "chat_templates/qwen3.jinja"
    reader = reader_with(tmp_path, *written_by("qwen3"))
    found = chat.open_template(reader, given="qwen3")
    Path("qwen3").mkdir()       # a model folder, or the export of this very run
    assert run_files.load([*words, "qwen3"]).data.chat_template == "qwen3"
    with pytest.raises(ValueError, match="data.chat_template='qwen3' is a shipped template, and there is also a file or "
                                         "folder of this name here; write chat_templates/qwen3.jinja or ./qwen3"):
        chat.open_template(reader, given="qwen3")
    assert chat.open_template(reader, given=named).text == found.text
    with pytest.raises(ValueError, match="data.chat_template='./qwen3' is not a file, nor a folder with a chat_template.jinja"):
        chat.open_template(reader, given="./qwen3")
    Path("qwen3/chat_template.jinja").write_text("mine")
    assert chat.open_template(reader, given="./qwen3").text == "mine"


def test_an_unknown_name_is_told_with_the_list(tmp_path):
    with pytest.raises(ValueError, match="data.chat_template='qwen33' is not a file, .* or one of the shipped templates "
                                         + ", ".join(NAMES)):
        chat.open_template(reader_with(tmp_path), given="qwen33")


def test_a_tokenizer_without_the_tokens_of_the_family_is_refused_and_bytes_write_them_out(tmp_path):
    reader = reader_with(tmp_path, "<|start_header_id|>")
    with pytest.raises(ValueError, match="chat template .*llama3.2.jinja writes <.end_header_id.>, <.eot_id.>, "
                                         "but data.tokenizer has no such token; name the template of its family"):
        chat.open_template(reader, given="llama3.2")
    with pytest.raises(ValueError, match=re.escape("mistral.jinja writes [SYSTEM_PROMPT], [/SYSTEM_PROMPT], [AVAILABLE_TOOLS]")):
        chat.open_template(reader, given="mistral")
    mine = tmp_path / "mine.jinja"          # of one's own nothing is asked
    mine.write_text("{% for m in messages %}<|eot_id|>{{ m.content }}{% endfor %}")
    assert chat.open_template(reader, given=str(mine)).text
    template = chat.open_template(tokenizer.Bytes(), given="chatml")
    assert bytes(chat.prompt(template, [ASK]).tolist()).decode() == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert ends.of_template(template).stops == ("<|im_end|>",)


# ---- the remedy ------------------------------------------------------------------------------------------------------

REMEDY = '(e.g. the shipped "{}", which writes the same text and keeps the reasoning of all turns)'


def test_a_template_that_drops_reasoning_is_told_with_the_shipped_one_of_its_format(tmp_path):
    data = chats(tmp_path, [{"messages": [ASK, THOUGHT, ASK, THOUGHT]}])
    own = tmp_path / "chatml" / "chat_template.jinja"
    own.write_text(OWN)
    message = fault(data, tmp_path)
    assert "renders a turn differently when others follow" in message and message.endswith(REMEDY.format("qwen3")), message
    own.write_text(OWN.replace("assistant\n'", "assistant:\n'"))     # another format: no remedy is known
    assert fault(data, tmp_path).endswith("or name another template as data.chat_template")


def test_reasoning_is_missed_in_answers_that_are_learned_alone():
    one, messages = Renderer(OWN, {}, False), [ASK, THOUGHT, ASK, ANSWER]
    written = one.whole(messages, None, False)
    assert [one.leaves_reasoning_out(messages, trained, written) for trained in (
        None, [True] * 4, [False, False, False, True])] == [True, True, False]
    assert not one.leaves_reasoning_out(messages[:2], None, one.whole(messages[:2], None, False))


def test_reasoning_that_a_marked_template_drops_is_told_once_a_file(tmp_path):
    lines = [{"messages": [ASK, one, ASK, ANSWER]} for one in (ANSWER, THOUGHT, THOUGHT | {"weight": 0}, ANSWER | {
        "content": "<think>\nhm, a mat\n</think>\n\nyes"})]
    data = chats(tmp_path, lines)
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    told = []
    sources.open_corpus(data, vocab_size=512, cache_dir=tmp_path, tell=told.append)
    (note,) = [line for line in told if "has reasoning" in line]
    assert "in 2 conversations (line 2 first) an answer has reasoning, which " in note and "chatml/chat_template" in note
    assert note.endswith("set data.chat_template to one that renders it " + REMEDY.format("qwen3"))
    told = []
    sources.open_corpus(data.model_copy(update={"chat_template": "qwen3"}), vocab_size=512, cache_dir=tmp_path, tell=told.append)
    assert told and not [line for line in told if "has reasoning" in line]


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_learns_by_a_shipped_template_and_its_export_and_its_prompts_have_it(tmp_path):
    reader_with(tmp_path, *written_by("qwen3"))
    (tmp_path / "chat.jsonl").write_text("".join(
        json.dumps({"messages": [ASK, THOUGHT | {"content": f"no {i}"}, ASK, THOUGHT]}) + "\n" for i in range(24)))
    words = {"run.dir": tmp_path / "run", "mesh.simulated_devices": 8, "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1,
             "sharding.rules": "ddp", "model.vocab_size": 512, "model.embed_dim": 16, "model.num_layers": 1,
             "model.num_heads": 2, "model.num_kv_heads": 1, "model.head_dim": 8, "model.mlp_dim": 16,
             "data.source": "chat", "data.paths": json.dumps([str(tmp_path / "chat.jsonl")]),
             "data.tokenizer": tmp_path / "tokenizer.json", "data.chat_template": "qwen3", "data.seq_len": 48,
             "data.global_batch": 8, "data.validation_fraction": 0.0, "validation.every": 0, "training.steps": 1,
             "metrics.tensorboard": "false"}
    argv = [f"--{key}={value}" for key, value in words.items()]
    refused(call(train.main, *argv, "--data.chat_template=qwen"), "data.chat_template='qwen' is not a file",
            "the shipped templates chatml, deepseek")
    checked = call(check.main, *argv)
    assert checked.code == 0 and "chat_templates/qwen3.jinja renders conversations" in checked.out, checked
    assert (ran := call(train.main, *argv)).code == 0, ran
    Path("qwen3").mkdir()
    answer = call(generate.main, tmp_path / "run", "--chat", "--prompt", "why?", "--max-tokens", "1", "--json",
                  "--mesh.simulated_devices=8", "--mesh.data=8", "--mesh.tensor=1")
    assert answer.code == 0, answer
    reader = tokenizer.open_file(str(tmp_path / "tokenizer.json"), "<s>")
    ids = json.loads(answer.out)["completions"][0]["prompt_ids"]
    assert reader.library.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "out").mkdir()
    export.write_companions(tmp_path / "out", None, trained.describe(str(tmp_path / "run"), None, [], "x").run.data.model_dump(),
                            (), grown=False)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == (HOME / "qwen3.jinja").read_text()
