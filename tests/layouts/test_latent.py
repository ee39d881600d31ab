"""Attention by latents against whole scores of plainly expanded heads: every gradient leaf, on one device and wherever
tokens, heads or the layer lie otherwise."""
import functools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import parity
import plain_attention
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from test_context import laid_out

from meshtrain import config
from meshtrain.choices import attention as choices
from meshtrain.cost.program import audit
from meshtrain.inference import cache, passes
from meshtrain.kernels import blockwise, pallas
from meshtrain.kernels.engine import CAUSAL, Scores
from meshtrain.kernels.tiles import Blocks, Tiles
from meshtrain.model import latent, params, rope, transformer
from meshtrain.model.execution import Engines, Execution, Numerics
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
def cell(mixer: str = "F", whole_queries: bool = False):
    """(section, module, parameters away from their initial values, x, dy, segments)."""
    keys = MODEL | dict(mixers=mixer, window=7 if mixer in "WV" else 0) | (WITHOUT if whole_queries else {})
    cfg = config.Model(**keys)
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


KERNELS = Tiles(*[Blocks(16, 16, 4, 2)] * 3)


def check(sizes: dict, method: str = "", rule: str = "zero3", mixer: str = "F", whole_queries: bool = False,
          manual: tuple = (), dtype: str = "float32", tolerance: float = 1e-5, kernels: bool = False, **more):
    cfg, module, weights, x, dy, segments = cell(mixer, whole_queries)
    mesh, layout = laid_out(sizes, rule)
    order = attention.METHODS[method].order(T, sizes["context"]) if method else np.arange(T)
    engine_of = lambda H, V, scores: pallas.engine(KERNELS, scores, interpret=True) if kernels else blockwise.engine(
        5, scores)
    attend = attention.RunAttention(engine_of, attention.METHODS.get(method))
    ex = Execution(layout, Numerics(jnp.dtype(dtype), **more), Engines(attend))

    def layer(weights, x, segments, positions):
        inputs = Inputs(segments, positions, jnp.arange(B), rope.of(cfg, positions), None)
        return module.bind(weights)(ex, x, inputs)[0]

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
        (dict(context=4), dict(method="ulysses", mixer="W")),
        (dict(context=2, tensor=2), dict(method="gather", kernels=True)), (dict(tensor=2), dict(kernels=True)),
        (dict(context=2, tensor=2), dict(method="ring", rule="tensor")),
        (dict(context=2, tensor=2), dict(method="ring", manual=("context",))),
        (dict(context=2, tensor=2), dict(method="ulysses", manual=("context",)))))])
def test_latents_over_devices_equal_expanded_heads(sizes, more):
    check(sizes, **more)


def test_in_bfloat16_latents_equal_expanded_heads_to_its_precision():
    """Up to 2% of a leaf's largest number: 8 bits of every factor."""
    check(dict(context=2), "ring", dtype="bfloat16", tolerance=3e-2)


# ---- whole steps and generation --------------------------------------------------------------------------------------

WHOLE = dict(vocab_size=259, embed_dim=32, num_layers=4, num_heads=4, head_dim=10, mlp_dim=48, compute_dtype="float32",
             latent=dict(kv_dim=12, query_dim=16, rope_dim=4, value_dim=6))
SINKS = dict(vocab_size=259, embed_dim=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48,
             compute_dtype="float32", attention_sinks=True, mixers="WF", window=5,
             rope_scaling=dict(partial_rotary_factor=0.5, llama_4_scaling_beta=0.3,
                               original_max_position_embeddings=3))
STAGED = dict(pipeline=dict(schedule="1f1b"))


@pytest.mark.parametrize(("model", "rule", "mesh", "more"), [
    (WHOLE, "zero3", dict(context=2, tensor=2), {}), (SINKS, "zero1", dict(stage=2, context=2), STAGED),
    *(slow(*one) for one in (
        (WHOLE, "zero3", dict(fsdp=2, tensor=2), dict(lora=dict(rank=2, alpha=3.0))),
        (WHOLE, "zero1", dict(stage=2, tensor=2), STAGED),
        (WHOLE, "zero3", dict(stage=2, context=2, tensor=2), dict(pipeline=dict(schedule="zero_bubble"))),
        (WHOLE, "hsdp", dict(context=2, fsdp=2), dict(context=dict(method="ulysses"))),
        (WHOLE | dict(param_dtype="bfloat16", compute_dtype="bfloat16"), "zero3", dict(fsdp=2, tensor=2), {}),
        (SINKS, "zero3", dict(fsdp=2, tensor=2), {}), (SINKS, "zero3", dict(context=2, tensor=2), {})))])
def test_steps_with_latents_or_sinks_equal_one_device(model, rule, mesh, more):
    run = config.Run(mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rule}.toml")), model=model,
                     training=dict(steps=9, microbatches=2, loss_chunk=24), data=dict(seq_len=16, global_batch=16),
                     optimizer=dict(learning_rate=1e-3, schedule="constant"), **more)
    exact = model["compute_dtype"] == "float32"
    parity.check(run, tolerance=parity.FLOAT32 if exact else parity.BFLOAT16)


