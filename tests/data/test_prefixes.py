"""A chat template without {% generation %} finds in a conversation of any length what rendering every prefix of it
finds."""
import random
import re
import time

import pytest

from meshtrain.data.documents import rendering

END = "{% if add_generation_prompt %}<assistant>{% endif %}"
# Templates as they are published, by what they ask of the messages; and whether a loop can be begun anywhere.
TEMPLATES = {
    "chatml": ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}" + END, True),
    "system first": ("{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = "
                     "messages[1:] %}{% endif %}[{{ system }}]{% for m in messages %}{{ m.role }}{{ loop.index0 }}{% "
                     "set c = m.content %}{% if loop.first %}{% set c = '!' + c %}{% endif %}{% for x in c %}{{ "
                     "loop.index }}{{ x }}{% endfor %}{{ loop.index }}{% endfor %}" + END, True),
    "neighbours": ("{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != m.role %}<{{ m.role "
                   "}}>{% endif %}{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != m.role %}|{% "
                   "endif %}{% endfor %}" + END, True),
    "a block": ("{% for m in messages %}{% set x %}{{ m.role }}{{ loop.index }}{% endset %}{{ x }}{{ m.content }}{% "
                "endfor %}" + END, True),
    "a first answer": ("{{ messages[1].content }}{% for m in messages %}{{ m.content }};{% endfor %}{{ "
                       "messages[2].role }}", True),
    "ahead": ("{% for m in messages %}{{ m.content }}{{ messages[loop.index0 + 2].role }}{% endfor %}", True),
    "the number": ("{% for m in messages %}{{ m.content }};{% endfor %}{% if messages|length > 3 %}{% endif %}", True),
    "no loop": ("{{ messages[0].content }}" + END, False),
    "a namespace": ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content }}{{ "
                    "ns.n }}{% endfor %}" + END, False),
    "the last": ("{% for m in messages %}{{ m.role }}{{ m.content if m.role == 'user' or loop.last else '…' }}{% "
                 "endfor %}", True),
    "two passes": ("{% for m in messages %}{% if m.role == 'tool' %}tools!{% endif %}{% endfor %}{% for m in messages "
                   "%}{{ m.content }},{% endfor %}", True),
    "a block around": ("{% set all %}{% for m in messages %}{{ m.content }};{% endfor %}{% endset %}{{ all }}"
                       + END, False),
    "a filter": ("{% for m in messages|list %}{{ m.content }};{% endfor %}" + END, True),
    "refusal": ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ "
                "m.content }};{% endfor %}", True),
    "odd turns": ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in "
                  "turn') }}{% endif %}{{ m.content }};{% endfor %}" + END, True),
    "an end": ("{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.content }};{% endfor %}",
               False),
    "chosen": ("{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ m.content }};{% else %}none{% endfor %}"
               + END, False),
    "before": ("{% for m in messages %}{{ loop.previtem.role }}{{ m.content }};{% endfor %}" + END, False),
    "a cycle": ("{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ m.content }};{% endfor %}" + END, False),
    "as JSON": ("{% for m in messages %}{{ m.content }};{% endfor %}{{ (messages|tojson)[:0] }}", True),
    "tests": ("{% if messages is sequence and messages is not string %}{% for m in messages %}{{ m.content }};{% "
              "endfor %}{% endif %}", True),
}


def asked(seed: int) -> dict:
    rng = random.Random(seed)
    roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * rng.randrange(2, 5) + ["assistant"] * rng.randrange(
        2)
    if seed % 3 == 0:
        roles[rng.randrange(len(roles))] = "tool"
    messages = [{"role": role, "content": rng.choice(["a", "bc", ""])} for role in roles]
    return {"messages": messages, "tools": None, "arguments": {}, "prompt": False, "trained": [rng.random() < 0.8 for _ in roles]}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_found_as_if_its_prefixes_were_rendered(name):
    text, resumable = TEMPLATES[name]
    renderer, plain = rendering.Renderer(text, {}, False), rendering.Renderer(text, {}, False)
    assert (renderer.resumable is not None) == resumable
    plain.resumable = None
    found = [(rendering.answer(renderer, asked(seed)), rendering.answer(plain, asked(seed))) for seed in range(40)]
    assert [one for one in found if one[0] != one[1]] == []


def test_a_conversation_of_a_thousand_answers_takes_seconds_whatever_the_template_is_like(monkeypatch):
    messages = [{"role": role, "content": "the cat sat"} for role in ("user", "assistant")] * 1000
    for name in ("chatml", "neighbours"):
        rendered, real = [], rendering.Renderer.render
        with monkeypatch.context() as counted:
            counted.setattr(rendering.Renderer, "render", lambda *args: rendered.append(len(args[1])) or real(*args))
            began = time.process_time()
            spans = rendering.answer(rendering.Renderer(TEMPLATES[name][0], {}, False), {
                "messages": messages, "tools": None, "arguments": {}, "prompt": False, "trained": [True] * 2000})["spans"]
        assert len(spans) == 1000 and sum(rendered) < 2010 and time.process_time() - began < 5


def test_a_long_conversation_that_cannot_be_rendered_within_the_limit_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr(rendering.signal, "getitimer", lambda _: (0.5, 0.0))
    told = rendering.answer(rendering.Renderer(TEMPLATES["a namespace"][0], {}, False), asked(1))["fault"]
    assert re.search(r"has \d answers to learn.* divide the conversation, or name a template with the tag", told)


def test_what_stands_for_messages_shows_a_template_nothing_of_the_process():
    renderer = rendering.Renderer("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages._reading }}{{ "
                                  "_each.__self__ }}", {}, False)
    assert rendering.Reading([{"content": "a"}], 1, 0).render(renderer, None, False) == "a"
