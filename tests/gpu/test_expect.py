"""inspect --expect: a gate that users keep beside a run; every collective or byte that changes is told by name."""
import dataclasses
import tomllib

import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401

from meshtrain.commands import inspect
from meshtrain.inspection.expect import Expected, ExpectedRow
from meshtrain.inspection import expect

GATHER = ("all-gather", ("fsdp",), "bf16[4096,14336]")
REDUCE = ("reduce-scatter", ("data", "fsdp"), "f32[4096,14336]")
STEP = Expected({"devices": "8 × h100", "model.num_layers": 32, "mesh": {"fsdp": 8}},
                {"jax": "0.10.2", "jaxlib": "0.10.2"},
                {"params": 100, "total": 1000}, {GATHER: ExpectedRow(64, 6400, "layers/mlp/up/kernel"),
                                                 REDUCE: ExpectedRow(32, 3200, "a \"b\" ü\\")})


def changed(**keys) -> Expected:
    return dataclasses.replace(STEP, **keys)


def test_the_file_says_all_and_is_the_same_whatever_the_order():
    text = expect.dumps(STEP, "python -m meshtrain.inspect run.toml --expect step.toml")
    assert expect.loads(text) == STEP and tomllib.loads(text)["compiler"] == {"jax": "0.10.2", "jaxlib": "0.10.2"}
    turned = changed(collectives=dict(reversed(STEP.collectives.items())))
    assert expect.dumps(turned, "python -m meshtrain.inspect run.toml --expect step.toml") == text
    assert sum("bytes =" in line
               for line in text.splitlines()) == len(STEP.collectives), "a line for each, so that a diff is read"


@pytest.mark.parametrize("now, said", [
    ({"collectives": STEP.collectives | {GATHER: ExpectedRow(128, 12800, "layers/mlp/up/kernel")}},
     "all-gather over fsdp of bf16[4096,14336] (layers/mlp/up/kernel): count 64 → 128, bytes 6,400 → 12,800"),
    ({"collectives": {GATHER: STEP.collectives[GATHER]}},
     "gone: reduce-scatter over data × fsdp of f32[4096,14336] (a \"b\" ü\\): count 32 → 0, bytes 3,200 → 0"),
    ({"collectives": STEP.collectives | {("all-to-all", ("fsdp",), "bf16[8]"): ExpectedRow(1, 7, "")}},
     "new: all-to-all over fsdp of bf16[8]: count 0 → 1, bytes 0 → 7"),
    ({"memory_bytes": {"params": 100, "total": 1001}}, "memory, total: bytes 1,000 → 1,001"),
    ({"memory_bytes": {"params": 100, "total": 1000, "host": 5}}, "memory, host: bytes none → 5")],
    ids=["more", "gone", "new", "memory", "host"])
def test_every_change_is_a_line_of_its_own(now, said):
    assert expect.differences(STEP, changed(**now)) == [said]
    assert expect.differences(STEP, changed(collectives=dict(STEP.collectives))) == []


def test_what_parameters_are_called_is_no_difference():
    renamed = {key: dataclasses.replace(row, of="another/name") for key, row in STEP.collectives.items()}
    assert expect.differences(STEP, changed(collectives=renamed)) == []


def test_another_run_and_another_compiler_are_told():
    other = changed(run=STEP.run | {"model.num_layers": 40, "training.remat": "full"},
                    compiler={"jax": "0.12.0", "jaxlib": "0.12.0"})
    assert expect.causes(STEP, other) == [
        "the run differs: model.num_layers 32 → 40", 'the run differs: training.remat "default" → "full"',
        "the compiler differs: written with jax 0.10.2 and jaxlib 0.10.2, compiled here with jax 0.12.0 and jaxlib "
        "0.12.0"]
    assert expect.causes(STEP, STEP) == []


def test_a_gate_passes_what_it_wrote_and_fails_what_moves_more(tiny, tmp_path):  # noqa: F811
    """zero3 instead of ddp: weights are gathered, gradients scattered, states split."""
    gate = (*tiny, "--model.compute_dtype", "bfloat16", "--expect", "step.toml")
    ran = call(inspect.main, *gate, "--update")
    assert (ran.code, ran.err) == (0, "written: step.toml\n"), ran
    text = (tmp_path / "step.toml").read_text()
    ran = call(inspect.main, *gate)
    assert (ran.code, ran.out) == (0, "") and ran.err.startswith("the step agrees with step.toml:"), ran
    moved = call(inspect.main, *gate, "--sharding.rules", "sharding_rules/zero3.toml")
    assert moved.code == 1 and moved.out == "", moved
    assert any(line.startswith("new: all-gather over data of") and "(layers/mlp/" in line
               for line in moved.err.splitlines())
    assert 'the run differs: rules "my rules.toml" → "zero3.toml"' in moved.err
    assert "memory, params: bytes" in moved.err
    assert (tmp_path / "step.toml").read_text() == text, "only --update writes"


@pytest.mark.parametrize("path, said", [("no/where.toml", "there is no directory no"), (".", "it is a directory")])
def test_where_nothing_can_be_written_is_told_before_anything_is_compiled(tiny, path, said, monkeypatch):  # noqa: F811
    monkeypatch.setattr(inspect.assembly, "assemble", None)
    refused(call(inspect.main, *tiny, "--expect", path, "--update"), f"--expect={path} cannot be written: {said}")
    refused(call(inspect.main, *tiny, "--schedule", "--expect", "a.toml"), "--schedule compiles nothing")
