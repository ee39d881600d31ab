"""Renders chat templates in a separate process, because a template is a program by the model folder's author.

A template runs in jinja2's immutable sandbox, without a loader and without credentials in its environment. The system
limits the process's memory, files and processes and the CPU time per conversation, so an endless template ends only
this process. `chat.py` starts it and exchanges JSON lines. This file runs as a script and imports nothing of meshtrain.
"""
from __future__ import annotations

import copy
import functools
import json
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import jinja2.visitor

MEMORY_BYTES = 1 << 30
# The process writes no file and starts no process. It may open the few files that Python imports late.
LIMITS = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NPROC: 0,
          resource.RLIMIT_NOFILE: 16, resource.RLIMIT_CORE: 0}
SPARE_S = 1.0       # rendering of prefixes stops when this much CPU time is left
SETS = 64           # sets of template arguments whose probes are kept
FEW = 1 << 14       # maximum number of messages rendered to find the beginnings of answers that are not learned
REASONING = ("reasoning_content", "reasoning", "thinking")     # keys of a message that have it
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# The date in training, whose tokens must not depend on the day; it is the default of Llama's templates.
TRAINING_DATE = datetime(2024, 7, 26)


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: writes the assistant's text between marks that no conversation has."""
    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(generation_seen=False, generation_marks=("", ""))

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        self.environment.generation_seen = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        begin, end = self.environment.generation_marks
        return begin + caller() + end


class Written(NamedTuple):
    """A rendered text. spans: characters to learn. begins: the known positions where answers begin (where their
    generation prompts end). elsewhere: whether an answer that {% generation %} marks begins elsewhere."""
    text: str
    spans: list[tuple[int, int]]
    begins: list[int]
    elsewhere: bool = False


