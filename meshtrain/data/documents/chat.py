"""Encodes conversations as token ids by a model folder's chat template (rendered in `rendering.py`), with a mask of the
ids to learn.

The template writes everything, separators and ends of turns included; nothing is added. Text inside {% generation %}
becomes a mask over ids, as in transformers; without the tag, an answer is the text that follows its generation prompt.
The ids before an answer are the ids that `prompt` returns: if a token would cross from the prompt into the answer, the
two are tokenized separately. Messages that contain names of special tokens are refused. This module knows no
conversation files and no cache.
"""
from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np

from meshtrain import environment, shipped
from meshtrain.data.documents import beside, chat_tokens
from meshtrain.data.documents.tokenizer import Bytes, Tokenizer, TokenizerFile, import_extra, using

TOKEN = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|\[/?[A-Z_]{4,}\]")
PROBE = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "zebra"}]
SET_HERE = ("messages", "tools", "add_generation_prompt", *beside.NAMES)   # variables that are no arguments
LIMIT_S = 10.0          # CPU time per conversation
LONGEST_S = 600.0       # wall time per reply: a stopped process, or a swapping machine, uses no CPU time
MOST_CHARS = 1 << 24    # in a conversation's text
MOST_REPLY_BYTES = 1 << 28
BATCH = 128             # conversations per request
ARGUMENTS = "chat_template_kwargs"      # the key of a line's arguments of the template, as in TRL
UNWRITTEN, UNREASONED = "unwritten", "unreasoned"      # the template leaves tool calls, or reasoning, out


class Conversation(NamedTuple):
    """A conversation. messages: the messages in the form that templates take, each with a role. trained: for each
    message, whether to learn it if it is the assistant's. tools: the tools in the form that templates take, or None.
    arguments: further variables of the template, besides those of the Template; None: none."""
    messages: list[dict]
    trained: list[bool]
    tools: list | None = None
    arguments: dict | None = None


class Encoded(NamedTuple):
    """An encoded conversation: int32 ids [T], and bool mask [T], whether to learn each id. notes: UNWRITTEN,
    UNREASONED, or a constant of chat_tokens.py on how prompt and answer were separated."""
    ids: np.ndarray
    mask: np.ndarray
    notes: tuple[str, ...] = ()


