"""Runs with training.ema, by the commands: validated, resumed, added and left out, read by other commands, refused."""
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import abstract, assert_same_bits, make_state, mesh
from commands import call, home, in_a_directory_of_its_own, ran, refused, rows, tiny  # noqa: F401
from folders import contents
from jax.sharding import PartitionSpec as P

from meshtrain import run_files
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.commands import convert, evaluate, generate, inspect, train
from meshtrain.model import transformer
from meshtrain.run import trees
from meshtrain.training import state

SIX = ("--training.steps=6", "--checkpoint.every=2", "--checkpoint.keep=9", "--run.sample_tokens=0",
       "--optimizer.learning_rate=0.01", "--model.compute_dtype=float32")
EMA = ("--training.ema=0.9",)
ZERO3 = ("--sharding.rules=zero3", "--mesh.data=1", "--mesh.fsdp=8")


def saved(directory, step) -> dict:
    """array -> its values, of a step."""
    checkpoints = Checkpoints(DirectoryStore(Path(directory) / "checkpoints"), read_only=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), checkpoints.arrays(step))
    return {name: np.asarray(leaf) for name, leaf in trees.leaves_of(checkpoints.restore(step, wanted)).items()}


def of_average(arrays) -> dict:
    return {name.removeprefix("ema/params/"): leaf for name, leaf in arrays.items() if name.startswith("ema/params/")}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run with an average and one without."""
    place = tmp_path_factory.mktemp("runs")
    ran(*tiny, *SIX, *EMA, *ZERO3, "--validation.every=3", "--run.dir", place / "ema")
    ran(*tiny, *SIX, *ZERO3, "--validation.every=3", "--run.dir", place / "plain")
    return place


def test_an_average_changes_no_training_and_is_validated_beside_it(runs):
    found, plain = rows(runs / "ema"), rows(runs / "plain")
    losses = lambda some, name="loss": [row[name] for row in some if name in row]
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)      # another program
    assert [row["step"] for row in found if "val_loss_ema" in row] == [3, 6]
    assert all(row["val_loss_ema"] != row["val_loss"] for row in found if "val_loss" in row)
    assert losses(found, "val_loss") == pytest.approx(losses(plain, "val_loss"), rel=1e-5)
    last = saved(runs / "ema", 6)
    assert last["ema/count"] == 6 and of_average(last).keys() == {
        name.removeprefix("params/") for name in last if name.startswith("params/")}


def test_a_resumed_run_has_the_same_average_to_the_bit(runs, tiny, tmp_path):
    shutil.copytree(runs / "ema", "run")
    shutil.rmtree("run/checkpoints/6")
    done = ran(*tiny, *SIX, *EMA, *ZERO3, "--validation.every=3", "--run.dir", "run")
    assert "resuming after step 4" in done.out and "average of the weights" not in done.out
    expected, got = saved(runs / "ema", 6), saved("run", 6)
    assert got.keys() == expected.keys()
    for name, leaf in expected.items():
        assert got[name].tobytes() == leaf.tobytes(), name
    assert rows(tmp_path / "run")[5]["val_loss_ema"] == rows(runs / "ema")[5]["val_loss_ema"]


def test_commands_read_the_average(runs, home):
    assert call(convert.main, runs / "ema", "out", "--weights=ema", "--dtype=float32").code == 0
    arrays, tensors = of_average(saved(runs / "ema", 6)), contents(Path("out"))
    assert tensors["model.embed_tokens.weight"][2] == arrays["embedding/table"][:257].tobytes()
    assert tensors["model.layers.0.mlp.up_proj.weight"][2] == np.ascontiguousarray(
        arrays["layers/mlp/up/kernel"][0].T).tobytes()

    def loss(where, *words):
        done = call(evaluate.main, where, "--json", "--mesh.tensor=1", "--data.source=text", "--data.tokenizer=bytes",
                    "--data.paths", json.dumps([str(home / "corpus.txt")]), "--data.seq_len=32", *words)
        assert done.code == 0, done.err
        return json.loads(done.out)["loss"]
    average, last = loss(runs / "ema", "--weights=ema"), loss(runs / "ema")
    assert average == pytest.approx(loss("out"), rel=1e-6) and abs(average - last) > 1e-3

    def tokens(where, *words):
        done = call(generate.main, where, "--prompt-ids=[[256, 5, 6]]", "--json", "--max-tokens=12",
                    "--mesh.tensor=1", *words)
        assert done.code == 0, done.err
        return json.loads(done.out)["completions"][0]["token_ids"]
    assert tokens(runs / "ema", "--weights=ema") == tokens("out", "--model.compute_dtype=float32")


def test_an_average_is_added_and_left_out_on_a_resume_and_both_are_told(tiny):
    def to(steps, *words):
        return ran(*tiny, *SIX, *ZERO3, "--validation.batches=1", "--run.dir=run", f"--training.steps={steps}", *words)
    to(2)
    done = to(4, *EMA)
    assert ("training.ema=0.9: the checkpoint has no average of the weights, so it starts as a copy of the weights of step 2"
            in done.out)
    assert "from step 3 on: training.ema=0.9 (was 0.0)" in done.out
    first, later = saved("run", 2), saved("run", 4)
    assert later["ema/count"] == 2 and not of_average(first)
    for name, mean in of_average(later).items():        # decays 1/10, 2/11: nearer to the weights than it began
        begun, now = first[f"params/{name}"], later[f"params/{name}"]
        assert np.abs(mean - now).max() <= np.abs(begun - now).max() + 1e-6, name
    done = to(6)
    assert "training.ema=0: the average of the weights in the checkpoint is left out" in done.out
    assert not of_average(saved("run", 6))


@pytest.mark.parametrize("kept, wanted", [(False, True), (True, False), (True, True)])
def test_states_on_hosts_may_have_an_average_or_not(tmp_path, kept, wanted):
    run = tmp_path / "run"
    run.mkdir()
    params = make_state(mesh(4, 2), P("a", "b")).params
    trees_of = {True: {"params": params, "ema": {"params": params}}, False: {"params": params}}
    tier = LocalCheckpoints(str(tmp_path / "local"), 2, run)
    tier.begin(0, False)
    tier.save(2, trees_of[kept], {})
    tier._join()
    found = LocalCheckpoints(str(tmp_path / "local"), 2, run).newest(0, abstract(trees_of[wanted]))
    assert found is not None and found.step == 2 and found.has("ema") == kept
    both = trees_of[kept and wanted]
    assert_same_bits(found.restore(abstract(both)), both)


def test_an_average_starts_from_the_weights_that_a_run_starts_from(runs, tiny):
    """Not from the initialized ones, also after a warm-up of the experts' biases."""
    still = ("--optimizer.learning_rate=1e-9", "--optimizer.weight_decay=0", "--training.steps=1")
    ran(*tiny, *SIX, *EMA, *still, "--checkpoint.init_from", runs / "plain", "--run.dir=next")
    expected = saved(runs / "plain", 6)
    for name, mean in of_average(saved("next", 1)).items():
        np.testing.assert_allclose(mean, expected[f"params/{name}"], atol=1e-6, err_msg=name)
    ran(*tiny, *SIX, *EMA, *still, "--model.num_experts=4", "--experts.bias_rate=0.1", "--experts.bias_warmup=2",
        "--run.dir=warm")
    warm = saved("warm", 1)
    assert warm["ema/count"] == 1 and "layers/moe/bias" not in of_average(warm)
    for name, mean in of_average(warm).items():
        np.testing.assert_allclose(mean, warm[f"params/{name}"], atol=1e-6, err_msg=name)