def _answers(messages: Sequence[dict]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


class Renderer:
    """A template, rendered as in transformers. today: whether the template sees the current date, or else a fixed date.
    most_chars: the largest length of a text."""

    def __init__(self, template: str, tokens: dict[str, str], today: bool, most_chars: int = sys.maxsize):
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=[Generation, jinja2.ext.loopcontrols])
        env.globals |= {"raise_exception": _refuse,
                        "strftime_now": (datetime.now() if today else TRAINING_DATE).strftime}
        env.filters["tojson"] = _to_json
        self.env, self.template, self.most_chars = env, env.from_string(template), most_chars
        self.variables: dict = {"documents": None, **tokens}
        self.resumable = None if env.generation_seen else Resumable().change(env.parse(template), env)
        self.names = sorted(jinja2.meta.find_undeclared_variables(env.parse(template)) - env.globals.keys())

    @functools.lru_cache(SETS)
    def using(self, arguments: str) -> Renderer:
        """Return a renderer with the variables of this JSON object. The new renderer has probed nothing yet, because
        the text that a template writes before an answer may depend on the variables."""
        other = copy.copy(self)
        other.__dict__.pop("opening", None), other.__dict__.pop("arguments_as_text", None)
        other.variables = self.variables | json.loads(arguments)
        return other

    def render(self, messages: Sequence[dict], tools, add_generation_prompt: bool) -> str:
        """Return the text of messages. Raises: ValueError if it is too long."""
        text = self.template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                    **self.variables)
        if len(text) > self.most_chars:
            raise ValueError(f"the chat template writes {len(text):,} characters, but the limit is "
                             f"{self.most_chars:,}")
        return text

    def spans(self, messages: Sequence[dict], tools, trained: Sequence[bool]) -> Written:
        """Return the text of messages, with the spans of trained assistant messages."""
        answers = _answers(messages)
        wanted = [trained[i] for i in answers]
        if not self.env.generation_seen:
            return self._by_prefix(messages, tools, [i for i in answers if trained[i]])
        text, marked = self._mark(messages, tools, False)
        if all(wanted):
            return Written(text, marked, *self._begins(messages, tools, text, marked))
        if len(marked) != len(answers):
            raise ValueError(f"the chat template marks {len(marked)} passages, but there are {len(answers)} answers, "
                             f"so the answers that are not loss targets cannot be found")
        return Written(text, [span for span, want in zip(marked, wanted) if want],
                       *self._begins(messages, tools, text, marked))

    def whole(self, messages: Sequence[dict], tools, wants_answer: bool) -> Written:
        """Return the text of messages, without spans. wants_answer: whether the generation prompt ends the text."""
        if self.env.generation_seen:
            text, marked = self._mark(messages, tools, wants_answer)
            return Written(text, [], *self._begins(messages, tools, text, marked))
        text = self.render(messages, tools, wants_answer)
        return Written(text, [], self._find_prompts(messages, tools, _answers(messages), text))

    @functools.cached_property
    def opening(self) -> tuple[str, str] | None:
        """A pair: the part of the generation prompt inside {% generation %} (mostly ""), after which an answer begins;
        and the end of the text before an answer. None: answers do not begin with the generation prompt, or the tag
        begins after the generation prompt."""
        try:
            text, marked = self._mark(PROBE, None, False)
            asked, plain = (self.render(PROBE[:1], None, wants_answer) for wants_answer in (True, False))
        except Exception:       # a template may raise anything, and may refuse these messages
            return "", ""
        begin = marked[0][0] if marked else len(text)
        if not text.startswith(asked) or begin > len(asked):
            return None
        return text[begin:len(asked)], asked[len(plain):] if asked.startswith(plain) else ""

    @functools.cached_property
    def arguments_as_text(self) -> bool:
        """Whether the template accepts a tool call's arguments only as a string of JSON, as DeepSeek's templates do."""
        def takes(arguments) -> bool:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            try:
                self.render([PROBE[0], {"role": "assistant", "content": "", "tool_calls": [call]}], None, False)
            except Exception:       # a template may raise anything
                return False
            return True
        return not takes({}) and takes("{}")

    def leaves_calls_out(self, messages: Sequence[dict], tools, written: Written) -> bool:
        """Return whether there are tool calls and the text is the same without them."""
        if not any(message.get("tool_calls") for message in messages):
            return False
        without = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        try:
            return self.render(without, tools, False) == written.text
        except Exception:       # a template may raise anything
            return False

    def leaves_reasoning_out(self, messages, trained, written: Written) -> bool:
        """Return whether an answer that is learned has reasoning, under a key or before </think>, that the text lacks.
        trained: as in `spans`; None: learn all."""
        at = 0
        for i in _answers(messages):
            before, closed, _ = messages[i]["content"].partition("</think>")
            given = [messages[i].get(key) for key in REASONING] + [before.rpartition("<think>")[2] if closed else ""]
            for text in (one.strip() for one in given if isinstance(one, str) and (trained is None or trained[i])):
                at = written.text.find(text, at)
                if at < 0:
                    return True
        return False

    def _begins(self, messages, tools, text: str, marked: Sequence[tuple[int, int]]) -> tuple[list[int], bool]:
        """Return `begins` and `elsewhere` of Written. marked: the spans that the tag marks."""
        if marked and self.opening is not None:
            opening, ending = self.opening
            return [begin + len(opening) for begin, _ in marked if text.startswith(opening, begin)
                    and text.endswith(ending, 0, begin + len(opening))], False
        # The opening depends on the answer: e.g. one with reasoning begins with the tag that a generation prompt opens.
        answers = _answers(messages) if marked else []
        begins = [place for place in self._find_prompts(messages, tools, answers, text)
                  if any(begin <= place <= end for begin, end in marked)]
        return begins, len(begins) < len(answers) and len(messages) * len(answers) <= FEW

    def _mark(self, messages, tools, wants_answer: bool) -> tuple[str, list[tuple[int, int]]]:
        marks = begin, end = tuple(f"\ufdd0{secrets.token_hex(8)}" for _ in range(2))
        self.env.generation_marks = marks
        try:
            parts = self.render(messages, tools, wants_answer).split(begin)
        finally:
            self.env.generation_marks = ("", "")
        text, marked = parts[0], []
        for part in parts[1:]:
            said, _, after = part.partition(end)
            marked.append((len(text), len(text) + len(said)))
            text += said + after
        return text, marked

    def _by_prefix(self, messages, tools, answers) -> Written:
        """Return the text and spans for a template without the tag. A span begins at the end of an answer's generation
        prompt and ends where the text of the messages up to the answer ends."""
        text = self.render(messages, tools, False)
        begins = self._prefixes(messages, tools, True, answers, text)
        ends = self._prefixes(messages, tools, False, [i + 1 for i in answers], text)
        for i, begin, end in zip(answers, begins, ends):
            if not 0 <= begin <= end:
                raise ValueError(self._why_untold(messages, tools, i))
        given = sorted(set(_answers(messages)).difference(answers))
        return Written(text, list(zip(begins, ends)),
                       sorted([*begins, *self._find_prompts(messages, tools, given, text)]))

    def _why_untold(self, messages, tools, i: int) -> str:
        """Return why the answer messages[i] cannot be separated from the text before it."""
        asked, alone = self.render(messages[:i], tools, True), self.render(messages[:i + 1], tools, False)
        if alone.startswith(asked):
            return ("the chat template renders a turn differently when others follow (it drops reasoning, for example) "
                    "and has no {% generation %}, so the assistant's text cannot be found; give one line per answer, "
                    "with the turns before it as its prompt")
        rest = asked[len(os.path.commonprefix([asked, self.render(messages[:i], tools, False)])):]
        return (f"the generation prompt of the chat template is {rest[-80:]!r}, but message {i} (from 0), an answer, "
                "does not begin with it, so the answer's text cannot be found; give answers that begin with it (with "
                "their reasoning, if that is missing), or a template with {% generation %} around answers")

    def _find_prompts(self, messages, tools, counts: Sequence[int], text: str) -> list[int]:
        """Return where the generation prompts of answers that are not learned end, as far as this is found at a low
        cost."""
        try:
            known = self._resume(messages, tools, True, counts, text) if len(counts) > 1 else {}
        except (Exception, Unknown):    # the template does not treat the messages as a list: render one by one
            known = {}
        for count in counts:
            if count not in known and len(messages) * len(counts) <= FEW:
                try:
                    prefix = self.render(messages[:count], tools, True)
                except Exception:       # a template may raise anything
                    continue
                known[count] = len(prefix) if text.startswith(prefix) else -1
        return sorted(begin for begin in known.values() if begin >= 0)

    def _prefixes(self, messages, tools, wants_answer: bool, counts: Sequence[int], text: str) -> list[int]:
        """Return, for each count, the length of the text of that many first messages; -1 if it is not a prefix of
        `text`."""
        try:
            known = self._resume(messages, tools, wants_answer, counts, text) if len(counts) > 1 else {}
        except (Exception, Unknown):    # as in `_find_prompts`; this reports the template's errors
            known = {}
        lengths = []
        for count in counts:
            if count not in known:
                if 0 < signal.getitimer(signal.ITIMER_PROF)[0] < SPARE_S:
                    raise ValueError(f"has {len(counts):,} answers to learn. The chat template has no {{% generation "
                                     f"%}}, and rendering it for each of them takes too long; divide the conversation, "
                                     f"or name a template with the tag")
                prefix = self.render(messages[:count], tools, wants_answer)
                known[count] = len(prefix) if text.startswith(prefix) else -1
            lengths.append(known[count])
        return lengths

    def _resume(self, messages, tools, wants_answer: bool, counts: Sequence[int], text: str) -> dict[int, int]:
        """Return count -> length, as `_prefixes`, for the counts that it finds. The time is linear in the messages
        instead of quadratic.

        The text of a prefix is the full text up to its last message, followed by what the template writes if its loop
        begins there. This holds if the template loops over the messages once, keeps no state between turns, and looks
        at most one message ahead. Raises: Exception if the template does anything else.
        """
        if self.resumable is None:
            return {}
        whole = Reading(messages, len(messages), 0)
        written = whole.render(self, tools, wants_answer)
        alike = len(os.path.commonprefix([written, text]))
        lengths = {}
        for count in counts:
            turn = count - 1 - whole.first
            # Messages accessed before the loop must exist; and a loop from turn 0 is the plain one.
            if turn < 1 or count <= whole.seen_before or turn >= len(whole.begins) or whole.far < turn:
                continue
            part = Reading(messages, count, turn)
            rest = part.render(self, tools, wants_answer)[part.begins[0]:]
            begin = whole.begins[turn]
            lengths[count] = begin + len(rest) if begin <= alike and text.startswith(rest, begin) else -1
        return lengths


