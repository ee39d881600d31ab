"""`meshtrain.prove`: a small run with the run's features, on layouts that hold every pair of choices, beside one device.

The comparison itself is that of tests/parity.py, whose tests see wrong gradients; tests/planted.py has the faults that
the command must find.
"""
import itertools
import json
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import call, in_a_directory_of_its_own, refused  # noqa: F401
from jax.sharding import PartitionSpec as P

import pages_samples
import planted
from meshtrain import assembly, config, parity, run_files, scratch
from meshtrain.commands import prove
from meshtrain.cost.program.audit import Collective, ProgramAudit
from meshtrain.pages import proofs
from meshtrain.parity import cells, compare, program, rule_files, shrink, smallest
from meshtrain.sharding import rules
from meshtrain.training import reduction
from test_pages import embedded, standing_alone
from tests.parity import check

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
PRESETS = sorted((ROOT / "configs" / "models").glob("*.toml"))
QUICK = ("--cells", "1")
TINY = ("--mesh.data", 2, "--mesh.fsdp", 1, "--mesh.tensor", 1)


def small_of(*words) -> config.Run:
    return shrink.shrunk(run_files.load([str(word) for word in words]), 8)[0]


@pytest.fixture
def without_gpu_program(monkeypatch):
    monkeypatch.setattr(program, "of_run", lambda run: ([], ["not read"]))


@pytest.fixture
def averaged(monkeypatch):
    """A fault: gradients of replicas are averaged, not summed."""
    def wrong(layout, deferred, axes, g):
        right = accumulate_right(layout, deferred, axes, g)
        return right / layout.num_shards(deferred) if deferred else right
    accumulate_right = reduction.reduce_deferred
    monkeypatch.setattr(reduction, "reduce_deferred", wrong)


# ---- the small run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[str(path)] for path in CONFIGS] + [
    ["--model.preset", path.stem] for path in PRESETS], ids=lambda words: Path(words[-1]).stem)
def test_a_shrunk_run_is_one_that_the_program_takes_and_is_its_own_shrunk_run(words):
    run = run_files.load(words)
    small, _ = shrink.shrunk(run, 8)
    assert shrink.shrunk(small, 8)[0] == small and config.problems(small) == []
    assert compare.num_devices(small) <= 8 and small.model.embed_dim == 32 and small.model.compute_dtype == "float32"
    for feature in ("norm", "norm_placement", "activation", "position", "qk_norm", "attention_bias", "mlp_bias",
                    "tie_embeddings", "router_score", "attention_sinks", "multipliers", "logit_softcap"):
        assert getattr(small.model, feature) == getattr(run.model, feature), feature
    has = lambda model: (model.window > 0, model.num_experts > 0, model.shared_expert_dim > 0, model.latent.kv_dim > 0,
                         model.linear.key_heads > 0, model.num_heads > model.num_kv_heads, bool(model.router_groups))
    assert has(small.model) == has(run.model)
    assert (small.training.objective, small.optimizer.name) == (run.training.objective, run.optimizer.name)


@pytest.mark.parametrize("words, mixers", [
    (("--model.mixers", "GGGF", "--model.num_layers", 8, "--model.linear", "{key_heads = 2, value_heads = 4}"), "GGGF"),
    (("--model.mixers", "WFFWFFFWFFFFWFFFFFWFFFFFFWFFFFFFFW", "--model.num_layers", 34, "--model.window", 4), "WF")])
def test_every_kind_of_layer_is_kept_and_what_has_no_period_gets_one(words, mixers):
    run = run_files.load([str(word) for word in words])
    small, told = shrink.shrunk(run, 8)
    assert small.model.mixers == mixers and any("no period" in line for line in told) == (mixers == "WF")


# ---- the cells -------------------------------------------------------------------------------------------------------


def test_the_cells_hold_every_pair_of_choices_that_the_program_takes():
    small = small_of("configs/quickstart.toml")
    found = cells.factors(small, [str(ROOT / "sharding_rules" / f"{name}.toml") for name in ("zero3", "ddp")], 8)
    made = cells.cover(small, found, 8)
    table = cells._Choices(small, found, 8)
    of = [tuple(sorted(cells.settings(run).items())) for run in made]
    assert len(set(of)) == len(of) < 40 and all(table.run.model == run.model for run in made)
    on = lambda run, axis: getattr(run.mesh, axis) > 1
    for a, b in itertools.combinations(config.AXES, 2):
        assert any(on(run, a) and on(run, b) for run in made), (a, b)
    for axis in config.AXES:
        assert any(getattr(run.mesh, axis) == 4 for run in made), axis
    staged = {(run.pipeline.schedule, run.context.method) for run in made if on(run, "stage") and on(run, "context")}
    assert staged == set(itertools.product(found["schedule"][1:], found["context"][1:]))
    assert not any(on(run, "stage") and run.training.remat == "offload" for run in made)       # refused
    for run in made[:3]:
        compare.check_accepted(run)


