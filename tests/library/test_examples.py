"""The examples train on any layout with the losses of one device."""
import importlib.util
from pathlib import Path

import pytest
from gpu_programs import needs_compiler

import meshtrain as mt

FOLDER = Path(__file__).parent.parent.parent / "examples"
LAYOUTS = {"linear_attention": [("zero3", {"fsdp": 2, "tensor": 2}), ("zero1", {"data": 4}), ("ddp", {"data": 2})],
           "vision_transformer": [("zero1", {"data": 2, "tensor": 2}), ("zero3", {"fsdp": 4}), ("ddp", {"data": 2})],
           "experts": [("ddp", {"stage": 2, "data": 2}), ("ddp", {"stage": 4}), ("zero3", {"fsdp": 2})]}
STEPS = 2


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_short():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(LAYOUTS)
    assert all(len(path.read_text().splitlines()) <= 120 for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name, rules, sizes", [
    pytest.param(name, *layout, id=f"{name}-{layout[0]}-{' '.join(layout[1])}", marks=[] if (name, number) == (
        "linear_attention", 2) else pytest.mark.full)
    for name, layouts in LAYOUTS.items() for number, layout in enumerate(layouts)])
def test_an_example_trains_with_the_losses_of_one_device(name, rules, sizes):
    example = load(name)
    expected = example.train(mt.Layout(rules, {}), STEPS)
    assert example.train(mt.Layout(rules, sizes), STEPS) == pytest.approx(expected, rel=2e-5)


@needs_compiler
@pytest.mark.full
def test_the_vision_transformer_is_priced_for_absent_gpus():
    costs = load("vision_transformer").price("zero1", {"data": 2, "tensor": 4}, "h100:8")
    sent = {(row["kind"], *row["axes"]) for row in costs.collectives["compiled"]}
    assert {("reduce-scatter", "data"), ("all-gather", "data"), ("all-reduce", "tensor")} <= sent
    assert costs.roofline["step_time_s"] > 0 and costs.memory_bytes["compiled"]["total"] > 0
