"""The worked examples that the field's guides advise: the number, or the layout feasible, with its distance to the best
plan.

Where a layout is more than 5% behind, the planner itself says why, by the parts of the two prices.
"""
import contextlib
import functools
import io
import json
import re

import pytest
import sampling

from meshtrain.commands import plan
from meshtrain.config import locate_shipped
from meshtrain.cost.formulas import simulate
from meshtrain.cost.formulas.price import Options
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout
from test_price import model, priced

# The words of the command → how far it is behind the best at most, and what the reasons name.
ADVISED = {
    "llama3-8b --gpus 8 --gpu h100 --global-batch 64 --fsdp 8": (.05, ""),
    "llama3-70b --gpus 64 --gpu h100 --global-batch 128 --tensor 8 --fsdp 8": (.35, "tensor 8"),
    "llama3-70b --gpus 64 --gpu a100-80gb --global-batch 128 --tensor 8 --stage 2": (.12, "tensor 8"),
    "gpt-180b --gpus 128 --gpu h100 --global-batch 512 --tensor 8 --stage 4": (.25, "tensor 8"),
    "llama3-70b --gpus 64 --gpu h100 --global-batch 16 --seq-len 131072 --tensor 8 --context 2 --stage 1": (
        .35, "tensor 8"),
    "llama3-405b --gpus 16384 --gpu h100 --global-batch 2048 --tensor 8 --stage 16 --context 1": (.05, ""),
    "llama3-405b --gpus 16384 --gpu h100 --global-batch 128 --seq-len 131072 --tensor 8 --stage 16 --context 16": (
        .05, "")}


@functools.cache
def page_of(words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert plan.main(words.split()) == 0
    return out.getvalue()


def answer(words: str) -> dict:
    return json.loads(page_of(f"{words} --json"))


@pytest.mark.parametrize("words", [pytest.param(words, marks=sampling.GRID) if "405b" in words else words
                                   for words in ADVISED])
def test_a_layout_that_is_advised_fits_and_says_how_far_it_is_behind_and_why(words):
    most, named = ADVISED[words]
    told = answer(words)
    first, stands = told["plans"][0], told["behind"]
    assert first["fits"] and 0 <= stands["behind"] <= most and 1 <= stands["rank"] <= stands["of"] + 1
    fixed = re.findall(r"--(fsdp|tensor|stage|context) (\d+)", words)
    assert fixed and all(one["mesh"].get(axis, 1) == int(size) for one in told["plans"] for axis, size in fixed)
    assert stands["behind"] == pytest.approx(first["step_time_s"] / stands["best"]["step_time_s"] - 1, abs=1e-9)
    if stands["behind"] > 0.05:
        assert any(named in reason for reason in stands["reasons"]), stands["reasons"]
        seconds = [float(n) * (1e-3 if unit == "ms" else 1) for reason in stands["reasons"]
                   for n, unit in re.findall(r"\((\d+\.\d+) (ms|s) more than the best\)", reason)]
        assert len(seconds) == len(stands["reasons"]) and min(seconds) > 0
        assert sum(seconds) >= 0.5 * (first["step_time_s"] - stands["best"]["step_time_s"]), "half of the distance is explained"


def test_a_reason_has_the_seconds_of_one_layer():
    """70B, tensor 8 in the host and fsdp 8 across: 7/8 of a layer's 214 MB come through one NIC of 40 GB/s."""
    words = "llama3-70b --gpus 64 --gpu h100 --tensor 8 --fsdp 8 --microbatches 16 --global-batch 128 --max-memory 34"
    stands, page = answer(words)["behind"], page_of(words)
    assert all(f"  - {reason}\n" in page for reason in stands["reasons"]) and f"number {stands['rank']} of" in page
    reason = next(reason for reason in stands["reasons"] if reason.startswith("fsdp 8"))
    assert "1 NIC on each of 8 hosts" in reason and "1,280 times" in reason
    assert "take 4.7 ms to gather during 2.8 ms of forward matmuls" in reason


def test_without_anything_fixed_nothing_is_behind():
    words = "llama3-8b --gpus 8 --gpu h100 --global-batch 64"
    assert answer(words)["behind"] is None and "fixed" not in page_of(words)


def test_what_is_fixed_as_the_best_has_it_costs_nothing():
    words = "llama3-8b --gpus 8 --gpu h100 --global-batch 64"
    best = answer(words)["plans"][0]
    fixed = " ".join(f"--{axis} {n}" for axis, n in best["mesh"].items())
    stands = answer(f"{words} {fixed}")["behind"]
    assert stands["rank"] == 1 and stands["reasons"] == [] and "costs nothing" in page_of(f"{words} {fixed}")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_weights_and_states_of_large_models_are_what_is_said_of_them():
    size = lambda preset: sum(info.size for info in model(preset)[1])
    assert 2 * size("llama3-405b") == pytest.approx(810e9, rel=.005), "405B in bfloat16: 810 GB"
    assert 12 * size("llama3-405b") == pytest.approx(4.86e12, rel=.005), "Adam's state at 12 bytes: 4.86 TB"
    assert 2 * size("gpt-180b") / 8 == pytest.approx(45e9, rel=.05), "180B in bfloat16 over tensor 8: 45 GB"


@pytest.mark.parametrize("rule, gigabytes", [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_rule_files_split_what_zero_says(rule, gigabytes):
    """7.5B parameters on 64 GPUs in the paper's convention: 2 bytes of weights, 2 of gradients, 12 of optimizer a
    parameter."""
    layout = Layout(rules.load(locate_shipped(f"sharding_rules/{rule}.toml")), MeshSpec({"fsdp": 64}).sizes)
    num_shards = {table: layout.num_shards(layout.mesh_axes(table, "embed"))
                  for table in ("params", "grads", "optimizer")}
    assert 7.5 * sum(n / num_shards[table] for table, n in (("params", 2), ("grads", 2),
                                                            ("optimizer", 12))) == pytest.approx(gigabytes, abs=.05)


def test_a_pipeline_of_four_stages_and_one_microbatch_idles_three_quarters():
    assert simulate.simulate(schedules.make("gpipe", 4, 1, 1)).bubble == pytest.approx(.75)
    for p, m in ((4, 8), (8, 32)):
        assert simulate.simulate(schedules.make("1f1b", p, m, 1)).bubble == pytest.approx((p - 1) / (m + p - 1))


def test_tensor_parallelism_sends_most_and_pipelines_least():
    """405B on 16,384 GPUs, data 128 × stage 16 × tensor 8."""
    sent = priced("zero1", dict(data=128, stage=16, tensor=8),
                  Options(8192, 2048, 16, "full", "interleaved", 4), "llama3-405b").traffic_bytes
    assert sent["tensor"] > sent["data"] > sent["stage"] > 0
