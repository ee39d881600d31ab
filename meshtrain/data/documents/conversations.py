"""Conversations in JSON lines: messages, ShareGPT's conversations, or prompt and completion, recognized by their keys.
Every fault of a line is a ValueError with file, line and remedy."""
from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator

from meshtrain.data.documents import chat, formats
from meshtrain.data.documents.chat import Conversation, Encoded, Template

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool",
                  "function_call": "assistant"}
USER, ASSISTANT = "user", "assistant"
BATCH_CHARS, BATCH_LINES = 1 << 22, 1 << 10     # encoded at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Chats:
    """How conversations become tokens. learn_all: learn more than the assistant's messages. pairs: a line holds two,
    chosen and rejected."""
    template: Template
    learn_all: bool
    pairs: bool = False

    @property
    def key(self) -> str:
        """Equal for two that give the same tokens and masks."""
        return f"{self.template.key}-{'pairs' if self.pairs else 'all' if self.learn_all else 'assistant'}"

    def read(self, path: str) -> Iterator[tuple[list[Encoded], int]]:
        """Batches of conversations of a JSON-lines file, with the bytes read so far. Raises: ValueError."""
        batch, numbers, chars = [], [], 0
        with formats.reading(path):
            example = '{"prompt": "…", "chosen": "…", "rejected": "…"}' if self.pairs else '{"messages": […]}'
            for number, value, position in formats.read_objects(path, example):
                try:
                    found = parse_pair(value) if self.pairs else [parse(value, self.learn_all)]
                except ValueError as error:
                    self._encode(path, batch, numbers)      # report faults of earlier lines first
                    raise formats.fault(path, f"line {number}", str(error)) from None
                batch += found
                numbers += [number] * len(found)
                chars += sum(len(message["content"]) for one in found for message in one.messages)
                if chars >= BATCH_CHARS or len(batch) >= BATCH_LINES:
                    yield self._encode(path, batch, numbers), position
                    batch, numbers, chars = [], [], 0
            if batch:
                yield self._encode(path, batch, numbers), position

    def _encode(self, path: str, batch: list[Conversation], numbers: list[int]) -> list[Encoded]:
        try:
            encoded = chat.encode(self.template, batch, self.learn_all)
        except chat.Fault as error:
            raise formats.fault(path, f"line {numbers[error.index]}", str(error)) from None
        for number, one in zip(numbers, encoded):
            if not len(one.ids) or not one.mask.any():
                what = "has no token to learn" if len(one.ids) else "is empty"
                raise formats.fault(path, f"line {number}", f"{what} as the chat template writes it; remove the line")
        return encoded


def parse(line: dict, learn_all: bool = False) -> Conversation:
    """The conversation in a JSON object. learn_all: learn all of it; no answer is required. Raises: ValueError."""
    if "messages" in line:
        messages = read_messages(line["messages"], "messages")
    elif "conversations" in line:
        messages = read_messages(line["conversations"], "conversations")
    elif "prompt" in line and "completion" in line:
        prompt, completion = _turns(line, "prompt", USER), _turns(line, "completion", ASSISTANT)
        messages = prompt + completion
    else:
        keys = ", ".join(map(repr, list(line)[:8])) or "none"
        raise ValueError(f"is no conversation (its keys: {keys}); give it messages, conversations, or prompt and "
                         f"completion")
    trained = [_weight(message, i) for i, message in enumerate(messages)]
    if "messages" not in line and "conversations" not in line:
        trained[:len(prompt)] = [False] * len(prompt)      # answers in a prompt are given
    system = _system(line, messages)
    messages, trained = system + messages, [True] * len(system) + trained
    if not learn_all and not any(wanted and message["role"] == ASSISTANT for message, wanted in zip(messages, trained)):
        raise ValueError('has no answer of the assistant to learn; remove it, or set data.loss_on="all"')
    tools = _tools(line)
    _check_characters(messages, tools)
    return Conversation(messages, trained, tools)