class Fault(ValueError):
    """A conversation cannot be encoded. index: the conversation's number among the given conversations. by_template:
    whether the template failed."""

    def __init__(self, index: int, message: str, by_template: bool = False):
        super().__init__(message)
        self.index, self.by_template = index, by_template


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """A chat template and the tokenizer of its output."""
    text: str
    path: str                   # its file
    tokens: dict[str, str | None]       # bos_token, eos_token, …; None: the tokenizer has none
    tokenizer: Tokenizer
    today: bool                 # use the current date; in training a fixed one
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)     # further variables of the template

    @property
    def key(self) -> str:
        """A hash that is equal for two templates if and only if both give the same ids."""
        arguments = [self.arguments] if self.arguments else []      # without them it is that of earlier versions
        content = json.dumps([self.text, self.tokens, self.tokenizer.key, *arguments])
        return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @functools.cached_property
    def library(self) -> Any:
        """A tokenizers.Tokenizer that reads names of special tokens as these tokens; None for byte ids."""
        if isinstance(self.tokenizer, Bytes):
            return None
        library = import_extra("tokenizers", "a chat template").Tokenizer.from_str(self.tokenizer.library.to_str())
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = False
        library.post_processor = None       # adds nothing here, and some take spaces from a token's characters
        return library

    @functools.cached_property
    def tokenize(self) -> Callable[[Sequence[dict]], list[chat_tokens.Tokens]]:
        """A function that tokenizes replies of the renderer."""
        if self.library is None:
            return functools.partial(chat_tokens.of_bytes, self.tokenizer)
        return chat_tokens.Parted(self.library, self.tokenizer.path).tokenize

    @functools.cached_property
    def _special(self) -> tuple[re.Pattern | None, frozenset[int]]:
        """(pattern of special tokens' names, ids of special tokens that also have other spellings)."""
        added = {} if self.library is None else self.library.get_added_tokens_decoder()
        special = {id: token for id, token in added.items() if token.special and token.content}
        names = sorted((token.content for token in special.values()), key=len, reverse=True)
        normalized = self.library is not None and self.library.normalizer is not None
        return (re.compile("|".join(map(re.escape, names))) if names else None,
                frozenset(id for id, token in special.items() if normalized and token.normalized))

    @functools.cached_property
    def _renderer(self) -> _Renderer:
        import_extra("jinja2", f"the chat template {self.path}")
        return _Renderer(self)

    @functools.cached_property
    def remedy(self) -> str:
        """Text for messages that names a shipped template: the template that writes a question, its answer and a prompt
        as this template does, and that writes all reasoning. "" if no shipped template does."""
        def write(text: str) -> list[str | None]:
            renderer = _Renderer(dataclasses.replace(self, text=text))
            asked = [(PROBE, False), (PROBE[:1], True)]
            renderer._write([_request(self, Conversation(messages, []), None, wants) for messages, wants in asked])
            return [(renderer._read() or {}).get("text") for _ in asked]

        texts = {path.read_text(encoding="utf-8"): name for name, path in shipped.names("chat_templates").items()}
        wanted = write(self.text)
        known = {} if self.text in texts or None in wanted else texts
        name = next((name for text, name in known.items() if "reasoning" in text and write(text) == wanted), "")
        return (f' (e.g. the shipped "{name}", which writes the same text and keeps the reasoning of all turns)'
                if name else "")

    def check(self) -> None:
        """Check the template. Raises: ValueError if it is malformed, or needs an undefined token."""
        is_shipped = Path(self.path).resolve().parent == shipped.locate_shipped("chat_templates")
        tokens = dict.fromkeys(TOKEN.findall(self.text)) if is_shipped and self.library is not None else ()
        if missing := [token for token in tokens if self.library.token_to_id(token) is None]:
            raise ValueError(f"the shipped chat template {self.path} writes {', '.join(missing)}, but data.tokenizer "
                             "has no such token; name the template of its family as data.chat_template, or add them")
        unknown = [name for name in beside.NAMES if name in self._renderer.names and name not in self.tokens]
        if unknown:
            raise ValueError(f"the chat template {self.path} writes {' and '.join(unknown)}, and no {beside.CONFIG} "
                             f'next to the tokenizer defines it; write one, e.g. {{"{unknown[0]}": "</s>"}}')
        self.check_arguments("data.template_arguments", self.arguments)

    def check_arguments(self, place: str, arguments: Mapping[str, Any]) -> None:
        """Check that the template reads these arguments. place: the key of the arguments, for errors. Raises:
        ValueError."""
        read = [name for name in self._renderer.names if name not in SET_HERE]
        for name in [name for name in arguments if name not in read]:
            if name in SET_HERE:
                raise ValueError(f"{place} sets {name!r}, which the program sets itself (messages and tools are in the "
                                 f"data, tokens in {beside.CONFIG}); leave it out")
            near = [f"did you mean {one!r}?" for one in difflib.get_close_matches(name, read, n=1)]
            near += [f"it reads {', '.join(read) or 'no arguments, so leave it out'}"]
            raise ValueError(f"{place} sets {name!r}, which the chat template {self.path} never reads; {near[0]}")


def open_template(tokenizer: Tokenizer, given: str = "", folders: Sequence[Path] = (), today: bool = False,
                  arguments: Mapping[str, Any] = types.MappingProxyType({})) -> Template:
    """Open a chat template: `given` (a template file, a model folder or a shipped name); else the template of the
    tokenizer's folder, or of the first of `folders` that has one. today: whether templates see the current date.
    arguments: data.template_arguments.

    Raises: ValueError if no template is found, or if the template is malformed or does not read an argument.
    """
    home = [Path(os.path.expanduser(tokenizer.path)).parent] if isinstance(tokenizer, TokenizerFile) else []
    places = [beside.local_template(given)] if given else [*home, *map(Path, folders)]
    for place in places:
        if text_and_path := beside.read_template(place, given):
            tokens = next((tokens for folder in [*home, text_and_path[1].parent, *map(Path, folders)]
                           if (tokens := beside.named_tokens(folder))), {})
            template = Template(text_and_path[0], str(text_and_path[1]), tokens, tokenizer, today, dict(arguments))
            template.check()
            return template
    if given:
        raise ValueError(f"data.chat_template={given!r} is not a file, nor a folder with a {beside.TEMPLATE} or a "
                         f"chat_template in {beside.CONFIG}; name a jinja template, a folder that has one, or one of "
                         f"the shipped templates {', '.join(shipped.names('chat_templates'))}")
    looked = ", ".join(map(str, places)) or "no folder, because data.tokenizer names none"
    raise ValueError(f"there is no chat template (looked in {looked}, for {beside.TEMPLATE} and {beside.CONFIG}); "
                     "name its file as data.chat_template")


