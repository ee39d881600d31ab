"""Attention is plain attention: every engine by itself and every method over devices, with all gradients.

One table of rows and one comparison, with whole scores in float64. Kernels for GPUs run step by step on the CPU.
"""
import functools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention as plain
import pytest
import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P
from test_context import laid_out

from meshtrain.kernels import blockwise, mosaic, mosaic_forward, pallas, tiles
from meshtrain.kernels.engine import CAUSAL, MASKED, WHOLE, Engine, Mask, Scores
from meshtrain.kernels.tiles import Blocks, Tiles
from meshtrain.parallel.context import attention

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax does not interpret GPU kernels with transposed operands")
SQUARE, FLAT, TALL = (Tiles(*[Blocks(rows, columns, 4, 2)] * 3) for rows, columns in ((16, 16), (16, 32), (32, 16)))
CAPPED, OUTSIDE = Scores(softcap=0.7), 10**6


class Row(NamedTuple):
    """heads: of queries and of keys. width: of keys and values, or of each. blocks: the engine's tiles, or tokens of
    its blocks. S: keys before the queries; 0: queries attend to themselves. full: programs that fill the GPU; 1: the
    heads of a group are summed inside dkv. method: "" where devices have whole sequences. manual: axes that a pipeline
    has made manual already. kinds: of segments."""
    engine: str
    T: int
    heads: tuple[int, int]
    width: int | tuple[int, int] = 8
    blocks: Tiles | int = 4
    mask: Mask = CAUSAL
    scores: Scores = Scores()
    S: int = 0
    full: int = 1
    method: str = ""
    mesh: dict = {}
    manual: tuple = ()
    sinks: bool = False
    dtype: str = "float32"
    kinds: tuple = plain.KINDS

    @property
    def widths(self) -> tuple[int, int]:
        return self.width if isinstance(self.width, tuple) else (self.width, self.width)

    @property
    def differentiated(self) -> bool:
        """By jax, as a layer is; else the backward is given o and lse as if the queries saw other keys as well."""
        return self.sinks or bool(self.manual)

    def __str__(self) -> str:
        mask = self.mask.label.strip("_") or "whole"
        return " ".join(filter(None, [
            self.engine, self.method, *(f"{axis}{count}" for axis, count in self.mesh.items()), mask,
            "in one document" * (not self.mask.documents), "scaled" * bool(self.scores.scale),
            "softcap" * bool(self.scores.softcap), "sinks" * self.sinks, "manual" * bool(self.manual),
            "outside" * (self.full > 1), f"{self.T}x{self.S or self.T}",
            "{} of {}".format(*self.heads), "x".join(map(str, dict.fromkeys(self.widths))),
            self.dtype * (self.dtype == "bfloat16")]))


def near(window: int, ahead: int | None = None) -> Mask:
    """A window of a causal mask, or of an earlier chunk's."""
    return CAUSAL._replace(window=window) if ahead is None else Mask(False, window, ahead)


# ---- the table -------------------------------------------------------------------------------------------------------

BLOCKS, KERNEL, HOPPER = partial(Row, "blockwise"), partial(Row, "pallas"), partial(Row, "mosaic", dtype="bfloat16")
SINKS = dict(heads=(8, 4), width=(24, 12), scores=Scores(0.21, 3.0), sinks=True)
TENSOR, EVERY = dict(context=2, tensor=2), dict(data=2, tensor=2, context=2)
RING4 = dict(method="ring", mesh=dict(context=4))
kinds = lambda *names: dict(kinds=names)

CORE = [
    BLOCKS(150, (4, 2), 16, 64), BLOCKS(40, (4, 2), 8, 512, near(12), Scores(0.6, 0.7)),
    *(BLOCKS(48, (4, 2), method=method, mesh=dict(context=4)) for method in attention.METHODS),
    BLOCKS(48, (4, 2), mask=near(9), **RING4),
    BLOCKS(24, (4, 2), mask=near(9)._replace(documents=False), method="ring", mesh=dict(context=2)),
    BLOCKS(48, blocks=8, method="ring", mesh=TENSOR, manual=("context",), **SINKS),
    KERNEL(70, (2, 1), 16, TALL, near(21), CAPPED),
    HOPPER(200, (2, 1), 64, **kinds("short documents")),
]
# Values narrower than keys and wider; a group whose heads are summed inside dkv and outside.
OF_PALLAS = [
    KERNEL(70, (4, 2), 16, TALL), KERNEL(40, (2, 1), 24, FLAT, WHOLE, S=72, full=OUTSIDE),
    KERNEL(50, (4, 2), (40, 20), TALL), KERNEL(40, (2, 1), (16, 40), FLAT, WHOLE, S=72, full=OUTSIDE)]
