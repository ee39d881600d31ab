"""Checkpoints: bit for bit onto any sharding, whole or absent, safe against donation, and a mismatch is told in full."""

import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.training import checkpoint


class Moments(NamedTuple):
    count: Any
    mu: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any


def mesh(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"))


def make_state(mesh, spec, seed=0, width=16):
    rng = np.random.default_rng(seed)
    put = lambda x, s: jax.device_put(jnp.asarray(x), NamedSharding(mesh, s))
    tree = lambda: {"layers": {"wq": put(rng.normal(size=(8, width)).astype("float32"), spec)}, "norm": put(rng.normal(size=8).astype("bfloat16"), P())}
    return State(put(np.int32(7), P()), tree(), (Moments(put(np.int32(7), P()), tree()), (), {"0": put(np.float32(np.nan), P())}))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_state_comes_back_bit_for_bit_on_another_mesh(tmp_path):
    old, new = make_state(mesh(4, 2), P("a", "b")), make_state(mesh(2, 2), P(None, ("a", "b")), seed=1)
    checkpoints = checkpoint.Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    blocked_s = checkpoints.save(7, old, {"run": "[run]\nname = 'x'", "position": 7})
    assert blocked_s > 0
    assert checkpoints.latest() == 7 and (tmp_path / "c" / "7").is_dir()  # orbax by itself also names a step that is still being written

    checkpoints = checkpoint.Checkpoints(tmp_path / "c", read_only=True)
    assert checkpoints.latest() == 7
    state, metadata = checkpoints.restore(7, abstract(new))
    assert metadata == {"format": 1, "run": "[run]\nname = 'x'", "position": 7} == checkpoints.metadata(7)
    assert_same_bits(state, old)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, new)


def test_only_the_weights_come_back_for_a_new_run(tmp_path):
    old = make_state(mesh(4, 2), P("a", "b"))
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, old, {})
    with checkpoint.Checkpoints(tmp_path, read_only=True) as checkpoints:
        part, _ = checkpoints.restore(7, {"params": abstract(old.params)}, part=True)
        assert_same_bits(part["params"], old.params)
        with pytest.raises(ValueError, match="opt_state/0/count: .* absent in this run"):
            checkpoints.restore(7, {"params": abstract(old.params)})


@pytest.mark.parametrize("spec", [P("a"), P()])
def test_a_donated_state_is_saved_as_it_was(tmp_path, spec):
    sharding = NamedSharding(mesh(8, 1), spec)
    state = jax.device_put(jnp.arange(2_000_000, dtype=jnp.float32).reshape(8, -1), sharding)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0, out_shardings=sharding)
    state = step(state)
    want = np.array(state)
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save(1, {"w": state}, {})
    for _ in range(3):
        state = step(state)
    got, _ = checkpoints.restore(1, abstract({"w": state}))
    np.testing.assert_array_equal(got["w"], want)
    again = step(got["w"])  # and what was restored can be donated in its turn
    np.testing.assert_array_equal(again, want * 2 + 1)


def test_a_mismatch_names_every_array_and_a_saved_step_is_left_alone(tmp_path):
    state = make_state(mesh(4, 2), P("a", "b"))
    checkpoints = checkpoint.Checkpoints(tmp_path)
    checkpoints.save(7, state, {"first": True})
    checkpoints.save(7, make_state(mesh(4, 2), P("a", "b"), seed=1), {"first": False})
    restored, metadata = checkpoints.restore(7, abstract(state))
    assert metadata["first"] is True
    assert_same_bits(restored, state)
    other = make_state(mesh(4, 2), P("a", "b"), width=32).replace(opt_state=())
    with pytest.raises(ValueError) as error:
        checkpoints.restore(7, abstract(other))
    assert "params/layers/wq: float32[8, 16] in the checkpoint, float32[8, 32] in this run" in str(error.value)
    assert "opt_state/0/count: int32[] in the checkpoint, absent in this run" in str(error.value)
    assert "params/norm" not in str(error.value)


def test_the_latest_are_kept_and_leftovers_are_cleaned(tmp_path):
    (tmp_path / "9.orbax-checkpoint-tmp-1").mkdir()
    checkpoints = checkpoint.Checkpoints(tmp_path, every=2, keep=2)
    assert [step for step in range(1, 7) if checkpoints.due(step)] == [2, 4, 6]
    for step in (2, 4, 6):
        checkpoints.save(step, {"w": jnp.ones(3)}, {})
    assert checkpoints.latest() == 6
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["4", "6"]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "FORMAT", 2)
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(ValueError, match="format 2, this version reads up to 1"):
        checkpoints.restore(1, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint_or_none(tmp_path):
    program = (
        "import logging, os, sys, jax.numpy as jnp\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from meshtrain.training import checkpoint\n"
        "checkpoints = checkpoint.Checkpoints(sys.argv[1])\n"
        "checkpoints.save(1, {'w': jnp.full(8_000_000, 1.0)}, {})\n"
        "checkpoints.wait()\n"
        "checkpoints.save(2, {'w': jnp.full(8_000_000, 2.0)}, {})\n"
        "os._exit(9)\n"
    )
    root = str(pathlib.Path(checkpoint.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert "INFO:absl" not in done.stderr and not done.stdout
    checkpoints = checkpoint.Checkpoints(tmp_path)
    step = checkpoints.latest()
    assert step in (1, 2)
    state, _ = checkpoints.restore(step, {"w": jax.ShapeDtypeStruct((8_000_000,), jnp.float32)})
    assert np.all(np.asarray(state["w"]) == step)
    assert not list(tmp_path.glob("*tmp*"))