def prompt(template: Template, messages: Sequence[dict], tools: list | None = None,
           arguments: dict | None = None) -> np.ndarray:
    """Return the int32 ids [T] of a conversation up to the assistant's answer. messages: [{"role": …, "content": …},
    …]. arguments: as in Conversation.

    Raises: ValueError if the template refuses them, or if one contains the name of a special token.
    """
    conversation = Conversation(list(messages), [False] * len(messages), tools, arguments)
    if fault := _find_fault(template, 0, conversation):
        raise fault
    replies = template._renderer.ask([_request(template, conversation, None, True)], [0])
    return template.tokenize(replies)[0].ids


def encode(template: Template, conversations: Sequence[Conversation], learn_all: bool = False) -> list[Encoded]:
    """Return the ids of conversations, with masks: the assistant's trained messages, or everything with learn_all.
    Raises: Fault for the first conversation that cannot be encoded."""
    return [one for one in encode_each(template, conversations, learn_all, go_on=False) if isinstance(one, Encoded)]


def encode_each(template: Template, conversations: Sequence[Conversation], learn_all: bool = False,
                go_on: bool = True) -> list[Encoded | Fault]:
    """Return the result of `encode` for each conversation, or the fault of a conversation that cannot be encoded.
    go_on: False raises the first fault."""
    found: dict[int, Encoded | Fault] = {
        index: fault for index, conversation in enumerate(conversations)
        if (fault := _find_fault(template, index, conversation))}
    if found and not go_on:
        raise cast(Fault, next(iter(found.values())))
    sound = [index for index in range(len(conversations)) if index not in found]
    for first in range(0, len(sound), BATCH):
        numbers = sound[first:first + BATCH]
        batch = [conversations[index] for index in numbers]
        requests = [_request(template, one, None if learn_all else one.trained, False) for one in batch]
        replies = dict(zip(numbers, template._renderer.ask(requests, numbers, go_on)))
        found |= {index: Fault(index, reply["fault"], True) for index, reply in replies.items() if "fault" in reply}
        whole = {index: reply for index, reply in replies.items() if index not in found}
        for tokens, (index, reply) in zip(template.tokenize(list(whole.values())), whole.items()):
            mask = np.full(len(tokens.ids), learn_all)
            for begin, end in reply["spans"]:
                mask[tokens.of(begin, end)] = True
            notes = tokens.parting, *(note for note in (UNWRITTEN, UNREASONED) if reply[note])
            found[index] = Encoded(tokens.ids, mask, tuple(filter(None, notes)))
    return [found[index] for index in range(len(conversations))]


def _request(template: Template, conversation: Conversation, trained: Sequence[bool] | None,
             wants_answer: bool) -> dict:
    return {"messages": conversation.messages, "tools": conversation.tools, "trained": trained, "prompt": wants_answer,
            "arguments": {**template.arguments, **(conversation.arguments or {})}}


def _find_fault(template: Template, index: int, conversation: Conversation) -> Fault | None:
    """Return the fault of a conversation that contains a special token's name, or has an argument that the template
    does not read. index: the conversation's number."""
    pattern, respelled = template._special
    try:
        template.check_arguments(ARGUMENTS, conversation.arguments or {})
    except ValueError as error:
        return Fault(index, str(error))
    for text in _strings([conversation.messages, conversation.tools, conversation.arguments]) if pattern else ():
        name = match[0] if (match := pattern.search(text)) else None
        if name is None and respelled:
            with using(f"data.tokenizer={template.tokenizer.path!r}"):
                ids = template.library.encode(text, add_special_tokens=False).ids
            name = next((template.library.id_to_token(id) for id in ids if id in respelled), None)
        if name is not None:
            return Fault(index, f"holds {name!r} in a message, which is a special token of {template.tokenizer.path} "
                         "and would become one; remove it, or write it differently")
    return None