class Reading:
    """One pass of a resumable template over the first `count` messages, beginning at turn `skipped`.

    begins: start of each turn's text. first: the message of turn 0. seen_before: number of messages accessed before the
    loop. far: the first turn that looked beyond the next message.
    """

    def __init__(self, messages: Sequence[dict], count: int, skipped: int):
        self.messages, self.count, self.skipped = messages, count, skipped
        self.begins, self.first, self.seen_before, self.far = [], 0, 0, len(messages)
        self.loop, self.length = None, 0

    def render(self, renderer: Renderer, tools, wants_answer: bool) -> str:
        pieces = []
        for piece in renderer.resumable.generate(
                messages=Turns(self, 0), tools=tools, add_generation_prompt=wants_answer, **renderer.variables,
                _each=self.each, _begin=self.begin, _skipped=self.turns_skipped):
            pieces.append(piece)
            self.length += len(piece)
        if not self.begins:
            raise TypeError("no loop over the messages")
        return "".join(pieces)

    def look(self, index: int) -> bool:
        """Record an access to a message; return whether the message exists."""
        if not self.begins:
            self.seen_before = max(self.seen_before, index + 1)
        elif index > self.first + len(self.begins):
            self.far = min(self.far, len(self.begins) - 1)
        return index < self.count

    def each(self, number: int, values):
        """Return the values of a loop of the template."""
        if not isinstance(values, Turns):
            return values
        if self.loop is not None:
            raise TypeError("a second loop over the messages")
        self.loop, self.first = number, values._first
        return self.messages[values._first + self.skipped:self.count]

    def begin(self, number: int) -> str:
        if number == self.loop:
            self.begins.append(self.length)
        return ""

    def turns_skipped(self, number: int) -> int:
        return self.skipped if number == self.loop else 0