FULL = [
    *OF_PALLAS, BLOCKS(1, (2, 2), 16, 64), BLOCKS(65, (2, 1), 16, 64),
    *(BLOCKS(T, (4, 2), 8, 16, near(window)) for T, window in (
        (40, 12), (64, 16), (64, 17), (64, 1), (50, 33), (64, 63))),
    BLOCKS(24, (4, 2), mask=near(23), method="ring", mesh=dict(context=2)),
    BLOCKS(48, (4, 2), mask=near(22), method="gather", mesh=dict(context=4)),
    BLOCKS(24, (4, 2), mask=near(12), method="ulysses", mesh=dict(context=2)),
    BLOCKS(24, (4, 2), mask=near(19), method="ring", mesh=dict(context=2), manual=("context",)),
    *(BLOCKS(24, (8, 4), method=method, mesh=EVERY, manual=("data", "context")) for method in attention.METHODS),
    KERNEL(48, blocks=SQUARE, **SINKS),
    *(BLOCKS(48, blocks=8, mask=mask, method=method, mesh=mesh, **SINKS) for method, mesh, mask in (
        ("", {}, CAUSAL), ("", dict(data=2, tensor=2), near(13)), ("ring", dict(context=4), CAUSAL),
        ("gather", TENSOR, CAUSAL), ("ulysses", dict(context=2), CAUSAL), ("ring", dict(context=2), near(17)))),
    KERNEL(48, (8, 4), 8, SQUARE, mesh=dict(data=2, tensor=2)), KERNEL(48, (8, 4), 8, SQUARE, **RING4),
    HOPPER(130, (2, 1), (48, 24), 4, near(200, 100), Scores(softcap=5.0), S=256, **kinds("rows that see nothing")),
]
# A window of one token, within a chunk of six tokens, of a chunk and one more, and nearly the whole sequence.
WINDOWS = [(method, cp, window) for method in ("ring", "gather") for cp in (2, 4)
           for window in (1, 2, 5, 6, 7, 12, 13, 25, 37, 12 * cp - 1) if window < 12 * cp]
