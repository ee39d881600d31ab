"""inspect as a stranger meets it: tables, the JSON of the contract, topologies that cannot be compiled."""
import json
import re

import pytest
from commands import ROOT, call, home, in_a_directory_of_its_own, process, refused, tiny  # noqa: F401

from meshtrain.commands import inspect

MEMORY = {"params", "grads", "optimizer", "activations", "total"}
ROW = {"kind": str, "axes": list, "count": int, "bytes": int, "dtype": str, "source": str}


def inspected(*args) -> dict:
    ran = call(inspect.main, *args, "--json")
    assert ran.code == 0, ran
    return json.loads(ran.out)


def test_inspect_prints_tables_and_reads_no_data(tiny, tmp_path):
    ran = call(inspect.main, *tiny, "--data.paths", '["nowhere.txt"]')
    assert (ran.code, ran.err) == (0, ""), ran
    for part in ("logical axes", "[params] spec", "total per device", "optimizer state per device",
                 "planned: 61,440 tokens, ", "memory per device", "gradients", "formulas", "compiled",
                 "all-reduce", "data", "f32", "matmul FLOPs",
                 "note: the files of data.paths are not opened; python -m meshtrain.check opens them"):
        assert part in ran.out
    assert list(tmp_path.iterdir()) == [], "inspect writes nothing"


@pytest.mark.parametrize("microbatches", [1, 2])
def test_inspect_json_is_the_contract(tiny, microbatches):
    told = inspected(*tiny, "--data.global_batch", 16, "--training.microbatches", microbatches)
    assert set(told) == {"memory_bytes", "recomputed_by_xla", "collectives", "roofline",
                         "run", "mesh", "parameters", "schedule",
                         "notes", "matmul_flops", "differences", "warnings", "broken_permutes", "sampling", "teacher"}
    assert told["mesh"]["sizes"]["data"] == told["mesh"]["num_devices"] == 8 and told["schedule"] is None
    assert sum(row["stored_bytes"] for row in told["parameters"]) == told["memory_bytes"]["formula"]["params"]
    assert sum(row["size"] for row in told["parameters"]) == told["run"]["num_params"]
    assert told["memory_bytes"]["usable"] is None and told["recomputed_by_xla"] == 0
    assert told["roofline"] is None, "a CPU's speed is not known"
    formula, compiled = told["memory_bytes"]["formula"], told["memory_bytes"]["compiled"]
    assert set(formula) == set(compiled) == MEMORY
    assert {type(count) for count in formula.values()} == {int} and formula["total"] == sum(formula.values()) - formula[
        "total"]
    assert told["differences"] == [], "the formulas are of programs for GPUs"
    assert told["warnings"] == []
    assert set(told["matmul_flops"]) == {"formula", "compiled"} and min(told["matmul_flops"].values()) > 0
    assert compiled["params"] == formula["params"]
    assert compiled["optimizer"] >= formula["optimizer"] > 0
    if microbatches == 1:
        assert compiled["grads"] is None
    else:
        assert 0 <= compiled["grads"] - formula["grads"] <= 16, "but for scalars that the loop carries too"
    assert compiled["total"] >= compiled["params"] + compiled["optimizer"] + compiled["activations"]
    assert told["collectives"]["compiled"], "data 8 reduces its gradients"
    for row in told["collectives"]["compiled"]:
        assert type(row.pop("line")) is str
    for row in told["collectives"]["compiled"] + told["collectives"]["formula"]:
        assert {key: type(value) for key, value in row.items()} == ROW
        assert set(row["axes"]) <= {"data"} and row["count"] > 0 and row["bytes"] > 0


def test_gradients_of_one_microbatch_are_part_of_the_activations_by_formulas_too(tiny, capsys):
    assert inspect.main([*map(str, tiny), "--data.global_batch", "16", "--training.microbatches", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^gradients +– +–$", out, re.MULTILINE) and not re.search(r"^activations +-", out, re.MULTILINE), out


@pytest.mark.parametrize("words", [(), ("--topology", "h100:8"), ("--schedule",)])
def test_a_share_of_memory_that_is_none_is_refused_before_anything_is_compiled(words, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "75%")
    refused(call(inspect.main, *words), "XLA_CLIENT_MEM_FRACTION=75%", "0.92")


def test_inspect_compiles_for_64_gpus_that_are_not_here(tiny):
    from meshtrain.cost.program import compile as gpu_compile
    try:
        gpu_compile.topology("h100:64")
    except ValueError as error:
        pytest.skip(str(error))
    told = inspected(ROOT / "configs/llama3-8b-64.toml", *tiny[tiny.index("--model.vocab_size"):],
                     "--topology", "h100:64", "--assume", "hbm.share=0.5",
                     "--model.embed_dim", 512, "--model.head_dim", 64, "--model.num_heads",
                     8, "--model.num_kv_heads", 8,
                     "--model.mlp_dim", 1024, "--model.num_layers", 2, "--data.seq_len",
                     256, "--data.global_batch", 256)
    compiled = told["memory_bytes"]["compiled"]
    assert compiled["params"] == told["memory_bytes"]["formula"]["params"] > 0
    assert told["memory_bytes"]["usable"] == int(0.92 * 84_942_979_072) and told["recomputed_by_xla"] == 0
    assert told["collectives"]["compiled"] and told["differences"] == []
    line = told["roofline"]
    assert (line["gpu"], line["num_gpus"]) == ("h100", 64) and 0 < line["mfu"] < 1
    assert line["tokens_per_s"] == pytest.approx(256 * 256
                                                 / line["step_time_s"]) and sum(line["share"].values()) == pytest.approx(1)
    assert line["exposed_s"] == pytest.approx(sum(line["exposed_s_by_axes"].values())) and "data" in line[
        "exposed_s_by_axes"]
    assert line["compute_s"] == pytest.approx(sum(kernel["time_s"] for kernel in line["kernels"]))
    assert line["assumed"]["hbm.share"] == 0.5, "what --assume says"


def test_inspect_says_nothing_but_its_own_words(tiny):  # noqa: F811
    """Where a CUDA plugin is installed and no GPU is there, jax's C++ reports that, while it is loaded and later."""
    child = process("-m", "meshtrain.inspect", *tiny)
    out, err = child.communicate(timeout=240)
    assert (child.returncode, err) == (0, "") and out.startswith("tiny: ")


def test_a_run_without_stages_has_no_schedule_to_draw_and_is_still_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["configs/llama3-8b.toml", "--topology", "h100:8", "--schedule"]
    assert inspect.main(words) == 0 and not list(tmp_path.iterdir())
    assert capsys.readouterr().out.startswith("mesh.stage=1: the run has no pipeline")
    assert inspect.main([*words, "--model.attention", "cudnn"]) == 2
    assert 'model.attention="cudnn" cannot serve this run' in capsys.readouterr().err
