"""LoRA on routed experts: on every layout the loss and the gradient of every adapter that a plain loop over experts
with the merged weights gives: dA = s dW B', dB = s A' dW."""
import functools
import math

import jax
import numpy as np
import pytest
from sampling import GRID
from test_experts import (FOUR_LAYERS, LAYOUTS, MODELS, PIPELINES, TOLERANCE, batch, computed, expected,
                          run_of)

import experts
from meshtrain import config
from meshtrain.model import transformer
from meshtrain.run.trees import leaves_of, nest

ALPHA, RANK = 5.0, 3
SCALE = ALPHA / RANK
ALL = ("expert_gate", "expert_up", "expert_down")


def with_lora(run: config.Run, targets=ALL) -> config.Run:
    return run.replace(lora=dict(rank=RANK, alpha=ALPHA, targets=targets), experts=dict(bias_rate=0.0))


@functools.cache
def wanted(model: str, targets=ALL, leaning: str = ""):
    """(parameters with adapters, nll, gradient of each adapter by path)."""
    run = with_lora(run_of("sharding_rules/ddp.toml", {}, (MODELS | FOUR_LAYERS)[model]), targets)
    rng, base = np.random.default_rng(0), leaves_of(expected(model, leaning)[0])
    adapters = {info.name: 0.1 * rng.normal(size=info.shape).astype(np.float32)
                for info in transformer.build(run.model, run.lora).parameters() if info.trainable}
    pairs = {name[:-2].replace("lora/", ""): (adapters[name], adapters[f"{name[:-2]}_b"])
             for name in adapters if name.endswith("_a")}
    assert pairs and len(pairs) == len(adapters) / 2
    merged = base | {path: base[path] + SCALE * a @ b for path, (a, b) in pairs.items()}
    dumped = run.model_dump()
    nll, grads, _, gap = experts.gradients(dumped["model"], dumped["experts"], nest(merged), batch())
    assert gap > 1e-6
    grads, out = leaves_of(grads), {}
    for path, (a, b) in pairs.items():
        home, _, name = path.rpartition("/")
        out[f"{home}/lora/{name}_a"] = SCALE * grads[path] @ b.swapaxes(-1, -2)
        out[f"{home}/lora/{name}_b"] = SCALE * a.swapaxes(-1, -2) @ grads[path]
    return nest(base | adapters), nll, out


def check(run, model, devices, *more) -> None:
    params, nll, grads = wanted(model, tuple(run.lora.targets), *more)
    loss, got, _ = computed(run, params, devices)
    got = leaves_of(got)
    assert abs(loss - nll) < 2e-6 * nll and got.keys() == grads.keys()
    errors = {path: float(np.abs(got[path] - grads[path]).max() / np.abs(grads[path]).max()) for path in got}
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("model, targets", [
    *(pytest.param(*case, marks=GRID) for case in (
        ("softmax", ALL), ("softmax", ("expert_down",)), ("softmax", ("expert_up",)), ("gelu, one of four", ALL[1:]),
        ("sigmoid in groups, scaled, shared, a dense layer first", ALL)))], ids=str)
def test_one_device_computes_what_the_merged_experts_do(model, targets):
    check(with_lora(run_of("sharding_rules/ddp.toml", {}, MODELS[model]), targets), model, jax.devices()[:1])


@pytest.mark.parametrize("layout, remat, dispatch, leaning", [
    ("expert over fsdp, expert_mlp over tensor", "full", "gather", ""),
    *(pytest.param(layout, "full", "gather", "", marks=GRID) for layout in LAYOUTS if "expert_mlp" not in layout),
    *(pytest.param(*case, marks=GRID) for case in (
        ("expert over fsdp", "none", "all_to_all", ""), ("expert over fsdp", "full", "all_to_all", "all to two"),
        ("expert over fsdp and tensor", "none", "gather", "all to two"),
        ("no axis of experts, zero3 with tensor", "none", "gather", "three without any")))], ids=str)
def test_layouts_compute_what_the_merged_experts_do(layout, remat, dispatch, leaning, tmp_path):
    text, mesh = LAYOUTS[layout]
    (tmp_path / "rules.toml").write_text(text)
    run = with_lora(run_of(tmp_path / "rules.toml", mesh, {}, dict(remat=remat), dispatch=dispatch))
    check(run, "softmax", jax.devices()[:math.prod(mesh.values())], leaning)


@pytest.mark.parametrize("name", [pytest.param(name, marks=GRID) for name in PIPELINES])
def test_pipelines_compute_what_the_merged_experts_do(name, tmp_path):
    text, mesh, schedule, chunks = PIPELINES[name]
    model = "three layers, sigmoid" if "do not divide" in name else "four layers"
    (tmp_path / "rules.toml").write_text(text)
    run = with_lora(run_of(tmp_path / "rules.toml", mesh, FOUR_LAYERS[model], dict(microbatches=4),
                           dict(schedule=schedule, chunks=chunks)))
    check(run, model, jax.devices()[:math.prod(mesh.values())])