@pytest.mark.parametrize("in_weights", ["data", ["tensor", "data"]])
def test_heads_that_activations_alone_split_are_computed_once(in_weights, tmp_path):
    """The weights that expand latents are cut to the heads of a device's queries, however [params] splits them."""
    (tmp_path / "rules.toml").write_text(f'''
[params]
heads = {json.dumps(in_weights)}
kv_heads = "data"
[activations]
batch = "fsdp"
heads = ["tensor", "data"]
kv_heads = ["tensor", "data"]
mlp = ["tensor", "data"]
''')
    run = config.Run(mesh=dict(tensor=2, fsdp=2), sharding=dict(rules=str(tmp_path / "rules.toml")), model=WHOLE | dict(num_layers=1),
                     training=dict(steps=9, loss_chunk=24), data=dict(seq_len=16, global_batch=16),
                     optimizer=dict(learning_rate=1e-3, schedule="constant"))
    parity.check(run)


@pytest.mark.parametrize("keys", [WHOLE, SINKS])
def test_tokens_from_a_cache_are_those_without(keys):
    """Prompts of four and of seven tokens in slots 2 and 0 of three; the last layer's output at every further token."""
    model = transformer.build(config.Model(**keys))
    draw = np.random.default_rng(0).standard_normal
    p = jax.tree.map(lambda w: w + 0.2 * draw(w.shape).astype(w.dtype), model.init(jax.random.key(0)))
    ex = Execution(laid_out({})[1], Numerics(jnp.dtype("float32")), Engines(
        attention.RunAttention(lambda H, V, scores: blockwise.engine(5, scores))))
    known_B, length, room = np.asarray([4, 7]), 12, cache.round_room(12)
    tokens_BT = np.random.default_rng(1).integers(0, 259, (2, length))
    at = np.tile(np.arange(length), (2, 1))

    def batch_of(tokens, positions, segments):
        return dict(tokens=tokens, positions=positions, segments=segments, index=np.zeros_like(tokens),
                    sequence=np.zeros(len(tokens), int))

    @jax.jit
    def by_cache(p):
        prompts = np.stack([np.pad(tokens[:known], (7 - known, 0)) for tokens, known in zip(tokens_BT, known_B)])
        place = at[:, :7] - (7 - known_B)[:, None]
        read = passes.read(model, ex, p, batch_of(prompts, np.maximum(place, 0), (place >= 0).astype(int)))
        caches = jax.tree.map(lambda x: jnp.full(x.shape, 7.0, x.dtype), passes.empty(model, ex, p, 3, room))
        slots = np.asarray([1, 0, 0])
        caches = cache.lay(ex.layout, caches, read, jnp.asarray([1, -1, 0]), jnp.asarray(known_B[slots]))
        outputs = []
        for i in range(5):
            at_S = known_B[slots] + i
            batch = batch_of(tokens_BT[slots, at_S][:, None], at_S[:, None], np.asarray([[1], [0], [1]]))
            x, caches = passes.extend(model, ex, p, batch, caches)
            outputs.append(x)
        return jnp.concatenate(outputs, 1), caches

    whole = jax.jit(lambda p: model.through_layers(ex, p, batch_of(tokens_BT, at, np.ones_like(at))))(p)
    got, caches = by_cache(p)
    for slot, row in ((0, 1), (2, 0)):
        # float32: latents are multiplied in another order
        np.testing.assert_allclose(got[slot], whole[row, known_B[row]:known_B[row] + 5], rtol=1e-4, atol=1e-4)
    if "latent" in keys:
        assert [x.shape for layer in caches[0] for x in layer] == [(4, 3, room, 12), (4, 3, room, 4)]


def test_devices_send_latents_and_no_heads():
    """Per token forward C + R numbers and a segment; N·(H + V) would be 108."""
    cfg, module, weights, x, _, segments = cell("F")
    mesh, layout = laid_out(dict(context=4), "ddp")
    ex = Execution(layout, Numerics(jnp.dtype("float32")), Engines(attention.RunAttention(
        lambda H, V, scores: blockwise.engine(5, scores), attention.METHODS["ring"])))
    positions = np.tile(np.arange(T), (B, 1))

    def layer(weights, x):
        return module.bind(weights)(ex, x, Inputs(segments, positions, jnp.arange(B), rope.of(cfg, positions), None))
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, jax.NamedSharding(mesh, P(None, "context")))
        program = audit.read(jax.jit(layer).lower(weights, rows).compile().as_text(), mesh)
    sent = {(one.kind, one.dtype): 0 for one in program.collectives}
    for one in program.collectives:
        sent[one.kind, one.dtype] += one.bytes
    assert set(sent) <= {("all-gather", "f32"), ("all-gather", "s32")}
    assert sent["all-gather", "f32"] == B * T * 4 * (12 + 6) * 3 // 4, sent


def test_a_window_over_split_latents_is_refused_where_it_is_not_computed():
    model = WHOLE | dict(mixers="W", window=5)
    fault = lambda method, window: choices.problems(
        config.Run(mesh=dict(context=2), model=model | dict(window=window), data=dict(seq_len=16),
                   context=dict(method=method)), laid_out(dict(context=2))[1])
    (said,) = fault("ring", 5)
    assert said == ('model.window=5 cannot be combined with model.latent and context.method="ring"; '
                    'use "ulysses", or mesh.context=1')
    assert fault("ulysses", 5) == fault("ring", 16) == []
