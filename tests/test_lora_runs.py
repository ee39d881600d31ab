"""Runs with LoRA, by the commands: begun from others, resumed, given back, refused."""
import json

import jax
import numpy as np
import pytest
from checkpoints import assert_same_bits
from commands import call, home, in_a_directory_of_its_own, tiny  # noqa: F401

from meshtrain import config, convert, inspect, train
from meshtrain.run.checkpoint import Checkpoints

LORA = ("--lora.rank", "3", "--lora.alpha", "7", "--optimizer.learning_rate", "0.02")


def saved(directory, step):
    """The parameters of a step, on one device."""
    checkpoints = Checkpoints(directory / "checkpoints", read_only=True)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), checkpoints.arrays(step))
    return jax.device_get(checkpoints.restore(step, wanted)[0])


def paths(tree) -> dict:
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def ran(*words):
    done = call(train.main, *words)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def runs(home, tiny, tmp_path_factory):
    """A run of the whole model, one with adapters that starts from it, and one that goes on from that."""
    place = tmp_path_factory.mktemp("runs")
    of = lambda name: ("--run.dir", str(place / name))
    ran(*tiny, *of("base"), "--training.steps", "2")
    ran(*tiny, *of("lora"), *LORA, "--checkpoint.init_from", str(place / "base"), "--training.steps", "4", "--checkpoint.every", "2")
    return place


def test_a_run_with_adapters_leaves_the_weights_that_it_began_with_as_they_were(runs):
    base, (first, last) = paths(saved(runs / "base", 2)["params"]), (paths(saved(runs / "lora", step)["params"]) for step in (2, 4))
    adapters = first.keys() - base.keys()
    assert len(adapters) == 14 and all("/lora/" in name for name in adapters)
    for name, leaf in base.items():
        np.testing.assert_array_equal(leaf, first[name])
        np.testing.assert_array_equal(leaf, last[name])
    assert all((first[name] != last[name]).any() for name in adapters)
