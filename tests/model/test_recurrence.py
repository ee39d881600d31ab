"""Linear attention's recurrence, in chunks and in the GPU's kernels, and its convolution, on one device against the
same token by token in float64. The kernels run step by step on the CPU."""
import functools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_recurrence as plain
import pytest
import sampling

from meshtrain.kernels import convolution, recurrence, recurrence_pallas
from meshtrain.kernels.recurrence import RecurrentState

ENGINES = {"chunks": recurrence.recurrence, "kernels": recurrence_pallas.engine(
    recurrence_pallas.Launch(chunk=16, columns=16, key_columns=16, interpret=True))}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def rounded(inputs, dtype):
    return tuple(None if x is None else jnp.asarray(x, dtype if i < 3 else jnp.float32) for i, x in enumerate(inputs))


@functools.cache
def both_ways(engine: str, chunk: int | None = None):
    """Jitted (inputs, segments, do) -> o and gradients, of an engine or "token by token"."""
    recur = ENGINES.get(engine) and partial(ENGINES[engine], **{} if chunk is None else dict(chunk=chunk))
    return jax.jit(lambda inputs, segments, do: plain.with_gradients(
        (lambda *args: recur(*args).o_BTNV) if recur else plain.recur, inputs, segments, do=do))


# ---- values and gradients --------------------------------------------------------------------------------------------


def cut_anywhere(B: int, T: int, shares) -> np.ndarray:
    """Rows, each cut at other places; documents of one token and rows without a cut among them."""
    rng = np.random.default_rng(3)
    segments = (1 + np.cumsum(rng.random((B, T)) < rng.choice(shares, (B, 1)), 1)).astype(np.int32)
    segments[::3][:, :7] = 0                    # padding before the first document
    return segments


class Case(NamedTuple):
    """segments: lengths of a row's documents, or int32 [B, T]. drawn: (arguments of `plain.drawn`, largest error)."""
    segments: list | np.ndarray
    drawn: list
    shape: dict = {}
    chunk: int | None = 16
    dtype: str = "float32"
    kinds: tuple = plain.KINDS


DOCUMENTS = [1, 3, 40, 19, 1, 64, 2, 7]         # 137 tokens: no whole number of chunks
SHORT = [1, 3, 20, 1, 13, 5]
REPEATED = dict(decay=1e-3, alike=1.0, beta=1.9)        # one key for all tokens: powers of A would reach 1e30
# Sums of up to 137 terms in float32, in another order. Cumulative sums of decays of 100 are rounded to 1e-5; dg is the
# difference of two of them. bfloat16: 2^-9 for each rounding of a product's operand and of the result.
CHUNKS = {
    "documents": Case(DOCUMENTS, [({}, 2e-5), *((dict(decay=decay), tolerance) for decay, tolerance in (
        (1e-4, 2e-5), (10.0, 1e-4), (100.0, 1e-3)))]),
    "bfloat16": Case(DOCUMENTS, [({}, 2e-2)], dtype="bfloat16"),
    "cut anywhere": Case(cut_anywhere(1000, 40, [0, 0.02, 0.1, 0.5, 1]), [({}, 2e-5)], dict(K=1, H=4, V=3)),
    "keys that repeat": Case([30, 100, 7], [(REPEATED, 2e-4)], chunk=64, kinds=("delta", "channels")),
    **{f"{T} tokens": Case([1, T - 1][:T], [({}, 2e-5)], chunk=0) for T in (1, 3, 17)}}
# Widths are padded to 16. Of decays of 100 the gradient, 1e-4 at most, is a difference of two sums of terms near 1,
# each rounded to 6e-8, and is 2e-3 off where their order differs.
ANYWHERE = cut_anywhere(12, 43, [0, 0.05, 0.5, 1])
KERNELS = {"documents": Case(SHORT, [({}, 2e-6)], dict(K=1), None),
           "cut anywhere": Case(ANYWHERE, [(dict(decay=5.0), 2e-5), (dict(decay=0.0), 5e-6), (dict(decay=100.0), 5e-3)],
                                dict(K=1, H=12), None),
           "blocks of columns": Case(SHORT, [({}, 2e-6)], dict(K=1, H=32, V=32), None),
           "bfloat16": Case(SHORT, [({}, 1e-2)], dict(K=1, H=32, V=32), None, "bfloat16"),
           "keys that repeat": Case([20, 28], [(REPEATED, 2e-4)], {}, None, kinds=("delta", "channels"))}