CELLS = [
    *(BLOCKS(T, heads, 16, 64) for T, heads in ((37, (4, 2)), (64, (2, 1)), (300, (2, 2)))),
    BLOCKS(96, (4, 2), method="ring", mesh=dict(context=8)),
    *(BLOCKS(12 * cp, (4, 2), mask=near(window), method=method, mesh=dict(context=cp)) for method, cp, window in WINDOWS
      if (method, cp, window) not in (("ring", 2, 23), ("gather", 4, 22))),
    BLOCKS(24, (4, 2), mask=near(19), method="gather", mesh=dict(context=2), manual=("context",)),
    *(KERNEL(48, blocks=SQUARE, mask=mask, method=method, mesh=mesh, **SINKS) for method, mesh, mask in (
        ("", dict(tensor=2), near(13)), ("ring", TENSOR, CAUSAL), ("ulysses", dict(context=4), CAUSAL))),
    *(BLOCKS(48, blocks=8, mask=near(17), method=method, mesh=mesh, **SINKS) for method, mesh in (
        ("gather", dict(context=4)), ("ulysses", TENSOR))),
    *(KERNEL(48, (8, 4), 8, SQUARE, method=method, mesh=mesh, manual=manual) for method, mesh, manual in (
        ("", dict(data=2, tensor=2), ("data",)), ("ring", EVERY, ("data", "context")), ("gather", dict(context=4), ()),
        ("ulysses", TENSOR, ()), ("ulysses", TENSOR, ("context",)), ("gather", TENSOR, ("context",)))),
    *(row._replace(dtype="bfloat16") for row in (KERNEL(70, (2, 1), 16, TALL, near(21), CAPPED), *OF_PALLAS)),
    KERNEL(90, (2, 2), 16, TALL, WHOLE, S=33), KERNEL(64, (6, 2), 16, SQUARE, full=OUTSIDE),
    KERNEL(50, (2, 1), 80, FLAT), KERNEL(48, (8, 1), 32, TALL),
    *(KERNEL(256, (2, 1), 128, tiles.of(128, "h100"), dtype=dtype) for dtype in ("float32", "bfloat16")),
    KERNEL(256, (2, 1), 128, tiles.of(128, "h100"), near(100), Scores(softcap=30.0)),
    KERNEL(96, (2, 2), 256, tiles.of(256, "b200"), WHOLE, S=128),
    KERNEL(96, (2, 2), (192, 128), tiles.of(192, "h100", value_dim=128), WHOLE, S=128),
    KERNEL(50, (2, 1), 16, FLAT, near(1)), KERNEL(64, (4, 2), 16, SQUARE, near(16), full=OUTSIDE),
    KERNEL(48, (2, 1), 16, SQUARE, near(70, 48), CAPPED, S=48), KERNEL(33, (2, 1), 16, TALL, near(20, 80), S=48),
    HOPPER(256, (2, 1), 128, **kinds("documents of half a row")), HOPPER(128, (8, 1), 64, **kinds("padding")),
    HOPPER(300, (2, 2), 64, mask=near(70), **kinds("documents of half a row")),
    HOPPER(140, (4, 2), (80, 128), mask=WHOLE, S=260, **kinds("documents of half a row")),
    HOPPER(128, (2, 1), 64, mask=WHOLE, S=140, **kinds("nothing in common")),
    HOPPER(200, (2, 1), (192, 128), **kinds("documents of half a row")),
    HOPPER(130, (2, 2), (160, 72), mask=near(200, 100), scores=Scores(softcap=5.0), S=256,
           **kinds("rows that see nothing")),
    HOPPER(256, (1, 1), 128, scores=Scores(softcap=30.0), **kinds("one document")),
]


# ---- the comparison --------------------------------------------------------------------------------------------------

# Of the largest number of a result. float32: sums of up to 300 products of 256 in another order. bfloat16: o, p and ds
# are rounded to 8 bits before they are summed; lse is not.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}
MERGED = ("o", "lse", "dq", "dk", "dv")


class Inputs(NamedTuple):
    """o, lse: what the backward is given. sinks: one a head."""
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_segments: np.ndarray
    k_segments: np.ndarray
    o: np.ndarray
    lse: np.ndarray
    do: np.ndarray
    sinks: np.ndarray


@functools.lru_cache(maxsize=64)
def prepared(B, T, S, heads, widths, mask, scores, dtype, differentiated, sinks, kind, seed):
    """(Inputs that the dtype has exactly, plain results by name in float64); rows of one shape share them."""
    (N, K), (H, V), rng = heads, widths, np.random.default_rng(seed)
    exact = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)
    q, k, v, do, elsewhere = (exact(rng.standard_normal((B, length, count, width))) for length, count, width in (
        (T, N, H), (S, K, H), (S, K, V), (T, N, V), (T, N, V)))
    segments = plain.drawn_segments(kind, rng, B, T, S, mask)
    seen, sinks_N = plain.seen_pairs(*segments, mask), np.asarray(rng.standard_normal(N), np.float32)
    o, lse = plain.forward(q, k, v, seen, scores)
    others = sinks_N if sinks else np.full(1, -np.inf) if differentiated else rng.standard_normal(lse.shape)
    together = np.logaddexp(lse, others)
    whole = o * np.exp(lse - together)[..., None]
    whole = whole if differentiated else exact(whole + elsewhere * np.exp(others - together)[..., None])
    expected = dict(zip(MERGED, (whole if differentiated else o, lse, *plain.backward(
        q, k, v, seen, whole, together, do, scores))))
    if sinks:
        expected["dsinks"] = -(np.exp(sinks_N - together) * (do * whole).sum(-1)).sum((0, 1))
    return Inputs(q, k, v, *segments, whole, together, do, sinks_N), expected


