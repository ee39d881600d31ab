"""What a teacher costs: formulas by hand and as compiled for simulated devices and GPUs; what fits with it; MFU."""
import functools
import json
import math

import jax
import pytest
from commands import call, in_a_directory_of_its_own, refused  # noqa: F401
from folders import GOLDENS, run_of

from meshtrain import assembly, design, hardware, teacher
from meshtrain.commands import check, inspect, plan
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import footprint, price
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.program import audit, compile, sources
from meshtrain.inspection import fitting, formula_vs_compiled, step_costs
from meshtrain.inspection.inspected import Inspected
from meshtrain.sharding.mesh import MeshSpec

needs_gpu_compiler = pytest.mark.skipif(compile.missing_wheels(),
                                        reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
SMALL = dict(vocab_size=512, embed_dim=64, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=8, mlp_dim=128)
# The teacher is larger in every way: layers, width, heads, MLP.
LARGER = dict(vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
              intermediate_size=384, tie_word_embeddings=False)
WIDE = dict(vocab_size=32768, hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=5632, tie_word_embeddings=False)
CELLS = [("ddp", dict(data=8), ""), ("zero3", dict(fsdp=8), ""), ("zero3", dict(fsdp=2, tensor=4), ""),
         ("zero3", dict(fsdp=2, context=4), ""), ("ddp", dict(data=2, fsdp=4), "zero3"), ("zero1", dict(data=8), "tensor")]


@functools.cache
def folder(place, **values) -> str:
    """A model folder of a Qwen 3 with these values: its config.json is all that costs need."""
    kept = json.loads((GOLDENS / "qwen3/config.json").read_text()) | values
    kept.pop("layer_types", None)
    (place / "config.json").write_text(json.dumps(kept))
    return str(place)


def distilled(place, rule: str, mesh: dict, own: str = "", values=LARGER, model=SMALL, **more):
    """A run of 16 rows in two microbatches."""
    taught = folder(place, **values)
    words = {f"--model.{key}": value for key, value in (model | {"vocab_size": values["vocab_size"]}).items()} | {
        "--training.objective": "distill", "--distill.teacher": taught, "--data.global_batch": 16, "--data.seq_len": 64,
        "--training.microbatches": 2, "--distill.top_tokens": 16, "--model.compute_dtype": "bfloat16"} | {
        f"--{key.replace('__', '.')}": value for key, value in more.items()} | ({"--distill.rules": own} if own else {})
    return run_of("", rule, mesh, *(word for pair in words.items() for word in map(str, pair)))


def cost_of(made):
    options = fitting.options_of(made, hardware.get("h100"), Rates(hardware.get("h100"), Assumptions("h100")))
    return options.teacher.beside(made.placed, options)


@pytest.mark.full
@pytest.mark.parametrize("rule, mesh, own", CELLS)
def test_a_teachers_bytes_and_flops_by_formulas_are_those_of_its_compiled_forward(tmp_path, rule, mesh, own):
    made = assembly.assemble(distilled(tmp_path, rule, mesh, own), jax.devices())
    cost, program = cost_of(made), teacher.compile_alone(made)
    shapes = jax.tree.leaves(teacher.assemble(made).state_shapes.params)
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in shapes)
    tokens = 16 * 64 // made.layout.num_shards(made.layout.token_axes)
    ids = 4 * tokens * 6 + 64        # at most six arrays of the batch, and one number of each row
    assert cost.memory_bytes["weights"] == held         # exactly: what is stored follows from the rules
    assert 0 <= program.memory_analysis().argument_size_in_bytes - held <= ids
    assert cost.memory_bytes["predictions"] == 8 * 16 * tokens
    assert abs(program.memory_analysis().output_size_in_bytes - 8 * 16 * tokens) <= 64         # XLA's pointers
    # Every product names its einsum; those of attention are left out.
    assert cost.matmul_flops == sum(dot.flops for dot in audit.read(program.as_text(), made.mesh).dots
                                    if "->" in dot.source and not sources.scope_of(dot.source))
    if own:     # by other rules than the run's
        assert cost.placed.layout.rules.path != made.layout.rules.path


@pytest.mark.full
@needs_gpu_compiler
@pytest.mark.parametrize("rule, mesh, kinds", [
    ("zero3", dict(fsdp=8), {("all-gather", "fsdp", "bf16"), ("all-to-all", "fsdp", "bf16")}),
    ("tensor", dict(fsdp=2, tensor=4), {("all-reduce", "tensor", "bf16"), ("all-gather", "tensor", "f32")})])