class Turns:
    """The messages from `first` on, for access to one at a time. Any other access raises Unknown."""

    def __init__(self, reading: Reading, first: int):
        self._reading, self._first = reading, first

    def __bool__(self) -> bool:
        return self._reading.look(self._first)

    def __getitem__(self, index):
        if type(index) is int and index >= 0:
            if self._reading.look(self._first + index):
                return self._reading.messages[self._first + index]
            raise IndexError
        if type(index) is slice and index.stop is index.step is None and type(index.start) is int and index.start >= 0:
            return Turns(self._reading, self._first + index.start)
        raise Unknown

    def _unknown(self, *_):
        raise Unknown

    __iter__ = __len__ = __contains__ = __reversed__ = __eq__ = __getattr__ = __str__ = _unknown
    __add__ = __radd__ = __mul__ = __rmul__ = _unknown


class Unknown(BaseException):
    """A template requested something that depends on the prefix. No test or filter of jinja catches this exception."""


KEPT = {"namespace", "cycler", "joiner"}    # objects that keep state between turns of a loop


class Resumable(jinja2.visitor.NodeTransformer):
    """Changes a template's outermost loops so that they can begin at any turn, for Reading. known: whether this is
    possible, since loops keep no state. Nested loops, macros and blocks are not changed: they get no Turns."""

    def __init__(self):
        self.number, self.inside, self.known = 0, False, True

    def change(self, template: jinja2.nodes.Template, environment: jinja2.Environment) -> jinja2.Template | None:
        """Return the changed template; None if it is not resumable. Changes `template`."""
        self.visit(template)
        if not self.known or not self.number:
            return None
        template.set_environment(environment)
        return environment.from_string(template.set_lineno(1))

    def visit_For(self, loop: jinja2.nodes.For) -> jinja2.nodes.For:
        if self.inside:
            loop.iter = self.visit(loop.iter)       # the body has its own `loop`
            self.known &= not any(name.name in KEPT for name in loop.find_all(jinja2.nodes.Name))
            return loop
        self.inside, self.known = True, self.known and not (loop.recursive or loop.else_ or loop.test)
        loop.body = [self.visit(node) for node in loop.body]
        loop.body.insert(0, jinja2.nodes.Output([self._call("_begin")]))
        loop.iter = self._call("_each", loop.iter)
        self.inside, self.number = False, self.number + 1
        return loop

    def _call(self, name: str, *values: jinja2.nodes.Expr) -> jinja2.nodes.Call:
        return jinja2.nodes.Call(jinja2.nodes.Name(name, "load"), [jinja2.nodes.Const(self.number), *values],
                                 [], None, None)

    def visit_Getattr(self, node: jinja2.nodes.Getattr) -> jinja2.nodes.Expr:
        if not (self.inside and isinstance(node.node, jinja2.nodes.Name) and node.node.name == "loop"):
            return self.generic_visit(node)
        if node.attr in ("index", "index0"):
            return jinja2.nodes.Add(node, self._call("_skipped"))
        if node.attr == "first":
            first = jinja2.nodes.Getattr(node.node, "index0", "load")
            return jinja2.nodes.Compare(jinja2.nodes.Add(first, self._call("_skipped")),
                                        [jinja2.nodes.Operand("eq", jinja2.nodes.Const(0))])
        self.known &= node.attr in ("last", "nextitem")
        return node

    def visit_Name(self, node: jinja2.nodes.Name) -> jinja2.nodes.Name:
        self.known &= node.name not in KEPT and not (self.inside and node.name == "loop")
        return node

    def _in_pieces(self, node: jinja2.nodes.Node) -> jinja2.nodes.Node:
        """Reject blocks that begin outside a loop: their text has no position yet."""
        return self.generic_visit(node) if self.inside else node

    def _unknown(self, node: jinja2.nodes.Node) -> jinja2.nodes.Node:
        self.known = False
        return node

    visit_AssignBlock = visit_FilterBlock = visit_CallBlock = _in_pieces
    visit_Macro = visit_Block = visit_Extends = visit_Include = visit_Import = visit_FromImport = visit_Break = _unknown


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_text(messages: Sequence[dict]) -> list[dict]:
    """Return the messages with the arguments of tool calls as strings of JSON."""
    def write_call(call: dict) -> dict:
        function = call.get("function", call)
        text = {"arguments": _to_json(function.get("arguments", {}))}
        return call | ({"function": function | text} if "function" in call else text)
    return [message | {"tool_calls": [write_call(call) for call in message["tool_calls"]]} if message.get("tool_calls")
            else message for message in messages]


