"""Checkpoints: bit for bit onto any mesh, rule file and number of processes; whole or absent; believed only when their
checksums hold; safe against donation; and what went wrong is told in one line, or in full where arrays do not fit."""

import contextlib
import errno
import gc
import json
import os
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain import assembly, config
from meshtrain.run import checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent


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


def test_state_comes_back_bit_for_bit_on_another_mesh(tmp_path):
    old, new = make_state(mesh(4, 2), P("a", "b")), make_state(mesh(2, 2), P(None, ("a", "b")), seed=1)
    checkpoints = checkpoint.Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    blocked_s = checkpoints.save(7, old, {"run": "[run]\nname = 'x'", "position": 7})
    assert blocked_s > 0
    assert checkpoints.latest() == 7

    checkpoints = checkpoint.Checkpoints(tmp_path / "c", read_only=True)
    assert checkpoints.latest() == 7
    state, metadata = checkpoints.restore(7, abstract(new))
    assert metadata == {"format": 2, "run": "[run]\nname = 'x'", "position": 7} == checkpoints.metadata(7)
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


@pytest.mark.parametrize("devices, spec", [(8, P("a")), (8, P()), (1, P())])
def test_a_donated_state_is_saved_as_it_was(tmp_path, devices, spec):
    sharding = NamedSharding(mesh(devices, 1), spec)
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


# ---- other meshes and other numbers of processes ---------------------------------------------------------------------

MESHES = [
    ("ddp", dict(fsdp=1)), ("zero1", dict(data=2)), ("zero3", dict(fsdp=8)), ("hsdp", dict(data=2, fsdp=4)),
    ("tensor", dict(data=2, tensor=2)), ("tensor_sequence", dict(data=2, tensor=4)),
]  # fmt: skip


def assemble(rule, sizes):
    run = config.Run(
        mesh=sizes, sharding=dict(rules=str(ROOT / f"sharding_rules/{rule}.toml")), data=dict(seq_len=16, global_batch=8),
        model=dict(vocab_size=256, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=32,
                   compute_dtype="float32"),
        training=dict(steps=8),
    )  # fmt: skip
    return assembly.assemble(run, jax.devices()[: int(np.prod(list(sizes.values())))])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory, the state saved there as step 3, on zero3_tensor_sequence over 2 x 2 x 2 devices and all of it random)."""
    directory, rng = tmp_path_factory.mktemp("trained"), np.random.default_rng(0)
    spec = assemble("zero3_tensor_sequence", dict(data=2, fsdp=2, tensor=2)).program.spec
    draw = lambda x: np.asarray(0.05 * rng.random(x.shape) if x.dtype == jnp.float32 else np.full(x.shape, 3), x.dtype)
    saved = jax.tree.map(draw, spec.abstract)
    with checkpoint.Checkpoints(directory) as checkpoints:
        checkpoints.save(3, jax.device_put(saved, spec.sharding), {})
    return directory, saved


def losses_after_restoring(directory, rule, sizes):
    made, losses = assemble(rule, sizes), []
    with jax.set_mesh(made.mesh):
        step = made.program.compile()
        state, _ = checkpoint.Checkpoints(directory, read_only=True).restore(3, made.program.spec.with_shardings())
    for n in range(3, 8):
        tokens = np.random.default_rng(n).integers(0, 256, (8, 17)).astype("int32")
        index = np.tile(np.arange(16, dtype="int32"), (8, 1))
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": index * 0, "positions": index,
                 "index": index, "sequence": np.arange(8, dtype="int32")}  # fmt: skip
        state, metrics = step(state, made.program.place(batch))
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("rule, sizes", MESHES)
def test_a_state_saved_on_one_mesh_is_the_same_bits_on_another(trained, rule, sizes):
    directory, saved = trained
    made = assemble(rule, sizes)
    abstract = made.program.spec.with_shardings()
    checkpoints = checkpoint.Checkpoints(directory, read_only=True)
    state, _ = checkpoints.restore(checkpoints.latest(), abstract)
    assert_same_bits(jax.device_get(state), saved)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert got.sharding == wanted.sharding


@pytest.mark.slow
def test_a_run_goes_on_alike_on_six_other_meshes(trained):
    directory, _ = trained
    losses = losses_after_restoring(directory, "zero3_tensor_sequence", dict(data=2, fsdp=2, tensor=2))
    assert len(set(losses)) == len(losses) == 5
    for rule, sizes in MESHES:  # sums in another order
        np.testing.assert_allclose(losses_after_restoring(directory, rule, sizes), losses, rtol=1e-5, err_msg=rule)


PROCESS = r"""
import os, sys, time
count, index, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from meshtrain.run import checkpoint
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
    got, _ = checkpoints.restore(step, forms)
    whole = state(step)
    rng = np.random.default_rng(step)
    want = [rng.normal(size=s).astype("f4") for s in ((8, 6), 8, 5)]
    for x, array in zip(want, (got["split"], got["rows"], got["whole"])):
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == x[shard.index].tobytes()

