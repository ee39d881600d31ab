"""The Python interface: the examples of its docstrings, its numbers on several layouts, and its mistakes."""
import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshtrain as mt
from meshtrain import interface, plan, prove, shown
from meshtrain.config import ConfigError
from meshtrain.names import NO_TARGET

SMALL = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 128, "data.seq_len": 32, "data.global_batch": 16,
         "training.microbatches": 2}


def experiment(rules=None, **mesh):
    return mt.Experiment(settings=SMALL | {f"mesh.{axis}": n for axis, n in mesh.items()}, rules=rules)


@pytest.fixture(scope="module")
def split():
    return experiment("zero3", fsdp=4, tensor=2)


@pytest.fixture(scope="module")
def stages():
    return experiment(stage=2)


def test_every_example_of_a_docstring_holds():
    run = mt.Experiment(settings={"mesh.fsdp": 4, "model.num_layers": 2}, rules="zero3")
    for module in (interface, shown):
        found = doctest.testmod(module, extraglobs={"mt": mt, "run": run, "JsonTable": shown.JsonTable,
                                                    "Rows": shown.Rows})
        assert found.attempted and not found.failed


def test_all_that_is_public_has_an_example():
    public = [getattr(interface, name) for name in ("Rules", "Experiment", "compare", "plan", "schedule", "prove")]
    public += [one for name, one in vars(interface.Experiment).items()
               if not name.startswith("_") and callable(one)] + [shown.JsonTable, shown.Rows, shown.StepCosts,
                                                                 shown.DrawnSchedule, shown.DrawnSchedule.simulate]
    assert [one.__qualname__ for one in public if ">>>" not in one.__doc__] == []


def test_the_import_starts_nothing_and_a_command_is_a_module_and_a_function():
    code = "import sys, meshtrain as mt; assert mt.__doc__ and 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mt.plan is plan and callable(mt.plan) and mt.prove is prove and plan.COMMAND.module == "meshtrain.plan"
    assert {"Experiment", "Rules", "compare", "plan", "schedule"} <= set(dir(mt))
    with pytest.raises(AttributeError, match="no attribute 'experiment'"):
        mt.experiment


def test_loss_and_gradients_are_the_same_whole_arrays_on_every_layout(split, stages):
    batch = split.batch()
    assert stages.loss(batch) == pytest.approx(split.loss(batch), rel=1e-6)
    found, expected = stages.gradients(batch), split.gradients(batch)
    assert list(found) == list(expected) == [row["name"] for row in split.parameters()]
    for row in split.parameters():      # float32, sums in another order
        assert found[row["name"]].shape == tuple(row["shape"])
        np.testing.assert_allclose(found[row["name"]], expected[row["name"]], atol=2e-5 * np.abs(
            expected[row["name"]]).max(), err_msg=row["name"])


def test_a_step_moves_weights_against_the_gradients_it_tells(split):
    one = experiment("zero3", fsdp=2)
    before, grads = one.loss(batch := one.batch()), one.gradients()
    metrics = one.step(batch=batch)
    norm = np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in grads.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4) and metrics["loss"] == pytest.approx(before, rel=1e-6)
    assert one.loss(batch) < before and len(one.history) == 1 and int(one.state.step) == 1


def test_an_experiment_begins_with_the_weights_that_its_run_file_names():
    """Hugging Face's logits of its own folder."""
    folder = Path(__file__).parent / "goldens" / "llama2"
    one = mt.Experiment(settings={"checkpoint.init_from": str(folder), "mesh.tensor": 2, "data.source": "tokens",
                                  "data.paths": ["none.npy"], "data.tokenizer": "bytes"})
    with np.load(folder / "golden.npz") as golden:
        np.testing.assert_allclose(one.logits(golden["tokens"]), golden["logits"], atol=1e-4)


def test_logits_are_those_whose_cross_entropy_is_the_loss(split):
    """Of rows with one document each."""
    tokens = np.random.default_rng(0).integers(0, 256, (3, 32))
    logits = split.logits(tokens).astype(np.float64)
    targets = np.roll(tokens, -1, 1)
    picked = np.take_along_axis(logits, targets[..., None], 2)[..., 0]
    losses = (np.log(np.exp(logits).sum(-1)) - picked)[:, :-1]
    place = np.tile(np.arange(32), (16, 1))
    rows = np.vstack([np.tile(tokens, (5, 1)), tokens[:1]])
    held = np.full((16, 32), NO_TARGET)
    held[:3, :-1] = targets[:, :-1]
    batch = {"tokens": rows, "targets": held, "segments": np.ones((16, 32)), "positions": place, "index": place,
             "sequence": np.arange(16)}
    assert split.loss({name: x.astype(np.int32) for name, x in batch.items()}) == pytest.approx(losses.mean(), rel=1e-5)


