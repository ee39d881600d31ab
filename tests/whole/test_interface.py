"""The Python interface: the examples of its docstrings, its numbers on several layouts, and its mistakes."""
import ast
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshtrain as mt
from meshtrain import config, devices, drawn, exercise, interface, run_files, shown
from meshtrain.commands import plan
from meshtrain.config import ConfigError
from meshtrain.library import fit, layouts, pipeline, ring, stack, unpack
from meshtrain.names import NO_TARGET

SMALL = {"model.num_layers": 2, "model.embed_dim": 64, "model.mlp_dim": 128, "data.seq_len": 32, "data.global_batch": 16,
         "training.microbatches": 2}


def experiment(rules=None, **mesh):
    return mt.Experiment(mesh=mesh, settings=SMALL, rules=rules)


@pytest.fixture(scope="module")
def split():
    return experiment("zero3", fsdp=4, tensor=2)


@pytest.fixture(scope="module")
def stages():
    return experiment(stage=2)


def test_every_example_of_a_docstring_holds():
    run = mt.Experiment(mesh={"fsdp": 4}, settings={"model.num_layers": 2}, rules="zero3")
    for module in (interface, devices, drawn, exercise, shown, fit, layouts, pipeline, ring, stack, unpack):
        found = doctest.testmod(module, extraglobs={"mt": mt, "run": run, "jax": jax, "JsonTable": shown.JsonTable,
                                                    "Rows": shown.Rows})
        assert found.attempted and not found.failed


def test_all_that_is_public_has_an_example():
    public = [getattr(mt, name) for name in mt.__all__ if name not in ("ConfigError", "size")]
    public += [one for name, one in vars(interface.Experiment).items()
               if not name.startswith("_") and callable(one)] + [
                   shown.JsonTable, shown.Rows, shown.ProgramCosts, shown.StepCosts, shown.DrawnSchedule,
                   shown.DrawnSchedule.simulate]
    assert [one.__qualname__ for one in public if ">>>" not in one.__doc__] == []


IN_A_NEW_PROCESS = """
import sys, time
began = time.process_time()
import meshtrain as mt
assert time.process_time() - began < 2 and mt.__doc__ and "jax" not in sys.modules and "numpy" not in sys.modules
before = dir(mt)
assert before == sorted([*mt.__all__, "__version__"])
mt.simulate(4)
import importlib, inspect, types, jax, meshtrain.plan, meshtrain.prove, meshtrain.inspect
assert jax.device_count() == 4 and mt.Experiment().run.mesh.simulated_devices == 4
assert dir(mt) == before
for name in ("plan", "prove", "inspect", "mesh", "bars"):
    assert inspect.isfunction(getattr(mt, name)) and inspect.signature(getattr(mt, name)).return_annotation
for name in ("plan", "prove", "inspect"):
    assert isinstance(importlib.import_module(f"meshtrain.{name}"), types.ModuleType)
    module = importlib.import_module(f"meshtrain.commands.{name}")
    assert module.COMMAND.module == f"meshtrain.{name}"
mt.simulate(4)
try:
    mt.simulate(8)
except ValueError as error:
    assert isinstance(error, mt.ConfigError) and "already runs jax with 4 devices" in str(error)
    assert "restart the kernel" in str(error) and "mt.simulate(8)" in str(error)
else:
    raise AssertionError
"""


def test_a_new_process_imports_fast_simulates_quietly_and_has_functions_beside_the_modules_of_commands():
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")}
    ran = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, env=environ)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_what_type_checkers_see_is_what_the_package_has():
    tree = ast.parse(Path(mt.__file__).read_text())
    (seen,) = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("mesh"))
    assert sorted(alias.name for alias in seen.names) == mt.__all__ == sorted(interface.__all__)
    with pytest.raises(AttributeError, match="no attribute 'experiment'"):
        mt.experiment


def test_a_name_of_the_interface_is_no_submodule_but_those_whose_command_is_elsewhere():
    package = Path(mt.__file__).parent
    both = {path.stem for path in package.iterdir()} & set(mt.__all__)
    assert both <= {path.stem for path in (package / "commands").glob("*.py")} and "plan" in both