def blind(engine: Engine) -> Engine:
    """An engine in which segment -1 sees nothing, not even itself, where queries and keys are the same tokens."""
    hide = lambda segments: jnp.where(segments == -1, -2, segments)
    return engine._replace(forward=lambda q, k, v, s, z, mask: engine.forward(q, k, v, s, hide(z), mask),
                           backward=lambda q, k, v, s, z, *rest: engine.backward(q, k, v, s, hide(z), *rest))


def engine_of(row: Row) -> Engine:
    if row.engine == "pallas":
        return pallas.engine(row.blocks, row.scores, row.full, interpret=True)
    if row.engine == "mosaic":
        return mosaic.engine(row.scores, interpret=plgpu.InterpretGPUParams(detect_races=True))
    return blockwise.engine(row.blocks, row.scores)


def by_itself(row: Row, backward: bool = True):
    """Inputs -> results by name; of kernels for Hopper not jitted."""
    engine = engine_of(row)

    def run(x: Inputs):
        found = engine.forward(*x[:5], row.mask)
        return dict(zip(MERGED, (*found, *engine.backward(*x[:8], row.mask)) if backward else found))
    return run if row.engine == "mosaic" else jax.jit(run)


def over_devices(row: Row):
    """Inputs -> results by name, both with tokens in their natural order; jitted."""
    mesh, layout = laid_out(row.mesh)
    method, engine = attention.METHODS.get(row.method), blind(engine_of(row))
    order = method.order(row.T, row.mesh["context"]) if method else np.arange(row.T)
    split = attention.PlainMethod(engine, method)

    def body(q, k, v, segments, o, lse, do, sinks):
        pin = lambda x, axis: layout.act(x, "batch", "seq", axis, "head_dim")
        q, k, v, do = pin(q, "heads"), pin(k, "kv_heads"), pin(v, "kv_heads"), pin(do, "heads")
        if not row.differentiated:
            return [*split.forward(layout, row.mask, q, k, v, segments),
                    *split.backward(layout, row.mask, q, k, v, segments, o, lse, do)], None
        attend = partial(plain.by_engine, engine, method, layout, mask=row.mask)
        if not row.sinks:
            o, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
            return [o, *back(do)], None
        o, back = jax.vjp(lambda q, k, v, sinks: attend(q, k, v, segments, sinks_N=sinks), q, k, v, sinks)
        *grads, dsinks = back(do)
        return [o, *grads], jax.lax.psum(dsinks, row.manual) if row.manual else dsinks

    rows = P(*(axis if axis in row.manual else None for axis in ("data", "context")))
    # Varying axes are checked as in a pipeline; not of kernels, nor where the sum over sinks is written out.
    inside = jax.shard_map(body, axis_names=set(row.manual), in_specs=(rows,) * 7 + (P(),), out_specs=(rows, P()),
                           check_vma=row.engine == "blockwise" and not row.sinks) if row.manual else body

    @jax.jit
    def run(x: Inputs):
        *tokens, sinks = x._replace(k_segments=None)
        found, dsinks = inside(*(a[:, order] for a in tokens if a is not None), sinks)
        names = [name for name in MERGED if name != "lse" or not row.differentiated]
        found = dict(zip(names, (a[:, np.argsort(order)] for a in found)))
        return found | ({} if dsinks is None else {"dsinks": dsinks})

    def call(x: Inputs):
        with jax.set_mesh(mesh):
            return run(x)
    return call


def errors(row: Row, run, kind: str, seed: int) -> dict[str, float]:
    """{result: its largest difference, of its largest number, which counts as 1 if it is less}."""
    given, expected = prepared(1 if row.engine == "mosaic" else 2, row.T, row.S or row.T, row.heads, row.widths,
                               row.mask, row.scores, row.dtype, row.differentiated, row.sinks, kind, seed)
    dtypes = dict.fromkeys(Inputs._fields, row.dtype) | dict.fromkeys(("q_segments", "k_segments"), "int32") | dict(
        lse="float32", sinks="float32")
    results = jax.device_get(run(Inputs(*(jnp.asarray(x, dtypes[name]) for name, x in given._asdict().items()))))
    nothing, found = expected["lse"] == MASKED, {}
    assert not results["o"][nothing].any()
    for name, got in results.items():
        assert got.dtype == np.float32
        want = expected[name]
        if name == "lse":
            assert (got[nothing] == np.float32(MASKED)).all()
            got, want = (np.where(nothing, 0, x) for x in (got, want))
        found[name] = float(np.abs(np.float64(got) - want).max() / max(1.0, np.abs(want).max()))
    return found


