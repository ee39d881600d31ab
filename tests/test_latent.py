"""Attention by latents against whole scores of plainly expanded heads: every gradient leaf, on one device and wherever
tokens, heads or the layer lie otherwise."""
import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from test_context import laid_out

from meshtrain import config
from meshtrain.kernels import blockwise
from meshtrain.kernels.engine import CAUSAL, Scores
from meshtrain.model import latent, layers, params, rope
from meshtrain.model.parts import Inputs
from meshtrain.parallel.context import attention

slow = partial(pytest.param, marks=sampling.GRID)
B, T = 2, 24
# All widths differ, so that none can stand in for another: H = 11 + 6, V = 10.
MODEL = dict(embed_dim=20, num_heads=4, head_dim=17, num_layers=1, norm_eps=1e-3, compute_dtype="float32",
             latent=dict(kv_dim=12, query_dim=14, rope_dim=6, value_dim=10), multipliers=dict(score=0.31),
             rope_scaling=dict(llama_4_scaling_beta=0.2, original_max_position_embeddings=9))
WITHOUT = dict(latent=dict(kv_dim=12, rope_dim=6))      # no latent of queries; values as wide as keys


@functools.cache
def cell(mixer: str = "F", whole_queries: bool = False, **more):
    """(section, module, parameters away from their initial values, x, dy, segments)."""
    cfg = config.Model(**MODEL | dict(mixers=mixer, window=7 if mixer in "WV" else 0) | (WITHOUT if whole_queries else {}) | more)
    module = params.Module(lambda rngs: latent.LatentAttention(cfg, rngs, mixer))
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)
    weights = jax.tree.map(lambda w: jnp.asarray(w + 0.2 * draw(*w.shape)), module.init(jax.random.key(0)))
    segments = 1 + np.cumsum(rng.random((B, T)) < 0.1, 1).astype(np.int32)
    return cfg, module, weights, draw(B, T, 20), draw(B, T, 20), segments


def plain(cfg, mixer: str, w, x, segments):
    """y [B, T, D]."""
    R, C = cfg.latent.rope_dim, cfg.latent.kv_dim
    kernel = lambda name: w[name]["kernel"]
    normed = lambda y, name: y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * w[name]["scale"]
    exact = partial(jnp.einsum, precision="highest")
    h = normed(exact("btd,dq->btq", x, kernel("query_down")), "query_latent_norm") if "query_down" in w else x
    q = exact("btd,dnh->btnh", h, kernel("query"))
    c = normed(exact("btd,dc->btc", x, kernel("latent")), "latent_norm")
    r = exact("btd,dr->btr", x, kernel("key_rope"))[:, :, None]
    position = np.tile(np.arange(T), (B, 1))
    if mixer in "FW":
        angle = position[..., None, None] * 10000.0 ** (-np.arange(R // 2) / (R // 2))
        turn = lambda y: jnp.concatenate([y[..., :R // 2] * np.cos(angle) - y[..., R // 2:] * np.sin(angle),
                                          y[..., R // 2:] * np.cos(angle) + y[..., :R // 2] * np.sin(angle)], -1)
        q = jnp.concatenate([q[..., :-R], turn(q[..., -R:])], -1)
        q, r = q * (1 + 0.2 * np.log(1 + position // 9))[..., None, None], turn(r)
    k = exact("btc,cnh->btnh", c, kernel("key"))
    k = jnp.concatenate([k, jnp.broadcast_to(r, (*k.shape[:3], R))], -1)
    o = plain_attention.attend(q, k, exact("btc,cnv->btnv", c, kernel("value")), segments, CAUSAL._replace(
        window=cfg.window), Scores(0.31))
    return exact("btnv,nvd->btd", o, kernel("out"))


def with_gradients(f, weights, x, dy):
    y, back = jax.vjp(f, weights, x)
    return y, back(dy)


@functools.cache
def expected(mixer: str, whole_queries: bool):
    cfg, _, weights, x, dy, segments = cell(mixer, whole_queries)
    return jax.jit(partial(with_gradients, lambda w, x: plain(cfg, mixer, w, x, jnp.asarray(segments))))(weights, x, dy)


def check(sizes: dict, method: str = "", rule: str = "zero3", mixer: str = "F", whole_queries: bool = False,
          manual: tuple = (), dtype: str = "float32", tolerance: float = 1e-5, **more):
    cfg, module, weights, x, dy, segments = cell(mixer, whole_queries)
    mesh, layout = laid_out(sizes, rule)
    order = attention.METHODS[method].order(T, sizes["context"]) if method else np.arange(T)
    attend = attention.RunAttention(lambda H, V, scores: blockwise.engine(5, scores), attention.METHODS.get(method))
    ex = layers.Execution(layout, jnp.dtype(dtype), attend, **more)

    def layer(weights, x, segments, positions):
        inputs = Inputs(segments, positions, jnp.arange(B), rope.of(cfg, positions), None)
        return module.bind(weights)(ex, x, inputs)

    def body(weights, x, dy, segments, positions):
        y, (dw, dx) = with_gradients(lambda w, x: layer(w, x, segments, positions), weights, x, dy)
        return y, dx, jax.tree.map(lambda d: jax.lax.psum(d, manual), dw) if manual else dw

    @jax.jit
    def run(weights, x, dy):
        rows = P(None, "context")
        specs = dict(in_specs=(P(), *[rows] * 4), out_specs=(rows, rows, P()))
        inside = jax.shard_map(body, axis_names=set(manual), check_vma=False, **specs) if manual else body
        sharded = jax.tree.map(lambda w, info: layout.constrain("params", w, info.axes), weights, infos)
        y, dx, dw = inside(sharded, *(a[:, order] for a in (x, dy, segments, np.tile(np.arange(T), (B, 1)))))
        return y[:, np.argsort(order)], (dw, dx[:, np.argsort(order)])

    infos = params.tree(params.infos(module), lambda info: info)
    with jax.set_mesh(mesh):
        got = run(weights, x.astype(dtype), dy.astype(dtype))
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected(mixer, whole_queries)),
                            strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        assert a.shape == b.shape and np.abs(b).max() > 1e-3, path
        # of the largest number of a leaf
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), (jax.tree_util.keystr(path), np.abs(a - b).max())


@pytest.mark.parametrize(("mixer", "whole_queries"), [("F", False), ("V", True)])
def test_latents_on_one_device_equal_expanded_heads(mixer, whole_queries):
    """F: with rope and queries that grow. V: a window, no rope, queries without a latent."""
    check({}, mixer=mixer, whole_queries=whole_queries)


@pytest.mark.parametrize(("sizes", "more"), [
    (dict(fsdp=2, tensor=2), {}), (dict(context=2), dict(method="ring")),
    (dict(context=2, tensor=2), dict(method="ulysses")),
    *(slow(*one) for one in (
        (dict(data=2, tensor=2), dict(rule="ddp", remat="full")), (dict(context=4), dict(method="gather")),
        (dict(context=4), dict(method="ulysses", mixer="W")), (dict(context=2, tensor=2), dict(method="ring", rule="tensor")),
        (dict(context=2, tensor=2), dict(method="ring", manual=("context",))),
        (dict(context=2, tensor=2), dict(method="ulysses", manual=("context",)))))])
def test_latents_over_devices_equal_expanded_heads(sizes, more):
    check(sizes, **more)


def test_in_bfloat16_weight_gradients_are_summed_in_float32():
    """1.5% of the largest number: 8 bits of every factor."""
    check(dict(context=2), "ring", dtype="bfloat16", tolerance=3e-2)