def say(*words):
    print(index, *words, flush=True)
"""


def run_processes(count, directory, body, timeout_s=120):
    """What each process of `count` printed with say(), without its index; they share 4 simulated devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count={4 // count} --xla_cpu_enable_concurrency_optimized_scheduler=false"
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
    return [[line[2:] for line in out.splitlines() if line[:2] == f"{index} "] for index, (out, _) in enumerate(told)]


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("f4") for name, shape in (("split", (8, 6)), ("rows", 8), ("whole", 5))}


def test_two_processes_save_and_one_restores_and_the_other_way_round(tmp_path):
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, jax.tree.map(jnp.asarray, values(step)), {"from": "one"})
    flip(tmp_path / "2" / "metadata.json")
    (tmp_path / ".9.saving" / "state").mkdir(parents=True)
    body = r"""
with checkpoint.Checkpoints(directory, keep=2, tell=lambda text: say("told", text)) as checkpoints:
    say("latest", checkpoints.latest())
    check(1, "b", "a")
    checkpoints.save(3, state(3), {"from": "two"})
    say("latest", checkpoints.latest())
    check(3, None, "a")
    write = checkpoint._checksums
    if index == 1:
        def broken(*args, **kwargs):
            raise OSError(28, os.strerror(28))
        checkpoint._checksums = broken
    checkpoints.save(4, state(4), {})
    start = time.perf_counter()
    try:
        checkpoints.wait()
    except checkpoint.CheckpointError as error:
        say("raised", error)
    say("quickly", time.perf_counter() - start < 20)
    checkpoint._checksums = write
    checkpoints.save(5, state(5), {"from": "two"})
    checkpoints.save(5, state(6), {"from": "the second attempt"})
say("left", sorted(os.listdir(directory)))
"""
    zero, one = run_processes(2, tmp_path, body)
    failed = f"checkpoint of step 4 not saved in {tmp_path}: "
    damaged = (f"told checkpoint {tmp_path}/2 is damaged (metadata.json: its checksum differs), kept as 2.damaged; "
               "trying the one before")  # fmt: skip
    missing = failed + "process 1 did not write its part (its output says why)"
    assert zero == [damaged, "latest 1", "latest 3", f"told {missing}", f"raised {missing}", "quickly True",
                    "left ['2.damaged', '3', '5']"]  # fmt: skip
    assert one == ["latest 1", "latest 3", f"told {failed}No space left on device", f"raised {missing}", "quickly True",
                   "left ['2.damaged', '3', '5']"]  # fmt: skip
    checkpoints = checkpoint.Checkpoints(tmp_path, read_only=True)
    assert checkpoints.latest() == 5
    wanted = values(5)
    got, metadata = checkpoints.restore(5, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted))
    assert metadata["from"] == "two"
    assert_same_bits(got, wanted)


# ---- whole or absent, and kept ---------------------------------------------------------------------------------------


