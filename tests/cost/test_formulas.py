"""Small formulas that no loss shows: what weights begin with, what dropout drops, what a token costs."""
import dataclasses
import math
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import assembly, config, run_files
from meshtrain import hardware
from meshtrain.cost.formulas import flops
from meshtrain.model import transformer
from meshtrain.model.dropout import dropout
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout

EXECUTION = Execution(Layout(rules.parse(""), dict.fromkeys(AXES, 1)), Numerics(jnp.float32),
                             Engines(None))


@pytest.mark.parametrize("given, std", [({}, 0.02), (dict(embedding_std=1), 1)])
def test_initial_weights_have_the_promised_deviations(given, std):
    """1/√fan-in; into the residual stream divided by √(2L) as well (GPT-2); tables embedding_std; nothing beyond 3
    deviations."""
    cfg = config.Run(model=dict(vocab_size=256, embed_dim=96, num_layers=4, num_heads=4, head_dim=16, mlp_dim=160,
                                attention_bias="all", norm="layernorm", **given)).model  # fmt: skip
    model = transformer.build(cfg)
    expected = {"embedding/table": std, "head/kernel": 96**-0.5, "layers/attention/out/kernel": (64 * 8) ** -0.5,
                "layers/mlp/down/kernel": (160 * 8) ** -0.5}  # fmt: skip
    params = jax.jit(model.init)(jax.random.key(0))
    chex.assert_tree_all_finite(params)
    for info in model.parameters():
        leaf = params
        for key in info.path:
            leaf = leaf[key]
        chex.assert_shape(leaf, info.shape)
        if info.role in ("norm", "bias"):
            assert (leaf == (info.role == "norm")).all(), info.name
            continue
        deviation = expected.get(info.name, 96**-0.5)
        assert jnp.abs(leaf).max() <= 3.001 * deviation, info.name
        # A normal distribution cut at 3 deviations has 0.9866 of its own; 10^4 weights or more know that to 1 %.
        assert jnp.std(leaf) == pytest.approx(0.9866 * deviation, rel=0.03), info.name
    kernels = params["layers"]["mlp"]["up"]["kernel"]
    assert (kernels[0] != kernels[1]).mean() > 0.99, "each layer has weights of its own"


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_keeps_the_mean_and_draws_anew_at_every_site_and_token(rate):
    B, T, D = 4, 16, 256
    index = jnp.tile(jnp.arange(T), (B, 1))
    inputs = transformer.Inputs(index, index, jnp.arange(B), None, jax.random.key(0))
    draw = jax.jit(lambda site: dropout(EXECUTION, jnp.ones((B, T, D)), rate, inputs, site))
    one, other = np.asarray(draw(0)), np.asarray(draw(1))
    kept = one != 0
    np.testing.assert_allclose(one[kept], 1 / (1 - rate), rtol=1e-6)
    # 16,384 draws: three deviations of the share are 0.012 at most.
    assert kept.mean() == pytest.approx(1 - rate, abs=0.012) and one.mean() == pytest.approx(1, abs=0.024)
    rows = kept.reshape(B * T, D)
    assert len(np.unique(rows, axis=0)) == B * T, "no two tokens have the same bits"
    agree = 1 - 2 * rate * (1 - rate)                       # of independent draws
    assert ((other != 0) == kept).mean() == pytest.approx(agree, abs=0.03)


def test_flops_per_token_are_those_counted_by_hand():
    """Llama 3 8B at 8,192 tokens: 6 FLOPs for every weight that is multiplied, and half of 12·L·D·S for the scores."""
    cfg = run_files.load(["--model.preset", "llama3-8b"]).model
    D, L, F, V, S = 4096, 32, 14336, 128256, 8192
    V = math.ceil(V / 256) * 256
    weights = L * (2 * D * D + 2 * D * 1024 + 3 * D * F) + D * V
    assert flops.model_flops_per_token(transformer.build(cfg).parameters(), cfg, S) == 6 * weights + 6 * L * D * S
    tied = cfg.model_copy(update=dict(tie_embeddings=True))
    assert flops.model_flops_per_token(transformer.build(tied).parameters(), tied, S) == 6 * weights + 6 * L * D * S


@pytest.mark.parametrize("depths", [1, 2])
def test_a_depth_counts_a_layer_its_merge_and_the_head_again(depths):
    """Llama 3 8B: 9.4% more for each depth. Depths that are not trained count nothing."""
    cfg = run_files.load(["--model.preset", "llama3-8b"]).model
    D, F, V, S = 4096, 14336, math.ceil(128256 / 256) * 256, 8192
    count = lambda cfg, **more: flops.model_flops_per_token(transformer.build(cfg, **more).parameters(), cfg, S)
    with_depths, each = cfg.model_copy(update=dict(mtp_layers=depths)), 2 * D * D + 2 * D * 1024 + 3 * D * F + 2 * D * D
    assert count(with_depths) - count(cfg) == depths * (6 * (each + D * V) + 6 * D * S)
    assert count(with_depths) / count(cfg) - 1 == pytest.approx(0.0945 * depths, rel=1e-3)
    assert count(with_depths, trains_depths=False) == count(cfg)


def test_chunks_of_the_head_are_long_enough_for_its_gradient_to_be_bound_by_matmuls_on_every_gpu():
    """Every chunk reads and writes the float32 gradient of the head's weight, 8 bytes an element, for 2 FLOPs a
    token."""
    chunk = config.Run().training.loss_chunk
    for name, gpu in hardware.GPUS.items():
        if gpu.hbm_bytes_per_s:
            assert 2 * chunk / gpu.peak("bfloat16") > 8 / gpu.hbm_bytes_per_s, name


def test_every_step_draws_its_own_dropout():
    """Without a learning rate to speak of, the same batch has another loss in the next step, and the same one in the
    same step."""
    root = Path(__file__).resolve().parent.parent.parent
    run = config.Run(model=dict(vocab_size=32, embed_dim=16, num_layers=1, num_heads=2,
                                mlp_dim=16, residual_dropout=0.5,
                                embedding_dropout=0.5, compute_dtype="float32"), data=dict(seq_len=16, global_batch=2),
                     # fmt: skip
                     optimizer=dict(learning_rate=1e-30),
                     sharding=dict(rules=str(root / "sharding_rules" / "ddp.toml")))
    program = assembly.assemble(run, jax.devices()[:1]).program
    ids = np.random.default_rng(0).integers(0, 32, (2, 2, 16)).astype(np.int32)
    index = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    batch = {"tokens": ids[0], "targets": ids[1], "segments": np.ones_like(index), "positions": index, "index": index,
             "sequence": np.arange(2, dtype=np.int32)}  # fmt: skip
    step = program.compile()
    state, losses = jax.device_get(program.initialize()), []
    for number in (0, 1, 0):
        placed = jax.device_put(dataclasses.replace(state, step=np.int32(number)), program.step.state.sharding)
        losses.append(float(step(placed, program.place(batch))[1]["loss"]))
    assert losses[0] == losses[2] and abs(losses[0] - losses[1]) > 1e-3