def test_a_teachers_forward_for_gpus_sends_and_holds_what_formulas_say(tmp_path, rule, mesh, kinds):
    run = distilled(tmp_path, rule, mesh, values=WIDE, data__seq_len=4096, distill__top_tokens=64,
                    training__loss_chunk=2048)
    made = assembly.assemble(run, compile.topology("h100:8"))
    cost, program = cost_of(made), teacher.compile_alone(made)
    text = program.as_text()
    found = audit.read(text, made.mesh)
    assert cost.matmul_flops == formula_vs_compiled.matmul_flops(found)
    # XLA's schedule decides what lives together: six layouts of this width were within 7%.
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert abs(cost.memory_bytes["temporaries"] - temporaries) < 0.1 * temporaries
    sent = {(row["kind"], *row["axes"], row["dtype"]): row["bytes"] for row in audit.summarize(found.collectives)}
    step = Inspected(made, program, teacher=program)
    by_formulas = {(row["kind"], *row["axes"], row["dtype"]): row["bytes"] for row in step.teacher_forward.formulas.collectives}
    for key in kinds:
        assert abs(by_formulas[key] - sent[key]) < 0.04 * sent[key], key      # norms and statistics have no formula
    # Formulas leave out copies between the parts of a microbatch: 9% to 26% of the forward in seven layouts.
    seconds, compiled = cost.seconds(Rates(hardware.get("h100"), Assumptions("h100"))), step.teacher_forward.program.roofline.step_s
    assert 0.7 * compiled < seconds < compiled


@pytest.mark.full
def test_a_step_with_a_teacher_takes_its_forward_and_holds_its_weights(tmp_path):
    made = design.make(distilled(tmp_path, "zero3", dict(fsdp=8)), MeshSpec(dict(data=1, fsdp=8, tensor=1, stage=1, context=1)),
                       "gpu", hardware.get("h100"))
    rated = Rates(hardware.get("h100"), Assumptions("h100"))
    options = fitting.options_of(made, hardware.get("h100"), rated)
    cost = options.teacher.beside(made.placed, options)
    with_it, alone = (price.price(made.placed, rated, given) for given in (
        options, type(options).of(made.run, "h100", attended=options.attended, optimizer_bytes=options.optimizer_bytes)))
    assert with_it.step_s == pytest.approx(alone.step_s + cost.seconds(rated)) and with_it.parts["teacher"] > 0
    own, held = cost.memory_bytes, footprint.memory(made.placed, options)
    beyond = max(0, own["temporaries"] - held["activations"] - held["grads"])
    assert held["teacher"] == own["weights"] + own["predictions"] + beyond > own["weights"]
    assert held["total"] == sum(value for name, value in held.items() if name != "total")
    # MFU counts its forward: 2 per element of a matrix, and half the square of attention's two products
    L, D, F, V, HD, S = 3, 128, 384, 512, 128, 64
    assert options.teacher.flops_per_token == 2 * (L * (4 * D * HD + 3 * D * F) + D * V) + L * S * 2 * HD
    per_token = alone.mfu * alone.step_s + 16 * 64 / 8 * options.teacher.flops_per_token / rated.peak("bfloat16")
    assert with_it.mfu * with_it.step_s == pytest.approx(per_token)


@pytest.mark.full
def test_the_mfu_of_a_run_counts_the_forward_of_its_teacher(tmp_path):
    run = distilled(tmp_path, "ddp", {})
    counted, alone = (step_costs.flops_of_step(assembly.assemble(given, jax.devices()[:1])).per_step for given in (
        run, run.replace(training={"objective": "next_token"}, distill={"teacher": ""})))
    L, D, F, V, HD, S = 3, 128, 384, 512, 128, 64
    assert counted - alone == 16 * 64 * (2 * (L * (4 * D * HD + 3 * D * F) + D * V) + L * S * 2 * HD)