def parse_pair(line: dict) -> list[Conversation]:
    """The chosen and the rejected conversation. Raises: ValueError.

    Answers are texts or messages after a prompt; or both are whole conversations, whose common prefix is the prompt,
    which may be repeated separately.
    """
    if not {"chosen", "rejected"} <= line.keys():
        keys = ", ".join(map(repr, list(line)[:8])) or "none"
        raise ValueError(f"is no pair of answers (its keys: {keys}); give it prompt, chosen and rejected")
    prompt = _turns(line, "prompt", USER) if line.get("prompt") is not None else []
    answers = [_turns(line, key, ASSISTANT) for key in ("chosen", "rejected")]
    if all(one[0]["role"] != ASSISTANT for one in answers):
        alike = [a == b for a, b in zip(*answers)]
        shared = alike.index(False) if False in alike else len(alike)
        given, prompt = prompt, answers[0][:shared]
        if given and prompt[-len(given):] != given:
            raise ValueError("has whole conversations as answers that do not begin with its prompt; mend it, or leave "
                             "the prompt out")
        answers = [one[shared:] for one in answers]
    elif not prompt:
        raise ValueError("has no prompt; give one beside the answers, or whole conversations as chosen and rejected")
    if answers[0] == answers[1]:
        raise ValueError("has the same answer as chosen and as rejected; remove it")
    for key, one in zip(("chosen", "rejected"), answers):
        if not any(message["role"] == ASSISTANT for message in one):
            raise ValueError(f"has no answer of the assistant in {key!r}; remove it")
    prompt = _system(line, prompt or answers[0]) + prompt
    tools = _tools(line)
    _check_characters(prompt, answers, tools)
    return [Conversation(prompt + one, [False] * len(prompt) + [True] * len(one), tools) for one in answers]


def _system(line: dict, messages: list[dict]) -> list[dict]:
    """The line's own system message, unless the messages begin with one."""
    text = line.get("system")
    given = isinstance(text, str) and text and messages[0]["role"] != "system"
    return [{"role": "system", "content": text}] if given else []


def _tools(line: dict) -> list | None:
    tools = line.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"has tools that are no list, but {_short(tools)}; give a list of their schemas, or none")
    return tools or None


def read_messages(value, key: str) -> list[dict]:
    """A list of messages, as templates take them. key: of the list, for errors. Raises: ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError(f'has no messages in {key!r}, but {_short(value)}; give a list, e.g. [{{"role": "user", '
                         f'"content": "…"}}, …]')
    return [_message(one, f"{key}[{i}]") for i, one in enumerate(value)]


def _turns(line: dict, key: str, role: str) -> list[dict]:
    """Messages, or one from a text."""
    if isinstance(line[key], str):
        return [_message({"role": role, "content": line[key]}, key)]
    return read_messages(line[key], key)


def _message(value, place: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f'{place} is no message, but {_short(value)}; write e.g. {{"role": "user", "content": "…"}}')
    names = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    role = value.get(names[0])
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = [*ROLES, *SHAREGPT_ROLES] if names[0] == "from" else ROLES
        near = difflib.get_close_matches(str(role), known, n=1)
        raise ValueError(f"{place} has the {names[0]} {_short(value.get(names[0]))}; "
                         + (f"did you mean {near[0]!r}? " if near else "") + f"Known are {', '.join(known)}")
    # Templates read role and content: ShareGPT's keys overwrite them.
    others = {name: one for name, one in value.items() if name not in (*names, "role", "content")}
    return {"role": role, "content": _content(value.get(names[1]), names[1], place, others), **others}


def _content(value, name: str, place: str, others: dict):
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str)
                                       and one.get("type") == "text"
                                       for one in value):
        return _content("".join(one["text"] for one in value), name, place, others)
    if value is None and others.get("tool_calls"):
        return ""
    raise ValueError(f"{place} has no text in {name!r}, but {_short(value)}; give a string")


def _weight(message: dict, number: int) -> bool:
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise ValueError(f"message {number} (from 0) has the weight {_short(weight)}; give 1, or 0 for what is not to "
                         f"be learned")
    return bool(weight)


def _check_characters(*values) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a character (\\u{ord(error.object[error.start]):04x}, a lone surrogate); "
                         "mend or remove the line") from None
    except RecursionError:
        raise ValueError("is nested too deeply; mend or remove the line") from None


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"
