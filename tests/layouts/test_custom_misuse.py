"""Code of a run's own that is not what its key calls ends with one message: the key, what is wrong, what to give."""
import itertools
import re
from pathlib import Path

import pytest

from meshtrain import config
from meshtrain.config import sections
from meshtrain.cost.formulas import mixers
from meshtrain.training import state
from test_custom import EXAMPLES, MODEL, make, run_of

PARTS = {"model.activation": "mine.py:reglu", "optimizer.name": "mine.py:build", "optimizer.schedule": "mine.py:rate",
         "training.objective": "focal.py:Focal", "model.custom.X": "mixers.py:Shift"}
CONTRACTS = dict(zip(PARTS, (sections.ACTIVATION, sections.OPTIMIZER, sections.SCHEDULE, sections.OBJECTIVE, sections.MIXER)))
OTHERS = """
from os import getcwd
import optax
from flax import nnx
import jax.numpy as jnp
from meshtrain.model.stats import LayerStats
from meshtrain.training.objective import NextToken, Objective

number = 3
def none(): return 0
def many(a, b, c, d, e, f): return 0
def keyword(a, b, *, c): return 0
def nothing(a, b): return None
def text(a, b): return "cosine"
def pair(a, b): return (a, b)
def raises(a, b): raise RuntimeError("first line\\nsecond line " + "x" * 999)
def exits(*arguments): raise SystemExit(3)
class Empty: pass
class Bare(nnx.Module):
    def __init__(self, a, b): pass
class Failing(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b, c): return self.missing
class Nothing(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b, c): return None
class Leaves(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b, c): raise SystemExit(3)
class Two(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b): return b
class Keyword(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b, c, *, d): return b
class Narrow(nnx.Module):
    def __init__(self, a, b): pass
    def __call__(self, a, b, c): return b.astype(jnp.float16)
class Scalar(NextToken):
    def head(self, a, b, c, d, e): return d.sum()
class Vector(NextToken):
    def head(self, a, b, c, d, e): return d.sum(0), d.sum(), LayerStats()
class Half(NextToken):
    def head(self, a, b, c, d, e): return d.sum().astype(jnp.bfloat16), d.sum(), LayerStats()
class Counts(NextToken):
    def count(self, a): return None
class Short(NextToken):
    def head(self, a, b, c): return 0
class Of(NextToken):
    @classmethod
    def of(cls): return cls(0, 1)
class Nowhere(NextToken):
    @classmethod
    def of(cls, run): return None
class Exits(NextToken):
    def head(self, *arguments): raise SystemExit(3)
class Abstract(Objective): pass
class Fails(NextToken):
    def head(self, a, b, c, d, e): return 1 / 0
def no_init(a, b): return optax.GradientTransformation(None, None)
def flat(a, b): return optax.GradientTransformation(lambda p: (), lambda g, s, p: (jnp.zeros(3), s))
def grows(a, b): return optax.GradientTransformation(lambda p: (), lambda g, s, p: (g, (1,)))
def rates(a, b): return lambda n: jnp.ones(3)
def rate_of_two(a, b): return lambda n, m: 1.0
"""
OWN = {"model.custom.X": ("Bare", "Failing", "Nothing", "Narrow", "Leaves", "Two", "Keyword"),
       "training.objective": ("Scalar", "Vector", "Half", "Counts", "Fails", "Short", "Of", "Abstract", "Nowhere", "Exits"),
       "optimizer.name": ("no_init", "flat", "grows", "rates"), "optimizer.schedule": ("rates", "rate_of_two", "no_init")}
EVERYWHERE = ("number", "none", "many", "keyword", "nothing", "text", "pair", "raises", "exits", "Empty", "getcwd", "missing")
CASES = [*((key, f"others.py:{name}") for key in PARTS for name in (*EVERYWHERE, *OWN.get(key, ()))),
         *((key, value) for (key, own), value in itertools.product(PARTS.items(), PARTS.values()) if value != own),
         *((key, "torn.py:f") for key in PARTS)]
QUICK = ("optimizer.name-mine.py:reglu", "training.objective-others.py:Scalar", "model.custom.X-others.py:Nothing",
         "optimizer.schedule-others.py:rate_of_two", "optimizer.name-others.py:grows")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {**EXAMPLES, "others.py": OTHERS, "torn.py": "import none_such\ndef f(a, b): pass\n"}.items():
        Path(name).write_text(text)


def run_with(key: str, value: str) -> config.Run:
    section, name = key.split(".")[:2]
    small = {**MODEL, "num_layers": 2, "activation": "swiglu"}
    if section == "model":
        return run_of({}, model=small | {name: {"X": value} if name == "custom" else value})
    return run_of({}, model=small).replace(**{section: {name: value}})


@pytest.mark.parametrize("key, value", [
    pytest.param(key, value, id=f"{key}-{value}", marks=[pytest.mark.full] * (f"{key}-{value}" not in QUICK))
    for key, value in CASES])
def test_a_part_of_a_wrong_kind_is_one_message(key, value):
    run = run_with(key, value)
    with pytest.raises(config.ConfigError) as raised:
        if faults := config.problems(run):
            raise config.ConfigError(*faults)
        make(run)
    (message,) = raised.value.messages
    file, _, name = value.partition(":")
    assert (f"the mixer {name}" in message or file in message) and len(message) < 450
    if name != "missing" and file != "torn.py":
        assert message.endswith(f"give {CONTRACTS[key]}") and message.count("; give") == 1, message


PRICED = """
from flax import nnx
from meshtrain.model.layers import Linear
class Mixer(nnx.Module):
    price = {price}
    def __init__(self, cfg, rngs):
        self.out = Linear(cfg, rngs, "BTD,DE->BTE", (cfg.embed_dim,) * 2, ("embed", {axis}))
    def __call__(self, ex, x_BTD, inputs): return self.out(ex, x_BTD)
"""


@pytest.mark.parametrize("price, axis, told", [
    ("3", "None", 'model.custom.X="mixer.py:Mixer" has the `price` 3; give a subclass of'),
    ("None", "'voacb'", "custom/out/kernel has the logical axis 'voacb', which no rule knows (did you mean 'vocab'?)"),
    ("None", "'seq'", "has the logical axis 'seq', which only activations have")])
def test_a_price_and_axes_of_a_wrong_kind_are_one_message(price, axis, told):
    Path("mixer.py").write_text(PRICED.format(price=price, axis=axis))
    with pytest.raises(config.ConfigError, match=re.escape(told)):
        with config.user_errors():
            mixers.class_of(make(run_with("model.custom.X", "mixer.py:Mixer")).run.model, "X")


def test_an_optimizer_without_state_is_placed():
    Path("stateless.py").write_text("import optax\ndef build(cfg, roles):\n"
                                    "    return optax.GradientTransformation(lambda p: (), lambda g, s, p: (g, s))\n")
    run = run_with("optimizer.name", "stateless.py:build")
    made = make(run)
    assert made.placed and state.state_spec(made.model, run.optimizer, 9, made.layout, made.mesh_spec.abstract()).abstract


@pytest.mark.full
def test_numbers_that_are_not_finite_are_no_mistake_of_the_kind():
    Path("nan.py").write_text("import jax.numpy as jnp\ndef gate(a, b): return a * jnp.nan\n"
                              "def rate(cfg, steps): return lambda n: jnp.nan\n")
    for key, name in (("model.activation", "gate"), ("optimizer.schedule", "rate")):
        run = run_with(key, f"nan.py:{name}")
        assert config.problems(run) == [] and make(run)
