"""Renders chat templates, in a process of its own: a template is a program of whoever made the model folder.

It runs in jinja2's immutable sandbox, without a loader, with a limit of memory for the process and of CPU time for each
conversation, which the system enforces: a template that does not end takes this process along and no other. `chat.py` starts it
and speaks with it in lines of JSON. This file is run as it stands, and imports nothing of meshtrain.
"""
from __future__ import annotations

import json
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

MEMORY_BYTES = 1 << 30
# Of training, whose tokens must not depend on the day: what Llama's own templates say where they are not told one.
TRAINING_DATE = datetime(2024, 7, 26)


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: what the assistant says, between marks that no conversation can know."""
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


class Renderer:
    """A template as transformers renders it. today: whether it may know the date; else it is always the same."""

    def __init__(self, template: str, tokens: dict[str, str], today: bool):
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                           extensions=[Generation, jinja2.ext.loopcontrols])
        env.globals |= {"raise_exception": _refuse, "strftime_now": (datetime.now() if today else TRAINING_DATE).strftime}
        env.filters["tojson"] = _to_json
        self.env, self.tokens, self.template = env, tokens, env.from_string(template)
        self.names = sorted(jinja2.meta.find_undeclared_variables(env.parse(template)))

    def render(self, messages: Sequence[dict], tools, add_generation_prompt: bool) -> str:
        return self.template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
                                    **self.tokens)

    def spans(self, messages: Sequence[dict], tools, trained: Sequence[bool]) -> tuple[str, list[tuple[int, int]]]:
        """(text, [where it is the assistant's]), in characters, of those messages that are trained."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [trained[i] for i in answers]
        if not self.env.generation_seen:
            return self._by_prefix(messages, tools, [i for i in answers if trained[i]])
        text, found = self._marked(messages, tools)
        if all(wanted):
            return text, found
        if len(found) != len(answers):
            raise ValueError(f"the chat template marks {len(found)} passages of {len(answers)} answers, so those that are not to "
                             "be learned cannot be told from the others")
        return text, [span for span, want in zip(found, wanted) if want]

    def _marked(self, messages, tools) -> tuple[str, list[tuple[int, int]]]:
        marks = begin, end = tuple(f"\ufdd0{secrets.token_hex(8)}" for _ in range(2))
        self.env.generation_marks = marks
        try:
            parts = self.render(messages, tools, False).split(begin)
        finally:
            self.env.generation_marks = ("", "")
        text, found = parts[0], []
        for part in parts[1:]:
            said, _, after = part.partition(end)
            found.append((len(text), len(text) + len(said)))
            text += said + after
        return text, found

    def _by_prefix(self, messages, tools, answers) -> tuple[str, list[tuple[int, int]]]:
        """Of a template without the tag: from the prompt for an answer to the text that ends with it."""
        text, found = self.render(messages, tools, False), []
        for i in answers:
            before, with_it = self.render(messages[:i], tools, True), self.render(messages[:i + 1], tools, False)
            if not (text.startswith(with_it) and with_it.startswith(before)):
                raise ValueError("the chat template writes a turn otherwise once others follow (it leaves reasoning out, say) and "
                                 "has no {% generation %}, so what the assistant said cannot be told; give a line for each answer, the turns before it as its prompt")
            found.append((len(before), len(with_it)))
        return text, found


def _refuse(message: str):
    raise jinja2.TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(renderer: Renderer, asked: dict) -> dict:
    """The reply to one request."""
    messages, tools = asked["messages"], asked["tools"]
    try:
        if asked["trained"] is None:
            return {"text": renderer.render(messages, tools, asked["prompt"]), "spans": []}
        text, spans = renderer.spans(messages, tools, asked["trained"])
        return {"text": text, "spans": spans}
    except ValueError as error:
        return {"fault": str(error)}
    except jinja2.TemplateError as error:
        return {"fault": f"the chat template refuses it: {error.message}"}
    except MemoryError:
        return {"fault": f"the chat template takes more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:      # whatever a template does to itself
        return {"fault": f"the chat template fails: {type(error).__name__}: {str(error)[:200]}"}


def main() -> None:
    """A first line {template, tokens, today, limit_s}, then a list of requests a line; a reply a line to each request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # of the terminal: the process that asks decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    first = json.loads(sys.stdin.readline())
    limit = lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    reply = lambda value: print(json.dumps(value), flush=True)
    limit(first["limit_s"])
    try:
        renderer = Renderer(first["template"], first["tokens"], first["today"])
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
