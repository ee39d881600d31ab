"""Reads conversations from JSON lines or rows of a table: messages, ShareGPT's conversations, prompt and completion, or
Alpaca's instruction and output. The keys decide which of these a line is.

Messages reach the template in one form, whatever the form of the data set. A key that is null counts as absent, and so
does an empty list of tool calls. A string of JSON (arguments of a call, tools, messages) is parsed. Every fault is a
ValueError with file, line and remedy.
"""
from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator

from meshtrain.data.documents import chat, chat_tokens, formats
from meshtrain.data.documents.chat import Conversation, Encoded, Template
from meshtrain.data.documents.faulty import LeftOut

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool",
                  "function_call": "assistant"}
USER, ASSISTANT = "user", "assistant"
LABELS = ("label", "kto_tag")       # keys that call a completion good or bad
COLUMNS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "chosen",
           "rejected", "system", "tools", chat.ARGUMENTS, *LABELS)      # keys read
BATCH_CHARS, BATCH_LINES = 1 << 22, 1 << 10     # encoded at a time
VERSION = 3     # of the result of the functions here and in chat.py; a change invalidates older caches
NULLS = "nulls"
# Messages about a file. where: the number of conversations, and the place of the first.
NOTES = {
    chat_tokens.APART:
        "in {where} a token would cross from a prompt into its answer; the two are tokenized separately there, as they "
        "are when the model answers",
    chat_tokens.CROSSED:
        "in {where} a token crosses from a prompt into its answer, but {template.tokenizer.path} cannot tokenize the "
        "two separately without changing the text, so the model is prompted with other tokens than it learns; end the "
        "chat template's generation prompt with a special token or a new line",
    chat_tokens.ELSEWHERE:
        "in {where} an answer's {{% generation %}} does not begin where the generation prompt of {template.path} "
        "ends, so prompts differ from training; fix the template, or set data.chat_template to another",
    chat.UNWRITTEN:
        "in {where} there are tool calls, which {template.path} does not render: answers are trained without them; set "
        "data.chat_template to one that renders them",
    chat.UNREASONED:
        "in {where} an answer has reasoning, which {template.path} does not render: it is left out of training; set "
        "data.chat_template to one that renders it{template.remedy}",
    NULLS:
        "in {where} the arguments of a tool call have a null, and the model is trained on it; remove these keys if a "
        "table with a column for each key added them",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Chats:
    """How conversations become tokens. learn_all: learn all messages, not only the assistant's. pairs: a line holds two
    conversations, chosen and rejected. leave_out: leave out faulty lines (faulty.py)."""
    template: Template
    learn_all: bool
    pairs: bool = False
    leave_out: bool = False

    @property
    def key(self) -> str:
        """A key that is equal for two objects if and only if both give the same tokens and masks."""
        return (f"{self.template.key}-{VERSION}-{'pairs' if self.pairs else 'all' if self.learn_all else 'assistant'}"
                f"{'-leave out' * self.leave_out}")

    def read(self, path: str, tell: Callable[[str], None] = print,
             left_out: LeftOut | None = None) -> Iterator[tuple[list[Encoded], int]]:
        """Yield (a batch of encoded conversations, bytes read so far) of a file of JSON lines, Parquet or Arrow. tell:
        receives notes on conversations that are not learned exactly as written. left_out: receives the faulty lines, if
        faulty lines are left out. Raises: ValueError."""
        batch: list[Conversation] = []
        places: list[str] = []
        notes: dict[str, list[str]] = {}
        chars = 0
        left_out = (left_out or LeftOut(path)) if self.leave_out else None
        with formats.reading(path):
            example = '{"prompt": "…", "chosen": "…", "rejected": "…"}' if self.pairs else '{"messages": […]}'
            for place, value, position in formats.read_rows(path, example, COLUMNS, left_out.add if left_out else None):
                try:
                    found = parse_pair(value) if self.pairs else [parse(value, self.learn_all)]
                except ValueError as error:
                    if left_out:
                        left_out.add(place, str(error))
                        continue
                    self._encode(path, batch, places, notes)      # report faults of earlier lines first
                    raise formats.fault(path, place, str(error)) from None
                batch += found
                places += [place] * len(found)
                chars += sum(len(message["content"]) for conversation in found for message in conversation.messages)
                if chars >= BATCH_CHARS or len(batch) >= BATCH_LINES:
                    yield self._encode(path, batch, places, notes, left_out), position
                    batch, places, chars = list[Conversation](), list[str](), 0
            if batch:
                yield self._encode(path, batch, places, notes, left_out), position
        if left_out:
            left_out.check(self.template.path, ended=True)
        for note, found in notes.items():
            where = f"{len(found):,} conversations ({found[0]} first)" if len(found) > 1 else found[0]
            tell(f"{path}: " + NOTES[note].format(where=where, template=self.template))

    def _encode(self, path: str, batch: list[Conversation], places: list[str],
                notes: dict[str, list[str]], left_out: LeftOut | None = None) -> list[Encoded]:
        try:
            each = [_with_targets(index, one) for index, one in enumerate(
                chat.encode_each(self.template, batch, self.learn_all, go_on=left_out is not None))]
            for fault in (one for one in each if isinstance(one, chat.Fault) and left_out is None):
                raise fault
        except chat.Fault as error:
            raise formats.fault(path, places[error.index], str(error)) from None
        faults = {places[one.index]: one for one in reversed(each) if isinstance(one, chat.Fault)}
        if left_out:
            for place, fault in faults.items():
                left_out.add(place, str(fault), fault.by_template)
            left_out.kept += len({*places} - faults.keys())
            left_out.check(self.template.path, ended=False)
        whole = [(place, conversation, one) for place, conversation, one in zip(places, batch, each)
                 if place not in faults and isinstance(one, Encoded)]
        for place, conversation, tokens in whole:
            for note in (*tokens.notes, *([NULLS] if _null_arguments(conversation) else ())):
                notes.setdefault(note, []).append(place)
        return [tokens for _, _, tokens in whole]


def _with_targets(index: int, one: Encoded | chat.Fault) -> Encoded | chat.Fault:
    """Return an encoded conversation, or a fault if the template wrote nothing to learn. index: its number."""
    if isinstance(one, chat.Fault) or one.mask.any():
        return one
    what = "has no token to learn" if len(one.ids) else "is empty"
    return chat.Fault(index, f"{what} as the chat template writes it; remove it", True)


def parse(line: dict, learn_all: bool = False) -> Conversation:
    """Return the conversation in a JSON object. learn_all: whether the whole conversation is learned; then no answer is
    required. Raises: ValueError.
    """
    line = _without_nulls(line)
    _check_unlabelled(line)
    prompt: list[dict] = []
    if "messages" in line:
        messages = read_messages(line["messages"], "messages")
    elif "conversations" in line:
        messages = read_messages(line["conversations"], "conversations")
    elif "prompt" in line and "completion" in line:
        prompt, completion = _turns(line, "prompt", USER), _turns(line, "completion", ASSISTANT)
        messages = prompt + completion
    elif "instruction" in line and "output" in line:
        messages = _instruction(line)
    elif {"chosen", "rejected"} <= line.keys():
        raise ValueError('is a pair of answers (its keys: chosen, rejected), not a conversation; set data.source='
                         '"preferences", or give it messages')
    else:
        keys = ", ".join(map(repr, list(line)[:8])) or "none"
        raise ValueError(f"is not a conversation (its keys: {keys}); give it messages, conversations, prompt and "
                         f"completion, or instruction and output")
    # for each message, whether to learn it
    trained = [_weight(message, i, learn_all) for i, message in enumerate(messages)]
    trained[:len(prompt)] = [False] * len(prompt)      # answers in a prompt are not learned
    system = _system(line, messages)
    messages, trained = system + messages, [True] * len(system) + trained
    if not learn_all and not any(wanted and message["role"] == ASSISTANT for message, wanted in zip(messages, trained)):
        raise ValueError('has no answer of the assistant to learn; remove it, or set data.loss_on="all"')
    tools, arguments = read_tools(line), read_arguments(line)
    _check_characters(messages, tools, arguments)
    return Conversation(messages, trained, tools, arguments)


def parse_pair(line: dict) -> list[Conversation]:
    """Return the chosen and the rejected conversation of a line. Raises: ValueError.

    Answers are texts or messages that follow a prompt. Alternatively, both are whole conversations. Then their common
    prefix is the prompt, which may also be given separately.
    """
    line = _without_nulls(line)
    if not {"chosen", "rejected"} <= line.keys():
        _check_unlabelled(line)
        keys = ", ".join(map(repr, list(line)[:8])) or "none"
        raise ValueError(f"is not a pair of answers (its keys: {keys}); give it prompt, chosen and rejected")
    prompt = _turns(line, "prompt", USER) if "prompt" in line else []
    answers = [_turns(line, key, ASSISTANT) for key in ("chosen", "rejected")]
    learned = [[_weight(message, i) for i, message in enumerate(one)] for one in (prompt, *answers)][1:]
    if all(one[0]["role"] != ASSISTANT for one in answers):
        alike = [a == b for a, b in zip(*answers)]
        shared = alike.index(False) if False in alike else len(alike)
        given, prompt = prompt, answers[0][:shared]
        if given and prompt[-len(given):] != given:
            raise ValueError("has whole conversations as answers, but they do not begin with its prompt; fix it, or "
                             "leave the prompt out")
        answers, learned = [turns[shared:] for turns in answers], [weights[shared:] for weights in learned]
    elif not prompt:
        raise ValueError("has no prompt; add one, or give whole conversations as chosen and rejected")
    if answers[0] == answers[1]:
        raise ValueError("has the same answer as chosen and as rejected; remove it")
    for key, one, wanted in zip(("chosen", "rejected"), answers, learned):
        if not any(message["role"] == ASSISTANT and want for message, want in zip(one, wanted)):
            raise ValueError(f"has no assistant's answer to learn in {key!r}; remove it")
    prompt = _system(line, prompt or answers[0]) + prompt
    tools, arguments = read_tools(line), read_arguments(line)
    _check_characters(prompt, answers, tools, arguments)
    return [Conversation(prompt + one, [False] * len(prompt) + wanted, tools, arguments)
            for one, wanted in zip(answers, learned)]


def _instruction(line: dict) -> list[dict]:
    """Return the two messages of an Alpaca row. The question is the instruction, and the input after an empty line."""
    for key in ("instruction", "input", "output"):
        if not isinstance(line.get(key, ""), str):
            raise ValueError(f"has {_short(line[key])} in {key!r}, which is not text; give a string")
    if line.get("history"):
        raise ValueError(f"has earlier turns in 'history', {_short(line['history'])}, which are not read; give all "
                         f"turns as messages")
    question = "\n\n".join(filter(None, (line["instruction"], line.get("input"))))
    if not question:
        raise ValueError("has neither an instruction nor an input; remove it")
    return [{"role": USER, "content": question}, {"role": ASSISTANT, "content": line["output"]}]


def _check_unlabelled(line: dict) -> None:
    """Check that no label calls the answer good or bad, as in rows for KTO. Raises: ValueError."""
    for key in LABELS:
        value = line.get(key)
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            raise ValueError(f"has the {key} {_short(value)}, as rows for KTO have; KTO is not an objective here: bad "
                             f"answers would be learned as good ones; keep the rows whose {key} is true, without this "
                             f"key, or make pairs of them as chosen and rejected")


def _system(line: dict, messages: list[dict]) -> list[dict]:
    """Return the line's own system message; none if the messages begin with one."""
    text = line.get("system")
    given = isinstance(text, str) and text and messages[0]["role"] != "system"
    return [{"role": "system", "content": text}] if given else []


def read_tools(line: dict) -> list | None:
    """Return the tools of a line, in the form that templates take. Raises: ValueError."""
    tools = line.get("tools")
    if isinstance(tools, str):
        tools = _of_json(tools, "tools", "[") if tools.strip() not in ("", "null") else None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"has tools that are not a list: {_short(tools)}; give a list of schemas, or no tools")
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())] or None


