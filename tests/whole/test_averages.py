"""Averages of a run's checkpoints, by the command: the mean of what each gives away alone, and what has no mean."""
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import flip
from commands import call, home, in_a_directory_of_its_own, ran, refused, tiny  # noqa: F401
from folders import contents
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshtrain.checkpoint import averages
from meshtrain.commands import convert

SIX = ("--training.steps=6", "--checkpoint.every=2", "--checkpoint.keep=9", "--data.validation_fraction=0",
       "--run.sample_tokens=0")
LORA = ("--lora.rank=3", "--lora.alpha=7", "--optimizer.learning_rate=0.02")
EXPERTS = ("--model.num_experts=4", "--model.router_score=sigmoid", "--model.router_bias=choice",
           "--experts.bias_rate=0.1")


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run of the whole model and one with adapters, which have saved steps 2, 4 and 6."""
    place = tmp_path_factory.mktemp("runs")
    for name, more in (("plain", ()), ("lora", LORA)):
        ran(*tiny, *SIX, *more, "--run.dir", place / name)
    return place


def tensors(run, *words):
    """name -> array in float64, of a folder in float32 that the command writes from a run."""
    shutil.rmtree("out", ignore_errors=True)
    done = call(convert.main, run, "out", "--dtype=float32", *words)
    assert done.code == 0, done.err
    folder = contents(Path("out")).items()
    return done, {name: np.frombuffer(raw, "float32").astype("float64") for name, (_, _, raw) in folder}


def mean(run, shares, *words, steps=(2, 4, 6)):
    """The same, averaged over the folders of these steps."""
    each = [tensors(run, f"--step={step}", *words)[1] for step in steps]
    return {name: sum(share * one[name] for share, one in zip(shares, each, strict=True)) for name in each[0]}


def assert_near(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-6, atol=1e-8)       # float32's rounding, thrice


@pytest.mark.parametrize("words, shares", [
    ((), (1 / 3, 1 / 3, 1 / 3)),
    (("--shares", "1-sqrt"), (3 ** -0.5, (2 ** 0.5 - 1) * 3 ** -0.5, 1 - (2 / 3) ** 0.5)),
    (("--shares", "1,2,5"), (1 / 8, 2 / 8, 5 / 8)),
])
def test_the_mean_of_checkpoints_is_that_of_the_folders_which_each_gives(runs, words, shares):
    done, got = tensors(runs / "plain", "--average=last:3", *words)
    assert_near(got, mean(runs / "plain", shares))
    assert f"step 2: share {shares[0]:.4f}; the updates up to it have the weight 1.0000" in done.out
    assert f"step 6: share {shares[2]:.4f}; the updates up to it have the weight {shares[2]:.4f}" in done.out
    assert "the mean weights of steps 2, 4, 6" in done.out


def test_adapters_are_merged_before_the_mean_and_the_note_tells_where_they_are_not(runs):
    third = (1 / 3,) * 3
    assert_near(tensors(runs / "lora", "--average=last:3")[1], mean(runs / "lora", third))
    done, got = tensors(runs / "lora", "--average=last:3", "--adapters")
    assert_near(got, mean(runs / "lora", third, "--adapters"))
    assert "A and B are averaged separately" in done.err and "the mean adapters of steps 2, 4, 6" in done.out


def test_the_last_of_a_step_are_those_up_to_it(runs):
    done, got = tensors(runs / "plain", "--average=last:2", "--step=4")
    assert "the mean weights of steps 2, 4 of" in done.out
    assert_near(got, mean(runs / "plain", (0.5, 0.5), steps=(2, 4)))


def test_balances_are_those_of_the_last_and_equal_weights_stay_to_the_bit(tiny):
    ran(*tiny, *SIX, *EXPERTS, "--run.dir", "experts")
    average = averages.open_last("experts", 3, 0, "linear")
    mesh = Mesh(np.array(jax.devices()), ("all",))
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P())) for name, (shape, dtype) in (
        (name.removeprefix("params/"), form) for name, form in average.last.checkpoints.forms(
            6, only_params=True).items())}
    balance = next(name for name in shapes if name.endswith("moe/bias"))
    each = [averages.CheckpointMean((saved,), (1.0,)).leaf(shapes, merge=False, of_last=())(balance)
            for saved in average.saved]
    assert len({np.asarray(one).tobytes() for one in each}) == 3
    got = average.leaf(shapes, merge=False, of_last=[balance])(balance)
    assert np.asarray(got).tobytes() == np.asarray(each[-1]).tobytes()
    same = averages.CheckpointMean((average.last,) * 3, averages.shares_of((0.2, 0.7, 0.4), 3))
    router = balance.replace("bias", "router")
    assert np.asarray(same.leaf(shapes, merge=False, of_last=())(router)).tobytes() == np.asarray(
        averages.CheckpointMean((average.last,), (1.0,)).leaf(shapes, merge=False, of_last=())(router)).tobytes()


def test_what_has_no_mean_is_refused(runs, tiny, tmp_path):
    def told(run, *words):
        done = call(convert.main, run, "new", *words)
        assert not (tmp_path / "new").exists()
        return done
    plain = runs / "plain"
    refused(told(plain, "--average=last:4"), "--average last:4", "has only 3: steps 2, 4, 6", "checkpoint.keep")
    refused(told(plain, "--average=last:3", "--step=4"), "has only 2: steps 2, 4 up to step 4")
    refused(told(plain, "--average=last:2", "--step=5"), "--step 5 is not saved")
    refused(told(tmp_path, "--average=last:2"), "has none")
    refused(told(plain, "--average=last:2", "--shares=1,2,3"), "--shares has 3 numbers for the 2 checkpoints")
    refused(told(plain, "--shares=1,2"), "add e.g. --average last:N")
    refused(call(convert.main, plain, "--average=last:2"), "give RUN_DIR and OUT")
    for option, words in (("--average", ("3", "last:1", "last:x", "first:3")), ("--shares", ("1,0", "cosine", "1,-2"))):
        for word in words:
            refused(told(plain, "--average=last:2", f"{option}={word}"), f"{option} {word} is")
    shutil.copytree(plain, "damaged")
    files = (path for path in (tmp_path / "damaged/checkpoints/4/params").rglob("*") if path.is_file())
    file = max(files, key=lambda path: path.stat().st_size)
    flip(file)
    refused(told("damaged", "--average=last:3"), "checkpoints/4 is damaged", file.name)
    assert told("plain", "--average=last:2").code == 2
    ran(*tiny, *SIX, "--model.mlp_dim=32", "--run.dir", "narrow")
    shutil.rmtree("damaged/checkpoints/4")
    shutil.copytree("narrow/checkpoints/4", "damaged/checkpoints/4")
    refused(told("damaged", "--average=last:2"), "params/layers/mlp", "in step 4 and", "in step 6")
