"""Every script of benchmarks runs in the tests: its own functions at a tiny size, or what needs a GPU with interpreted
kernels or up to the GPU. RUNS names the test of each script; a script without one fails."""
import ast
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshtrain import run_files
from meshtrain.cost.program import compile as gpu_compile

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))       # benchmarks is installed nowhere

RUNS = {
    "test_benchmark_peers.py": {
        "peers": "test_meshtrain_and_plain_flax_take_turns",
        "peers_compiled": "test_the_ratio_to_plain_flax_on_eight_gpus_has_not_fallen"},
    "test_benchmark_processes.py": {
        "restart": "test_the_phases_of_a_restart_are_measured", "rl": "test_words_are_learned_and_sums_written",
        "soak": "test_a_fault_is_met_and_told",
        "start": "test_the_parts_of_a_start_are_measured_beside_a_trainer_by_hand"},
    "test_benchmark_runs.py": {
        "bubble": "test_a_pipeline_of_sleeping_stages_is_measured",
        "checkpoint": "test_checkpoints_are_measured",
        "context": "test_what_the_methods_of_context_parallelism_send_is_measured",
        "data": "test_batches_of_every_source_are_measured",
        "generate": "test_samplers_are_measured_and_agree",
        "gpu_flags": "test_garbage_collection_by_step_is_compared",
        "gpu_sampling": "test_sampling_between_steps_is_measured",
        "layouts": "test_a_layout_is_priced_by_formula_and_by_its_compiled_step",
        "peers_checkpoints": "test_checkpoints_are_measured_beside_those_of_orbax",
        "machine": "test_the_line_under_a_title_names_the_machine",
        "pictures": "test_pictures_are_drawn",
        "pipeline": "test_a_schedule_is_measured_beside_the_baseline",
        "plan": "test_a_search_is_measured",
        "pods": "test_calls_of_the_watchdog_are_measured",
        "reduce": "test_losses_are_compared_and_a_sum_is_rounded_after_each_addition",
        "roofline": "test_the_page_of_the_roofline_is_written",
        "step": "test_a_step_is_measured_beside_plain_jax",
        "weights": "test_weights_are_measured_out_and_in",
        "words": "test_words_are_read_and_refused"},
    "test_commit.py": {"commit": "written"},
    "test_experts_benchmark.py": {"experts": "test_what_a_layer_sends_is_what_inspects_formulas_say"},
    "test_first_light.py": {
        "gpu": "test_the_process_that_computes_takes_every_item_once_and_tells_the_other_of_it",
        "gpu_attention": "attention_of", "gpu_kernels": "test_grouped_matmuls_are_found_right_and_wrong",
        "gpu_record": "test_the_page_says_what_auto_should_take_once_both_engines_have_run",
        "gpu_speed": "test_speed_memory_and_a_profile_are_written",
        "gpu_steps": "test_one_device_compiles_one_program_for_all_rule_files",
        "grouped_tiles": "test_blocks_of_experts_kernels_are_timed_beside_those_in_use",
        "tiles": "test_tiles_are_timed_and_the_fastest_is_told_beside_those_in_use"},
    "test_published_2026.py": {
        "other_frameworks": "test_a_run_file_cannot_ask_for_what_is_priced_for_comparison_alone",
        "published_2026": "compared"}}
needs_gpu_compiler = pytest.mark.skipif(gpu_compile.missing_wheels(),
                                        reason=f"pip install -e '.[gpu-compile]': no {gpu_compile.missing_wheels()}")
NARROW = tuple("--model.embed_dim 32 --model.num_heads 4 --model.num_kv_heads 2 --model.head_dim 16 --model.mlp_dim 64 "
               "--model.vocab_size 257 --model.num_layers 2".split())