def read_arguments(line: dict) -> dict | None:
    """Return a line's arguments of the chat template; None if it has none. Raises: ValueError."""
    given = line.get(chat.ARGUMENTS)
    return None if given is None else _object(given, chat.ARGUMENTS) or None


def _tool(value, place: str) -> dict:
    value = _object(value, place)
    if "function" in value:
        value = value | {"function": _object(value["function"], f"{place}.function")}
    inner = value.get("function", value)
    if isinstance(inner.get("parameters"), str):
        inner["parameters"] = _object(inner["parameters"], f"{place} parameters")
    return value


def read_messages(value, key: str) -> list[dict]:
    """Return messages in the form that templates take, from a list or a string of JSON. key: the key that has the list,
    for errors. Raises: ValueError."""
    if isinstance(value, str):
        value = _of_json(value, key, "[")
    if not isinstance(value, list) or not value:
        raise ValueError(f'has {_short(value)} in {key!r}, which is not a list of messages; give one, e.g. [{{"role": '
                         '"user", "content": "…"}, …]')
    return [_message(message, f"{key}[{i}]") for i, message in enumerate(value)]


def _turns(line: dict, key: str, role: str) -> list[dict]:
    """Return the messages of a key; a text becomes one message of `role`. Raises: ValueError, also for a text that is a
    whole dialogue."""
    if isinstance(line[key], str):
        if line[key].lstrip().startswith("Human:") and "\n\nAssistant:" in line[key]:
            raise ValueError(f'has a whole dialogue as the text of {key!r}, "Human: … Assistant: …" as in HH, which '
                             f'would become a single turn; give its turns as messages, e.g. "{key}": '
                             f'[{{"role": "user", "content": "…"}}, …]')
        return [_message({"role": role, "content": line[key]}, key)]
    return read_messages(line[key], key)


