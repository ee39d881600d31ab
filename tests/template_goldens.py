"""Conversations as the chat templates of model families write them, for the shipped templates of the same families.

`python tests/template_goldens.py FOLDER`, where transformers is installed, writes lines of
tests/goldens/chat/families.txt anew. FOLDER has families' own templates, NAME.jinja, of which the file keeps the
digests alone: for each of COUNT conversations a hash of the text, one of the spans of its answers, and one of the
prompts of its answers. Lines of other families stay. Made with transformers 5.17; the tests need neither it nor the
templates.

A family's template may write an answer otherwise once others follow: Qwen3's leaves out its reasoning, and
DeepSeek's leave it out always. So the texts come from pieces: each answer is what the family's template writes for it
behind one question, the last of its conversation; every other message what the template writes for it. What is
otherwise on purpose is here, too: GLM's answers end with the token that begins what follows, and there is no default
system message of Mistral.
"""
import datetime
import hashlib
import json
import random
import sys
from pathlib import Path

import conversations as drawn

COUNT = 150
FILE = drawn.HOME / "families.txt"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DATE = {"date_string": "26 Jul 2024", "strftime_now": datetime.datetime(2024, 7, 26).strftime}      # that of training
TOOLS = [{"type": "function", "function": {"name": name, "description": "naïve <b>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}} for name in ("weather", "time_of")]
# Schemas of every form that gpt-oss writes as a type.
SCHEMAS = [
    {"type": "string"}, {"type": "string", "nullable": True, "description": "a <b>"}, {"type": "integer", "default": 3},
    {"type": "string", "enum": ["é", "b"], "default": "b"}, {"type": "boolean"}, {"type": ["string", "null"]}, {},
    {"type": ["number"]}, {"type": "object"}, {"type": "array"}, {"type": "array", "nullable": True}, {"type": "null"},
    *({"type": "array", "items": {"type": kind}} for kind in ("string", "integer", "number", "boolean", "object")),
    {"type": "array", "items": {"type": "string", "enum": ["a"]}, "nullable": True, "default": ["x"]},
    {"type": "array", "items": {"type": "array", "items": {"type": ["object", "object"]}}},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}}}},
    {"oneOf": [{"type": "string", "description": "x", "default": "é"}, {"type": "object"}], "default": "q"},
    {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "array"}}}, "c": {}},
     "required": ["c"]}]
QUESTION = {"role": "user", "content": "why?"}
LLAMA = ("llama3.1", "llama3.2")
GLM, ONE_CALL = ("glm4.5", "glm4.7"), (*LLAMA, "gpt-oss")
OTHERS = (*GLM, "deepseek-v3.1", "gpt-oss", "mistral")     # with one system message, the first
AS_THEY_ARE = ("chatml", "qwen2.5", *LLAMA, "mistral")      # they write a turn as it is, whatever follows
HEADS = {"deepseek-r1-distill": "<｜Assistant｜>", "deepseek-v3.1": "<｜Assistant｜>", "gpt-oss": "<|start|>assistant",
         **dict.fromkeys(GLM, "<|assistant|>"), "qwen3": "<|im_start|>assistant\n"}
EMPTY = "<think>\n\n</think>\n\n"
TOOLS_CALLED = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {}}}]


def _text(rng: random.Random) -> str:
    return rng.choice(["", "\n", " a\n"]) if rng.random() < 0.15 else drawn.text(rng)


def _answer(rng: random.Random, family: str, calls: bool, asked: bool) -> dict:
    message = {"role": "assistant", "content": _text(rng)}
    if family == "deepseek-v3.1" and (calls or not asked):
        pass        # it has no form for reasoning here
    elif family in ("qwen3", *OTHERS) and rng.random() < 0.4:
        message["reasoning_content"] = _text(rng)
    elif family in ("qwen3", "deepseek-r1-distill", "deepseek-v3.1", *GLM) and rng.random() < 0.5:
        message["content"] = f"{rng.choice(['<think>', '<think>', ''])}{_text(rng)}</think>{_text(rng)}"
    if calls:
        count = 1 if family in ONE_CALL else rng.randint(1, 3)
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": {
            "name": "weather", "arguments": {"city": _text(rng), "n": [1, None, {"é": 2.5}]}}} for _ in range(count)]
        if family in LLAMA or "reasoning_content" in message and family == "gpt-oss":
            message["content"] = ""
    elif family == "mistral":
        message["content"] = message["content"] or "x"
    return message


