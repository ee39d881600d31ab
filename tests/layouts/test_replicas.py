"""Checksums of replicas: one flipped bit is found and named, replicas of a healthy run are the same bit for bit."""
import types

import cells
import injected
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from commands import call, home, in_a_directory_of_its_own, tiny  # noqa: F401
from test_layouts import run_of

from meshtrain import assembly
from meshtrain.commands import train
from meshtrain.inspection import measured
from meshtrain.journal.rows import MetricRows
from meshtrain.run import hooks, replicas


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def state(mesh):
    """One array of every kind of placement and dtype."""
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    draw = lambda *shape: jax.random.normal(jax.random.key(0), shape)
    return {"split": place(draw(8, 8, 4), "data", ("fsdp", "tensor")), "norm": place(draw(5)),
            "w": place(draw(3, 8, 4), None, "fsdp"),
            "half": place(draw(4, 6).astype(jnp.bfloat16), "tensor"),
            "byte": place(draw(4, 6).astype(jnp.float8_e4m3fn), "data"),
            "flags": place(draw(16) > 0, ("data", "tensor")), "count": place(jnp.int32(7)),
            "none": place(jnp.zeros((0, 4)))}


@pytest.fixture(scope="module")
def checked(mesh, state):
    return replicas.Replicas(state, mesh)


def flipped(x, device: int, bit: int):
    """x with one bit of the shard on one device flipped, in that device's own memory."""
    shards = [np.array(shard.data) for shard in x.addressable_shards]
    position = next(i for i, shard in enumerate(x.addressable_shards) if shard.device.id == device)
    flat = shards[position].reshape(-1).view(np.uint8)
    flat[bit // 8 % flat.size] ^= 1 << bit % 8
    placed = [jax.device_put(data, shard.device) for data, shard in zip(shards, x.addressable_shards)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


def test_clean_replicas_are_the_same(checked, state):
    assert checked.faults(state) == [] and checked.any
    checked.check(1, state)


@pytest.mark.parametrize("name, bits", [("norm", (0, 31, 159)), ("w", (0, 5, 511)), ("half", (3, 77)),
                                        ("byte", (0, 40)), ("flags", (0,)),
                                        ("count", (0, 31))])
def test_any_flipped_bit_of_a_replica_is_found_and_its_array_and_device_named(checked, state, name, bits):
    for bit in bits:
        for device in (0, 5):
            (found, groups), = checked.faults(state | {name: flipped(state[name], device, bit)})
            alone = [[d.id for d in group] for group in groups if len(group) == 1]      # of two replicas each is
            assert found == name and [device] in alone and len(groups) == 2, (bit, device)
            copies = 8 // len(set(map(str, state[name].sharding.devices_indices_map(state[name].shape).values())))
            assert sum(map(len, groups)) == copies


def test_what_has_no_replica_is_not_read(checked, state):
    assert checked.faults(state | {"split": flipped(state["split"], 3, 9)}) == []
    assert {name for name, _, axes in checked.leaves if not axes} == {"split", "none"}


def test_values_that_change_places_are_no_replicas_of_each_other(mesh):
    x = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, P()))
    shards = [np.array(shard.data) for shard in x.addressable_shards]
    shards[2][[0, 1]] = shards[2][[1, 0]]
    placed = [jax.device_put(data, shard.device) for data, shard in zip(shards, x.addressable_shards)]
    swapped = jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
    assert len(replicas.Replicas({"x": x}, mesh).faults({"x": swapped})) == 1


def test_the_message_names_arrays_and_devices_and_what_to_do(checked, state):
    broken = state | {"norm": flipped(state["norm"], 6, 1), "count": flipped(state["count"], 6, 1),
                      "half": flipped(state["half"], 6, 1),
                      "flags": flipped(state["flags"], 6, 0)}
    with pytest.raises(replicas.ReplicasDiffer) as raised:
        checked.check(40, broken)
    words = str(raised.value)
    assert words.startswith("step 40: replicas that must have the same bits differ in count: device 6 (process 0 on ")
    assert "against 7 others" in words and "; and 1 more arrays" in words and "not saved" in words
    assert raised.value.agreed


def test_of_two_replicas_nobody_knows_which_is_right(mesh, state):
    pair = {"x": jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(("data", "tensor"))))}
    words = replicas._words(replicas.Replicas(pair, mesh).faults({"x": flipped(pair["x"], 2, 0)})[0][1], ["h"])
    assert sorted(words.split(" and ")) == ["device 0 (process 0 on h)", "device 2 (process 0 on h)"]


def test_of_a_state_that_is_all_split_nothing_can_be_checked(mesh):
    split = {"x": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P(("data", "fsdp", "tensor")))),
             "step": jax.device_put(jnp.int32(1), NamedSharding(mesh, P()))}
    assert not replicas.Replicas(split, mesh).any


def test_the_hook_checks_at_its_steps_and_before_every_save(checked):
    hook = hooks.CheckReplicas(checked, 3, [types.SimpleNamespace(due=due)
                               for due in (lambda step, ending: ending, lambda step, ending: step % 5 == 0)])
    assert [step for step in range(1, 12) if hook.due(step, step == 11)] == [3, 5, 6, 9, 10, 11] and hook.after_row


# ---- whole runs ------------------------------------------------------------------------------------------------------