def test_the_latest_are_kept_and_leftovers_are_cleaned(tmp_path):
    for leftover in (".9.saving", ".1.deleting"):
        (tmp_path / leftover / "state").mkdir(parents=True)
    (tmp_path / "7.damaged").mkdir()
    (tmp_path / "notes").mkdir()
    with checkpoint.Checkpoints(tmp_path, every=2, keep=2) as checkpoints:
        assert names(tmp_path) == ["7.damaged", "notes"]
        assert [step for step in range(1, 7) if checkpoints.due(step)] == [2, 4, 6]
        for step in (2, 4, 6):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
    assert names(tmp_path) == ["4", "6", "7.damaged", "notes"]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_last_whole_one_stays_until_the_next_is_whole(tmp_path, monkeypatch):
    """With keep=1 there is a moment with two, and none with none: seen at every rename and removal."""
    seen = []
    for owner, name in ((pathlib.Path, "rename"), (shutil, "rmtree")):

        def watched(*args, real=getattr(owner, name)):
            real(*args)
            seen.append([name for name in names(tmp_path) if name.isdecimal()])

        monkeypatch.setattr(owner, name, watched)
    with checkpoint.Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
    assert seen == [["1"], ["1", "2"], ["2"], ["2"]]


def test_a_checkpoint_has_its_number_only_when_its_checksums_are_on_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    name = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(name(descriptor)), real(descriptor)))
    before = {}
    rename = pathlib.Path.rename

    def watched(path, target):
        before.update({"synced": list(synced), "files": {str(p) for p in path.rglob("*")} | {str(path)}})
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", watched)
    with checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    assert before["files"] <= set(before["synced"])
    assert str(tmp_path / ".1.saving" / "checksums.json") in before["files"]
    assert synced[-1] == str(tmp_path)


