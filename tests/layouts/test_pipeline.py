"""A pipeline's state on other stages, its memory, and what it refuses and says. What its steps compute, send and multiply:
`test_cells`."""
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import parity
import pytest

from meshtrain import assembly, config
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.model.stats import LayerStats
from meshtrain.parallel.pipeline import schedules
from meshtrain.training import objective
from test_layouts import MODEL, RULES, T

SEQUENCES = 48
LAYERS = 8
CHUNKS = dict.fromkeys(schedules.INTERLEAVED, 2)


def run_of(rule: str, mesh: dict, schedule: str = "1f1b", model: dict = {}, training: dict = {},
           chunks: int = 0, **more):
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")), model=MODEL | dict(num_layers=LAYERS) | model,
        data=dict(seq_len=T, global_batch=SEQUENCES) | more.get("data", {}),
        training=dict(steps=20, microbatches=8, loss_chunk=24) | training,
        pipeline=dict(schedule=schedule, chunks=chunks or CHUNKS.get(schedule, 1)) | more.get("pipeline", {}),
        optimizer=dict(learning_rate=1e-3, warmup_steps=2),
    )  # fmt: skip


def test_evaluation_equals_one_device():
    run = run_of("zero1", dict(stage=2, data=2), "interleaved", dict(num_layers=4))
    np.testing.assert_allclose(parity.evaluate(run), parity.evaluate(parity.on_one_device(run)), rtol=1e-5)


class Doubled(objective.NextToken):
    def head(self, model, ex, p, x_BTD, batch):
        total, nll, stats = super().head(model, ex, p, x_BTD, batch)
        return 2 * total, 2 * nll, stats


class Reporting(objective.NextToken):
    def head(self, model, ex, p, x_BTD, batch):
        total, nll, stats = super().head(model, ex, p, x_BTD, batch)
        return total, nll, stats | LayerStats.of("target", nll_twice=2 * nll)


def run_of_own_objective(z_loss: float) -> config.Run:
    """z_loss: another one for each objective, because the reference on one device is cached by the run."""
    return run_of("zero1", dict(stage=2), model=dict(num_layers=2), training=dict(microbatches=2, z_loss=z_loss),
                  data=dict(global_batch=4))


def test_stages_train_the_loss_of_an_objective_of_ones_own(monkeypatch):
    monkeypatch.setitem(objective.OBJECTIVES, "next_token", Doubled.of)
    case = parity.check(run_of_own_objective(3e-4))
    assert parity.train(case, parity.draw_parameters(case.made, 0), 1)[0][0, 0] > 10, "twice log 259 is 11"


def test_stages_report_the_numbers_of_an_objective_of_ones_own(monkeypatch):
    monkeypatch.setitem(objective.OBJECTIVES, "next_token", Reporting.of)
    case = parity.check(run_of_own_objective(4e-4))
    losses, metrics = parity.train(case, parity.draw_parameters(case.made, 0), 1)[:2]
    assert metrics["nll_twice"] == pytest.approx(2 * losses[0, 0], rel=1e-6)


def test_state_goes_from_any_number_of_stages_and_chunks_to_any_other(tmp_path):
    """Layers are stored in the model's order, [L, …], without padding."""
    def program(rule, mesh, **more):
        run = run_of(rule, mesh, model=dict(num_layers=6), **more)
        return assembly.assemble(run, jax.devices()[:math.prod(mesh.values())]).program
    first = program("zero1", dict(stage=2, data=2), schedule="interleaved")
    with jax.set_mesh(first.step.mesh):
        state = first.initialize()
    with checkpoint.Checkpoints(DirectoryStore(tmp_path / "c")) as kept:
        kept.save(1, state, {"run": ""})
    for rule, mesh, more in (("ddp", dict(fsdp=1), {}), ("ddp", dict(stage=4), {}),
                             ("zero3", dict(stage=3, fsdp=2), {})):
        other = program(rule, mesh, **more)
        with checkpoint.Checkpoints(DirectoryStore(tmp_path / "c")) as kept:
            restored = kept.restore(1, other.step.state.abstract)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))


# ---- what the compiled program does ----------------------------------------------------------------------------------


def temp_bytes(schedule: str, microbatches: int) -> int:
    run = run_of("ddp", dict(stage=4), schedule, dict(num_layers=4), dict(microbatches=microbatches, remat="full"),
                 data=dict(global_batch=16 * microbatches))
    return parity.compile_run(run).step.memory_analysis().temp_size_in_bytes


@pytest.mark.long
@pytest.mark.cell
def test_memory_of_1f1b_does_not_grow_with_the_microbatches_and_gpipes_does():
    few, many = temp_bytes("1f1b", 8), temp_bytes("1f1b", 32)
    assert many <= 1.02 * few
    assert temp_bytes("gpipe", 32) > temp_bytes("gpipe", 8) + 20 * 16 * T * MODEL["embed_dim"] * 4, "24 inputs more"


# ---- what is refused and said ----------------------------------------------------------------------------------------


def assembled(rule: str, mesh: dict, *args, **kwargs):
    return assembly.assemble(run_of(rule, mesh, *args, **kwargs), jax.devices()[:math.prod(mesh.values())])


THIRDS = dict(embed_dim=48, num_heads=6, num_kv_heads=6)


