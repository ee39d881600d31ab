"""What the tests of checkpoints share: a state of many forms, processes that share a directory, and what lies there."""
from __future__ import annotations

import os
import pathlib
import socket
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

from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Moments(NamedTuple):
    count: Any
    mu: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def mesh(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("a", "b"))


def make_state(mesh, spec, seed=0, width=16):
    rng = np.random.default_rng(seed)
    put = lambda x, s: jax.device_put(jnp.asarray(x), NamedSharding(mesh, s))
    draw = lambda shape, dtype, spec: put(rng.normal(size=shape).astype(dtype), spec)
    tree = lambda: {"layers": {"wq": draw((8, width), "float32", spec)}, "norm": draw(8, "bfloat16", P())}
    moments = Moments(put(np.int32(7), P()), tree())
    return State(put(np.int32(7), P()), tree(), (moments, (), {"0": put(np.float32(np.nan), P())}))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same_bits(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def flip(path, bit=5):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def latest(directory):
    told = []
    return checkpoint.Checkpoints(DirectoryStore(directory), tell=told.append).newest().step, told


PROCESS = r"""
import os, sys, time
count, index, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshtrain import files
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, initialization_timeout=60)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))

def put(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: x[index])

def state(seed):
    rng = np.random.default_rng(seed)
    return {"split": put(rng.normal(size=(8, 6)).astype("f4"), "a", "b"), "rows": put(rng.normal(size=8).astype("f4"), "b"),
            "whole": put(rng.normal(size=5).astype("f4"))}

def check(step, *spec):
    wanted = state(step)
    forms = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for k, x in wanted.items()}
    forms["split"] = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(mesh, P(*spec)))
    got = checkpoints.restore(step, forms)
    whole = state(step)
    rng = np.random.default_rng(step)
    want = [rng.normal(size=s).astype("f4") for s in ((8, 6), 8, 5)]
    for x, array in zip(want, (got["split"], got["rows"], got["whole"])):
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes()

def say(*words):
    print(f"said by {index}:", *words, flush=True)        # Gloo's threads tear their own lines
"""


def run_processes(count, directory, body, timeout_s=120):
    """What each process of `count` printed with say(), without its index; they share 4 simulated devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={4 // count}"      # the last one counts
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS + body, str(count), str(index), port, str(directory)], env=env,
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for index in range(count)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, told, strict=True):
        assert process.returncode == 0, err
    said = [f"said by {index}: " for index in range(count)]
    return [[line.partition(mark)[2] for line in out.splitlines() if mark in line]
            for mark, (out, _) in zip(said, told)]


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("f4") for name, shape in (("split", (8, 6)), ("rows", 8), ("whole", 5))}