def test_an_exception_in_the_run_waits_for_the_save_and_is_not_replaced(tmp_path):
    with pytest.raises(KeyError, match="mine"), checkpoint.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        raise KeyError("mine")
    assert names(tmp_path) == ["1"]


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    checkpoints = checkpoint.Checkpoints(tmp_path)
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint, "FORMAT", 3)
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
    with pytest.raises(ValueError, match="format 3, this version reads up to 2"):
        checkpoints.restore(1, {"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_a_checkpoint_of_the_format_without_checksums_is_refused_and_left_alone(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(ValueError, match="7 was written by an earlier version, without checksums"):
        checkpoint.Checkpoints(tmp_path).latest()
    assert names(tmp_path) == ["7"]


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint_or_none(tmp_path):
    program = (
        "import logging, os, sys, jax.numpy as jnp\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "from meshtrain.run import checkpoint\n"
        "checkpoints = checkpoint.Checkpoints(sys.argv[1])\n"
        "checkpoints.save(1, {'w': jnp.full(8_000_000, 1.0)}, {})\n"
        "checkpoints.wait()\n"
        "checkpoints.save(2, {'w': jnp.full(8_000_000, 2.0)}, {})\n"
        "os._exit(9)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert "INFO:absl" not in done.stderr and not done.stdout
    checkpoints = checkpoint.Checkpoints(tmp_path)
    step = checkpoints.latest()
    assert step in (1, 2)
    state, _ = checkpoints.restore(step, {"w": jax.ShapeDtypeStruct((8_000_000,), jnp.float32)})
    assert np.all(np.asarray(state["w"]) == step)
    assert names(tmp_path) == (["1"] if step == 1 else ["1", "2"])


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with the checkpoints 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    with checkpoint.Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(mesh(4, 2), P("a", "b"), seed=step), {"position": step})
    return directory


@contextlib.contextmanager
def copied(two):
    """A copy of `two` for each example of a property; the arrays are small, so copying is nothing."""
    copy = two.with_name(f"copy{time.monotonic_ns()}")
    shutil.copytree(two, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def flip(path, bit=5):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def latest(directory):
    told = []
    return checkpoint.Checkpoints(directory, tell=told.append).latest(), told


def check_passed_over(directory, name, what):
    step, told = latest(directory)
    assert step == 1 and len(told) == 1
    assert told[0] == f"checkpoint {directory / '2'} is damaged ({name}{what}), kept as 2.damaged; trying the one before"
    assert names(directory) == ["1", "2.damaged"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_in_any_file_is_noticed_told_and_passed_over(two, data):
    with copied(two) as directory:
        path = directory / "2" / data.draw(st.sampled_from([name for name in files(two / "2") if name != "checksums.json"]))
        flip(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1)))
        check_passed_over(directory, path.relative_to(directory / "2"), ": its checksum differs")


def test_a_flipped_bit_anywhere_in_the_checksums_themselves_is_noticed(tmp_path):
    place, checksums = tmp_path / "2", tmp_path / "2" / "checksums.json"
    place.mkdir()
    for name in ("metadata.json", "manifest"):
        (place / name).write_text(name)
    checksums.write_text(json.dumps(checkpoint._checksums(place, [place / name for name in files(place)])))
    checkpoints, whole = checkpoint.Checkpoints(tmp_path), checksums.read_bytes()
    assert not checkpoints._fault(2)
    for bit in range(8 * len(whole)):
        flip(checksums, bit)
        assert checkpoints._fault(2), f"bit {bit}: {checksums.read_bytes()}"
        checksums.write_bytes(whole)
    flip(checksums, 3)
    with pytest.raises(ValueError, match="only damaged"):
        latest(tmp_path)


def test_any_truncated_or_missing_file_is_noticed_told_and_passed_over(two):
    for name in files(two / "2"):
        with copied(two) as directory:
            (directory / "2" / name).unlink()
            check_passed_over(directory, name, " is missing")
        size = (two / "2" / name).stat().st_size
        if name != "checksums.json":
            with copied(two) as directory:
                os.truncate(directory / "2" / name, size - 1)
                check_passed_over(directory, name, f": {size - 1} bytes, {size} were written")
    with copied(two) as directory:
        os.truncate(directory / "2" / "checksums.json", 100)
        assert latest(directory)[0] == 1


def test_a_file_that_is_no_part_of_it_does_not_matter(two):
    with copied(two) as directory:
        (directory / "2" / "notes.txt").write_text("keep this one")
        assert latest(directory) == (2, [])


def test_a_run_never_starts_over_checkpoints_that_are_all_damaged(two):
    with copied(two) as directory:
        for step in "12":
            flip(directory / step / "metadata.json")
        for _ in range(2):  # and the second start has not forgotten
            with pytest.raises(ValueError, match=r"only damaged ones \(1.damaged, 2.damaged\); restore .* remove"):
                latest(directory)
        shutil.copytree(two / "1" / "state", directory / "1.damaged" / "state", dirs_exist_ok=True)
        shutil.copy(two / "1" / "metadata.json", directory / "1.damaged")
        (directory / "1.damaged").rename(directory / "1")
        assert latest(directory) == (1, [])


def test_a_step_that_is_damaged_twice_is_kept_twice(two):
    with copied(two) as directory:
        flip(directory / "2" / "metadata.json")
        assert latest(directory)[0] == 1
        shutil.copytree(two / "2", directory / "2")
        flip(directory / "2" / "metadata.json")
        assert latest(directory)[0] == 1
        assert names(directory) == ["1", "2.damaged", "2.damaged-2"]


def test_nothing_is_changed_in_the_directory_of_another_run(two):
    with copied(two) as directory:
        flip(directory / "2" / "metadata.json")
        (directory / ".3.saving").mkdir()
        told = []
        assert checkpoint.Checkpoints(directory, read_only=True, tell=told.append).latest() == 1
        assert "damaged (metadata.json: its checksum differs); trying the one before" in told[0]
        assert names(directory) == [".3.saving", "1", "2"]
        flip(directory / "1" / "metadata.json")
        with pytest.raises(ValueError, match=r"only damaged ones \(1, 2\)"):
            checkpoint.Checkpoints(directory, read_only=True, tell=told.append).latest()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's, about what is no array
def test_no_file_of_a_checkpoint_is_unpickled(two, tmp_path):
    """Each file in turn, and the names that orbax may look for, is a pickle that leaves a trace; its checksum holds."""
    trace = tmp_path / "trace"
    bomb = pickle.dumps(Bomb(trace))
    pickle.loads(bomb)
    trace.unlink()  # it would have worked
    for name in [*files(two / "2"), "state/checkpoint", "state/_CHECKPOINT_METADATA", "state/checkpoint.pkl"]:
        if name == "checksums.json":
            continue
        with copied(two) as directory:
            place = directory / "2"
            (place / name).write_bytes(bomb)
            (place / "checksums.json").unlink()
            (place / "checksums.json").write_text(json.dumps(checkpoint._checksums(place, [place / n for n in files(place)])))
            checkpoints = checkpoint.Checkpoints(directory)
            assert checkpoints.latest() == 2
            with contextlib.suppress(Exception):
                checkpoints.restore(2, abstract(make_state(mesh(4, 2), P("a", "b"))))
            assert not trace.exists(), name
    gc.collect()  # here, where what tensorstore leaves behind is expected


# ---- what the disk refuses -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_told_leaves_nothing_and_the_next_save_may_work(small_disk, capfd):
    random = jnp.asarray(np.random.default_rng(0).normal(size=2_000_000).astype("f4"))  # 8 MB that hardly compress
    told = []
    with checkpoint.Checkpoints(small_disk / "c", keep=1, tell=told.append) as checkpoints:
        checkpoints.save(1, {"w": random[:1000]}, {})
        checkpoints.save(2, {"w": random}, {})
        message = f"checkpoint of step 2 not saved in {small_disk / 'c'}: No space left on device"
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoints.wait()
        assert told == [str(error.value)] == [message] and names(small_disk / "c") == ["1"]
        checkpoints.save(3, {"w": random}, {})  # told, and nobody is stopped: the run goes on
        checkpoints.save(4, {"w": random[:2000]}, {})
        assert checkpoints.latest() == 4 and names(small_disk / "c") == ["4"] and len(told) == 2
        got, _ = checkpoints.restore(4, {"w": jax.ShapeDtypeStruct((2000,), "float32")})
        np.testing.assert_array_equal(got["w"], random[:2000])
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("where", ["_checksums", "_write", "_sync", "rename"])
def test_wherever_the_disk_refuses_the_last_whole_one_stays(tmp_path, monkeypatch, where, error):
    told = []
    with checkpoint.Checkpoints(tmp_path, keep=1, tell=told.append) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        checkpoints.wait()
        with monkeypatch.context() as broken:

            def fail(*args, **kwargs):
                raise OSError(error, os.strerror(error))

            broken.setattr(*((pathlib.Path, where) if where == "rename" else (checkpoint, where)), fail)
            checkpoints.save(2, {"w": jnp.ones(3)}, {})
            with pytest.raises(checkpoint.CheckpointError, match=f"step 2 not saved in {tmp_path}: {os.strerror(error)}"):
                checkpoints.wait()
        assert len(told) == 1 and names(tmp_path) == ["1"] and checkpoint.Checkpoints(tmp_path).latest() == 1
        checkpoints.save(3, {"w": jnp.ones(3)}, {})
    assert names(tmp_path) == ["3"]


def test_a_directory_that_went_away_is_told_and_the_run_goes_on(tmp_path):
    told = []
    with checkpoint.Checkpoints(tmp_path / "c", tell=told.append) as checkpoints:
        (tmp_path / "c").rmdir()
        (tmp_path / "c").write_text("")
        checkpoints.save(1, {"w": jnp.ones(3)}, {})
        with pytest.raises(checkpoint.CheckpointError, match="step 1 not saved in .*/c: Not a directory"):
            checkpoints.wait()
        (tmp_path / "c").unlink()
        checkpoints.save(2, {"w": jnp.ones(3)}, {})
    assert latest(tmp_path / "c") == (2, [])
    assert len(told) == 1


def test_a_directory_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/c cannot hold checkpoints: Not a directory .*; give a directory"):
        checkpoint.Checkpoints(tmp_path / "file" / "c")


def test_the_last_failed_save_raises_at_the_end(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="step 1 not saved"):
        with checkpoint.Checkpoints(tmp_path / "c") as checkpoints:
            (tmp_path / "c").rmdir()
            (tmp_path / "c").write_text("")
            checkpoints.save(1, {"w": jnp.ones(3)}, {})