FULL = ("chunks-3 tokens", "kernels-cut anywhere", "kernels-keys that repeat")
LONG = ("kernels-blocks of columns", "kernels-bfloat16")


@pytest.mark.parametrize("case, kind, engine", [
    pytest.param(case, kind, engine, id=f"{engine}-{name}-{kind}", marks=(
        sampling.GRID if f"{engine}-{name}" in LONG else [pytest.mark.full] * (f"{engine}-{name}" in FULL)))
    for engine, cases in (("chunks", CHUNKS), ("kernels", KERNELS)) for name, case in cases.items()
    for kind in case.kinds])
def test_values_and_gradients_are_those_token_by_token(case, kind, engine):
    segments = case.segments if isinstance(case.segments, np.ndarray) else plain.segments_of(case.segments)
    for how, tolerance in case.drawn:
        inputs = rounded(plain.drawn(kind, segments.shape[1], B=len(segments), **case.shape | how), case.dtype)
        do = np.random.default_rng(9).standard_normal(inputs[2].shape)
        expected = both_ways("token by token")(jax.tree.map(lambda x: x.astype(jnp.float64), inputs), segments, do)
        found = both_ways(engine, case.chunk)(inputs, segments, do)
        for got, want in zip(found, expected, strict=True):
            assert got is None or plain.error(got, want) < tolerance, how


@pytest.mark.parametrize("kind", plain.KINDS)
def test_a_document_of_a_packed_row_is_that_document_alone(kind):
    inputs, segments = rounded(plain.drawn(kind, 40), jnp.float32), plain.segments_of([9, 14, 17])
    do = np.random.default_rng(1).standard_normal(inputs[2].shape)
    whole = both_ways("chunks", 8)(inputs, segments, do)
    part = lambda tree: jax.tree.map(lambda x: x[:, 9:23], tree)
    alone = both_ways("chunks", 8)(part(inputs), segments[:, 9:23], do[:, 9:23])
    assert plain.error(alone, part(whole)) < 2e-6
    # Bit for bit the same whatever the others hold.
    others = rounded(plain.drawn(kind, 40, seed=1, decay=50.0), jnp.float32)
    mixed = jax.tree.map(lambda x, y: y.at[:, 9:23].set(x[:, 9:23]), inputs, others)
    seen = both_ways("chunks", 8)(mixed, segments, do)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 9:23], b[:, 9:23]), seen, whole)


# A document ends at the cut, and does not; a chunk has fewer tokens than the others.
@pytest.mark.parametrize("engine, kind", [
    ("chunks", "delta"), ("chunks", "sum"), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("chunks", "channels"), ("kernels", "sum"))),
    *(pytest.param("kernels", kind, marks=sampling.GRID) for kind in ("delta", "channels"))])
def test_rows_go_on_from_a_state(engine, kind):
    """With the gradient of the state."""
    inputs = rounded(plain.drawn(kind, 37, K=1 if engine == "kernels" else 2), jnp.float32)
    recur = ENGINES[engine]
    how = [dict(chunk=8), dict(chunk=16)] if engine == "chunks" else [{}, {}]

    def whole(segments, cut, *inputs):
        return recurrence.recurrence(*inputs, segments, chunk=8)[:2]

    def in_parts(segments, cut, *inputs):
        first, second = (tuple(None if x is None else x[:, part] for x in (*inputs, segments))
                         for part in (slice(cut), slice(cut, None)))
        o, end, _ = recur(*first, **how[0])
        more, end, _ = recur(*second, RecurrentState(end, segments[:, cut - 1]), **how[1])
        return jnp.concatenate([o, more], 1), end

    @partial(jax.jit, static_argnums=(0, 2))
    def with_gradients(f, segments, cut, inputs):
        out, back = jax.vjp(partial(f, segments, cut), *inputs)
        return out, back(jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), out))
    for cut, lengths in ((20, [20, 17]), (20, [13, 24]), (3, [37])) if engine == "chunks" else (
            (20, [20, 17]), (11, [20, 17])):
        segments = plain.segments_of(lengths)
        expected, found = with_gradients(whole, segments, 0, inputs), with_gradients(in_parts, segments, cut, inputs)
        assert plain.error(found, expected) < 2e-5      # float32 sums in another order