def test_a_state_goes_to_another_layout_and_a_comparison_leaves_it(split, stages):
    split.step(2)
    stages.state = split.state
    assert stages.generate("def ", max_tokens=3) == split.generate("def ", max_tokens=3)
    loss = stages.loss(split.batch(7))
    assert loss == pytest.approx(split.loss(split.batch(7)), rel=1e-5)
    rows = mt.compare([split, stages])
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5) and rows[0]["name"] == split.layout
    assert int(stages.state.step) == 2 and stages.loss(split.batch(7)) == loss
    assert str(rows).splitlines()[0].split() == ["layout", "memory", "sent", "step", "loss", "after", "2", "steps"]
    with pytest.raises(ConfigError, match="of 2 experiments to compare only 1 differ"):
        mt.compare([split, split])


def test_what_a_notebook_draws_is_a_picture_with_its_labels(split, stages):
    split.step()
    for shown_one, words in ((split.inspect(), "activations"), (split.inspect().collectives, "all-gather"),
                             (split.history, "loss"), (stages.inspect().schedule, "stage 1"),
                             (mt.compare([split, stages], steps=1), "weights")):
        picture = shown_one._repr_svg_()
        assert picture.startswith("<svg") and words in picture and "<style>" in picture
        assert not re.search(r"\bnan\b|None", picture)
    assert split.inspect().roofline is None and split.inspect().schedule is None
    assert split.parameters()._repr_svg_() is None and "layers/mlp/up/kernel" in str(split.parameters())


def test_a_new_process_inspects_for_gpus_and_then_computes_on_simulated_devices():
    """jax, first asked for GPUs that are not here, would start with one device."""
    code = f"""
import meshtrain as mt
one = mt.Experiment(settings={SMALL | {"model.num_layers": 1, "mesh.fsdp": 8}!r}, rules="zero3")
costs = one.inspect("h100:8")
assert costs.roofline["step_time_s"] > 0 and not costs["mesh"]["simulated"] and "reduce-scatter" in costs.sent_bytes
assert 0 < one.step()["loss"] < 10
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("asked, said", [
    (lambda: experiment(fdsp=2), "mesh.fdsp.*did you mean mesh.fsdp"),
    (lambda: mt.Rules('[params]\nembd = "fsdp"'), "unknown logical axis .did you mean 'embed'"),
    (lambda: experiment('[params]\nembed = "fsdpp"', fsdp=2).made, "did you mean 'fsdp'"),
    (lambda: experiment("zero4", fsdp=2).made, 'sharding.rules="zero4" is not a file; did you mean'),
    (lambda: experiment("zero3", fsdp=3).made, "embed=64 does not divide over fsdp 3"),
    (lambda: experiment("zero3", fsdp=16).made, "mesh.fsdp=16 takes 16 devices, and there are 8"),
    (lambda: mt.Experiment(settings={"mesh.fsdp": 4}, simulated_devices=4).made, 'os.environ."XLA_FLAGS". = .*=4"'),
    (lambda: mt.Experiment("none.toml"), "there is no such run file"),
    (lambda: mt.Experiment("configs/quickstart-rl.toml").batch(), 'objective="rl" learns from answers of its own'),
    (lambda: mt.Experiment("configs/llama3-8b.toml").batch(), "matches no file"),
    (lambda: mt.Experiment("configs/llama3-8b.toml").loss({}), "state take .* on 8 simulated devices of this machine"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h1"), "--gpu h1 is unknown"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", tensors=2), "--tensors is not an option"),
    (lambda: mt.prove(model=lambda w, x: x, parameters={"w": ((4, 4), ("embd", None))}), "no logical axis 'embd'"),
    (lambda: mt.schedule("zb", 4, 8), 'pipeline.schedule="zb" is unknown'),
    (lambda: mt.schedule("F0 B0\nF0 B0"), "stage 1, tick 0: F0 needs F0 of stage 0"),
    (lambda: mt.schedule("1f1b"), "mesh.stage=0 must be at least 1"),
    (lambda: mt.schedule("1f1b", 2, 4).simulate(forward_s=-1.0), "forward_s=-1.0"),
])
def test_a_mistake_is_one_readable_error(asked, said):
    with pytest.raises(ConfigError, match=said):
        asked()


def test_the_page_of_the_interface_runs_as_it_stands():
    text = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    blocks, names = re.findall(r"```python\n(.*?)```", text, re.DOTALL), {}
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)
    shown_rows = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines()
    for told, row in zip(shown_rows[1:], names["rows"], strict=True):
        assert told.startswith(row["name"]) and row["layout"] in told
        assert float(told.split()[-1]) == pytest.approx(row["loss"], abs=0.3)     # the library of this Python
    assert shown_rows[0].split() == str(names["rows"]).splitlines()[0].split()
