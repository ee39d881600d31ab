"""Distillation: the divergence from a teacher's most likely tokens, beside whole distributions in numpy."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.model import divergence
from meshtrain.model.divergence import DivergenceSpec
from meshtrain.model.execution import Execution, Numerics
from meshtrain.model.loss import LossSpec
from meshtrain.names import AXES, NO_TARGET
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout

V, D, K = 50, 8, 5


def log_softmax(z):
    return z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)


def classes(logp, top):
    """[…, k + 1] log-probabilities of the tokens in `top` and of all others together, float64."""
    kept = np.take_along_axis(logp, top, -1)
    rest = np.log1p(-np.exp(kept).sum(-1, keepdims=True))
    return np.concatenate([kept, rest], -1)


def kl(a, b):
    return (np.exp(a) * (a - b)).sum(-1)


@functools.cache
def drawn():
    """(the teacher's logits, the model's [6, V], the teacher's k most likely tokens)."""
    rng = np.random.default_rng(0)
    teacher, student = rng.normal(0, 2, (6, V)), rng.normal(0, 2, (6, V))
    return teacher, student, np.argsort(-teacher, -1)[:, :K]


def compare(reverse, teacher, student, top):
    """`divergence.compare`, and the gradient by all logits that it stands for."""
    p, q = (np.take_along_axis(log_softmax(z), top, -1).astype(np.float32) for z in (teacher, student))
    value, d_K, d_rest = divergence.compare(reverse, p, q)
    grad = np.exp(log_softmax(student)) * np.asarray(d_rest)[:, None]
    np.put_along_axis(grad, top, np.asarray(d_K, float), -1)
    return np.asarray(value), grad


@pytest.mark.parametrize("reverse", [False, True])
def test_the_divergence_of_classes_and_its_gradient_are_those_of_numpy(reverse):
    teacher, student, top = drawn()

    def value_of(z):
        p, q = classes(log_softmax(teacher), top), classes(log_softmax(z), top)
        return kl(q, p) if reverse else kl(p, q)
    value, grad = compare(reverse, teacher, student, top)
    np.testing.assert_allclose(value, value_of(student), rtol=1e-5)
    numeric = np.zeros_like(student)        # central differences, good to about 1e-8
    for at in np.ndindex(*student.shape):
        step = np.zeros_like(student)
        step[at] = 1e-5
        numeric[at] = (value_of(student + step) - value_of(student - step))[at[0]] / 2e-5
    np.testing.assert_allclose(grad, numeric, atol=2e-6)
    if not reverse:     # computed independently: the mean, and that it is below that of whole distributions
        assert abs(value.mean() - 1.988) < 5e-4 and kl(log_softmax(teacher), log_softmax(student)).mean() > 2.7


@pytest.mark.parametrize("reverse", [False, True])
def test_a_model_that_predicts_as_its_teacher_has_no_divergence_and_no_gradient(reverse):
    teacher, _, top = drawn()
    value, grad = compare(reverse, teacher, teacher, top)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(grad, 0, atol=1e-6)


def test_all_probability_outside_the_named_tokens_has_a_finite_divergence():
    sure, elsewhere = np.zeros((1, V)), np.zeros((1, V))
    sure[0, 0], elsewhere[0, -1] = 80, 80
    top = np.arange(K)[None]
    for reverse in (False, True):
        for p, q in ((sure, elsewhere), (elsewhere, sure), (sure, sure)):
            value, grad = compare(reverse, p, q, top)
            assert np.isfinite(value).all() and np.isfinite(grad).all()


@pytest.mark.parametrize("reverse, temperature, weight, softcap", [
    (False, 1.0, 1.0, 0.0), (True, 2.0, 0.3, 0.0), (False, 0.5, 0.8, 3.0)])
def test_sums_and_gradients_in_chunks_are_those_of_whole_logits(reverse, temperature, weight, softcap):
    """Three chunks of the tokens, of which the last is padded; the vocabulary is padded, too."""
    one = Layout(rules.parse(""), dict.fromkeys(AXES, 1))
    ex = Execution(one, Numerics(jnp.dtype("float32")), None)
    spec = LossSpec(("embed", "vocab"), V, 0.0, 5, softcap, temperature=temperature)
    keys = jax.random.split(jax.random.key(1), 4)
    x, w = jax.random.normal(keys[0], (2, 7, D)), jax.random.normal(keys[1], (D, 64))
    targets = jax.random.randint(keys[2], (2, 7), 0, V).at[0, 3].set(NO_TARGET)
    teacher = jax.nn.log_softmax(2 * jax.random.normal(keys[3], (2, 7, V)))
    logp, ids = jax.lax.top_k(teacher, K)
    goal = DivergenceSpec(spec, reverse, weight)

    def plain(x, w):
        logits = (x @ w)[..., :V]
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        q = jax.nn.log_softmax(logits / temperature)
        q, p = (jnp.concatenate([a, jnp.log1p(-jnp.exp(a).sum(-1, keepdims=True))], -1)
                for a in (jnp.take_along_axis(q, ids, -1), logp))
        each = ((jnp.exp(q) * (q - p)) if reverse else (jnp.exp(p) * (p - q))).sum(-1)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        apart, nll = (jnp.where(targets != NO_TARGET, a, 0).sum() for a in (each, nll))
        return weight * temperature ** 2 * apart + (1 - weight) * nll, (nll, apart)

    def ours(x, w):
        objective, nll, apart = divergence.distillation_sums(ex, goal, x, w, targets, ids, logp)
        return objective, (nll, apart)
    with jax.default_matmul_precision("highest"):
        (value, sums), grads = jax.jit(jax.value_and_grad(ours, (0, 1), has_aux=True))(x, w)
        (wanted, plain_sums), plain_grads = jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(x, w)
        top, top_logp = jax.jit(lambda x, w: divergence.top_tokens(ex, spec, K, x, w, targets))(x, w)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(sums, plain_sums, rtol=1e-5)
    for got, plain_grad in zip(grads, plain_grads, strict=True):        # sums of 13 tokens in another order
        np.testing.assert_allclose(got, plain_grad, atol=2e-5 * np.abs(plain_grad).max())
    logits = (x @ w)[..., :V]
    logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
    expected, at = jax.lax.top_k(jax.nn.log_softmax(logits / temperature), K)
    np.testing.assert_allclose(top_logp, expected, rtol=1e-4)
    np.testing.assert_array_equal(top, at)


@pytest.mark.parametrize("V, k", [(4096, 64), (2048, 1), (4096, 7), (100, 5), (1024, 100)])    # in groups, or too few tokens
def test_the_likeliest_tokens_are_those_of_top_k(V, k):
    @jax.jit
    def both(x):
        return divergence._select(x, k), jax.lax.top_k(x, k)
    x = np.random.default_rng(V).permutation(6 * V).reshape(3, 2, V).astype(np.float32)
    x[..., V - 70:] = -np.inf           # rows that pad the vocabulary
    (top, ids), (best, first) = both(x)
    np.testing.assert_array_equal(top, best)
    here = np.isfinite(top)             # -inf has no order
    np.testing.assert_array_equal(np.where(here, ids, 0), np.where(here, first, 0))
    assert all(len(set(row)) == k for row in np.asarray(ids).reshape(-1, k))