def draw(family: str, number: int) -> tuple[list[dict], list | None]:
    """(messages, tools) of a conversation."""
    rng = random.Random(f"{family} {number}")
    calls = family in ("qwen2.5", "qwen3", *LLAMA, *OTHERS)
    tools = TOOLS[:rng.randint(1, 2)] if calls and rng.random() < 0.4 else None
    if tools and family == "gpt-oss":
        schemas = {f"p{n}": schema for n, schema in enumerate(rng.sample(SCHEMAS, rng.randint(0, 6)))}
        tools = [*tools, {"type": "function", "function": {"name": "any_of", "description": _text(rng), "parameters": {
            "type": "object", "properties": schemas, "required": rng.sample(sorted(schemas), len(schemas) // 2)}}}]
    messages = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _text(rng)})
        if turn and family not in ("deepseek-r1-distill", *OTHERS) and rng.random() < 0.1:
            messages.append({"role": "system", "content": _text(rng)})
        while tools and rng.random() < 0.5:
            messages.append(_answer(rng, family, True, messages[-1]["role"] == "user"))
            messages += [{"role": "tool", "content": _text(rng)} for _ in range(rng.randint(1, 2))]
        messages.append(_answer(rng, family, False, messages[-1]["role"] == "user"))
    return messages, None if family == "deepseek-v3.1" else tools


def _as_own(family: str, message: dict) -> dict:
    """The message in the form that the family's template reads."""
    reasoning = message.get("reasoning_content")
    if family == "gpt-oss" and reasoning is not None:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        return message | {"thinking": reasoning} if reasoning else message
    if family == "mistral" and reasoning:
        chunks = {"thinking": reasoning, "text": message["content"]}
        return message | {"content": [{"type": key, key: text} for key, text in chunks.items() if text]}
    if family == "deepseek-v3.1" and "tool_calls" in message:
        return message | {"tool_calls": [call | {"function": call["function"] | {"arguments": json.dumps(
            call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]]}
    return message


def golden(text: str, spans, prompts) -> str:
    """A line of the file."""
    return " ".join(hashlib.blake2b(repr(one).encode(errors="surrogatepass"), digest_size=8).hexdigest()
                    for one in (text, [tuple(span) for span in spans], list(prompts)))


def _split(message: dict) -> tuple[str, str]:
    """(reasoning, text) of an answer of DeepSeek."""
    reasoning, closed, text = message["content"].partition("</think>")
    if "reasoning_content" in message or not closed:
        return message.get("reasoning_content", ""), message["content"]
    return reasoning.split("<think>")[-1], text


def _pieces(family: str, own, messages: list[dict], tools) -> list[tuple[str, str, str]]:
    """(text before, what it ends with if the answer is asked for, answer) of every message, by the family's `own`."""
    first = next(number for number, message in enumerate(messages) if message["role"] != "system")
    pieces, number = [(own(messages[:first + 1], tools), "", "")], first + 1
    while number < len(messages):
        message, count, context = messages[number], 1, [QUESTION]
        if message["role"] == "tool":
            count = next((n for n, other in enumerate(messages[number:]) if other["role"] != "tool"), 1)
        if family in OTHERS and messages[number - 1]["role"] in ("assistant", "tool") and message["role"] != "user":
            context += [{"role": "assistant", "content": "", "tool_calls": TOOLS_CALLED}]
            context += [{"role": "tool", "content": "so"}] if message["role"] == "assistant" else []
        before, text = own(context), own(context + messages[number:number + count])
        assert text.startswith(before)
        text, start = text[len(before):], ""
        if message["role"] == "assistant":
            start = HEADS[family] if family != "deepseek-v3.1" or context == [QUESTION] else ""
            opened = own(context, asks=True)[len(before):]
            assert opened.startswith(start) and text.startswith(start)
            text = text[len(start):]
            if family == "deepseek-r1-distill":     # its template has removed the reasoning, and nothing else
                told = message["content"].split("</think>")[-1]
                assert text.startswith(told)
                text = message["content"] + text[len(told):]
            reasoning, told = _split(message) if family == "deepseek-v3.1" and start else ("", "")
            if reasoning:       # removed, too; an answer with it goes on where a prompt to think ends
                assert text.startswith("</think>" + told)
                text = own(context, asks=True, thinking=True)[len(before + start):] + reasoning + text
            if family == "gpt-oss" and number + 1 < len(messages):
                text = text.removesuffix("<|return|>")
            pieces.append((start, opened[len(start):], text))
            if family == "gpt-oss" and number + 1 < len(messages) and not text.endswith("<|call|>"):
                pieces.append(("<|end|>", "", ""))
        else:
            pieces.append((text, "", ""))
        number += count
    return pieces


def _end_answers(text: str, spans: list, messages: list[dict]) -> tuple[str, list]:
    """GLM's text and spans: an answer ends with the token that begins what follows, or would."""
    if messages[-1]["role"] == "assistant":
        text += "<|observation|>" if "tool_calls" in messages[-1] else "<|user|>"
    return text, [(begin, text.index("|>", end) + 2) for begin, end in spans]


def by_family(family: str, own, messages: list[dict], tools) -> tuple[str, list, list, bool]:
    """(text, spans of answers, their prompts, whether `own` writes the same text)."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if family in AS_THEY_ARE:
        prompts = [own(messages[:number], tools, True) for number in answers]
        text = own(messages, tools)
        spans = [(len(prompt), len(own(messages[:number + 1], tools))) for number, prompt in zip(answers, prompts)]
        assert all(text.startswith(prompt) for prompt in prompts)
        return text, spans, prompts, True
    text, spans, prompts = "", [], []
    for before, opened, answer in _pieces(family, own, messages, tools):
        text += before
        if answer:
            prompts.append(text + opened)
            spans.append((len(text), len(text + answer)))
            text += answer
    same = text == own(messages, tools)
    thinks = any(message.get("reasoning_content") or "</think>" in message["content"]
                 or family == "gpt-oss" and "tool_calls" in message and message["content"] for message in messages)
    if not thinks and family in OTHERS or len(answers) == 1 and (family in ("qwen3", *GLM) or not thinks):
        assert same, (text, own(messages, tools))
    if family == "glm4.7":
        assert text == own(messages, tools, clear_thinking=False)
    if family == "qwen3" and not thinks and not any(message["content"].startswith("\n") for message in messages):
        assert text.replace(EMPTY, "") == own(messages, tools).replace(EMPTY, "")   # but for blocks of earlier answers
    return *(_end_answers(text, spans, messages) if family in GLM else (text, spans)), prompts, same


def main(folder: Path, count: int = COUNT) -> None:
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template
    kept, lines = FILE.read_text().splitlines()[1:], []
    for path in sorted(folder.glob("*.jinja")):
        template, name = path.read_text(), path.stem

        def own(messages, tools=None, asks=False, **more):
            told = [_as_own(name, message) for message in messages]
            (text,), _ = render_jinja_template([told], tools, chat_template=template, add_generation_prompt=asks,
                                               **TOKENS, **DATE, **more)
            if name == "mistral" and messages[0]["role"] != "system":
                begin, end = text.index("[SYSTEM_PROMPT]"), text.index("[/SYSTEM_PROMPT]") + len("[/SYSTEM_PROMPT]")
                return text[:begin] + text[end:]
            return text

        lines.append(f"# {name}: sha256 of the family's template {hashlib.sha256(template.encode()).hexdigest()}")
        alike = 0
        for number in range(count):
            text, spans, prompts, same = by_family(name, own, *draw(name, number))
            lines.append(f"{name} {number} {golden(text, spans, prompts)}")
            alike += same
        kept = [line for line in kept if not line.removeprefix("# ").startswith((f"{name} ", f"{name}:"))]
        print(f"{name}: its own template writes {alike} of {count} texts")
    lines = sorted(kept + lines, key=lambda line: line.removeprefix("# ").split()[0].removesuffix(":"))
    FILE.write_text("\n".join([f"# transformers {transformers.__version__}", *lines]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
