"""Linear attention with sequences, heads and rows split over devices: the numbers of one device."""
import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain_recurrence as plain
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from test_context import laid_out
from test_recurrence import ENGINES

from meshtrain import config
from meshtrain.choices import recurrence
from meshtrain.choices.setting import Setting
from meshtrain.model.execution import LinearAttention
from meshtrain.parallel.context import attention
from meshtrain.parallel.context import recurrence as linear

DOCUMENTS = [1, 3, 20, 9, 1, 30, 17, 15]        # 96 tokens: runs of 12 end inside, at and beside documents' ends
MESHES = {"context 2": dict(context=2), "context 4, tensor 2": dict(context=4, tensor=2),
          "context 2, tensor 2, fsdp 2": dict(context=2, tensor=2, fsdp=2), "fsdp 2": dict(fsdp=2)}


def chosen(method: str, layout) -> LinearAttention:
    run = config.Run(model=dict(mixers="G"), context=dict(method=method))
    return recurrence.choose(Setting(layout, "cpu", run=run)).value


def drawn(kind: str, dtype=jnp.float32):
    """(q, k, v, g, beta), convolution weights, segments, do."""
    inputs, rng = plain.drawn(kind, sum(DOCUMENTS)), np.random.default_rng(5)
    inputs = tuple(None if x is None else jnp.asarray(x, dtype if i < 3 else jnp.float32)
                   for i, x in enumerate(inputs))
    ws = tuple(jnp.asarray(0.5 * rng.standard_normal((4, *x.shape[2:])), jnp.float32) for x in inputs[:3])
    return inputs, ws, jnp.asarray(plain.segments_of(DOCUMENTS)), jnp.asarray(rng.standard_normal(inputs[2].shape),
                                                                              dtype)


def both_ways(functions: LinearAttention, layout, inputs, ws, segments, do):
    """o of convolution and recurrence, gradients of all inputs and weights."""
    def layer(inputs, ws):
        q, k, v = functions.convolve(layout, inputs[:3], ws, segments)
        return functions.recur(layout, q, k, v, *inputs[3:], segments)
    o, back = jax.vjp(layer, inputs, ws)
    return o, *back(do)


@functools.cache
def on_one_device(kind: str):
    _, layout = laid_out({})
    return jax.jit(partial(both_ways, chosen("ring", layout), layout))(*drawn(kind))


# What the first and the last mesh split the others split together.
SPLIT = [pytest.param("chunks", kind, name, method, marks=sampling.GRID if name in ("context 2", "fsdp 2") else ())
         for method in attention.METHODS if method != "gather" for name in MESHES for kind in plain.KINDS]
SPLIT += [pytest.param("kernels", kind, "context 2, tensor 2", method,
                       marks=() if method == "ring" and kind != "sum" else sampling.GRID)
          for method, kind in (("ring", "delta"), ("ring", "channels"), ("ring", "sum"), ("ulysses", "delta"),
                               ("ulysses", "channels"))]


@pytest.mark.parametrize("engine, kind, mesh, method", SPLIT)
def test_split_sequences_match_one_device(engine, kind, mesh, method):
    mesh, layout = laid_out(MESHES.get(mesh, dict(context=2, tensor=2)), "ddp")
    inputs, ws, segments, do = drawn(kind)
    order = attention.METHODS[method].order(segments.shape[1], layout.sizes["context"])
    turned, functions = partial(jax.tree.map, lambda x: x[:, order]), chosen(method, layout)
    if engine == "kernels":
        of = linear.Recurrence(ENGINES[engine], linear.TokenRuns(1 if method == "ulysses" else 2))
        functions = functions._replace(recur=partial(linear.recur, of))
    with jax.set_mesh(mesh):
        o, dinputs, dws = jax.jit(partial(both_ways, functions, layout))(
            turned(inputs), ws, turned(segments), turned(do))
    back = partial(jax.tree.map, lambda x: x[:, np.argsort(order)])
    assert plain.error((back(o), back(dinputs), dws), on_one_device(kind)) < 5e-6      # float32 sums in another order


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_convolution_of_one_tap_scales_each_token(method):
    mesh, layout = laid_out(dict(context=2), "ddp")
    inputs, ws, segments, _ = drawn("delta")
    xs, ws = inputs[:3], tuple(w[:1] for w in ws)
    with jax.set_mesh(mesh):
        ys, back = jax.vjp(jax.jit(lambda xs, ws: chosen(method, layout).convolve(layout, xs, ws, segments)), xs, ws)
        dxs, dws = back(ys)
    scaled = tuple(w * x for x, w in zip(xs, ws, strict=True))
    expected = scaled, tuple(w * y for w, y in zip(ws, scaled)), tuple(
        (x * y).sum((0, 1))[None] for x, y in zip(xs, scaled))
    assert plain.error((ys, dxs, dws), expected) < 5e-6


def test_bfloat16_keeps_its_dtypes():
    mesh, layout = laid_out(dict(context=2), "ddp")
    args = drawn("delta", jnp.bfloat16)
    with jax.set_mesh(mesh):
        o, dinputs, dws = jax.jit(partial(both_ways, chosen("ulysses", layout), layout))(*args)
    assert [x.dtype for x in jax.tree.leaves((o, dinputs, dws))] == [jnp.bfloat16] * 4 + [jnp.float32] * 5
    assert plain.error((o, dinputs, dws), on_one_device("delta")) < 6e-2       # 2^-9 an operand, through two stages


def test_where_context_is_manual_weight_gradients_are_left_to_the_caller():
    """As inside a pipeline."""
    mesh, layout = laid_out(dict(context=2, tensor=2), "ddp")
    tokens, functions = P(None, "context"), chosen("ulysses", layout)

    def local(*args):
        o, dinputs, dws = both_ways(functions, layout, *args)
        return o, dinputs, jax.tree.map(lambda dw: jax.lax.psum(dw, "context"), dws)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(local, in_specs=(tokens, P(), tokens, tokens), out_specs=(tokens, tokens, P()),
                                      axis_names={"context"}, check_vma=False))(*drawn("delta"))
    assert plain.error(found, on_one_device("delta")) < 5e-6


def gathers(saved_names) -> int:
    """All-gathers of a recurrence and its gradients under remat that saves these names."""
    mesh, layout = laid_out(dict(context=2), "ddp")
    inputs, _, segments, do = drawn("delta")
    keep = jax.checkpoint_policies.save_only_these_names(*saved_names)
    recur = jax.checkpoint(lambda *inputs: chosen("ring", layout).recur(layout, *inputs, segments), policy=keep)
    with jax.set_mesh(mesh):
        text = jax.jit(lambda: plain.with_gradients(recur, inputs, do=do)).lower().compile().as_text()
    return len(re.findall(r" all-gather(?:-start)?\(", text))


def test_saved_states_spare_the_backward_a_repeat_of_the_forwards_gathers():
    assert gathers([]) == 3 * gathers(["linear_o", "linear_states"]) // 2 > 0


def test_what_cannot_be_split_is_said():
    run = config.Run(model=dict(mixers="G"), data=dict(seq_len=16))
    for sizes, said in ((dict(context=8), "use at least 48"), (dict(context=2), "")):
        faults = recurrence.problems(run, laid_out(sizes, "ddp")[1])
        assert [said in fault for fault in faults] == [True] * bool(said)