def test_rule_files_that_split_a_model_alike_are_one():
    dense = {Path(path).stem for path in cells.differing_rules(small_of("configs/quickstart.toml"))}
    experts = {Path(path).stem for path in cells.differing_rules(small_of("configs/quickstart-experts.toml"))}
    assert experts - dense == {"zero3_experts_fsdp", "zero3_experts_tensor"}


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_run_that_is_right_ends_with_0_and_tells_each_cell(without_gpu_program, tmp_path):
    ran = call(prove.main, "--cells", 2, "--json", "--html", "proof.html")
    assert ran.code == 0, ran
    told, page = json.loads(ran.out), (tmp_path / "proof.html").read_text()
    first, second = told["cells"]
    assert first["settings"] == {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "training.microbatches": 1,
                                 "sharding.rules": "sharding_rules/zero3.toml", "training.remat": "none"}
    assert set(first["leaves"]) >= {"embedding/table", "layers/attention/query/kernel", "head/kernel"}
    assert 0 < max(first["leaves"].values()) < 1e-4 and len(first["losses"]) == 3 and not told["failed"]
    assert "1/2  zero3 · data 2 × fsdp 2 × tensor 2: equal" in ran.err and "of " in told["notes"][-2]
    assert embedded(page) == told and {str(max(second["leaves"].values()))} <= standing_alone(page).exact


def test_a_layout_that_differs_is_shrunk_to_a_run_file_that_shows_it_again(averaged, without_gpu_program, tmp_path):
    words = ("--mesh.data", 4, "--mesh.fsdp", 2, "--mesh.tensor", 1, "--sharding.rules", "sharding_rules/zero1.toml",
             "--training.microbatches", 2, "--model.residual_dropout", 0.1)
    ran = call(prove.main, *QUICK, *words)
    assert ran.code == 1 and "DIFFERS: gradient norm" in ran.out, ran
    written = tmp_path / "quickstart-differs.toml"
    tables = tomllib.loads(written.read_text())
    assert tables.pop("data") == {"source": "stdlib"}, "a run file names its data"
    assert tables in ({"mesh": {"data": 2}}, {"mesh": {"fsdp": 2}}) and "python -m meshtrain.prove quickstart-differs.toml" in written.read_text()
    again = call(prove.main, written, *QUICK)
    assert again.code == 1 and "is the smallest that shows" in again.out and len(list(tmp_path.iterdir())) == 1, again
    without = call(prove.main, written, *QUICK, "--no-shrink")
    assert without.code == 1 and "smallest" not in without.out and "DIFFERS" in without.out, without


def test_a_gradient_that_is_not_finite_differs():
    off = compare.leaf_differences({"a": np.array([1.0, np.nan]), "b": np.ones(2)}, {"a": np.ones(2), "b": np.ones(2)}, 0)
    found = compare.Differences(0.0, 0.0, off, (0.0,) * 3)
    assert found.beyond(compare.FLOAT32) == ["gradient of ['a']: inf"]


def test_keys_are_left_out_while_the_difference_stays(monkeypatch):
    """Of a difference that a schedule and a window make together, those two and the mesh remain."""
    def made_up(run, devices):
        wrong = ("gradient norm: 1",) if run.pipeline.schedule == "zero_bubble" and run.model.window else ()
        return parity.CellResult(cells.title(run), {}, None, None, {}, (), wrong, 0.0, run)
    monkeypatch.setattr(parity.proof, "compare_cell", made_up)
    small = small_of("--mesh.data", 2, "--mesh.fsdp", 1, "--mesh.tensor", 1, "--mesh.stage", 4, "--model.window", 64,
                     "--pipeline.schedule", "zero_bubble", "--training.remat", "full", "--optimizer.name", "lion")
    found = smallest.of(made_up(small, ()), jax.devices())
    assert found.keys == {"mesh.stage": 2, "model.window": 6, "pipeline.schedule": "zero_bubble"}
    assert smallest.keys_of(smallest.read(found.text)) == found.keys


def test_a_file_of_other_content_is_not_overwritten(tmp_path):
    found = smallest.Smallest(f"# {smallest.NAME}\n", {}, 0)
    (tmp_path / "a-differs.toml").write_text("mine")
    names = [smallest.write(found, "a").name for _ in range(2)]
    assert names == ["a-differs-2.toml"] * 2 and (tmp_path / "a-differs.toml").read_text() == "mine"
    assert (tmp_path / "a-differs-2.toml").read_text() == "# a-differs-2.toml\n"