def _strings(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


class _Renderer:
    """The rendering process (`rendering.py`). It is started on demand, and again after a template has ended it."""

    def __init__(self, template: Template):
        self.template, self._lock = template, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self.names: list[str] = self._start()["names"]

    def _start(self) -> dict:
        script = Path(__file__).with_name("rendering.py")
        # -P: do not import from the script's folder.
        self._process = subprocess.Popen([sys.executable, "-P", str(script)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         env=environment.select(os.environ))
        self._unread, self._late, self._long = bytearray(), False, False
        tokens = {name: token for name, token in self.template.tokens.items() if token is not None}
        self._write({"template": self.template.text, "tokens": tokens, "today": self.template.today,
                     "limit_s": LIMIT_S, "most_chars": MOST_CHARS})
        reply = self._read()
        if reply is None:
            raise ValueError(f"the chat template {self.template.path} {self._describe_end()}; fix it, or name another "
                             "as data.chat_template")
        if "fault" in reply:
            self._end()
            raise ValueError(f"the chat template {self.template.path} is not valid jinja: {reply['fault']}; fix it, "
                             f"or name another as data.chat_template")
        return reply

    def ask(self, requests: Sequence[dict], numbers: Sequence[int], go_on: bool = False) -> list[dict]:
        """Return a reply to each request. numbers: the conversations' numbers. go_on: whether a reply may be {"fault":
        message}. Raises: without go_on, the first Fault."""
        with self._lock:
            replies: list[dict] = []
            while len(replies) < len(requests):
                if self._process is None:
                    self._start()
                    self._write(requests[len(replies):])
                elif not replies:
                    self._write(requests)
                reply = self._read()
                if reply is None:
                    why = f"the chat template {self.template.path} {self._describe_end()}"
                    reply = {"fault": f"{why}; fix it, or name another as data.chat_template"}
                elif "fault" in reply:
                    reply["fault"] += ("; fix or remove it, or name another template as data.chat_template"
                                       + self.template.remedy)
                if "fault" in reply and not go_on:
                    if self._process is not None:
                        self._end()     # discards unread replies
                    raise Fault(numbers[len(replies)], reply["fault"], True)
                replies.append(reply)
            return replies

    def _write(self, value) -> None:
        timer = threading.Timer(LONGEST_S, self._kill_late)
        timer.start()
        try:
            _, stdin, _ = self._pipes()
            stdin.write(json.dumps(value).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass        # it has ended, so _read returns None
        finally:
            timer.cancel()

    def _read(self) -> dict | None:
        """Return the next reply; None if the process has ended, or was killed because it exceeded the limit of time or
        of a reply's length."""
        waits, from_here = select.poll(), 0
        process, _, stdout = self._pipes()
        waits.register(stdout)
        while (end := self._unread.find(b"\n", from_here)) < 0:
            from_here = len(self._unread)
            if not waits.poll(1000 * LONGEST_S):
                self._kill_late()
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                return None
            self._unread += piece
            if len(self._unread) > MOST_REPLY_BYTES:
                self._long = True
                process.kill()
                return None
        line = bytes(self._unread[:end])
        del self._unread[:end + 1]
        return json.loads(line)

    def _pipes(self) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
        """Return the process, which was started, with its input and its output."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        return process, process.stdin, process.stdout

    def _kill_late(self) -> None:
        self._late = True
        self._pipes()[0].kill()

    def _end(self) -> None:
        process, _, _ = self._pipes()
        self._process = None
        process.kill()
        process.communicate()

    def _describe_end(self) -> str:
        """Return how the process ended by itself. Raises: RuntimeError if it was killed for a reason other than the
        template."""
        code = self._pipes()[0].wait()      # it has closed its output
        self._end()
        if self._late:
            raise RuntimeError(f"the process that renders the chat template {self.template.path} has not answered for "
                               f"{LONGEST_S:g} s; it was stopped, or this machine has no memory or no CPU left for it")
        if self._long:
            return f"wrote more than {MOST_REPLY_BYTES:,} bytes and was stopped"
        return f"did not end within {LIMIT_S:g} s of CPU time and was stopped" if code == -signal.SIGPROF else \
            f"ended its process (exit code {code})"

    def __del__(self):
        if self.__dict__.get("_process"):
            self._end()
