"""Code of a run's own, given by path: the examples of docs/extend.md compute on every layout what they compute on one device,
and what cannot be computed is refused by name."""
import json
import math
import re
from pathlib import Path

import parity
import pytest
from commands import call, refused

from meshtrain import config, design, pattern
from meshtrain.commands import convert, generate, plan, train
from meshtrain.cost.formulas import mixers
from meshtrain.inference import cache
from meshtrain.kernels import activations
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training import objective, optimizer, state

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL))
MODEL = dict(vocab_size=259, embed_dim=32, num_layers=4, num_heads=4, head_dim=8, mlp_dim=48, norm_eps=1e-2,
             compute_dtype="float32", mixers="FX", activation="mine.py:reglu", custom=dict(X="mixers.py:Shift"))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """A directory with the examples of the page."""
    monkeypatch.chdir(tmp_path)
    for name, text in EXAMPLES.items():
        Path(name).write_text(text)


def run_of(mesh: dict, rules: str = "zero3", model: dict = MODEL, **sections) -> config.Run:
    training = dict(steps=9, loss_chunk=24, objective="focal.py:Focal") | sections.pop("training", {})
    return config.Run(mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rules}.toml")), model=model,
                      data=dict(seq_len=32, global_batch=8) | sections.pop("data", {}), training=training,
                      optimizer=dict(learning_rate=1e-3, name="mine.py:build", schedule="mine.py:rate"), **sections)


ADAPTERS, FLOAT8 = dict(rank=2, alpha=4.0), dict(matmul_dtype="float8")
SHARED = MODEL | dict(custom=dict(X="shared.py:Shared"))
CASES = {
    # As many rows as tokens: a mixer that got [T, B, D] would still compute something.
    "sequence parallel": (dict(fsdp=2, tensor=2), "zero3", MODEL, dict(data=dict(seq_len=16, global_batch=16))),
    "three axes": (dict(data=2, fsdp=2, tensor=2), "zero3", MODEL, dict(training=dict(remat="selective"))),
    "microbatches": (dict(fsdp=4), "zero3", MODEL, dict(training=dict(microbatches=2, remat="full"))),
    "tensor": (dict(tensor=4, data=2), "tensor", MODEL, {}),
    "stage and tensor": (dict(stage=2, tensor=2), "zero1", MODEL, dict(training=dict(microbatches=2))),
    "stage and data": (dict(stage=2, data=2), "zero1", MODEL, dict(
        training=dict(microbatches=4), pipeline=dict(schedule="zero_bubble"))),
    "context and tensor": (dict(context=2, tensor=2), "zero3", SHARED, {}),
    "context and stage": (dict(context=2, stage=2), "zero1", SHARED, dict(training=dict(microbatches=2))),
    "adapters and tensor": (dict(fsdp=2, tensor=2), "zero3", MODEL, dict(lora=ADAPTERS)),
    "adapters and stage": (dict(stage=2, data=2), "zero1", MODEL, dict(lora=ADAPTERS, training=dict(microbatches=2))),
    "adapters and context": (dict(context=2, fsdp=2), "zero3", SHARED, dict(lora=ADAPTERS)),
    "float8 and tensor": (dict(fsdp=2, tensor=2), "zero3", MODEL | FLOAT8, {}),
    "float8 and context": (dict(context=2, fsdp=2), "zero3", SHARED | FLOAT8, {}),
    "float8 and stage": (dict(stage=2, data=2), "zero1", MODEL | FLOAT8, dict(training=dict(microbatches=2))),
}
# Sums in another order move some numbers to the next float8 value, 6 or 12% away: leaves are then some tenths of a percent off.
NEAR_FLOAT8 = parity.Tolerance(1e-5, 1e-2, 3e-2, 1e-2, 1e-2, 1e-2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (number > 0))
                                  for number, name in enumerate(CASES)])
def test_layouts_compute_what_one_device_does(name):
    mesh, rules, model, sections = CASES[name]
    run = run_of(mesh, rules, model, **sections)
    assert config.problems(run) == []
    # With seed 0 stages choose another scale of one array: all leaves are off by 5%, with seeds 1 to 3 by 1e-5.
    parity.check(run, seed=int("float8" in name), tolerance=NEAR_FLOAT8 if "float8" in name else parity.FLOAT32)


def make(run: config.Run) -> design.Design:
    return design.make(run, MeshSpec(config.mesh_sizes(run, math.prod(getattr(run.mesh, axis) for axis in config.AXES)), run.mesh.placement), "cpu", None)