def test_mistakes_end_with_2_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "compile_run", lambda *_: pytest.fail("compiled"))
    (tmp_path / "wrong.toml").write_text('[params]\nembd = "fsdp"\n')
    refused(call(prove.main, "--rules", "none.toml"), "none.toml")
    refused(call(prove.main, "--rules", "wrong.toml"), "embd", "embed")
    refused(call(prove.main, "--devices", "1"), "--devices 1")
    refused(call(prove.main, "--model.num_heads", "0"), "model.num_heads=0")


def test_a_crash_of_a_cell_is_a_difference_with_its_message(monkeypatch):
    def fails(*_):
        raise RuntimeError("out of order\nmore")
    monkeypatch.setattr(compare, "compile_run", fails)
    found = parity.proof.compare_cell(small_of(*TINY), jax.devices())
    assert found.wrong == ("RuntimeError: out of order",) and json.dumps(found.as_json())


# ---- rule files ------------------------------------------------------------------------------------------------------

ZERO3 = rules.load(ROOT / "sharding_rules" / "zero3.toml").text


def lacking(logical: str, table: str = "") -> str:
    """ZeRO-3 without a line, in one table or in all."""
    lines, here = [], ""
    for line in ZERO3.splitlines():
        here = line.strip("[]") if line.startswith("[") else here
        if line.partition(" = ")[0] != logical or table not in ("", here):
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("text, named", [
    (lacking("vocab"), ["no table names 'vocab'", "[params] and [activations]"]),
    (lacking("mlp", "activations"), ["[params] splits mlp over tensor", "write mlp"]),
    (lacking("layers"), ['needs layers = "stage" in [params]']),
    (lacking("batch"), ["splits no matmul", 'batch = ["fsdp"] in [activations]']),
    (ZERO3.replace('batch = ["data", "fsdp"]', 'batch = "data"'), ["mesh.fsdp=2", 'batch = ["data", "fsdp"]']),
    (lacking("kv_heads"), ["no table names 'kv_heads'", "layers/attention/key/kernel"])])