def test_the_options_of_plan_are_those_of_the_command():
    of_files = {"gpus", "gpu", "json", "html", "write"}      # parameters, and what writes files
    assert set(interface.PlanOptions.__annotations__) == {
        name.replace("-", "_") for name in plan.COMMAND.options} - of_files


def test_settings_are_keys_or_dicts_of_sections_and_a_string_stands_for_a_list_of_one():
    nested = {"model": {"num_layers": np.int64(2), "compute_dtype": "bfloat16"}, "data.source": "text",
              "data": {"paths": Path("a.txt"), "seq_len": 32}}
    flat = {"model.num_layers": 2, "model.compute_dtype": "bfloat16", "data.source": "text", "data.paths": ["a.txt"],
            "data.seq_len": 32}
    assert run_files.load(config.words(nested)) == run_files.load(config.words(flat))
    assert run_files.load(config.words(flat)).data.paths == ("a.txt",)


def test_without_a_run_file_axes_that_are_not_named_are_1_and_with_one_they_stay():
    quickstart = str(run_files.QUICKSTART)
    for given, layout in (({}, "one device"), ({"mesh": {"fsdp": 8}}, "fsdp=8"),
                          ({"settings": {"mesh": {"fsdp": 8}}}, "fsdp=8"), ({"settings": {"mesh.tensor": 2}}, "tensor=2"),
                          ({"run_file": quickstart}, "data=2 fsdp=2 tensor=2"),
                          ({"run_file": quickstart, "mesh": {"fsdp": 1}}, "data=2 tensor=2")):
        assert mt.Experiment(**given).layout == f"{layout}, zero3"


def test_what_names_no_optimizer_has_adamw():
    """The quickstart takes what learns most in its minutes."""
    words = plan.COMMAND.of(["llama3-8b"], {"gpus": 8, "gpu": "h100"})
    assert mt.Experiment().run.optimizer.name == plan.run_of(words).optimizer.name == "adamw"
    assert mt.Experiment(settings={"optimizer.name": "muon"}).run.optimizer.name == "muon"
    assert mt.Experiment(run_files.QUICKSTART).run.optimizer == run_files.load([]).optimizer


def test_rules_as_a_dict_are_those_of_their_text():
    text = 'extends = "ddp"\n[params]\nembed = ["data", "fsdp"]\n[activations]\nseq = []\n'
    tables = {"extends": "ddp", "params": {"embed": ("data", "fsdp")}, "activations": {"seq": []}}
    assert mt.Rules(tables).tables == mt.Rules(text).tables
    assert experiment(tables, fsdp=2).run.sharding == experiment(tables, fsdp=2).run.sharding


def test_a_rule_text_extends_a_file_of_this_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('extends = "ddp"\n[params]\nembed = "fsdp"\n')
    assert mt.Rules({"extends": "mine"}).mesh_axes("params", "embed") == ("fsdp",)