CELLS = ["dense: zero3 data2 fsdp2 tensor2", *(pytest.param(name, marks=sampling.GRID) for name in (
    "dense: zero1 fsdp8", "dense: zero2 fsdp8", "dense: hsdp_zero1 data2 fsdp4", "dense: ddp fsdp8",
    "dense: zero3 fsdp8", "dense: tensor data2 fsdp2 tensor2", "dense: ddp data2 tensor4", "dense: ddp context2 data2 ring",
    "dense: zero2 data2 fsdp2 stage2 1f1b full m4", "dense: zero2 data2 stage2 tensor2 halves",
    "dense: zero3 context2 tensor2 fsdp2 ring"))]


@pytest.mark.parametrize("name", CELLS)
def test_replicas_of_a_healthy_run_are_the_same_bit_for_bit_after_20_steps(name):
    made = cells.compiled(cells.cell(name))
    checked, state = replicas.Replicas(made.made.program.step.state.abstract,
                                       made.made.mesh), assembly.initialize(made.made)
    for n in range(20):
        state, _ = made.step(state, made.made.program.place(parity.batch_of(made.made.run, n)))
        assert checked.faults(state) == [], n
    assert checked.any, "norms and biases of heads lie whole on every device"


def with_a_flipped_bit(monkeypatch, at: int, name: str, device: int):
    """From step `at` on, one bit of a parameter's replica on one device is another."""
    compile_step = assembly.compile_step

    class Flips:
        def __init__(self, compiled):
            self.compiled, self.calls = compiled, 0

        def __getattr__(self, name):
            return getattr(self.compiled, name)

        def __call__(self, state, batch, *more):
            state, out = self.compiled(state, batch, *more)
            self.calls += 1
            if self.calls == at:
                jax.block_until_ready(state)
                flip = lambda path, x: flipped(x, device,
                                               3) if jax.tree_util.keystr(path, simple=True,
                                                                          separator="/") == name else x
                state = jax.tree_util.tree_map_with_path(flip, state)
            return state, out
    monkeypatch.setattr(assembly, "compile_step", lambda *given: Flips(compile_step(*given)))


def test_a_run_with_a_flipped_bit_ends_with_1_and_goes_on_from_the_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    words = (*tiny, "--run.dir", tmp_path / "run", "--training.steps", 9, "--checkpoint.every",
             3, "--training.check_replicas_every", 4,
             "--validation.batches", 1)
    with monkeypatch.context() as patched:
        with_a_flipped_bit(patched, 5, "params/final_norm/scale", 6)
        ran = call(train.main, *words)
    assert ran.code == 1 and "error: step 6: replicas" in ran.err and "Traceback" not in ran.err, ran
    assert "params/final_norm/scale: device 6 (process 0 on " in ran.err and "against 7 others" in ran.err
    assert [path.name
            for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"], "the state of step 6 is not saved"
    assert "replicas" in measured.of(tmp_path / "run")["state"]
    again = call(train.main, *words)
    assert again.code == 0 and "resuming after step 3" in again.out, again
    assert [row["step"] for row in [*MetricRows(tmp_path / "run" / "metrics.jsonl")]] == list(range(1, 10))


def test_where_nothing_is_replicated_that_is_said_and_nothing_is_checked(capsys):
    run = run_of("zero3", dict(fsdp=8), training=dict(check_replicas_every=5))
    made = assembly.assemble(run, jax.devices()[:8])
    assert replicas.of_run(run, made.state_shapes, made.mesh) is None
    assert capsys.readouterr().out.count("training.check_replicas_every=5: only scalars are replicated on this "
                                         "mesh") == 1
    assert replicas.of_run(run_of("ddp", dict(fsdp=8)), made.state_shapes, made.mesh) is None
    assert capsys.readouterr().out == "", "off by default"


FLIP = '''
import sys, threading, time
def flip():
    while not hasattr(sys.modules.get("meshtrain.commands.train"), "main"):
        time.sleep(0.002)
    sys.path[:0] = ["tests", "tests/layouts"]
    import jax
    from test_replicas import flipped
    from meshtrain import assembly
    real = assembly.compile_step
    class Flips:
        calls = 0
        def __init__(self, compiled):
            self.compiled = compiled
        def __getattr__(self, name):
            return getattr(self.compiled, name)
        def __call__(self, state, batch, *more):
            state, out = self.compiled(state, batch, *more)
            self.calls += 1
            if self.calls == 5:
                jax.block_until_ready(state)
                name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
                own = jax.local_devices()[0].id
                state = jax.tree_util.tree_map_with_path(
                    lambda path, x: flipped(x, own, 3) if name(path) == "params/final_norm/scale" else x, state)
            return state, out
    assembly.compile_step = lambda *given: Flips(real(*given))
if any(word == "--distributed.process_id=1" for word in sys.argv):
    threading.Thread(target=flip, daemon=True).start()
'''


@pytest.mark.long
def test_a_bit_that_flips_in_the_second_of_two_processes_ends_both_with_1(tmp_path):
    injected.prepare(tmp_path)
    (tmp_path / "inject" / "sitecustomize.py").write_text(FLIP)
    run = injected.launched(tmp_path, tmp_path / "run", 2, "--training.steps", 9, "--checkpoint.every",
                            3, "--training.check_replicas_every", 4)
    code, said = run.wait(600), (tmp_path / "run.log").read_text()
    assert code == 1 and said.count("error: step 6: replicas that must have the same bits differ in "
                                    "params/final_norm/scale") == 1, said
    assert "(process 0 on " in said and "(process 1 on " in said, "of two replicas nobody knows which is right"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