def _message(value, place: str) -> dict:
    value = _of_json(value, place, "{") if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f'{place} is not a message: {_short(value)}; write e.g. {{"role": "user", "content": "…"}}')
    value = _without_nulls(value)
    names = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    role = value.get(names[0])
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = [*ROLES, *SHAREGPT_ROLES] if names[0] == "from" else ROLES
        near = difflib.get_close_matches(str(role), known, n=1)
        raise ValueError(f"{place} has the {names[0]} {_short(value.get(names[0]))}; "
                         + (f"did you mean {near[0]!r}? " if near else "") + f"Known names: {', '.join(known)}")
    # Templates read role and content: ShareGPT's keys overwrite them.
    others = {name: inner for name, inner in value.items() if name not in (*names, "role", "content")}
    if "tool_calls" in others:
        calls = _calls(others.pop("tool_calls"), f"{place}.tool_calls")
        others |= {"tool_calls": calls} if calls else {}
    if isinstance(others.get("function_call"), dict):       # OpenAI's older form
        others["function_call"] = _parse_call(others["function_call"], f"{place}.function_call")
    return {"role": role, "content": _content(value.get(names[1]), names[1], place, others), **others}


def _calls(value, place: str) -> list[dict]:
    """Return tool calls with objects as arguments. Accepted are OpenAI's {"function": {"name", "arguments"}} and bare
    {"name", "arguments"}."""
    if isinstance(value, str):
        value = _of_json(value, place, "[") if value.strip() not in ("", "null") else []
    if not isinstance(value, list):
        raise ValueError(f'{place} is not a list: {_short(value)}; give e.g. [{{"type": "function", "function": '
                         f'{{"name": "…", "arguments": {{}}}}}}]')
    calls = []
    for i, one in enumerate(value):
        call = _object(one, f"{place}[{i}]")
        if "function" in call:
            call["function"] = _parse_call(call["function"], f"{place}[{i}]")
        calls.append(call if "function" in call else _parse_call(call, f"{place}[{i}]"))
    return calls