def test_a_function_of_ones_own_is_inspected(split):
    mesh = split.made.mesh
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, in_specs=jax.P("fsdp"),
                                  out_specs=jax.P()))
    costs = mt.inspect(total, np.zeros((8, 256), np.float32))
    assert costs.sent_bytes == {"all-reduce": 2 * 3 * 2 * 256 * 4 // 4}
    assert re.search(r"all-reduce +fsdp +f32", str(costs)) and costs["mesh"]["sizes"]["fsdp"] == 4
    assert mt.inspect(split).sent_bytes == split.inspect().sent_bytes


def test_an_answer_is_checked_within_its_tolerance(capsys):
    for answer, right in ((1.009, 1), (np.int32(7), 7.0), ("fsdp", "fsdp"), ([1, 2], [1, 2]), (..., 3)):
        mt.check_answer(answer, right, "hint")
    assert capsys.readouterr().out.split("\n")[:4] == ["right"] * 4
    for answer, right in ((1.02, 1), ("data", "fsdp"), ([1], [1, 2]), (None, 3)):
        with pytest.raises(AssertionError, match="is not right. Hint: count again"):
            mt.check_answer(answer, right, "count again")


def test_a_folder_of_a_model_is_planned_for():
    plans = mt.plan(Path(__file__).parent.parent / "goldens" / "llama3.1", gpus=[8, 16], gpu="h100", seq_len=64,
                    settings={"data": {"source": "tokens", "tokenizer": "bytes"}})
    assert [row["gpus"] for row in plans] == [8, 16] and all(row["fits"] for row in plans)


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


def test_gradients_have_the_dropout_of_the_next_step():
    one = mt.Experiment(settings=SMALL | {"model.num_layers": 1, "model.embed_dim": 16, "model.mlp_dim": 16,
                                          "model.residual_dropout": 0.5, "model.embedding_dropout": 0.5})
    batch, norms = one.batch(), []
    for _ in range(2):      # two steps have two masks
        norms.append(np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in one.gradients(batch).values())))
        assert one.step(batch=batch)["grad_norm"] == pytest.approx(norms[-1], rel=1e-4)