@pytest.mark.full
def test_inspect_shows_the_teacher_beside_the_step_and_adds_both(tmp_path):
    place = tmp_path / "teacher"
    place.mkdir()
    words = ["--training.objective", "distill", "--distill.teacher", folder(place, **LARGER), "--mesh.fsdp", "2",
             "--mesh.simulated_devices", "8", "--sharding.rules", "zero3", "--data.source", "tokens", "--data.paths",
             '["none.tokens.npy"]', "--data.bos_token", "0", "--run.sample_tokens", "0", "--data.seq_len", "64",
             "--data.global_batch", "8", "--mesh.data", "2", "--mesh.tensor", "2", *(word for key, value in SMALL.items() for word in (f"--model.{key}", str(value)))]
    shown = call(inspect.main, *words, "--html", "page.html")
    assert shown.code == 0, shown.err
    assert "teacher: " in shown.out and "memory per device of the teacher" in shown.out
    assert "teacher: weights and forward" in open("page.html").read()
    data = json.loads(call(inspect.main, *words, "--json").out)
    own, held = data["teacher"]["memory_bytes"], data["memory_bytes"]["compiled"]
    assert own["compiled"]["weights"] == own["formula"]["weights"] > 0
    beyond = max(0, own["compiled"]["temporaries"] - held["activations"] - (held["grads"] or 0))
    assert held["teacher"] == own["compiled"]["weights"] + own["compiled"]["predictions"] + beyond
    assert held["total"] > held["params"] + held["optimizer"] + held["activations"] + held["teacher"]
    assert 0 < data["teacher"]["matmul_flops"]["formula"] <= data["teacher"]["matmul_flops"]["compiled"]
    assert not [note for note in data["notes"] if "teacher" in note]


LLAMA = ("llama3-8b", "--seq-len", "8192", "--global-batch", "64", "--gpu", "h100")
GREAT = dict(vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
             head_dim=128, intermediate_size=28672, tie_word_embeddings=False)


@pytest.mark.full
def test_plan_and_check_know_a_teacher_that_does_not_fit(tmp_path):
    """70B in bfloat16 are 66 GiB on each of two GPUs, beside the training state of 8B."""
    great = ("--training.objective", "distill", "--distill.teacher", folder(tmp_path, **GREAT))
    fixed = ("--gpus", "2", "--fsdp", "2", "--microbatches", "32", "--remat", "full")
    alone, beside = (call(plan.main, *LLAMA, *fixed, *more) for more in ((), great))
    assert alone.code == 0 and beside.code == 3, (alone, beside)
    assert "weights and forward of the teacher take" in beside.out
    run = ("--model.preset", "llama3-8b", "--mesh.fsdp", "2", "--sharding.rules", "zero3", "--training.remat", "full",
           "--data.source", "tokens", "--data.paths", '["none.tokens.npy"]', "--model.compute_dtype", "bfloat16",
           "--optimizer.name", "adamw", "--run.sample_tokens", "0", "--mesh.data", "1", "--mesh.tensor", "1",
           "--mesh.simulated_devices", "0")
    looked = call(check.main, *run, *great, "--topology", "h100:2")
    assert "the largest part is teacher" in looked.out, looked


@pytest.mark.full
@pytest.mark.parametrize("command, more", [(plan, ("--gpus", "8", "--gpu", "h100")), (inspect, ())])
def test_a_teacher_that_is_not_there_or_whose_rules_are_not_is_one_message(tmp_path, command, more):
    (tmp_path / "run.toml").write_text('[data]\npaths = ["none.tokens.npy"]\nbos_token = "0"\n[model]\nvocab_size = 512\n'
                                       '[training]\nobjective = "distill"\n')
    asked = (str(tmp_path / "run.toml"), *more, "--run.sample_tokens", "0", "--mesh.simulated_devices", "8")
    refused(call(command.main, *asked, "--distill.teacher", "nowhere"), 'distill.teacher="nowhere"', "config.json")
    refused(call(command.main, *asked, "--distill.teacher", folder(tmp_path, **LARGER), "--distill.rules", "zreo3"),
            'distill.rules="zreo3"')


@pytest.mark.full
def test_a_layout_that_the_teacher_does_not_allow_is_refused_by_its_name(tmp_path):
    run = distilled(tmp_path, "zero3", dict(tensor=8), values=LARGER | {"num_attention_heads": 4, "num_key_value_heads": 4})
    faults = design.check_teacher(run, "cpu", None)
    assert faults and all(fault.startswith("distill.teacher: ") and "heads" in fault for fault in faults)
    with pytest.raises(ConfigError, match="distill.teacher: .*heads=4"):
        teacher.compile_alone(assembly.assemble(run, jax.devices()))
