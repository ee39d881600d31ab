"""Which schedule a run gets, what it is told of it, and what inspect says of a pipeline's memory."""
import contextlib
import dataclasses
import io
import json
import math
import re
from pathlib import Path

import jax
import parity
import pytest
import sampling

from meshtrain import assembly, config, design, run_files
from meshtrain.commands import inspect, train
from meshtrain import hardware
from meshtrain.cost.formulas import footprint
from meshtrain.cost.formulas.options import StepOptions
from meshtrain.cost.program import carried as carried_by_loops, compile, hlo
from meshtrain.inspection import memory, report
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training import state
from test_pipeline import run_of

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
# No limit of memory, and what moves through it costs nothing: the schedule with the smallest bubble is the fastest.
GPU = dataclasses.replace(hardware.get("h100"), hbm_bytes=None, hbm_bytes_per_s=1e18)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def designed(rule: str, mesh: dict, *args, gpu=None, **kwargs) -> design.Design:
    return design.make(run_of(rule, mesh, *args, **kwargs), MeshSpec(mesh), "gpu" if gpu else "cpu", gpu)


def carried(step) -> int:
    """Bytes that the outermost compiled loop that changes most of them carries and changes."""
    module = hlo.parse(step.as_text())
    loops = [hlo.find_changed(module, ins.attr("body")) for ins in module.computations[module.entry].values()
             if ins.op == "while"]
    return max(sum(map(hlo.shape_bytes, shapes)) for shapes in loops)


# ---- auto ------------------------------------------------------------------------------------------------------------


def test_auto_trains_the_cheapest_table_and_the_notes_say_so():
    run = run_of("zero1", dict(stage=2, data=2), "auto")
    made = assembly.assemble(run, jax.devices()[:4])
    assert (made.choice.schedule.name, made.choice.schedule.num_chunks) == ("interleaved_zero_bubble",
                                                                            4), "8 layers on 2 stages"
    assert made.choice.fits is None, "a simulated device has no memory to run out of"
    assert f"note: pipeline: {made.choice.why}" in report.before(made).splitlines()
    assert "MiB of activations" in made.choice.why and "next interleaved of 4 chunks" in made.choice.why


def test_auto_takes_what_fits_into_the_gpus_memory():
    """A little less memory than the step of the first choice needs."""
    of = lambda gpu: designed("ddp", dict(stage=4), "auto", training=dict(remat="full"), gpu=gpu).choice
    free = of(GPU)
    assert free.fits is None
    run, mesh_spec = run_of("ddp", dict(stage=4), "auto", training=dict(remat="full")), MeshSpec(dict(stage=4))
    made = assembly.assemble(run, jax.devices()[:4])
    assert made.choice.schedule.name == free.schedule.name
    total = footprint.memory(made.placed, StepOptions.of(
        run, schedule=free.schedule.name, chunks=free.schedule.num_chunks,
        **state.optimizer_bytes(made.model, run.optimizer, run.training.steps)))["total"]
    enough = math.ceil(total / hardware.MEMORY_SHARE) + 1
    assert of(dataclasses.replace(GPU, hbm_bytes=enough)).schedule.name == free.schedule.name
    tight = of(dataclasses.replace(GPU, hbm_bytes=enough - 4))
    assert tight.fits and tight.memory_bytes < free.memory_bytes and tight.schedule.name != free.schedule.name
    assert f"{free.schedule.name}" in tight.why and "needs" in tight.why
    nothing = of(dataclasses.replace(GPU, hbm_bytes=1))
    assert nothing.fits is False and "none of" in nothing.why
    asked = design.make(run_of("ddp", dict(stage=4), "gpipe"), mesh_spec, "gpu",
                            dataclasses.replace(GPU, hbm_bytes=1))
    assert "as requested; it does not fit into 0.00 MiB" in asked.choice.why


def test_auto_chooses_the_same_again():
    """Nothing but the run and the name of the GPU goes in: not time, not the order of a set."""
    choices = [designed("zero3", dict(stage=4, fsdp=2, tensor=2), "auto", gpu=hardware.get("h100")).choice
               for _ in range(2)]
    assert choices[0].why == choices[1].why and choices[0].memory_bytes == choices[1].memory_bytes