def test_an_experiment_begins_with_the_weights_that_its_run_file_names():
    """Hugging Face's logits of its own folder."""
    folder = Path(__file__).parent.parent / "goldens" / "llama2"
    one = mt.Experiment(mesh={"tensor": 2}, settings={
        "checkpoint.init_from": folder, "data": {"source": "tokens", "paths": "none.npy", "tokenizer": "bytes"}})
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
    with pytest.raises(ConfigError, match="the 2 experiments to compare have only 1 different"):
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
    (lambda: experiment(fdsp=2), "mesh has no axis 'fdsp'; did you mean 'fsdp'"),
    (lambda: mt.Rules('[params]\nembd = "fsdp"'), "unknown logical axis .did you mean 'embed'"),
    (lambda: experiment('[params]\nembed = "fsdpp"', fsdp=2).made, "did you mean 'fsdp'"),
    (lambda: experiment("zero4", fsdp=2).made, 'sharding.rules="zero4" is not a file; did you mean'),
    (lambda: experiment("zero3", fsdp=3).made, "embed=64 does not divide over fsdp 3"),
    (lambda: experiment("zero3", fsdp=16).made, "mesh.fsdp=16 takes 16 devices, and there are 8"),
    (lambda: mt.Experiment(mesh={"fsdp": 4}, simulated_devices=4).made, r"(?s)runs jax with 8 devices.*mt.simulate\(4\)"),
    (lambda: mt.Experiment("none.toml"), "there is no such run file"),
    (lambda: mt.Experiment("configs/quickstart-rl.toml").batch(), 'objective="rl" trains on answers that only'),
    (lambda: mt.Experiment("configs/llama3-8b.toml").batch(), "matches no file"),
    (lambda: mt.Experiment("configs/llama3-8b.toml").loss({}), "state take .* on 8 simulated devices of this machine"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h1"), "^gpu='h1' is unknown; use one of a100"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", tensors=2), "^tensors=2 is not an option; did you mean tensor"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", stage=1.5), "^stage=1.5 is not a whole number"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", html="a"), "html is an option of the command line"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", fsdp=3), "^fsdp 3: no mesh of 8 GPUs"),
    (lambda: mt.plan("llama3-8b", gpus=[8, 16], gpu="h100", verify=1), "^verify is for .*; give a single number"),
    (lambda: mt.plan("meta-llama/Llama-3.1-8B", gpus=8, gpu="h100"), "hub, give hf://meta-llama/Llama-3.1-8B"),
    (lambda: mt.plan("llama3-8b", gpus=8, gpu="h100", settings={"seq_len": 8}), "did you mean 'data.seq_len'"),
    (lambda: experiment(tp=8), "mesh has no axis 'tp'; did you mean 'tensor'"),
    (lambda: mt.Experiment(mesh=8), "mesh=8 is not a dict; write e.g. mesh={"),
    (lambda: mt.Experiment(mesh={"fsdp": "8"}), "mesh.fsdp=.8. is not a whole number"),
    (lambda: mt.Experiment(mesh={"fsdp": 8}, settings={"mesh.fsdp": 4}), "mesh.fsdp is given twice"),
    (lambda: experiment("zero3", fsdp=16).made, "16 simulated devices restart .* mt.simulate.16."),
    (lambda: mt.Experiment(settings={"num_layers": 2}), "'num_layers'.=2: did you mean 'model.num_layers'"),
    (lambda: mt.Experiment(settings={"model": 2}), "model is a section, so its value must be a dict"),
    (lambda: mt.Experiment(settings={"-model.num_layers": 2}), "did you mean 'model.num_layers'"),
    (lambda: mt.Experiment(settings={"model.num_layers": None}), "is not a value; leave the key out to use its default"),
    (lambda: mt.Experiment(settings={"a.b.c": 1, 3: 4}), 'keys are "section.key"'),
    (lambda: mt.Experiment(settings="model.num_layers=2"), "is not a dict"),
    (lambda: mt.Experiment(settings={"modle": {"num_layers": 2}}), r"no section .modle.; did you mean .model."),
    (lambda: mt.Experiment(settings={"model": {"layers": 2}}), "did you mean model.num_layers"),
    (lambda: mt.Experiment(settings={"model": {"num_layers": 2}, "model.num_layers": 3}), "num_layers is given twice"),
    (lambda: experiment({"params": {"embd": "fsdp"}}), "rules .params. embd: unknown logical axis .did you mean 'embed'"),
    (lambda: experiment({"parms": {"embed": "fsdp"}}), "unknown table .parms. .did you mean 'params'"),
    (lambda: experiment({"params": {"embed": None}}), "embed = None: must be a mesh axis"),
    (lambda: experiment({"params": "fsdp"}), "rules.'params'.='fsdp' is not a dict"),
    (lambda: experiment({"extends": 3}), "extends=3: must name one rule file"),
    (lambda: experiment(3), "rules=3 has the wrong type"),
    (lambda: mt.Experiment(settings={"sharding.rules": "ddp"}, rules="ddp"), "sharding.rules is given twice"),
    (lambda: mt.Experiment("configs/llama3-8b.toml").inspect("h1:8"), "unknown GPU 'h1'"),
    (lambda: mt.Experiment("configs/llama3-8b.toml").inspect(8), "topology=8 is not a string"),
    (lambda: experiment(fsdp=8).inspect("h100:16"), "mesh.fsdp=16 .*, or topology h100:8"),
    (lambda: mt.inspect(lambda x: x), "an Experiment, a run file, a function that jax.jit returned"),
    (lambda: mt.compare([1]), "1 is not an Experiment"),
    (lambda: mt.simulate("8"), "takes a whole number of devices"),
    (lambda: mt.bars({"a": 3}), "bars takes a dict of dicts"),
    (lambda: mt.bars({"a": {"b": -1}}), "-1 is not a number of at least 0"),
    (lambda: mt.curves({"a": []}), "curves takes a dict of lists of points"),
    (lambda: mt.curves({"a": [(1,)]}), "curves takes a dict of lists of points"),
    (lambda: mt.curves({"a": [(0, 1)]}, log=True), "log=True needs points above 0"),
    (lambda: mt.mesh({"tp": 8}), "the axes are data, fsdp"),
    (lambda: mt.shards({"before": [[0]], "after": [[0], [1]]}), "with the same devices in each state"),
    (lambda: mt.prove(model=lambda w, x: x, parameters={"w": ((4, 4), ("embd", None))}), "no logical axis 'embd'"),
    (lambda: mt.schedule("zb", 4, 8), 'pipeline.schedule="zb" is unknown'),
    (lambda: mt.schedule("F0 B0\nF0 B0"), "stage 1, tick 0: F0 needs F0 of stage 0"),
    (lambda: mt.schedule("1f1b"), "mesh.stage=0 must be at least 1"),
    (lambda: mt.schedule("1f1b", 2, 4).simulate(forward_s=-1.0), "forward_s=-1.0"),
])
def test_a_mistake_is_one_readable_error(asked, said):
    with pytest.raises(ConfigError, match=said) as told:
        asked()
    assert not re.search(r"--[a-z]", str(told.value)), "an option of the command line"