@pytest.mark.parametrize("kind", plain.KINDS)
def test_steps_of_generation_match_chunks(kind):
    inputs, segments = rounded(plain.drawn(kind, 30), jnp.float32), plain.segments_of([4, 21, 5])
    segments[0, :9] = 0                         # left padding of a row
    now = lambda part: tuple(None if x is None else x[:, part] for x in (*inputs, segments))
    recur, step = jax.jit(recurrence.recurrence), jax.jit(recurrence.step)
    whole = recur(*now(slice(None)))
    o, S, _ = recur(*now(slice(23)))
    for t in range(23, 30):
        more, S = step(*now(slice(t, t + 1)), RecurrentState(S, segments[:, t - 1]))
        o = jnp.concatenate([o, more], 1)
    assert plain.error((o, S), whole[:2]) < 2e-6


def test_known_states_give_the_same_gradients_without_a_scan():
    inputs, segments = rounded(plain.drawn("delta", 48), jnp.float32), plain.segments_of([11, 37])
    recur = partial(recurrence.recurrence, chunk=16)
    states = jax.jit(recur)(*inputs, segments).states_ZBNHV
    with_states = lambda inputs, states: plain.with_gradients(
        lambda *args: recur(*args, states_ZBNHV=states).o_BTNV, inputs, segments, do=inputs[2])
    expected = both_ways("chunks", 16)(inputs, segments, inputs[2])
    assert plain.error(jax.jit(with_states)(inputs, states), expected) < 1e-6
    assert str(jax.make_jaxpr(with_states)(inputs, states)).count(" scan[") == 1


# ---- the convolution -------------------------------------------------------------------------------------------------


def test_convolution_within_documents():
    rng = np.random.default_rng(0)
    segments = (1 + np.cumsum(rng.random((50, 23)) < 0.3, 1)).astype(np.int32)
    x, w, dy = (rng.standard_normal(shape) for shape in ((50, 23, 3, 2), (4, 3, 2), (50, 23, 3, 2)))

    @partial(jax.jit, static_argnums=0)
    def run(convolve, x, w):
        y, back = jax.vjp(lambda x, w: convolve(x, w, segments), x, w)
        return y, back(dy.astype(x.dtype))
    assert plain.error(run(convolution.convolve, *(jnp.float32(a) for a in (x, w))), run(plain.convolve, x, w)) < 1e-6


def test_gradients_of_a_bfloat16_convolution_are_summed_in_float32():
    """In bfloat16, 1 + 2**-9 is 1, and 4093 would be 4096. The two channels have their taps in opposite order."""
    x, taps = jnp.ones((1, 4096, 2, 1), jnp.bfloat16), jnp.asarray([1] + 3 * [2**-9], jnp.float32)
    w, segments = jnp.stack([taps, taps[::-1]], 1)[..., None], jnp.ones((1, 4096), jnp.int32)
    total = lambda x, w: convolution.convolve(x, w, segments).sum(dtype=jnp.float32)
    dx, dw = jax.jit(jax.grad(total, (0, 1)))(x, w)
    np.testing.assert_array_equal(dw[..., 0], np.full((2, 4), [4093, 4094, 4095, 4096]).T)
    np.testing.assert_array_equal(dx[:, :-3].astype(jnp.float32), 1 + 2**-7)


def test_convolution_goes_on_from_its_tail():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 12, 3, 2), (4, 3, 2)))
    segments = plain.segments_of([6, 6])

    @jax.jit
    def in_parts(x, w):
        y, tail = convolution.convolve(x[:, :2], w, segments[:, :2]), convolution.tail(x[:, :2], segments[:, :2], 4)
        for now in (slice(2, 7), slice(7, 8), slice(8, 12)):
            y = jnp.concatenate([y, convolution.convolve(x[:, now], w, segments[:, now], tail)], 1)
            tail = convolution.tail(x[:, now], segments[:, now], 4, tail)
        return y, convolution.convolve(x, w, segments)
    assert plain.error(*in_parts(x, w)) < 1e-6