@pytest.mark.parametrize("case, parts", [
    ((("ddp", dict(stage=4)), dict(schedule="1f1b", chunks=2)), ["pipeline.chunks=2", "interleaved"]),
    ((("ddp", dict(stage=4)), dict(schedule="interleaved", training=dict(microbatches=6))),
     ["multiple of mesh.stage=4", "8"]),
    # Taken from the stages, a vocabulary of 512 must still divide over tensor.
    ((("zero1", dict(stage=2, tensor=3)), dict(model=THIRDS, data=dict(seq_len=48))),
     ["vocab=512", "tensor 3", "model.vocab_size"]),
    ((("ddp", dict(stage=4)), dict(training=dict(remat="offload"))),
     ['training.remat="offload"', "mesh.stage=4", '"full"']),
    ((("ddp", dict(stage=4)), dict(schedule="interleaved", chunks=3, model=dict(num_layers=7))),
     ["pipeline.chunks=3", "num_layers=7", "without a layer", "use at most 2"]),
], ids=["chunks", "microbatches", "vocabulary", "offload", "empty chunks"])  # fmt: skip
def test_pipeline_that_cannot_be_is_refused_in_one_line(case, parts):
    with pytest.raises(config.ConfigError) as error:
        assembled(*case[0], **case[1])
    assert len(error.value.messages) == 1
    for part in parts:
        assert part in str(error.value)


def test_vocabulary_that_divides_over_tensor_alone_is_no_fault():
    """The layers are split over the stages, or over none, all the same."""
    for layers in (6, 5):
        notes = assembled("zero1", dict(stage=3, tensor=2), model=dict(num_layers=layers)).notes
        assert sum("vocabulary of 512" in note for note in notes) == 1


def test_pipeline_is_assembled_the_same_with_a_mesh_in_force():
    made = assembled("ddp", dict(stage=2))
    with jax.set_mesh(made.mesh):
        assert assembled("ddp", dict(stage=2)).choice.memory_bytes == made.choice.memory_bytes


def test_auto_takes_the_schedule_with_the_least_modelled_bubble_and_says_so():
    made = assembled("ddp", dict(stage=4), schedule="auto")
    assert len(made.notes) == 1 and made.notes[0].startswith("pipeline: interleaved_zero_bubble of 2 chunks")
    assert made.choice.schedule.num_chunks == 2


@pytest.mark.parametrize("params, parts", [
    ('layers = "stage"\nmlp = "stage"\nvocab = "stage"\n', ["mlp: only layers and vocab", "not in [activations]"]),
    ('embed = "data"\n', ["mesh.stage=2", 'layers = "stage" in [params], [grads], [optimizer]', "add the line"])])
def test_rules_that_put_stage_elsewhere_or_nowhere_are_refused(tmp_path, params, parts):
    path = tmp_path / "mine.toml"
    path.write_text(f'[params]\n{params}[activations]\nbatch = "data"\n')
    run = run_of("ddp", dict(stage=2)).model_copy(update={"sharding": config.Sharding(rules=str(path))})
    with pytest.raises(config.ConfigError) as error:
        assembly.assemble(run, jax.devices()[:2])
    assert all(part in str(error.value) for part in parts), error.value


def test_a_section_that_the_mesh_has_no_use_for_is_named():
    assert assembled("zero1", dict(data=2), schedule="1f1b").notes == ("mesh.stage=1: [pipeline] is not used",)
    assert assembled("zero1", dict(data=2), schedule="auto").notes == ()


def test_padding_and_what_does_not_divide_is_said_once():
    notes = assembled("ddp", dict(stage=3), model=dict(num_layers=5)).notes
    for part in ("identity layer", "do not divide", "vocabulary of 512"):
        assert sum(part in note for note in notes) == 1, part
    assert not [note for note in assembled("ddp", dict(stage=4)).notes if "identity layer" in note or "divide" in note]
    for stages, chunks, gathers in ((2, 3, True), (4, 2, False), (2, 4, False)):
        notes = assembled("ddp", dict(stage=stages), "interleaved", dict(num_layers=24), chunks=chunks).notes
        assert sum("gathers the layers of all" in note for note in notes) == gathers


# ---- slow: many devices, many runs -----------------------------------------------------------------------------------

IN_ITS_OWN_PROCESS = """
import sys
sys.path[:0] = {path!r}
import test_pipeline
test_pipeline.{call}
"""


def in_its_own_process(call: str, devices: int):
    flags = (f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices} "
             "--xla_cpu_collective_call_terminate_timeout_seconds=600")
    env = os.environ | {"XLA_FLAGS": flags, "NPROC": str(4 * devices), "JAX_PLATFORMS": "cpu"}
    code = IN_ITS_OWN_PROCESS.format(path=sys.path, call=call)
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=Path(__file__).resolve().parent.parent.parent,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test_five_axes_at_two_equal_one_device():
    in_its_own_process("five_axes()", 32)


def five_axes():
    mesh = dict(data=2, fsdp=2, tensor=2, stage=2, context=2)
    parity.check(run_of("zero3", mesh, "interleaved_zero_bubble", training=dict(remat="full", microbatches=4)))


@pytest.mark.long
def test_forty_runs_of_a_ring_inside_a_pipeline_give_the_same_bits():
    """Permutes of one device that are under way together pair up on CPUs, once in a hundred runs, without the order
    that `ordered` makes."""
    in_its_own_process("forty_runs()", 8)


def forty_runs():
    case = parity.compile_run(run_of("zero3", dict(stage=2, context=4), "interleaved_zero_bubble",
                                  training=dict(remat="full")))
    params = parity.draw_parameters(case.made, 0)
    first = parity.train(case, params, 1)
    for _ in range(39):
        jax.tree.map(np.testing.assert_array_equal, parity.train(case, params, 1), first)
