"""What does not fit: exit code 3, and the change with which it fits."""
import pytest

from meshtrain import design, hardware, run_files
from meshtrain.commands import inspect, plan
from meshtrain.inspection import fitting, topologies
from meshtrain.cost.formulas import footprint

LLAMA = "configs/llama3-8b.toml"


def designed(topology: str, *words: str) -> tuple[design.Design, hardware.Gpu, int]:
    """(design, GPU, bytes of a GPU by the formulas)."""
    run, spec, platform, gpu = topologies.resolve_layout(run_files.load([LLAMA, *words]), topology)
    made = design.make(run, spec, platform, gpu)
    return made, gpu, footprint.memory(made.placed, fitting.options_of(made, gpu, fitting.rates_of(gpu)))["total"]


@pytest.mark.parametrize("topology, words, keys", [
    ("h100:64", ("--sharding.rules", "ddp", "--training.microbatches", "1"), {"sharding.rules": "zero3"}),
    ("h100:64", ("--training.microbatches", "1", "--training.remat", "none"), {"training.remat": "selective"}),
    ("h100:8", ("--training.microbatches", "1", "--training.remat", "none"), {"training.microbatches": "8"}),
    ("h100:2", ("--training.remat", "full", "--training.microbatches", "32"), {"optimizer.offload": "true"})])
def test_the_remedy_fits_by_the_formulas(topology, words, keys):
    made, gpu, held = designed(topology, *words)
    told = fitting.remedy(made, gpu, max(held, hardware.usable_bytes(gpu) + 1))
    assert told.startswith(" with ".join(f"{key}={value}" for key, value in keys.items()) + " fits: ")
    *_, changed = designed(topology, *words, *[word for key, value in keys.items() for word in (f"--{key}", value)])
    assert changed <= hardware.usable_bytes(gpu)


def test_a_step_that_is_far_larger_than_the_formulas_has_no_remedy_by_them():
    made, gpu, held = designed("h100:8")
    assert fitting.remedy(made, gpu, 1000 * held) == ""


def test_plan_ends_with_3_where_nothing_fits(capfd):
    assert plan.main(["llama3-405b", "--gpus", "1", "--gpu", "h100"]) == 3
    assert "no layout fits" in capfd.readouterr().out


@pytest.mark.full
def test_inspect_ends_with_3_and_a_remedy_where_the_compiled_step_does_not_fit(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.00002")
    code = inspect.main(["--topology", "h100:8", "--model.compute_dtype", "bfloat16"])
    told = capfd.readouterr()
    assert code == 3 and "IT DOES NOT FIT" in told.out
    assert "error" not in told.err and "it does not fit: " in told.err and "--gpus 8 --gpu h100 finds" in told.err
