"""Conversations as the chat templates of model families write them, for the shipped templates of the same families.

`python tests/template_goldens.py FOLDER`, where transformers is installed, writes lines of tests/goldens/chat/families.txt
anew. FOLDER has families' own templates, NAME.jinja, of which the file keeps the digests alone: for each of COUNT
conversations a hash of the text, one of the spans of its answers, and one of the prompts of its answers. Lines of other
families stay. Made with transformers 5.17; the tests need neither it nor the templates.

A family's template may write an answer otherwise once others follow: Qwen3's leaves out its reasoning, and
DeepSeek-R1-Distill's leaves it out always. So the texts come from pieces: each answer is what the family's template
writes for it behind one question, the last of its conversation; every other message what the template writes for it.
"""
import hashlib
import random
import sys
from pathlib import Path

import conversations as drawn

COUNT = 150
FILE = drawn.HOME / "families.txt"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
DATE = {"date_string": "26 Jul 2024"}       # that of training
TOOLS = [{"type": "function", "function": {"name": name, "description": "naïve <b>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}} for name in ("weather", "time_of")]
QUESTION = {"role": "user", "content": "why?"}
LLAMA = ("llama3.1", "llama3.2")
EMPTY = "<think>\n\n</think>\n\n"


def _text(rng: random.Random) -> str:
    return rng.choice(["", "\n", " a\n"]) if rng.random() < 0.15 else drawn.text(rng)


def _answer(rng: random.Random, family: str, calls: bool) -> dict:
    message = {"role": "assistant", "content": _text(rng)}
    if family == "qwen3" and rng.random() < 0.4:
        message["reasoning_content"] = _text(rng)
    elif family in ("qwen3", "deepseek-r1-distill") and rng.random() < 0.5:
        message["content"] = f"{rng.choice(['<think>', '<think>', ''])}{_text(rng)}</think>{_text(rng)}"
    if calls:
        count = 1 if family in LLAMA else rng.randint(1, 3)
        message["tool_calls"] = [{"id": "c1", "type": "function", "function": {
            "name": "weather", "arguments": {"city": _text(rng), "n": [1, None, {"é": 2.5}]}}} for _ in range(count)]
        if family in LLAMA:
            message["content"] = ""
    return message


def draw(family: str, number: int) -> tuple[list[dict], list | None]:
    """(messages, tools) of a conversation."""
    rng = random.Random(f"{family} {number}")
    tools = TOOLS[:rng.randint(1, 2)] if family in ("qwen2.5", "qwen3", *LLAMA) and rng.random() < 0.4 else None
    messages = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _text(rng)})
        if turn and family != "deepseek-r1-distill" and rng.random() < 0.1:
            messages.append({"role": "system", "content": _text(rng)})
        while tools and rng.random() < 0.5:
            messages.append(_answer(rng, family, calls=True))
            messages += [{"role": "tool", "content": _text(rng)} for _ in range(rng.randint(1, 2))]
        messages.append(_answer(rng, family, calls=False))
    return messages, tools


def golden(text: str, spans, prompts) -> str:
    """A line of the file."""
    return " ".join(hashlib.blake2b(repr(one).encode(errors="surrogatepass"), digest_size=8).hexdigest()
                    for one in (text, [tuple(span) for span in spans], list(prompts)))


def _pieces(family: str, own, messages: list[dict], tools) -> list[tuple[str, str, str]]:
    """(text before, what it ends with if the answer is asked for, answer) of every message, by the family's `own`."""
    first = next(number for number, message in enumerate(messages) if message["role"] != "system")
    pieces, number = [(own(messages[:first + 1], tools), "", "")], first + 1
    asked = own([QUESTION], None, True)
    opening = asked[len(own([QUESTION])):]
    while number < len(messages):
        message, count = messages[number], 1
        if message["role"] == "assistant":
            told = message if family == "qwen3" else message | {"content": message["content"].split("</think>")[-1]}
            answered = own([QUESTION, told])
            start = opening.removesuffix("<think>\n") if family != "qwen3" else opening
            assert answered.startswith(own([QUESTION]) + start)
            answer = answered[len(own([QUESTION]) + start):]
            if family != "qwen3":       # its template has removed the reasoning, and nothing else
                assert answer.startswith(told["content"])
                answer = message["content"] + answer[len(told["content"]):]
            pieces.append((start, opening[len(start):], answer))
        elif message["role"] == "tool":
            count = next((n for n, other in enumerate(messages[number:]) if other["role"] != "tool"), 1)
            pieces.append((own(messages[number:number + count]), "", ""))
        else:
            pieces.append((own([QUESTION, message])[len(own([QUESTION])):], "", ""))
        number += count
    return pieces


def by_family(family: str, own, messages: list[dict], tools) -> tuple[str, list, list, bool]:
    """(text, spans of answers, their prompts, whether `own` writes the same text)."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if family in ("chatml", "qwen2.5", *LLAMA):     # they write a turn as it is, whatever follows
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
    thinks = any("reasoning_content" in message or "</think>" in message["content"] for message in messages)
    if len(answers) == 1 and (family == "qwen3" or not thinks):
        assert same, (text, own(messages, tools))
    if not thinks and not any(message["content"].startswith("\n") for message in messages):
        assert text.replace(EMPTY, "") == own(messages, tools).replace(EMPTY, "")   # but for blocks of earlier answers
    return text, spans, prompts, same


def main(folder: Path, count: int = COUNT) -> None:
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template
    kept, lines = FILE.read_text().splitlines()[1:], []
    for path in sorted(folder.glob("*.jinja")):
        template, name = path.read_text(), path.stem

        def own(messages, tools=None, asks=False):
            (text,), _ = render_jinja_template([messages], tools, chat_template=template, add_generation_prompt=asks,
                                               **TOKENS, **DATE)
            return text

        lines.append(f"# {name}: sha256 of the family's template {hashlib.sha256(template.encode()).hexdigest()}")
        alike = 0
        for number in range(count):
            text, spans, prompts, same = by_family(name, own, *draw(name, number))
            lines.append(f"{name} {number} {golden(text, spans, prompts)}")
            alike += same
        kept = [line for line in kept if not line.removeprefix("# ").startswith((f"{name} ", f"{name}:"))]
        print(f"{name}: its own template writes {alike} of {count} texts")
    FILE.write_text("\n".join([f"# transformers {transformers.__version__}", *kept, *lines]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
