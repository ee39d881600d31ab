"""`ring_attention` against plain attention: values, gradients, what is sent, what is refused."""
import functools
from functools import partial

import jax
import numpy as np
import plain_attention
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import hardware
from meshtrain.choices import attention as choices
from meshtrain.config import ConfigError
from meshtrain.cost.program import audit
from meshtrain.kernels.engine import Mask
from meshtrain.library import ring
from meshtrain.library.layouts import Layout
from meshtrain.library.ring import ring_attention, token_order

B, T, N, K, H, V = 4, 16, 4, 4, 8, 8
# Sums over keys are in another order: 16 summands of float32.
CLOSE = 2e-6
MESHES = {"one device": {}, "context 4": dict(context=4), "context 4, data 2": dict(context=4, data=2),
          "context 2, tensor 2, data 2": dict(context=2, tensor=2, data=2)}


def layout_on(sizes: dict) -> Layout:
    return Layout("ddp", sizes)


@functools.cache
def arrays(num_heads: int = N, num_kv_heads: int = K):
    """(q, k, v, segments of two documents, the output's cotangent)."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((B, T, n, width)).astype(np.float32) for n, width in (
        (num_heads, H), (num_kv_heads, H), (num_kv_heads, V), (num_heads, V)))
    return q, k, v, np.where(np.arange(T) < 10, 1, 2)[None].repeat(B, 0).astype(np.int32), do


def compute(attend, q, k, v, segments, do):
    """[o, dq, dk, dv] of a compiled program."""
    def program(q, k, v, segments, do):
        o, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
        return o, *back(do)
    return list(map(np.asarray, jax.jit(program)(q, k, v, segments, do)))


@functools.cache
def expected(mask: Mask = Mask(), documents: bool = True, num_kv_heads: int = K):
    q, k, v, segments, do = arrays(num_kv_heads=num_kv_heads)
    segments = segments if documents else np.ones_like(segments)
    if mask.causal:
        return compute(partial(plain_attention.attend, mask=mask), q, k, v, segments, do)
    seen = plain_attention.seen_pairs(segments, segments, mask)
    o, lse = plain_attention.forward(q, k, v, seen)
    return [o, *plain_attention.backward(q, k, v, seen, o, lse, do)]


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(a - b).max() <= CLOSE * np.abs(b).max()


def compare(sizes: dict, wanted, num_kv_heads: int = K, documents: bool = True, **options):
    layout = layout_on(sizes)
    q, k, v, segments, do = arrays(num_kv_heads=num_kv_heads)
    def attend(q, k, v, segments):
        return ring_attention(q, k, v, segments if documents else None, layout=layout, **options)
    with jax.set_mesh(layout.mesh):
        assert_close(compute(attend, q, k, v, segments, do), wanted)


@pytest.mark.parametrize("method", ["ring", pytest.param("gather", marks=pytest.mark.full),
                                    pytest.param("ulysses", marks=pytest.mark.full)])
@pytest.mark.parametrize("sizes", [pytest.param(sizes, id=name, marks=[] if name.endswith("tensor 2, data 2") else
                                                pytest.mark.full) for name, sizes in MESHES.items()])
def test_values_and_gradients_are_those_of_plain_attention(sizes, method):
    compare(sizes, expected(), method=method)


@pytest.mark.full
@pytest.mark.parametrize("options, wanted", [
    (dict(method="ring", window=5), dict(mask=Mask(window=5))), (dict(method="gather", window=5), dict(mask=Mask(window=5))),
    (dict(method="ring", window=T), {}), (dict(method="ulysses", causal=False), dict(mask=Mask(causal=False))),
    (dict(method="ring", documents=False), dict(documents=False)), (dict(num_kv_heads=2), dict(num_kv_heads=2))])
def test_masks_and_groups_of_heads_are_those_of_plain_attention(options, wanted):
    compare(dict(context=2, data=2), expected(**wanted), **options)


@pytest.mark.full
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_arrays_in_token_order_give_the_same_in_that_order(method):
    layout = layout_on(dict(context=4))
    order = token_order(T, layout, method)
    assert (order == np.arange(T)).all() == (method == "ulysses")
    with jax.set_mesh(layout.mesh):
        found = compute(partial(ring_attention, layout=layout, method=method, in_order=True), *(
            x[:, order] for x in arrays()))
    assert_close(found, [x[:, order] for x in expected()])


def sent(layout: Layout, method: str, in_order: bool) -> dict[str, int]:
    """Kind of collective -> how often the forward and the backward of a compiled program have it."""
    with jax.set_mesh(layout.mesh):
        rows, heads = (NamedSharding(layout.mesh, P(None, "context", *more)) for more in ((), (None, None)))
        placed = [jax.device_put(x, rows if x.ndim == 2 else heads) for x in arrays()]
        def program(q, k, v, segments, do):
            o, back = jax.vjp(lambda q, k, v: ring_attention(
                q, k, v, segments, layout=layout, method=method, in_order=in_order), q, k, v)
            return o, *back(do)
        text = jax.jit(program, out_shardings=heads).lower(*placed).compile().as_text()
    count: dict[str, int] = {}
    for one in audit.read(text, layout.mesh).collectives:
        count[one.kind] = count.get(one.kind, 0) + one.trips
    return count


def test_arrays_in_token_order_are_sent_by_the_ring_alone():
    """Three hops of k, v and segments forward; three of k and v and four of dk and dv backward, which shares the segments.
    In natural order q, k, v, the segments, the output and the four gradients cross context besides, in two halves."""
    layout = layout_on(dict(context=4))
    assert sent(layout, "ring", True) == {"collective-permute": 3 * 3 + 3 * 2 + 4 * 2}
    assert sent(layout, "ring", False) == {"collective-permute": 3 * 3 + 3 * 2 + 4 * 2 + 2 * 9}


def test_faults_are_told_together_with_value_rule_and_remedy():
    q, k, v, segments, _ = arrays()
    layout = layout_on(dict(context=4))
    def refuse(*operands, layout=layout, mesh=None, **options):
        with jax.set_mesh(mesh or layout.mesh), pytest.raises(ConfigError) as raised:
            ring_attention(*operands, layout=layout, **options)
        return str(raised.value)
    short = [x[:, :12] for x in (q, k, v, segments)]
    assert refuse(*short) == "T=12 cannot be split into 2 × mesh.context = 8 chunks of equal length; use 8 or 16"
    assert refuse(q, k, v, method="rnig").startswith("method='rnig' is not a method (did you mean 'ring'?); use 'ring' or")
    with pytest.raises(ConfigError, match="did you mean 'gather'"):
        token_order(T, layout, "gathre")
    with pytest.raises(ConfigError, match="T=20 cannot be split .* e.g. 24"):
        token_order(20, layout)
    with pytest.raises(ConfigError, match="no mesh is in context, .* within `with jax.set_mesh"):
        ring_attention(q, k, v, segments, layout=layout)
    assert "'context': 2" in refuse(q, k, v, mesh=layout_on(dict(context=2)).mesh)
    three = [x[:, :, :3] for x in (q, k, v)]
    assert "splits 3 heads (N=3 over tensor 1) over mesh.context=4" in refuse(*three, method="ulysses")
    assert "method='ring' computes causal attention only; use method=\"ulysses\"" in refuse(q, k, v, causal=False)
    assert "window=3 with causal=False" in refuse(q, k, v, causal=False, window=3, method="ulysses")
    odd = layout_on(dict(context=2, data=2, tensor=2))
    told = refuse(q[:3], k[:3, :, :3], v[:3], segments[:, :8], layout=odd)
    assert all(word in told for word in ("N is a multiple of K", "segments int32[4, 8] must be integers [3, 16]",
                                         "batch=3 does not divide over data 2", "kv_heads=3 does not divide over tensor 2"))
    assert "q float32[4, 16, 4, 8]" not in refuse(q, k.astype(np.float16), v) and "k float16" in refuse(
        q, k.astype(np.float16), v)


def test_a_slower_engine_on_a_gpu_is_told_once_in_words_of_the_call(monkeypatch):
    said = []
    monkeypatch.setattr(ring.warnings, "warn", lambda message, stacklevel: said.append(message))
    monkeypatch.setattr(choices, "_has_cudnn", lambda: False)
    monkeypatch.setattr(hardware, "from_device_kind", lambda kind: hardware.GPUS["h100"])
    monkeypatch.setattr(ring, "Place", lambda layout, platform, gpu: choices.Place(layout, "gpu", gpu))
    layout = layout_on({})
    for _ in range(2):
        ring_attention(*arrays()[:4], layout=layout)
    assert said == ["ring_attention: blockwise XLA engine, because kernels take bfloat16, not float32; cuDNN's kernel has "
                    "no document mask (segments are given); the cuDNN library is not installed (extra 'gpu')"]