@pytest.mark.parametrize("change, said", [
    (lambda batch: [1, 2, 3], r"^batch=\[1, 2, 3\] is a list; a batch is a dict of tokens int32 \[16, 32\], "),
    (lambda batch: {"token": batch["tokens"]}, "^batch has no tokens, targets, .*; it has 'token'"),
    (lambda batch: batch | {"tokens": batch["tokens"][:, :8]}, r"'tokens'. is int32 \[16, 8\], but this run needs int32"),
    (lambda batch: batch | {"targets": batch["targets"] * 1.0}, r"'targets'. is float64 \[16, 32\]"),
    (lambda batch: batch | {"tokens": batch["tokens"] + 512}, "and token ids are 0 to 511"),
    (lambda batch: batch | {"targets": batch["targets"] - 600}, "token ids are 0 to 511, or -1 for no target"),
    (lambda batch: batch | {"segments": [[1], [1, 2]]}, "'segments'. has rows of different lengths"),
])
def test_a_wrong_batch_is_one_error_that_says_what_is_expected(split, change, said):
    for use in (split.loss, split.gradients, lambda batch: split.step(batch=batch)):
        with pytest.raises(ConfigError, match=said) as told:
            use(change(split.batch()))
        assert "sequence int32 [16]; `batch()` of the experiment makes one" in str(told.value)
    wide = {name: array.astype(np.int64).tolist() for name, array in split.batch().items()}
    assert split.loss(wide) == split.loss(split.batch())


@pytest.mark.parametrize("use, said", [
    (lambda run: run.logits([1, 2, 3]), r"tokens is int64 \[3\]; give integers \[B, T\]"),
    (lambda run: run.logits([[1, 2], [3]]), "rows of different lengths"), (lambda run: run.logits("abc"), "is text"),
    (lambda run: run.logits([[512]]), "tokens has 512, and token ids are 0 to 511"),
    (lambda run: run.generate([]), "neither a text nor token ids"), (lambda run: run.generate([-1]), "prompt has -1"),
    (lambda run: run.step(0), "^n=0 is not a whole number of at least 1"), (lambda run: run.train(-1), "^steps=-1 is not"),
    (lambda run: run.loss(run.batch() | {"targets": np.full((16, 32), NO_TARGET)}), "batch has no loss target"),
    (lambda run: mt.compare([run], steps=0), "^steps=0 is not"), (lambda run: run.batch("a"), "^n='a' is not a whole"),
    (lambda run: run.generate("a", max_tokens=-1), "^max_tokens=-1 is not a whole number of at least 0"),
    (lambda run: mt.prove(cells=0), "^cells=0 is not"), (lambda run: mt.schedule("1f1b", stages="2"), "^stages='2' is"),
    (lambda run: setattr(run, "state", {"step": 1}), "this state belongs to another model"),
    (lambda run: setattr(run, "state", jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.int8), run.made.state_shapes)),
     "this state belongs to another model"),
])
def test_what_a_method_cannot_take_is_one_error(split, use, said):
    with pytest.raises(ConfigError, match=said):
        use(split)


def test_the_page_of_the_interface_runs_as_it_stands():
    text = (Path(__file__).parent.parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    blocks, names = re.findall(r"```python\n(.*?)```", text, re.DOTALL), {}
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, names)
    shown_rows = re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines()
    for told, row in zip(shown_rows[1:], names["rows"], strict=True):
        assert told.startswith(row["name"]) and row["layout"] in told
        assert float(told.split()[-1]) == pytest.approx(row["loss"], abs=0.3)     # the library of this Python
    assert shown_rows[0].split() == str(names["rows"]).splitlines()[0].split()
