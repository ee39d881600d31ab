"""Models whose layers differ in their mixers compute on every layout what they compute on one device: the loss and
every gradient leaf, of packed documents."""
import os
import subprocess
import sys
from pathlib import Path

import parity
import pytest
import sampling

from meshtrain import config

ROOT = Path(__file__).resolve().parent.parent.parent
T = 32
BASE = dict(vocab_size=259, embed_dim=32, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48,
            norm_eps=1e-2, compute_dtype="float32", num_experts=4, experts_per_token=2, expert_mlp_dim=16, mlps="de*")
LINEAR = dict(key_heads=2, value_heads=4, key_dim=8, value_dim=6, norm_eps=1e-2)
MODELS = {
    # The gated delta rule beside attention with sinks, gates and biases of experts.
    "delta": BASE | dict(mixers="GF", linear=LINEAR, attention_gate=True, attention_sinks=True, mlp_bias=True,
                         router_bias="logits", activation="swiglu_clamped", shared_expert_dim=16,
                         shared_expert_gate=True),
    # Kimi delta attention beside latents without rope.
    "kda": BASE | dict(mixers="KN", linear=dict(key_heads=4, value_heads=4, key_dim=8, value_dim=8, norm_eps=1e-2),
                       num_kv_heads=4, head_dim=14, latent=dict(kv_dim=16, query_dim=24, rope_dim=6, value_dim=10)),
    # Mamba-2, a layer without an MLP, windows with rope of their own and partial rotation.
    "mamba": BASE | dict(mixers="MMW", mlps="d.e", linear=LINEAR | dict(conv_bias=True), activation="relu2", window=7,
                         multipliers=dict(residual=0.5, logits=0.5), layer_scale=True, head_dim=12, num_layers=6,
                         rope_scaling=dict(partial_rotary_factor=0.5)),
}
ZERO_BUBBLE = dict(schedule="interleaved_zero_bubble", chunks=2)


def run_of(model: str, mesh: dict, rules: str = "zero3", **sections) -> config.Run:
    training = dict(steps=9, loss_chunk=24) | sections.pop("training", {})
    layers = dict(num_layers=9 if model != "mamba" else 12) if mesh.get("stage", 1) > 1 else {}
    return config.Run(mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rules}.toml")),
                      model=MODELS[model] | layers, data=dict(seq_len=T, global_batch=8), training=training,
                      optimizer=dict(learning_rate=1e-3, schedule="constant"), **sections)


CASES = [
    ("delta", dict(fsdp=2, tensor=2), "zero3", {}),
    ("kda", dict(context=2, tensor=2), "zero3", {}),
    ("mamba", dict(context=2, fsdp=2), "zero3", dict(context=dict(method="gather"))),
] + [
    pytest.param(*case, marks=sampling.GRID) for case in [
        ("delta", dict(context=2, data=2), "zero3", dict(training=dict(remat="selective"))),
        ("kda", dict(fsdp=2, tensor=2), "zero3", dict(training=dict(microbatches=2, remat="full"))),
        ("kda", dict(fsdp=2, tensor=2), "zero3", dict(lora=dict(rank=2, alpha=3.0))),
        ("mamba", dict(fsdp=2, tensor=2), "zero3", {})]
] + [
    pytest.param(model, dict(context=count), "zero3", dict(context=dict(method=method)), marks=sampling.GRID)
    for model in MODELS for count in (2, 4) for method in ("ring", "gather", "ulysses")
] + [
    pytest.param(model, dict(stage=2, fsdp=2), "zero1", dict(pipeline=ZERO_BUBBLE, training=dict(
        microbatches=4, remat=remat)), marks=sampling.GRID) for model in MODELS for remat in ("none", "full")
] + [
    pytest.param(model, dict(tensor=4, data=2), "tensor", {}, marks=sampling.GRID) for model in MODELS
]


@pytest.mark.parametrize("model, mesh, rules, sections", CASES)
def test_layouts_compute_what_one_device_does(model, mesh, rules, sections):
    run = run_of(model, mesh, rules, **sections)
    assert config.problems(run) == []
    parity.check(run)


FIVE_AXES = """
import sys
sys.path[:0] = ["tests", "tests/layouts"]
import parity
from test_hybrids import ZERO_BUBBLE, run_of
mesh = dict(data=2, fsdp=2, tensor=2, stage=2, context=2)
parity.check(run_of(sys.argv[1], mesh, pipeline=ZERO_BUBBLE, training=dict(microbatches=2)))
"""


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_all_five_axes_on_32_devices(model):
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=32")
    done = subprocess.run([sys.executable, "-c", FIVE_AXES, model], cwd=ROOT, text=True, capture_output=True,
                          env={**os.environ, "XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-3000:]