@pytest.mark.parametrize("layers, chunks, notes", [
    (8, 2, []), (6, 2, ["6 layers over mesh.stage=4 × pipeline.chunks=2 are padded with 2",
                        "6 layers do not divide"]),
    (4, 1, [])])  # fmt: skip
def test_auto_takes_chunks_only_where_no_layers_are_added_for_them(layers, chunks, notes):
    made = designed("ddp", dict(stage=4), "auto", model=dict(num_layers=layers))
    assert made.choice.schedule.num_chunks == chunks
    assert len(made.notes) == 1 + len(notes) and all(part in note for part, note in zip(notes, made.notes[1:]))


def test_auto_with_chunks_takes_just_those():
    assert designed("ddp", dict(stage=2), "auto", chunks=2).choice.schedule.num_chunks == 2


# ---- what a microbatch leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule, mesh, schedule, remat, most", [
    ("ddp", dict(stage=4), "gpipe", "none", 1.0),
    pytest.param("zero1", dict(stage=2, data=2, tensor=2), "interleaved_zero_bubble", "selective", 1.0,
                 marks=sampling.GRID),
    pytest.param("zero3", dict(stage=2, context=2, tensor=2), "zero_bubble", "none", 1.25, marks=sampling.GRID),
], ids=["gpipe", "interleaved", "tensor and context"])  # fmt: skip
def test_slot_bytes_are_what_the_compiled_loops_carry(rule, mesh, schedule, remat, most):
    """Without remat, and in what B hands to W, an upper bound: what is as wide as the residual stream counts whole."""
    case = parity.compile_run(run_of(rule, mesh, schedule, training=dict(remat=remat)))
    choice = case.made.choice
    accumulators = memory.formula(case.made)["loop_grads"]
    held = carried(case.step)
    # The largest loop may lack accumulators, or a buffer that no tick of it writes, and carries one dx or y.
    assert choice.memory_bytes <= most * held and held - accumulators <= 1.02 * choice.memory_bytes


# ---- what inspect says -----------------------------------------------------------------------------------------------


def call(main, *args):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


def arguments(rule="zero3", stage=2, **more):
    values = {"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 1, "mesh.stage": stage, "mesh.simulated_devices": 8,
              "sharding.rules": RULES / f"{rule}.toml", "optimizer.name": "adamw",
              "model.vocab_size": 512, "model.embed_dim": 32,
              "model.num_layers": 4,
              "model.num_heads": 4, "model.num_kv_heads": 2, "model.mlp_dim": 64, "data.seq_len": 32,
              "data.global_batch": 16,
              "training.microbatches": 4, "run.name": "mine", "model.compute_dtype": "bfloat16"}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return [str(word) for key, value in values.items() for word in (f"--{key}", value)]


def test_inspect_says_what_stands_inside_the_loop_and_the_program_agrees():
    code, out, err = call(inspect.main, *arguments(), "--json", "--schedule")
    assert code == 0, err
    held = json.loads(out)["memory_bytes"]
    formula, compiled = held["formula"], held["compiled"]
    assert formula["total"] == sum(formula[kind] for kind in ("params", "optimizer", "loop_grads", "activations"))
    assert (compiled["params"], compiled["optimizer"]) == (formula["params"], formula["optimizer"])
    # Zero-3 over fsdp outside, whole inside; the loop's accumulators are float32, its matrices are bfloat16.
    assert compiled["grads"] == formula["loop_grads"] and 3.9 * formula["grads"] < formula["loop_grads"] <= 4 * formula[
        "grads"]
    # two in each of two layers, one at the end: always float32
    norms = 4 * (2 * 2 * 32 + 32)
    assert formula["loop_weights"] == (formula["loop_grads"] - norms) // 2 + norms
    assert compiled["total"] > compiled["activations"] > 0
    # The chart goes to stderr, so that stdout is JSON alone.
    title = err.splitlines()[0]
    assert "interleaved_zero_bubble: 2 stages, 4 microbatches, 2 chunks" in title and "MiB)" in title
    assert "note: pipeline: interleaved_zero_bubble of 2 chunks: modelled bubble" in err
    assert {path.name for path in Path().iterdir()} == {"mine-schedule.svg"}