def test_each_part_of_ones_own_is_in_the_model_the_objective_and_the_state():
    """A part that another replaces without a word would agree with itself on every layout."""
    run = run_of({})
    made = make(run)
    names = {info.name for info in made.model.parameters()}
    assert {"layers/1/custom/inward/kernel", "layers/0/attention/query/kernel"} <= names
    assert type(objective.of_run(run)).__name__ == "Focal"
    assert activations.find(run.model.activation)(-1.0, 2.0) == 0 and run.model.gated
    assert state.optimizer_bytes(made.model, run.optimizer, 9)["optimizer_bytes"] == 4.0     # a parameter; AdamW has 8
    rate = optimizer.learning_rate_schedule(run.replace(optimizer={"warmup_steps": 2}).optimizer, 9)
    assert [float(rate(n)) for n in (0, 2)] == [0, pytest.approx(1e-3)]
    assert {row.split("=")[0] for row in made.notes if "cost formulas" in row} == {
        "model.activation", "model.custom.X", "training.objective"}


@pytest.mark.parametrize("mesh, model, told", [
    (dict(context=2), {}, r'mesh.context=2: model.custom.X="mixers.py:Shift" gets a part of each sequence.*context = True'),
    ({}, dict(activation="wrong.py:mean"), r'model.activation="wrong.py:mean" returned .*; give a function of \(gate, up\)'),
    ({}, dict(custom=dict(X="wrong.py:Bare")), r"the parameter custom/w has no logical axes; declare it by Linear"),
    ({}, dict(custom=dict(X="wrong.py:Raises")), r'model.custom.X="wrong.py:Raises" was called with \(Model, Rngs\) and raised KeyError in line 13 of wrong.py')])
def test_what_a_part_cannot_do_is_refused_before_anything_is_compiled(mesh, model, told):
    Path("wrong.py").write_text(WRONG)
    with pytest.raises(config.ConfigError, match=told):
        make(run_of(mesh, model=MODEL | model))


def test_an_objective_of_other_data_is_refused_by_name():
    Path("wrong.py").write_text(WRONG)
    with pytest.raises(config.ConfigError, match='training.objective="wrong.py:Pairs".*trains on documents with tokens'):
        make(run_of({}).replace(training={"objective": "wrong.py:Pairs"}))


WRONG = """
import jax.numpy as jnp
from flax import nnx
from meshtrain.training.objective import NextToken

def mean(up): return up.mean(-1)

class Bare(nnx.Module):
    def __init__(self, cfg, rngs): self.w = nnx.Param(jnp.ones(3))
    def __call__(self, ex, x_BTD, inputs): return x_BTD

class Raises:
    def __init__(self, cfg, rngs): raise KeyError("size")

class Pairs(NextToken):
    data = "pairs"
"""


def test_plan_and_generation_name_what_a_mixer_lacks():
    Path("RUN.toml").write_text(config.dump(run_of({}).replace(data={"source": "stdlib"})))
    ran = call(plan.main, "RUN.toml", "--gpus", "8", "--gpu", "h100")
    refused(ran, 'model.custom.X="mixers.py:Shift" has no price')
    with pytest.raises(ValueError, match='model.custom.X="mixers.py:Shift" has no cache'):
        cache.check(run_of({}).model)
    assert cache.check(run_of({}, model=SHARED).model) is None
    with pytest.raises(config.ConfigError, match="has no cache"):
        make(run_of({}, run={"sample_tokens": 8}))


def test_a_letter_without_a_row_and_a_family_without_a_cost_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="there is no mixer 'Q'; the table of letters has F, W"):
        pattern.mixer("Q")
    monkeypatch.setitem(pattern.MIXERS, "Q", pattern.Mixer("another", "quadratic"))
    with pytest.raises(ValueError, match=r"the mixer 'Q' \(another\) has no cost"):
        mixers.class_of(run_of({}).model, "Q")


@pytest.mark.full
def test_a_run_keeps_its_code_and_later_commands_need_no_other_file(tmp_path, monkeypatch):
    model = SHARED | dict(num_layers=2)
    Path("RUN.toml").write_text(config.dump(run_of({"simulated_devices": 8, "data": 8}, "ddp", model=model)
                                            .replace(data={"source": "stdlib"}, training={"steps": 2})))
    first = call(train.main, "RUN.toml", "--run.dir", "own", "--run.compilation_cache=")
    assert first.code == 0, first.err
    Path("mine.py").write_text(EXAMPLES["mine.py"].replace("relu(gate)", "relu(gate + 1)"))
    again = call(train.main, "RUN.toml", "--run.dir", "own", "--run.compilation_cache=", "--training.steps", "3")
    assert again.code == 0 and "from step 3 on: run.code=" in again.out, again.err
    (change,) = [row for row in map(json.loads, Path("own/changes.jsonl").read_text().splitlines())
                 if row["key"] == "run.code"]
    assert [len(set(change["from"]) - set(change["to"])), change["step"]] == [1, 2]
    for name in EXAMPLES:
        Path(name).unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path("own").rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)
    for step in (2, 3):     # each with the code of its step
        said = call(generate.main, "moved", "--step", step, "--prompt", "The ", "--max-tokens", 3)
        assert said.code == 0, said.err
    refused(call(convert.main, "moved", "out"), 'model.activation="')
    refused(call(train.main, tmp_path / "RUN.toml", "--run.dir", "moved"), "mine.py cannot be read")