def check(row: Row):
    run = over_devices(row) if row.mesh or row.differentiated else by_itself(row)
    for seed, kind in enumerate(row.kinds):
        found = errors(row, run, kind, seed)
        assert max(found.values()) <= TOLERANCE[row.dtype] and found.get("lse", 0) <= 1e-5, (kind, found)


@pytest.mark.parametrize("row", [
    pytest.param(row, id=str(row), marks=[*marks, *[needs_interpreter] * (row.engine == "mosaic")])
    for rows, marks in ((CORE, ()), (FULL, [pytest.mark.full]), (CELLS, sampling.GRID)) for row in rows])
def test_values_and_gradients(row):
    check(row)


def test_plain_gradients_are_those_that_jax_finds():
    """With sinks, a window, a softcap and values narrower than keys."""
    mask, scores = near(7), SINKS["scores"]
    x, expected = prepared(2, 16, 16, (4, 2), (6, 5), mask, scores, "float32", True, True, "short documents", 0)

    @jax.jit
    def found(q, k, v, sinks, do):
        attend = lambda q, k, v, sinks: plain.attend(q, k, v, x.q_segments, mask, scores, sinks)
        o, back = jax.vjp(attend, q, k, v, sinks)
        return o, *back(do)
    for name, got in zip(("o", "dq", "dk", "dv", "dsinks"), found(*(jnp.float32(a) for a in (*x[:3], x.sinks, x.do)))):
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-5, err_msg=name)       # float32


@st.composite
def rows(draw):
    method, cp = draw(st.sampled_from(sorted(attention.METHODS))), draw(st.sampled_from([2, 3, 4, 8]))
    chunk, K, G = draw(st.integers(1, 13)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if method == "ulysses":                     # its heads must divide
        G *= cp // math.gcd(K * G, cp)
    T = 2 * cp * chunk
    return BLOCKS(T, (K * G, K), 8, draw(st.sampled_from([3, 8, 512])), near(draw(st.just(0) | st.integers(1, T + 2))),
                  method=method, mesh=dict(context=cp))


test_rows_of_any_shape = pytest.mark.full(settings(max_examples=5, derandomize=True)(given(rows())(check)))
test_many_more_rows_of_any_shape = pytest.mark.long(settings(max_examples=120)(given(rows())(check)))


# ---- planted faults --------------------------------------------------------------------------------------------------


class Without:
    """jax's module without one of its functions."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name):
        return (lambda *_, **__: None) if name == self._name else getattr(plgpu, name)


def off_by_one(bounds):
    def wrong(*args):
        found = bounds(*args)
        return jnp.minimum(found, jnp.maximum(found[..., 3:] - 1, found[..., :1]))      # the last step is left out
    return wrong


FAULTS = {
    "no barrier is waited for": lambda patch: patch.setattr(mosaic_forward, "plgpu", Without("barrier_wait")),
    "a bound is off by one": lambda patch: patch.setattr(mosaic, "bounds", off_by_one(mosaic.bounds)),
    "no row counts as one that has seen nothing": lambda patch: patch.setattr(mosaic_forward, "SOME", -jnp.inf),
    "memory is not committed before it is stored": lambda patch: patch.setattr(
        mosaic_forward, "plgpu", Without("commit_smem")),
}


@needs_interpreter
@pytest.mark.parametrize("fault", [pytest.param(fault, marks=[] if "barrier" in fault else sampling.GRID)
                                   for fault in FAULTS])
def test_a_fault_planted_in_kernels_for_hopper_is_found(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    row = HOPPER(128, (1, 1), 64, mask=WHOLE, S=256)
    try:
        found = errors(row, by_itself(row, backward=False), "rows that see nothing" if "row" in fault else "padding", 0)
    except jax.errors.JaxRuntimeError as error:
        assert "race detected" in str(error).lower(), error
        return
    except AssertionError:          # rows that see nothing are no zeros
        return
    assert not max(found.values()) <= TOLERANCE["bfloat16"], found