def test_a_forgotten_axis_is_named_with_its_table(text, named, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    findings, _ = rule_files.check(small_of("configs/quickstart.toml"), "mine.toml")
    assert [word for word in named if not any(word in line for line in findings)] == []


def test_shipped_rule_files_forget_nothing():
    for words in ("configs/quickstart.toml", "configs/quickstart-experts.toml"):
        small = small_of(words)
        for path in sorted((ROOT / "sharding_rules").glob("*.toml")):
            assert rule_files.check(small, str(path)) == ([], [])


def test_a_rule_file_of_ones_own_is_proved_in_place_of_the_shipped_ones(without_gpu_program, tmp_path):
    (tmp_path / "mine.toml").write_text('[params]\nembed = "fsdp"\n[activations]\nbatch = ["data", "fsdp"]\n')
    ran = call(prove.main, "--rules", "mine.toml", "--cells", 2, "--json", *TINY)
    told = json.loads(ran.out)
    assert {cell["settings"]["sharding.rules"] for cell in told["cells"]} == {"mine.toml"}
    assert any("names tensor: layouts with this mesh axis were not tested" in note for note in told["notes"]) and ran.code == 0, ran


# ---- the GPU program -------------------------------------------------------------------------------------------------


def row(dims, kind="reduce-scatter", axes=("fsdp",), dtype="bf16") -> Collective:
    return Collective(kind, axes, 1000, 1000, dtype, "", 1, 8, False, (dims,))


def test_gradients_that_are_summed_in_bfloat16_are_named_and_activations_are_not():
    made = assembly.assemble(small_of("--mesh.data", 1, "--mesh.fsdp", 8, "--mesh.tensor", 1), jax.devices())
    up = (32, 48)
    of = lambda *rows: program.unlike_sums(made, ProgramAudit(rows, (), (), (), ()))
    (line,) = of(row(up))
    assert "layers/mlp/up/kernel is summed over fsdp in bf16" in line
    assert of(row(up, dtype="f32"), row(up, kind="all-gather"), row((4, 16, 32)), row(up, axes=("tensor",))) == []
    narrow = scratch.rule_file({"extends": "zero3", "grads": {"reduce": "bfloat16"}})
    made = assembly.assemble(small_of("--mesh.data", 1, "--mesh.fsdp", 8, "--mesh.tensor", 1, "--sharding.rules", narrow),
                             jax.devices())
    (line,) = of(row(up), row(up, dtype="f32"), row((32,), dtype="f32"))
    assert "summed over fsdp in f32" in line and "reduces in bfloat16" in line


@pytest.mark.parametrize("words, gpus", [((), "h100:8"), (("--mesh.fsdp", -1), "h100:8"), (("--mesh.tensor", 8), "h100:32"),
                                         (("--mesh.data", -1, "--mesh.fsdp", 8, "--mesh.tensor", 1), "h100:16")])
def test_the_gpus_are_those_of_the_runs_own_mesh(words, gpus):
    assert program.target(run_files.load([str(word) for word in words])) == gpus


# ---- a layer of one's own --------------------------------------------------------------------------------------------

MLP = {"up": ((32, 64), ("embed", "mlp")), "down": ((64, 32), ("mlp", "embed"))}


def layer(end):
    """An MLP by hand; end: what becomes of a device's part of the sum."""
    rows = P(("data", "fsdp"), None, None)

    def mlp(w, x_BTD):
        local = lambda up, down, x: end(jax.nn.gelu(x @ up) @ down)
        return jax.shard_map(local, in_specs=(P(None, "tensor"), P("tensor", None), rows), out_specs=rows,
                             check_vma=False)(w["up"], w["down"], x_BTD)
    return mlp


def test_a_layer_of_ones_own_is_proved_and_a_forgotten_sum_is_found():
    proved = parity.prove_layer(layer(lambda y: jax.lax.psum(y, "tensor")), MLP, ["sharding_rules/ddp.toml"], cells=5)
    assert not proved.failed and {"mesh.tensor": 2, "sharding.rules": "sharding_rules/ddp.toml"} in [
        cell.settings for cell in proved.cells]
    wrong = parity.prove_layer(layer(lambda y: y), MLP, ["sharding_rules/ddp.toml"], cells=5)
    assert wrong.failed and all(cell.differs == ("mesh.tensor" in cell.settings) for cell in wrong.cells)
    assert json.dumps(wrong.as_json())


def test_a_layer_with_axes_that_no_rule_file_knows_is_refused():
    with pytest.raises(config.ConfigError, match="there is no logical axis 'hidden'"):
        parity.prove_layer(lambda w, x: x, {"w": ((4, 4), ("embed", "hidden"))})


# ---- what it found in meshtrain --------------------------------------------------------------------------------------


def test_one_microbatch_through_stages_sends_the_segments_of_its_ring_in_order():
    """Without the order XLA ends the process: two permutes at once."""
    check(small_of("--mesh.data", 1, "--mesh.fsdp", 1, "--mesh.tensor", 1, "--mesh.stage", 2, "--mesh.context", 4,
                   "--pipeline.schedule", "zero_bubble", "--training.remat", "selective",
                   "--sharding.rules", "sharding_rules/zero2.toml"))


def test_recurrences_of_fewer_tokens_than_a_chunk_have_a_price():
    compare.check_accepted(small_of("--model.mixers", "GF", "--model.num_layers", 4, "--mesh.data", 1, "--mesh.fsdp", 1,
                              "--mesh.tensor", 2, "--mesh.stage", 2, "--mesh.context", 2, "--context.method", "gather",
                              "--pipeline.schedule", "interleaved", "--pipeline.chunks", 2,
                              "--training.microbatches", 4, "--model.linear",
                              "{key_heads = 2, value_heads = 4, key_dim = 16, value_dim = 16}"))


# ---- the page --------------------------------------------------------------------------------------------------------


def test_names_of_users_are_text_on_the_page_and_what_is_not_finite_has_no_number():
    name = pages_samples.HOSTILE
    cell = {"title": name, "settings": {}, "loss": None, "grad_norm": 1e-7, "leaves": {name: None, "b": 1e-7},
            "losses": [None, 1e-6, 1e-5], "wrong": [f"gradient of {name}: inf"], "seconds": 1.5, "differs": True}
    told = {"name": name, "devices": 8, "failed": True, "tolerance": compare.FLOAT32._asdict(), "cells": [cell],
            "findings": [name], "notes": [name], "seconds": 3.0, "smallest": name}
    page = proofs.page(told)
    assert " ".join(name.split()) in standing_alone(page).words and embedded(page) == told
    assert page.count("<script") == 2 and "<img" not in page and "No: 1 of 1 layout does not compute what one device computes" in page


# ---- planted faults --------------------------------------------------------------------------------------------------


def test_the_planted_faults_have_their_place():
    assert len({one.name for one in planted.TABLE}) == len(planted.TABLE) >= 40
    for one in planted.TABLE:
        assert one.fault.planted((ROOT / one.fault.file).read_text())[1] == 1, one.name


@pytest.mark.long
@pytest.mark.cell
@pytest.mark.parametrize("one", planted.TABLE, ids=lambda one: one.name)
def test_a_planted_fault_is_found_where_it_changes_a_number(one):
    said = planted.plant(one)
    assert planted.found(one, said) == (one.seen in (planted.CELL, planted.PROGRAM)), said


@pytest.mark.long
@pytest.mark.parametrize("name", planted.SHRUNK)
def test_a_planted_fault_is_shrunk_to_twelve_keys(name):
    (one,) = (one for one in planted.TABLE if one.name == name)
    assert planted.plant(one, smaller=True)["smallest"]["keys"] <= 12
