"""Linear attention's recurrence and convolution on one device against the same token by token in float64."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import plain_recurrence as plain
import pytest

from meshtrain.kernels import convolution, recurrence
from meshtrain.kernels.recurrence import RecurrentState

DOCUMENTS = [1, 3, 40, 19, 1, 64, 2, 7]         # 137 tokens: no whole number of chunks


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def compared(kind: str, segments, dtype=jnp.float32, chunk: int = 16, **how) -> list[float]:
    """Errors of o and of every gradient, for inputs rounded to dtype."""
    inputs = rounded(plain.drawn(kind, segments.shape[1], B=segments.shape[0], **how), dtype)
    do = np.random.default_rng(9).standard_normal(inputs[2].shape)
    expected = both_ways(None)(jax.tree.map(lambda x: x.astype(jnp.float64), inputs), segments, do)
    return [plain.error(*pair) for pair in zip(both_ways(chunk)(inputs, segments, do), expected, strict=True)
            if pair[0] is not None]


def rounded(inputs, dtype):
    return tuple(None if x is None else jnp.asarray(x, dtype if i < 3 else jnp.float32) for i, x in enumerate(inputs))


def both_ways(chunk: int | None):
    """Jitted (inputs, segments, do) -> o and gradients, in chunks or, if None, token by token."""
    recur = plain.recur if chunk is None else lambda *args: recurrence.recurrence(*args, chunk=chunk).o_BTNV
    return jax.jit(lambda inputs, segments, do: plain.with_gradients(recur, inputs, segments, do=do))


# ---- the recurrence --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", plain.KINDS)
def test_chunks_match_token_by_token(kind):
    # Sums of 137 terms in float32, in another order.
    assert max(compared(kind, plain.segments_of(DOCUMENTS))) < 2e-5


@pytest.mark.parametrize("kind", plain.KINDS)
def test_documents_cut_anywhere_never_leak(kind):
    """1,000 rows, each cut at other places; documents of one token and rows without a cut among them."""
    rng = np.random.default_rng(3)
    starts = rng.random((1000, 40)) < rng.choice([0, 0.02, 0.1, 0.5, 1], (1000, 1))
    segments = (1 + np.cumsum(starts, 1)).astype(np.int32)
    segments[::3][:, :7] = 0                    # padding before the first document
    assert max(compared(kind, segments, K=1, H=4, V=3)) < 2e-5


@pytest.mark.parametrize("kind", plain.KINDS)
def test_a_document_of_a_packed_row_is_that_document_alone(kind):
    inputs, segments = rounded(plain.drawn(kind, 40), jnp.float32), plain.segments_of([9, 14, 17])
    do = np.random.default_rng(1).standard_normal(inputs[2].shape)
    whole = both_ways(8)(inputs, segments, do)
    part = lambda tree: jax.tree.map(lambda x: x[:, 9:23], tree)
    alone = both_ways(8)(part(inputs), segments[:, 9:23], do[:, 9:23])
    assert plain.error(alone, part(whole)) < 2e-6
    # Bit for bit the same whatever the others hold.
    others = rounded(plain.drawn(kind, 40, seed=1, decay=50.0), jnp.float32)
    mixed = jax.tree.map(lambda x, y: y.at[:, 9:23].set(x[:, 9:23]), inputs, others)
    seen = both_ways(8)(mixed, segments, do)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 9:23], b[:, 9:23]), seen, whole)


@pytest.mark.parametrize("kind", plain.KINDS)
@pytest.mark.parametrize("decay, tolerance", [(1e-4, 2e-5), (10.0, 1e-4), (100.0, 1e-3)])
def test_weak_and_strong_decays(kind, decay, tolerance):
    # Cumulative sums of decays of 100 are rounded to 1e-5; dg is the difference of two of them.
    assert max(compared(kind, plain.segments_of(DOCUMENTS), decay=decay)) < tolerance


@pytest.mark.parametrize("kind", ["delta", "channels"])
def test_keys_that_repeat(kind):
    """One key for all tokens and beta = 1.9: powers of A would reach 1e30."""
    errors = compared(kind, plain.segments_of([30, 100, 7]), chunk=64, decay=1e-3, alike=1.0, beta=1.9)
    assert max(errors) < 2e-4


@pytest.mark.parametrize("kind", plain.KINDS)
def test_bfloat16(kind):
    # 2^-9 for each rounding of a product's operand and of the result.
    assert max(compared(kind, plain.segments_of(DOCUMENTS), jnp.bfloat16)) < 2e-2


@pytest.mark.parametrize("T", [1, 3, 17])
def test_any_length(T):
    for kind in plain.KINDS:
        assert max(compared(kind, plain.segments_of([1, T - 1] if T > 1 else [1]), chunk=0)) < 2e-5


@pytest.mark.parametrize("kind", plain.KINDS)
@pytest.mark.parametrize("cut, lengths", [(20, [20, 17]), (20, [13, 24]), (3, [37])])
def test_rows_go_on_from_a_state(kind, cut, lengths):
    """Also where a document ends at the cut, and with the gradient of the state."""
    inputs, segments = rounded(plain.drawn(kind, 37), jnp.float32), plain.segments_of(lengths)
    whole = lambda *inputs: recurrence.recurrence(*inputs, segments, chunk=8)[:2]

    def in_parts(*inputs):
        first, second = (tuple(None if x is None else x[:, part] for x in (*inputs, segments))
                         for part in (slice(cut), slice(cut, None)))
        o, end, _ = recurrence.recurrence(*first, chunk=8)
        more, end, _ = recurrence.recurrence(*second, RecurrentState(end, segments[:, cut - 1]), chunk=16)
        return jnp.concatenate([o, more], 1), end
    do, dend = (jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.float32)
                for x in jax.eval_shape(whole, *inputs))

    def with_gradients(f):
        out, back = jax.vjp(f, *inputs)
        return out, back((do, dend))
    expected, found = (jax.jit(partial(with_gradients, f))() for f in (whole, in_parts))
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
    states = recur(*inputs, segments).states_ZBNHV
    with_states = lambda inputs, states: plain.with_gradients(
        lambda *args: recur(*args, states_ZBNHV=states).o_BTNV, inputs, segments, do=inputs[2])
    expected = plain.with_gradients(lambda *args: recur(*args).o_BTNV, inputs, segments, do=inputs[2])
    assert plain.error(with_states(inputs, states), expected) < 1e-6
    assert str(jax.make_jaxpr(with_states)(inputs, states)).count(" scan[") == 1


# ---- the convolution -------------------------------------------------------------------------------------------------


def test_convolution_within_documents():
    rng = np.random.default_rng(0)
    segments = (1 + np.cumsum(rng.random((50, 23)) < 0.3, 1)).astype(np.int32)
    x, w, dy = (rng.standard_normal(shape) for shape in ((50, 23, 3, 2), (4, 3, 2), (50, 23, 3, 2)))
    run = lambda f, *args: jax.tree.leaves(jax.vjp(lambda x, w: f(x, w, segments), *args)[1](dy.astype(args[0].dtype)))
    low = [jnp.asarray(a, jnp.float32) for a in (x, w)]
    assert plain.error(convolution.convolve(*low, segments), plain.convolve(x, w, segments)) < 1e-6
    assert plain.error(run(convolution.convolve, *low), run(plain.convolve, *map(jnp.asarray, (x, w)))) < 1e-6


def test_weight_gradients_of_a_bfloat16_convolution_are_float32():
    x, w = jnp.ones((1, 4096, 1, 1), jnp.bfloat16), jnp.ones((4, 1, 1), jnp.float32)
    segments = jnp.ones((1, 4096), jnp.int32)
    dw = jax.grad(lambda w: convolution.convolve(x, w, segments).sum(dtype=jnp.float32))(w)
    np.testing.assert_array_equal(dw.ravel(), [4093, 4094, 4095, 4096])     # 4093 is no bfloat16


def test_convolution_goes_on_from_its_tail():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 12, 3, 2), (4, 3, 2)))
    segments = plain.segments_of([6, 6])
    y, tail = convolution.convolve(x[:, :2], w, segments[:, :2]), convolution.tail(x[:, :2], segments[:, :2], 4)
    for now in (slice(2, 7), slice(7, 8), slice(8, 12)):
        y = jnp.concatenate([y, convolution.convolve(x[:, now], w, segments[:, now], tail)], 1)
        tail = convolution.tail(x[:, now], segments[:, now], 4, tail)
    assert plain.error(y, convolution.convolve(x, w, segments)) < 1e-6