def answer(renderer: Renderer, asked: dict) -> dict:
    """Return the reply to one request."""
    messages, tools = asked["messages"], asked["tools"]
    try:
        renderer = renderer.using(json.dumps(asked["arguments"])) if asked["arguments"] else renderer
        if any(message.get("tool_calls") for message in messages) and renderer.arguments_as_text:
            messages = _with_text(messages)
        written = renderer.whole(messages, tools, asked["prompt"]) if asked["trained"] is None else \
            renderer.spans(messages, tools, asked["trained"])
        unwritten = not asked["prompt"] and renderer.leaves_calls_out(messages, tools, written)
        unreasoned = not asked["prompt"] and renderer.leaves_reasoning_out(messages, asked["trained"], written)
        return written._asdict() | {"unwritten": unwritten, "unreasoned": unreasoned}
    except ValueError as error:
        return {"fault": str(error)}
    except jinja2.TemplateError as error:
        return {"fault": f"the chat template refuses it: {error.message}"}
    except MemoryError:
        return {"fault": f"the chat template takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:      # a template may raise anything
        return {"fault": f"the chat template fails: {type(error).__name__}: {str(error)[:200]}"}


def main() -> None:
    """Read a line {template, tokens, today, limit_s, most_chars}, then a list of requests per line; write a line of
    replies to each."""
    # Signals from the terminal, or from Slurm, which may signal all processes of a step: the parent handles them.
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limited, most in LIMITS.items():
        resource.setrlimit(limited, (most, most))
    first = json.loads(sys.stdin.readline())

    def limit(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def reply(value: object) -> None:
        print(json.dumps(value), flush=True)

    limit(first["limit_s"])
    try:
        renderer = Renderer(first["template"], first["tokens"], first["today"], first["most_chars"])
    except (jinja2.TemplateError, RecursionError, MemoryError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return reply({"fault": f"{line}{getattr(error, 'message', None) or error}"})
    reply({"names": renderer.names})
    for line in sys.stdin:
        for asked in json.loads(line):
            limit(first["limit_s"])
            reply(answer(renderer, asked))
        limit(0)


if __name__ == "__main__":
    main()