def test_inspect_tells_people_the_same():
    code, out, err = call(inspect.main, *arguments("zero1", model__num_layers=2, pipeline__schedule="1f1b"))
    assert code == 0, err
    assert "the pipeline's loop holds all weights of a stage in bfloat16" in out
    assert "note: pipeline: 1f1b: modelled bubble" in out
    (gradients,) = (line.split() for line in out.splitlines() if line.startswith("gradients "))
    assert gradients[-2:] == gradients[1:3] == ["100.4", "KiB"]


def test_accumulators_that_are_in_no_loop_are_null_and_not_zero():
    case = parity.compile_run(run_of("ddp", dict(stage=2), "1f1b", model=dict(num_layers=2)))
    shapes = memory.in_loop(case.made)
    text = case.step.as_text()
    assert carried_by_loops.all_bytes(text, [s for _, s in shapes]) == sum(4 * math.prod(s) for _, s in shapes)
    assert carried_by_loops.all_bytes(text, [s for _, s in shapes] + [(3, 5, 7)]) is None
    assert carried_by_loops.all_bytes(text, [s for _, s in shapes] + [shapes[0][1]] * 2) is None, "not one array twice"


def test_schedule_of_gpus_that_are_not_here_is_drawn_with_its_memory():
    rules = RULES / "zero3.toml"
    args = ["--model.preset", "llama3-70b", "--sharding.rules", rules, "--mesh.simulated_devices", 0, "--mesh.stage", 4,
            "--mesh.data", 1, "--mesh.fsdp", -1, "--mesh.tensor", 8, "--data.seq_len", 8192, "--data.global_batch", 64,
            "--training.microbatches", 16, "--training.remat", "full", "--model.compute_dtype",
            "bfloat16", "--schedule"]
    code, out, err = call(inspect.main, *args, "--topology", "h100:64")
    assert code == 0, err
    assert "GiB)" in out.splitlines()[0] and "of activations" in out.splitlines()[1]


# ---- the shipped run of many GPUs ------------------------------------------------------------------------------------


def told_by_the_run_file() -> tuple[int, int]:
    """(GiB of a GPU, those of activations that wait for their backward), as configs/llama3-70b-pipeline.toml says."""
    text = config.locate_shipped("configs/llama3-70b-pipeline.toml").read_text()
    return tuple(map(int, re.search(r"# by `inspect` (\d+) GiB a GPU, of which (\d+) are activations;", text).groups()))


def test_the_shipped_pipeline_fits_and_its_model_says_what_its_run_file_says():
    run = run_files.load(["configs/llama3-70b-pipeline.toml"])
    mesh_spec = MeshSpec(config.mesh_sizes(run, 64), run.mesh.placement)
    choice = design.make(run, mesh_spec, "gpu", hardware.get("h100")).choice
    assert choice.fits and round(choice.memory_bytes / 2**30) == told_by_the_run_file()[1], choice.why


@pytest.mark.long
@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
def test_the_shipped_pipeline_is_compiled_to_what_its_run_file_says():
    """Versions of XLA differ by some hundred MiB of temporaries."""
    made = assembly.assemble(run_files.load(["configs/llama3-70b-pipeline.toml"]), compile.topology("h100:64"))
    held = memory.measure(made, assembly.compile_step(made, made.program.lower_step()))
    assert held["total"] / 2**30 == pytest.approx(told_by_the_run_file()[0], abs=1)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [train.main, inspect.main])
@pytest.mark.parametrize("more, parts", [
    (dict(training__microbatches=1, pipeline__chunks=2),
     ["training.microbatches=1", "multiple of mesh.stage=2", "use 2,"]),
    (dict(training__microbatches=1, pipeline__schedule="interleaved", pipeline__chunks=2), ["use 2,"]),
    (dict(pipeline__schedule="1f1b", pipeline__chunks=2), ["pipeline.chunks=2", 'pipeline.schedule="interleaved"']),
], ids=["microbatches of auto", "microbatches", "chunks"])  # fmt: skip
def test_pipeline_that_cannot_be_is_told_in_one_message(main, more, parts):
    code, out, err = call(main, *arguments(**more))
    assert (code, out) == (2, "starting the devices\n" if main is train.main else "") and err.startswith("error: ") and all(part in err for part in parts), err
    assert "Traceback" not in err
    assert list(Path().iterdir()) == []
