"""A Llama trainer as a careful user writes it with flax.nnx and optax. Nothing of meshtrain is in it.

Layers are stacked and scanned, each is rematerialized but for the activations that `SAVED` names, shardings are written
by hand, and attention is jax.nn's, by cuDNN on GPUs. Rows are whole: that function has no documents.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.contenders.case import BETAS, CLIP, DECAY, LEARNING_RATE, Case

SAVED = jax.checkpoint_policies.save_only_these_names("qkv", "attention", "mlp")
SPECS = {"embed": P("fsdp"), "head": P("fsdp"), "norm": P(), "attention_norm": P(), "mlp_norm": P(),
         "query": P(None, "fsdp"), "key": P(None, "fsdp"), "value": P(None, "fsdp"), "out": P(None, None, "fsdp"),
         "gate": P(None, "fsdp"), "up": P(None, "fsdp"), "down": P(None, None, "fsdp")}


class Llama(nnx.Module):
    def __init__(self, c: Case, rngs: nnx.Rngs):
        def matrix(*shape):
            return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-2] ** -0.5)

        def ones(*shape):
            return nnx.Param(jnp.ones(shape, jnp.float32))
        L, D, H, F = c.num_layers, c.embed_dim, c.head_dim, c.mlp_dim
        self.embed, self.head, self.norm = matrix(c.vocab_size, D), matrix(D, c.vocab_size), ones(D)
        self.query, self.out = matrix(L, D, c.num_heads * H), matrix(L, c.num_heads * H, D)
        self.key, self.value = matrix(L, D, c.num_kv_heads * H), matrix(L, D, c.num_kv_heads * H)
        self.gate, self.up, self.down = matrix(L, D, F), matrix(L, D, F), matrix(L, F, D)
        self.attention_norm, self.mlp_norm = ones(L, D), ones(L, D)


def normalize(x, scale, eps):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotate(x, theta):
    T, H = x.shape[1], x.shape[-1]
    angle = jnp.arange(T)[:, None] * theta ** (-jnp.arange(0, H, 2) / H)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def attend_by(implementation: str):
    """jax.nn's attention: "cudnn" or "xla"."""
    return partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


def compute_loss(params, c: Case, tokens, targets, mesh: Mesh, attend):
    def split_batch(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))

    def cast(weight):
        return weight.astype(c.dtype)

    def layer(x, p):
        B, T, _ = x.shape

        def heads(h, name, count):
            return (h @ cast(p[name])).reshape(B, T, count, c.head_dim)
        h = normalize(x, p["attention_norm"], c.norm_eps)
        q = checkpoint_name(rotate(heads(h, "query", c.num_heads), c.rope_theta), "qkv")
        k = checkpoint_name(rotate(heads(h, "key", c.num_kv_heads), c.rope_theta), "qkv")
        v = checkpoint_name(heads(h, "value", c.num_kv_heads), "qkv")
        with jax.named_scope("attention"):
            o = attend(q, k, v)
        o = checkpoint_name(o.reshape(B, T, -1), "attention")
        x = split_batch(x + o @ cast(p["out"]))
        h = normalize(x, p["mlp_norm"], c.norm_eps)
        gate, up = (checkpoint_name(split_batch(h @ cast(p[name])), "mlp") for name in ("gate", "up"))
        return split_batch(x + (jax.nn.silu(gate) * up) @ cast(p["down"])), None
    x = split_batch(cast(params["embed"])[tokens])
    stacked = {name: params[name] for name in params if name not in ("embed", "head", "norm")}
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=SAVED, prevent_cse=False), x, stacked)
    logits = split_batch(normalize(x, params["norm"], c.norm_eps) @ cast(params["head"])).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(losses * (targets >= 0))


def build(c: Case, mesh: Mesh, attend):
    """Return (jitted step, jitted init, ShapeDtypeStructs of its arguments). The step takes (params, optimizer state,
    tokens, targets), int32 [microbatches, B, T]."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, *BETAS, weight_decay=DECAY))

    def init():
        params = nnx.to_pure_dict(nnx.state(Llama(c, nnx.Rngs(0)), nnx.Param))
        return params, tx.init(params)

    def place(path, leaf):
        name = next((key.key for key in reversed(path) if getattr(key, "key", None) in SPECS), "norm")
        return NamedSharding(mesh, SPECS[name] if leaf.ndim else P())
    shapes = jax.eval_shape(init)
    split = jax.tree_util.tree_map_with_path(place, shapes)
    rows = NamedSharding(mesh, P(None, "fsdp"))

    def step(params, state, tokens, targets):
        count = jnp.maximum(jnp.sum(targets >= 0), 1)
        gradients = jax.value_and_grad(lambda p, x, y: compute_loss(p, c, x, y, mesh, attend) / count)

        def accumulate(total, batch):
            loss, grads = gradients(params, *batch)
            return jax.tree.map(jnp.add, total, grads), loss
        if tokens.shape[0] == 1:
            loss, grads = gradients(params, tokens[0], targets[0])
        else:
            zeros = jax.tree.map(lambda p, at: jax.lax.with_sharding_constraint(jnp.zeros_like(p), at), params, split[0])
            grads, losses = jax.lax.scan(accumulate, zeros, (tokens, targets))
            loss = losses.sum()
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss
    shape = (c.microbatches, c.rows * mesh.size, c.seq_len)
    args = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, split)
    batch = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows),) * 2
    jitted = jax.jit(step, in_shardings=(*split, rows, rows), out_shardings=(*split, None), donate_argnums=(0, 1))
    return jitted, jax.jit(init, out_shardings=split), (*args, *batch)


def mesh_of(devices) -> Mesh:
    return Mesh(np.array(devices), ("fsdp",), axis_types=(AxisType.Auto,))


class Trainer:
    """The contract is `case.Trainer`."""

    def __init__(self, case: Case, variant: str = ""):
        self.case, self.mesh = case, mesh_of(jax.devices()[:1])
        implementation = "xla" if jax.default_backend() == "cpu" else "cudnn"
        step, self.init, args = build(case, self.mesh, attend_by(implementation))
        self.settings = f"nnx + optax, attention {implementation}, saves q, k, v, attention, gate and up"
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
        self.program = step.lower(*args).compile()
        self.rows = args[-1].sharding

    def reset(self) -> None:
        self.carry = None
        self.carry = self.init()

    def place(self, batch):
        shape = (self.case.microbatches, self.case.rows, self.case.seq_len)
        return [jax.device_put(batch[name].reshape(shape), self.rows) for name in ("tokens", "targets")]

    def step(self, placed):
        *self.carry, loss = self.program(*self.carry, *placed)
        return loss

    def wait(self) -> None:
        jax.block_until_ready(self.carry)

    def peak_bytes(self) -> int:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