def used(file: Path, function: str) -> set[str]:
    """The scripts of benchmarks that a function of a test file uses."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    scripts = {name.asname or name.name: name.name for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) and node.module == "benchmarks" for name in node.names}
    (body,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return {scripts[node.id] for node in ast.walk(body) if isinstance(node, ast.Name) and node.id in scripts}


def test_every_script_has_a_run():
    named = sorted(script for tests in RUNS.values() for script in tests)
    assert named == sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert [test for file, tests in RUNS.items() for script, test in tests.items()
            if script not in used(next((ROOT / "tests").rglob(file)), test)] == []


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_checkpoints_are_measured_beside_those_of_orbax(tmp_path):
    from benchmarks import peers_checkpoints
    found = peers_checkpoints.measure(tmp_path, 1e4, rounds=3)
    assert all(len(turns) == 2 and min(map(min, turns)) >= 0 for kind in found.values() for turns in kind.values())
    _, _, save, restore = peers_checkpoints.tell({1e4: found})
    assert "| save |" in save and "| restore |" in restore and save.count("[") == 3


def test_checkpoints_are_measured(tmp_path, monkeypatch):
    from benchmarks import checkpoint
    monkeypatch.setattr(checkpoint, "ROUNDS", 1)
    found = checkpoint.measure(tmp_path, {"w": jnp.ones((64, 64))})
    assert found["bytes"] == 64 * 64 * 4 and all(found[name] > 0 for name in ("saved", "verify", "restore", "on_disk"))


def test_a_pipeline_of_sleeping_stages_is_measured(monkeypatch):
    """Each op sleeps as often as the schedule says: `measure` asserts it."""
    from benchmarks import bubble
    from meshtrain.parallel.pipeline import schedules
    from meshtrain.training import executor
    monkeypatch.setattr(bubble, "REPEATS", 1)
    mesh = jax.make_mesh((2,), (executor.STAGE,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    assert 0 < bubble.measure(schedules.make("1f1b", 2, 2, 1), mesh) < 1


def test_calls_of_the_watchdog_are_measured(monkeypatch):
    from benchmarks import pods
    monkeypatch.setattr(pods, "STEP_S", 0.01)
    assert set(pods.watched()) == {"watchdog: its calls in a step", "watchdog: its thread, in a step"}


def test_weights_are_measured_out_and_in(tmp_path, monkeypatch):
    """`measure` compares what comes back."""
    from benchmarks import weights
    monkeypatch.setattr(weights, "MODEL", dict(vocab_size=512, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
                                               head_dim=8, mlp_dim=48))
    monkeypatch.setattr(weights, "FILE_BYTES", 40_000)
    assert weights.measure("float32", 8, tmp_path).startswith("| float32 | 8 |")


def test_what_the_methods_of_context_parallelism_send_is_measured(monkeypatch):
    """Their outputs agree: `measure` compares them."""
    from benchmarks import context
    monkeypatch.setitem(context.SHAPES, "cpu", (4, 2, 8, (64,)))
    monkeypatch.setattr(context, "ROUNDS", 1)
    found = {one.method: one for one in context.measure(64, 2, jax.devices())}
    assert set(found) == {"ring", "gather", "ulysses"} and all(min(one.sent_bytes) > 0 for one in found.values())
    assert cells(found["ring"].row())[:3] == ["64", "2", "ring"]


def test_batches_of_every_source_are_measured(tmp_path, monkeypatch):
    from benchmarks import data
    for name, value in dict(BATCH_TOKENS=512, TOKEN_DOCUMENTS=60, TEXT_FILES=20, COPY_BYTES=1 << 16, ROUNDS=1,
                            ROUND_S=0.01, SEQ_LENS=(256,), MANY_FILES=3, INDEX_DOCUMENTS=20_000,
                            WHOLE_COUNTED=1000).items():
        monkeypatch.setattr(data, name, value)
    lines, width = data.batch_rows(tmp_path, data.copy_bytes_per_s()[1])
    assert len(lines) == 5 * len(data.PREFETCH) and width > 4
    assert "| of 20,000 documents, " in data.index_rows(str(tmp_path))


def test_samplers_are_measured_and_agree(monkeypatch):
    """Both functions compare the answers of two samplers."""
    from benchmarks import generate
    tiny = (1, 16, 2, 2, 16, 64)
    for name, value in dict(SHAPES={"1 million": tiny}, PROMPT=4, NEW=6, WHOLE=2, SAMPLES=4, MOST=6, SLOTS=(2,),
                            TURNS=1).items():
        monkeypatch.setattr(generate, name, value)
    assert cells(generate.measure("1 million", 16, 2, jax.devices()[:1]))[:3] == ["1 million", "16", "2"]
    (row,) = generate.refilled(jax.devices()[:1])
    assert cells(row)[:2] == ["2", "4"]


def test_garbage_collection_by_step_is_compared(monkeypatch):
    from benchmarks import gpu_flags, gpu_speed
    monkeypatch.setattr(gpu_flags, "PLAN", gpu_speed.Plan(
        "8B", "configs/llama3-8b.toml", 1, True, "selective", (*NARROW, "--data.seq_len", "64")))
    monkeypatch.setattr(gpu_flags, "STEPS", 4)
    found = gpu_flags.collection(jax.devices()[:1], gpu_speed.Sizes(microbatches=2))
    assert found["compared"]["losses"][0] == 0 and found["row"]["so"]


def test_sampling_between_steps_is_measured(tmp_path):
    from benchmarks import gpu_sampling
    sizes = gpu_sampling.Sizes((8,), prompt=5, answer=4, rounds=1, overrides=(
        *NARROW, "--model.attention", "blockwise", "--data.seq_len", "64", "--rl.max_tokens", "8"))
    (item,) = gpu_sampling.items(jax.devices()[:1], tmp_path, sizes)
    row = item.measure()["row"]
    assert row["by inspect"] == "–" and all(row[name] for name in row)      # no GPU's rates here


@needs_gpu_compiler
def test_a_layout_is_priced_by_formula_and_by_its_compiled_step(tmp_path, monkeypatch):
    from benchmarks import layouts
    run_file = tmp_path / "run.toml"
    run_file.write_text('[model]\nvocab_size = 512\nembed_dim = 256\nnum_layers = 2\nnum_heads = 4\nhead_dim = 64\n'
                        'mlp_dim = 512\n[mesh]\nfsdp = 2\n[data]\nsource = "stdlib"\n')
    monkeypatch.setattr(layouts, "SEQ_LEN", 256)
    case = layouts.Case(str(run_file), 8, "zero3", dict(fsdp=2), 2)
    line, row = layouts.measure(case)
    recorded = tomllib.loads(line)[case.name]
    assert recorded["step_s"] >= 0 and 0.1 < layouts.priced(case).memory_bytes["total"] / recorded["bytes"] < 10
    assert row.startswith(f"| {case.name} | ")


def test_the_line_under_a_title_names_the_machine():
    from benchmarks import machine
    assert f"{machine.cores()} CPU cores" in machine.line("2 × a GPU", "jax") and machine.line("", "jax").endswith(
        f"jax {jax.__version__}")


@needs_gpu_compiler
def test_pictures_are_drawn(tmp_path, monkeypatch):
    from benchmarks import pictures
    monkeypatch.setattr(pictures, "DOCS", tmp_path)
    monkeypatch.setattr(pictures, "LAYOUTS", {"zero3": pictures.LAYOUTS["zero3"]})
    monkeypatch.setattr(pictures, "PLANNED", {"model": "llama3.2-1b", "gpus": 8, "gpu": "h100"})
    monkeypatch.setattr(pictures, "MODEL", {
        "model.vocab_size": 512, "model.embed_dim": 256, "model.num_layers": 2, "model.num_heads": 4,
        "model.head_dim": 64, "model.mlp_dim": 512, "model.compute_dtype": "bfloat16", "data.seq_len": 256,
        "data.global_batch": 16, "training.microbatches": 2})
    assert pictures.main([]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"mesh.svg", "traffic.svg", "plan.svg"}
    assert all("<svg" in path.read_text() for path in tmp_path.iterdir())


def test_losses_are_compared_and_a_sum_is_rounded_after_each_addition(monkeypatch, tmp_path):
    from benchmarks import reduce
    monkeypatch.setattr(reduce, "PAGE", tmp_path / "reduce.md")
    monkeypatch.setattr(reduce, "RUNS", {name: reduce.RUNS[name] for name in ("float32", "bfloat16, ring")})
    assert reduce.main(["10"]) == 0
    rows = [line for line in (tmp_path / "reduce.md").read_text().splitlines() if " to " in line]
    off = [float(cells(row)[-1]) for row in rows]
    assert len(off) == 10 and off[0] == 0 and 0 < max(map(abs, off)) < 0.05


def test_a_schedule_is_measured_beside_the_baseline(monkeypatch):
    """Loss and gradients agree: `measure` compares them."""
    from benchmarks import pipeline
    for name, value in dict(REMATS=("none",), SCHEDULES=[("1f1b", 1)], ROUNDS=1, COMPILES=1).items():
        monkeypatch.setattr(pipeline, name, value)
    run = run_files.load([str(ROOT / "benchmarks/pipeline.toml"), *NARROW, *(
        "--mesh.stage 2 --mesh.simulated_devices 2 --model.num_layers 4 --data.seq_len 16 --data.global_batch 8 "
        "--training.microbatches 4".split())])
    page = pipeline.measure(run, jax.devices()[:2])
    rows = [cells(line) for line in page.splitlines() if line.startswith("| none | ")]
    assert [row[1] for row in rows] == [pipeline.BASELINE, "1f1b"] and float(rows[1][6]) == pytest.approx(1, abs=.3)


def test_a_search_is_measured(monkeypatch):
    from benchmarks import plan
    monkeypatch.setattr(plan, "REPEATS", 1)
    row = cells(plan.measure("llama3.2-1b", 2, 8, 2048))
    assert row[:3] == ["llama3.2-1b", "2", "2,048"] and int(row[3].replace(",", "")) > int(row[4]) > 0


@needs_gpu_compiler
def test_the_page_of_the_roofline_is_written(monkeypatch):
    from benchmarks import roofline
    narrow = " ".join([*NARROW, "--data.seq_len 256 --data.global_batch 16 --training.microbatches 2",
                       "--training.remat full --model.head_dim 64 --model.attention pallas"])
    case = roofline.Case("tiny", "llama3-8b.toml", 8, narrow)
    published = roofline.Published(case, "h100", 1e6, "a page", roofline.CUDNN, "much")
    for name, value in dict(GPUS=("h100",), SHIPPED=(case, case), PUBLISHED=(published,)).items():
        monkeypatch.setattr(roofline, name, value)
    page = roofline.written()
    assert "| h100 | tiny | " in page and "| a page | tiny | 8 × h100 | " in page
    assert "The costliest kernels of tiny" in page


def test_a_step_is_measured_beside_plain_jax(tmp_path, monkeypatch):
    """Loss and gradient norm agree: `measure` compares them."""
    from benchmarks import step
    run = run_files.load([str(ROOT / "benchmarks/step.toml"), *NARROW, "--data.seq_len", "32", "--data.global_batch", "8",
                       "--run.compilation_cache", "", "--data.validation_fraction", "0"])
    monkeypatch.setattr(step, "ROUNDS", 1)
    monkeypatch.setattr(step, "STEPS", 1)
    monkeypatch.setattr(step, "first_step_s", lambda directory, cache: 1.0)
    monkeypatch.setattr(step.local_devices, "start", lambda run: jax.devices()[:1])
    ratios = [cells(line) for line in step.measure(run, tmp_path).splitlines() if " ÷ " in line]
    assert len(ratios) == 3 and all(float(row[1]) > 0 for row in ratios)


def test_words_are_read_and_refused(capsys):
    from benchmarks import words
    parser = words.Parser("what it is")
    parser.add_alone("NAME")
    assert parser.parse_args(["--alone", "child"]).alone == ["child"]
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["nonsense"])
    assert end.value.code == 2 and "nonsense" in capsys.readouterr().err
