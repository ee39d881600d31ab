"""A small dense run for other tests, and its initialization on any layout. What layouts compute and hold: `test_cells`."""
from pathlib import Path

import jax
import numpy as np
import parity

from meshtrain import config

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
MICROBATCHES = 2
SEQUENCES, T = 32, 32  # of a step
MODEL = dict(vocab_size=509, embed_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, mlp_dim=96,
             compute_dtype="float32")
ONE = {}
GPT2 = dict(norm="layernorm", activation="gelu", position="learned", max_seq_len=T, attention_bias="all", mlp_bias=True,
            num_kv_heads=8, tie_embeddings=True)  # fmt: skip


def run_of(rule: str, mesh: dict, model: dict = {}, training: dict = {}) -> config.Run:
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")), model=MODEL | model,
        data=dict(seq_len=T, global_batch=SEQUENCES),
        training=dict(steps=20, microbatches=MICROBATCHES, loss_chunk=24) | training,
        optimizer=dict(learning_rate=1e-3, warmup_steps=2),
    )  # fmt: skip


def test_initialization_is_the_same_bits_on_any_layout():
    made = parity.assemble(run_of("zero3", dict(data=2, fsdp=2, tensor=2)))
    with jax.set_mesh(made.mesh):
        state = made.program.initialize()
    params = jax.jit(made.model.init)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), jax.device_get(params))