def _parse_call(value, place: str) -> dict:
    """Return a function call with its arguments as an object."""
    value = _object(value, place)
    if "arguments" in value or "parameters" not in value:
        value["arguments"] = _object(value.get("arguments", {}), f"{place} arguments", whole=True)
    return value


def _object(value, place: str, whole: bool = False) -> dict:
    """Return a copy of an object, or of the object in a string of JSON. Keys that are null are left out, unless
    `whole`."""
    parsed = _of_json(value, place, "{") if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise ValueError(f"{place}: {_short(value)} is not a JSON object; give an object, or a string "
                         f"that contains one as JSON")
    return dict(parsed) if whole else _without_nulls(parsed)


def _of_json(text: str, place: str, begin: str):
    """Return the value in a string of JSON; return `text` if it does not begin with `begin`. Raises: ValueError."""
    if not text.lstrip().startswith(begin):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ValueError(f"{place}: the string {_short(text)} is broken JSON ({why}); fix it, or give the value "
                         f"itself") from None


def _without_nulls(value: dict) -> dict:
    return {name: inner for name, inner in value.items() if inner is not None}


def _null_arguments(conversation: Conversation) -> bool:
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    return any(_has_null(call.get("function", call).get("arguments")) for call in calls)


def _has_null(value) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict) and None in inner or any(map(_has_null, inner))