def test_adapters_and_their_base_are_merged_from_averages(runs, tiny):
    ran(*tiny, *SIX, *EMA, "--lora.rank=3", "--checkpoint.init_from", runs / "plain", "--run.dir=lora")
    last, scale = saved("lora", 6), run_files.load(["lora/config.toml"]).lora.alpha / 3
    assert all("/lora/" in name for name in of_average(last))
    assert call(convert.main, "lora", "out", "--weights=ema", "--dtype=float32").code == 0
    a, b = (last[f"ema/params/layers/mlp/up/lora/{name}"][0].astype("float64") for name in "ab")
    expected = last["params/layers/mlp/up/kernel"][0] + scale * (a @ b)
    _, shape, raw = contents(Path("out"))["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_allclose(np.frombuffer(raw, "float32").reshape(shape), expected.T, rtol=1e-5, atol=1e-6)
    done = call(convert.main, "lora", "adapters", "--weights=ema", "--adapters")
    assert done.code == 0 and "the averaged adapters of step 6" in done.out, done
    _, shape, raw = contents(Path("adapters"))["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    np.testing.assert_array_equal(np.frombuffer(raw, "float32").reshape(shape), a.T.astype("float32"))


def test_what_cannot_be_is_refused(runs, tiny):
    for main, words in ((convert.main, (runs / "plain", "new")), (evaluate.main, (runs / "plain",)),
                        (generate.main, (runs / "plain", "--prompt=a"))):
        refused(call(main, *words, "--weights=ema"), "--weights ema: step 6 of", "has no average", "training.ema")
        refused(call(main, *words, "--weights=mean"), "--weights mean is unknown; use one of last, ema")
    refused(call(convert.main, runs / "ema", "new", "--weights=ema", "--average=last:2"), "give --weights or --average")
    folder = Path(__file__).resolve().parent.parent / "goldens/llama2"
    refused(call(generate.main, folder, "--prompt-ids=[[1]]", "--weights=ema"), "is a model folder")
    refused(call(convert.main, folder, "--weights=ema"), "a model folder has one set of weights")
    for value in ("1", "-0.1", "nan"):
        refused(call(train.main, *tiny, f"--training.ema={value}"), "training.ema=")
    refused(call(train.main, *tiny, *EMA, "--training.objective=rl", "--rl.reward=number"),
            "training.ema=0.9 is an average")


def test_its_bytes_are_counted_with_the_optimizers(tiny):
    def optimizer_bytes(*words):
        done = call(inspect.main, *tiny, *ZERO3, "--json", *words)
        assert done.code == 0, done.err
        memory = json.loads(done.out)["memory_bytes"]
        return [memory[kind]["optimizer"] for kind in ("formula", "compiled")], memory["compiled"]["params"]
    run = run_files.load([*tiny, *ZERO3])
    model = transformer.build(run.model)
    alone, beside = (state.optimizer_bytes(model, run.optimizer, 6, averages)["optimizer_bytes"] for averages in (False, True))
    assert beside - alone == pytest.approx(4, abs=1e-3)         # what plan counts
    (formula, compiled), params = optimizer_bytes()
    (more, compiled_more), _ = optimizer_bytes(*EMA)
    assert compiled_more - compiled == params + 4       # float32 as the weights, and the count
    assert more - formula == pytest.approx(params, abs=8)