def _content(value, name: str, place: str, others: dict):
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str)
                                       and part.get("type") == "text" for part in value):
        return _content("".join(part["text"] for part in value), name, place, others)
    if value is None and others.get("tool_calls"):
        return ""
    raise ValueError(f"{place} has {_short(value)} in {name!r}, which is not text; give a string")


def _weight(message: dict, number: int, learn_all: bool = False) -> bool:
    """Return whether an assistant's message is learned, by its key "weight", or "train" (as in axolotl's data). Removes
    these keys. number: the message's number. Raises: ValueError, also if a key asks for something unsupported."""
    place = f"message {number} (from 0)"
    if "train_detail" in message:
        raise ValueError(f"{place} has train_detail, spans of characters to learn, which are not read; remove it, and "
                         "use train to learn the whole message or none of it")
    given = {name: message.pop(name) for name in ("weight", "train") if name in message}
    for name, value in given.items():
        if not isinstance(value, bool) and (name == "train" or not isinstance(value, (int, float))
                                            or value not in (0, 1)):
            learn, leave = ("true", "false") if name == "train" else ("1 or true", "0 or false")
            raise ValueError(f"{place} has {name}={_short(value)}; use {learn} to learn the message, or {leave} to use "
                             "it only as context")
    wanted = {bool(value) for value in given.values()} or {True}
    said = " and ".join(f"{name} {_short(value)}" for name, value in given.items())
    if len(wanted) > 1:
        raise ValueError(f"{place} has {said}, which contradict each other; keep one of them")
    if learn_all and False in wanted:
        raise ValueError(f'{place} has {said}, but data.loss_on="all" learns every message; remove the key, or use '
                         f'data.loss_on="assistant"')
    if not learn_all and given.get("train") and message["role"] != ASSISTANT:
        raise ValueError(f"{place} has {said}, but its role is {message['role']}, and only the assistant's messages "
                         f'are learned; remove the key, or learn all of a chat with data.loss_on="all"')
    return wanted == {True}


def _check_characters(*values) -> None:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a character (\\u{ord(error.object[error.start]):04x}, a lone surrogate); "
                         "fix or remove the line") from None
    except RecursionError:
        raise ValueError("is nested too deeply; fix or remove the line") from None


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:39] + "…"
