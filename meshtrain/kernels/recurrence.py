"""Linear attention on one device: gated delta rule, KDA and Mamba-2 as one recurrence over chunks of packed documents.

    S_t = e^{g_t} S_{t-1} + k_t u_t^T        o_t = S_t^T q_t        u_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t), or v_t

Within a chunk all tokens are computed together. Between chunks the three kinds share one linear recurrence of the
states. The backward of this recurrence is the same recurrence from the right. Documents are masks, and S begins with
zeros in each document. Sources: gated delta rule arXiv:2412.06464, its chunked form arXiv:2406.06484; KDA
arXiv:2510.26692; Mamba-2 arXiv:2405.21060. This module knows no mesh.

Dims: B rows, Z chunks of a row, C tokens of a chunk (I tokens that read, J tokens that write), N value heads, K key
heads, G=N/K, H key width, V value width.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshtrain.kernels import products

# The fastest of 32 … 256 in the roofline of a layer of 8,192 tokens on an H100. Longer chunks have larger matmuls;
# shorter ones launch more kernels and write more states. Any power of two gives the same result.
DELTA_CHUNK, SUM_CHUNK = 128, 256
LEAF = 4            # tokens of the blocks in which decays per channel are computed for each pair
BEFORE_ALL = -1     # the segment of the token before the first


class RecurrentState(NamedTuple):
    """The state with which the next tokens begin: the state after a token, [B, N, H, V] float32, and its segment [B].

    S_BNHV None means zeros, or the state that `across` of `recurrence` returns.
    """
    S_BNHV: jax.Array | None
    segment_B: jax.Array


class Recurred(NamedTuple):
    """The results of `recurrence`.

    o_BTNV: outputs, in v's dtype. end_BNHV: the state after the last token, float32; None if states were given.
    states_ZBNHV: the states before each chunk, in v's dtype. The backward needs only these and the inputs.
    """
    o_BTNV: jax.Array
    end_BNHV: jax.Array | None
    states_ZBNHV: jax.Array


def recurrence(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT, start: RecurrentState | None = None, *,
               across: Callable | None = None, states_ZBNHV=None, chunk: int = 0) -> Recurred:
    """Compute the recurrence over each row, within segments.

    q: normalized and scaled by the caller. Value head n uses key head n // G. g: log decays, float32, at most 0: [B, T,
    N], or [B, T, N, H] per channel, with N = K. beta: None without the delta rule. start: the state of rows that
    continue earlier tokens. across(M, X, reverse) -> S: the states before each row, if rows are runs of tokens whose
    neighbours are on other devices. A row maps the state S to M S + X, from its end if reverse. states: the states from
    an earlier call, to avoid computing them again. chunk: tokens, a power of two; 0: the default. Matmuls have operands
    in v's dtype. The decays, the inverse, the operands of the inverse and the carried state are float32.
    """
    (B, T, K, H), (N, V) = k_BTKH.shape, v_BTNV.shape[2:]
    G, C = N // K, min(chunk or (SUM_CHUNK if beta_BTN is None else DELTA_CHUNK), 1 << (T - 1).bit_length())
    if start is None:
        start = RecurrentState(None, jnp.full(B, BEFORE_ALL, segments_BT.dtype))
    documents = documents_of(pad(segments_BT, C, "edge").reshape(B, -1, C).swapaxes(0, 1), start.segment_B)
    q, k = (chunks_of(x.astype(v_BTNV.dtype), C, K) for x in (q_BTKH, k_BTKH))
    v, beta = chunks_of(v_BTNV, C, K, G), None if beta_BTN is None else chunks_of(beta_BTN.astype(jnp.float32), C, K, G)
    decay = chunks_of(since_document(g, documents), C, K, G)
    parts = (_by_channel if g.ndim == 4 else _by_head)(q, k, v, decay, beta, documents)
    S0, kept = (x if x is None else x.reshape(*x.shape[:-3], K, G, H, V) for x in (start.S_BNHV, states_ZBNHV))
    S, end = _states(across, parts.through, parts.left, parts.right, parts.X, S0, kept)
    new = parts.u if parts.w is None else parts.u - _product("ZBKGCH,ZBKGHV->ZBKGCV", parts.w.astype(v.dtype), S)
    o = parts.read(S) + _product("ZBKGIJ,ZBKGJV->ZBKGIV", parts.scores.astype(v.dtype), new.astype(v.dtype))
    o_BTNV = o.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, V)[:, :T].astype(v.dtype)

    def merge_batch(x):
        return x if x is None else x.reshape(*x.shape[:-4], N, H, V)
    return Recurred(o_BTNV, merge_batch(end), merge_batch(S))


def step(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT, start: RecurrentState) -> tuple[jax.Array, jax.Array]:
    """Return (o_BTNV, the next state) of `recurrence` for one token per row (T = 1), for generation. All is float32."""
    G = v_BTNV.shape[2] // k_BTKH.shape[2]
    q_BNH, k_BNH = (jnp.repeat(x[:, 0].astype(jnp.float32), G, 1) for x in (q_BTKH, k_BTKH))
    decay = jnp.exp(g[:, 0] if g.ndim == 4 else g[:, 0, :, None])
    goes_on = (segments_BT[:, 0] == start.segment_B)[:, None, None, None]
    S_BNHV = jnp.where(goes_on, decay[..., None] * start.S_BNHV, 0)
    u_BNV = v_BTNV[:, 0].astype(jnp.float32)
    if beta_BTN is not None:
        u_BNV = beta_BTN[:, 0, :, None] * (u_BNV - _product("BNH,BNHV->BNV", k_BNH, S_BNHV))
    S_BNHV = S_BNHV + k_BNH[..., None] * u_BNV[..., None, :]
    return _product("BNH,BNHV->BNV", q_BNH, S_BNHV)[:, None].astype(v_BTNV.dtype), S_BNHV


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(eq: str, x, y):
    """Return the einsum of two arrays of one dtype, summed in float32.

    The operands of its backward have the same dtype. Autodiff would multiply the float32 cotangent."""
    return products.einsum(eq, x, y, jnp.float32)


def _product_backward(eq, saved, dz):
    x, y = saved
    operands, out = eq.split("->")
    left, right = operands.split(",")
    dz = dz.astype(x.dtype)
    return (products.einsum(f"{out},{right}->{left}", dz, y, jnp.float32).astype(x.dtype),
            products.einsum(f"{left},{out}->{right}", x, dz, jnp.float32).astype(y.dtype))


_product.defvjp(lambda eq, x, y: (_product(eq, x, y), (x, y)), _product_backward)


# ---- chunks and documents --------------------------------------------------------------------------------------------


def pad(x, C: int, mode: str = "constant"):
    """Pad T to whole chunks. Tokens of zeros in the last segment leave the state after the last token unchanged."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % C)] + [(0, 0)] * (x.ndim - 2), mode=mode)


def chunks_of(x, C: int, *heads: int):
    """[B, T, heads, …] -> [Z, B, *heads, C, …]."""
    x = pad(x, C)
    x = x.reshape(x.shape[0], -1, C, *heads, *x.shape[3:])
    order = [1, 0, *range(3, 3 + len(heads)), 2, *range(3 + len(heads), x.ndim)]
    return x.transpose(order)


class Documents(NamedTuple):
    """Masks that broadcast over [Z, B, K, G, …]: which tokens belong to the same document."""
    segments: jax.Array     # [Z, B, 1, 1, C], the segment of each token
    pairs: jax.Array        # [Z, B, 1, 1, I, J], tokens I and J, where J is not after I
    of_start: jax.Array     # [Z, B, 1, 1, C], each token and the last token before the chunk
    of_end: jax.Array       # [Z, B, 1, 1, C], each token and the chunk's last token
    through: jax.Array      # [Z, B, 1, 1, 1], the last token before the chunk and the chunk's last token


def documents_of(segments_ZBC, before_B) -> Documents:
    ends = segments_ZBC[..., -1:]
    starts = jnp.concatenate([before_B[None, :, None], ends[:-1]])
    C = segments_ZBC.shape[-1]
    pairs = (segments_ZBC[..., :, None] == segments_ZBC[..., None, :]) & np.tril(np.ones((C, C), bool))
    return Documents(*(x[:, :, None, None] for x in (segments_ZBC, pairs, segments_ZBC == starts,
                                                      segments_ZBC == ends, ends == starts)))


def since_document(g, documents: Documents):
    """Return the sums of g from the start of each token's document or chunk to the token, float32, with T padded.

    g: [B, T, N] or [B, T, N, H]. The sums are one matmul with the mask. Differences of plain cumulative sums would
    carry the rounding errors of other documents' decays.
    """
    pairs_ZBIJ = documents.pairs[:, :, 0, 0].astype(jnp.float32)
    g = pad(g.astype(jnp.float32), pairs_ZBIJ.shape[-1])
    g_BZJD = g.reshape(g.shape[0], *pairs_ZBIJ.shape[::2], -1)
    return products.einsum("ZBIJ,BZJD->BZID", pairs_ZBIJ, g_BZJD).reshape(g.shape)


def mask_exp(mask, x):
    """Return e^x where the mask is true, else 0. x is masked before exp, so that the gradient is finite."""
    return jnp.exp(jnp.where(mask, x, -jnp.inf))


# ---- inside a chunk --------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """The parts of a chunk that do not depend on its state S.

    through, left, right, X: arguments of `_states`. New values are u - w S. Outputs are read(S) + scores (u - w S). w,
    right: None without the delta rule.
    """
    through: jax.Array
    left: jax.Array
    right: jax.Array | None
    X: jax.Array
    u: jax.Array
    w: jax.Array | None
    scores: jax.Array
    read: Callable


def _by_head(q, k, v, decay, beta, documents: Documents) -> _Parts:
    """Return the parts of chunks with decays per head [Z, B, K, G, C], which multiply values and scores: keys stay at K
    heads."""
    last = decay[..., -1:]
    since_start, until_end = mask_exp(documents.of_start, decay), mask_exp(documents.of_end, last - decay)
    between = mask_exp(documents.pairs, decay[..., :, None] - decay[..., None, :])

    def of_pairs(x, y):
        return _product("ZBKIH,ZBKJH->ZBKIJ", x, y)[:, :, :, None] * between
    u, w, right = v.astype(jnp.float32), None, None
    if beta is not None:
        T = _delta(of_pairs(k, k), beta)
        u = _product("ZBKGIJ,ZBKGJV->ZBKGIV", T, u)
        w = _product("ZBKGIJ,ZBKJH->ZBKGIH", T * since_start[..., None, :], k.astype(jnp.float32))
        right = (w * until_end[..., None]).astype(k.dtype)
    X = _product("ZBKCH,ZBKGCV->ZBKGHV", k, (u * until_end[..., None]).astype(k.dtype))

    def read(S):
        return _product("ZBKCH,ZBKGHV->ZBKGCV", q, S) * since_start[..., None]
    return _Parts(mask_exp(documents.through, last), k, right, X, u, w, of_pairs(q, k), read)


def _by_channel(q, k, v, decay, beta, documents: Documents) -> _Parts:
    """Return the parts of chunks with decays per channel [Z, B, K, 1, C, H]. The decays multiply queries and keys."""
    q, k = (x.astype(jnp.float32)[:, :, :, None] for x in (q, k))
    last = decay[..., -1:, :]
    since_start = mask_exp(documents.of_start[..., None], decay)
    left = (k * mask_exp(documents.of_end[..., None], last - decay)).astype(v.dtype)

    def of_pairs(x, y):
        return _decay_pairs(x, y, decay, documents.segments, v.dtype)
    u, w, right = v.astype(jnp.float32), None, None
    if beta is not None:
        T = _delta(of_pairs(k, k), beta)
        u = _product("ZBKGIJ,ZBKGJV->ZBKGIV", T, u)
        w = _product("ZBKGIJ,ZBKGJH->ZBKGIH", T, k * since_start)
        right = w.astype(v.dtype)
    X = _product("ZBKGCH,ZBKGCV->ZBKGHV", left, u.astype(v.dtype))

    def read(S):
        return _product("ZBKGCH,ZBKGHV->ZBKGCV", (q * since_start).astype(v.dtype), S)
    return _Parts(mask_exp(documents.through, last[..., 0, :]), left, right, X, u, w, of_pairs(q, k), read)


def _delta(pairs, beta):
    """Return (I + A)^-1 diag(beta), which maps values to state updates. A: beta_i pairs_ij below the diagonal."""
    below = np.tril(np.ones(pairs.shape[-2:], bool), -1)
    return inverse(jnp.where(below, pairs * beta[..., None], 0)) * beta[..., None, :]


@jax.custom_vjp
def inverse(A):
    """Return (I + A)^-1 of strictly lower triangular A [..., C, C], float32. C is a power of two.

    The inverse is computed by block substitution, which is exact even if keys are almost equal. A product of powers of
    A would lose all digits.
    """
    C, b = A.shape[-1], 1
    T = jnp.ones((*A.shape[:-2], C, 1, 1), A.dtype)
    while b < C:
        below, first, second = _below(A, b), T[..., 0::2, :, :], T[..., 1::2, :, :]
        T, b = _join_blocks(-_small_product(_small_product(second, below), first), first, second), 2 * b
    return T[..., 0, :, :]


def _inverse_backward(T, dT):
    dA = products.einsum("...ji,...jk->...ik", T, products.einsum("...ij,...kj->...ik", dT, T))
    return -jnp.tril(dA, -1),


inverse.defvjp(lambda A: (T := inverse(A),) * 2, _inverse_backward)


def _small_product(x, y):
    if x.shape[-1] < 8:         # too small for a matmul
        return jnp.sum(x[..., :, :, None] * y[..., None, :, :], -2)
    return products.einsum("...ij,...jk->...ik", x, y)


def _below(A, b: int):
    """Return the blocks [..., C/2b, b, b] of A between the pairs of diagonal blocks that a merge joins."""
    m = A.shape[-1] // (2 * b)
    blocks = A.reshape(*A.shape[:-2], m, 2, b, m, 2, b)[..., :, 1, :, :, 0, :]
    return jnp.einsum("...mimj->...mij", blocks, precision=lax.Precision.HIGHEST)


def _join_blocks(below, first, second):
    """Return [[first, 0], [below, second]] of blocks [..., m, b, b]."""
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([upper, jnp.concatenate([below, second], -1)], -2)


def _decay_pairs(x, y, decay, segments, dtype):
    """Return Σ_h x_ih y_jh e^{decay_ih - decay_jh} of [..., C, H], where i >= j are of one document, else 0.

    Every exponent is at most 0, however strong the decay. Blocks off the diagonal measure both decays from the first
    token of the later half. A document that reaches both halves contains this token. Blocks of LEAF tokens on the
    diagonal compute the exponent of each pair.
    """
    C, H = decay.shape[-2:]

    def cut(b):
        return (a.reshape(*a.shape[:-2], C // b, b, a.shape[-1]) for a in (x, y, decay, segments[..., None]))
    b = min(LEAF, C)
    x_, y_, d, document = cut(b)
    same = (document == document.swapaxes(-1, -2)) & np.tril(np.ones((b, b), bool))
    between = mask_exp(same[..., None], d[..., :, None, :] - d[..., None, :, :])
    out = jnp.sum(x_[..., :, None, :] * y_[..., None, :, :] * between, -1)
    while b < C:
        (x_, y_, d, document), early, late = cut(b), np.s_[..., 0::2, :, :], np.s_[..., 1::2, :, :]
        anchor, there = d[late][..., :1, :], document[late][..., :1, :]
        reader = x_[late] * mask_exp(document[late] == there, d[late] - anchor)
        writer = y_[early] * mask_exp(document[early] == there, anchor - d[early])
        below = _product("ZBKGmIH,ZBKGmJH->ZBKGmIJ", reader.astype(dtype), writer.astype(dtype))
        out, b = _join_blocks(below, out[early], out[late]), 2 * b
    return out[..., 0, :, :]


# ---- from chunk to chunk ---------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states(across, through, left, right, X, S0, kept):
    """Return (states before each chunk [Z, B, K, G, H, V] in left's dtype, the state after the last chunk).

    A chunk maps the state S to through · S - leftᵀ (right S) + X. Shapes: through [Z, B, K, G, 1 or H]; left [Z, B, K,
    (G,) C, H]; right [Z, B, K, G, C, H] or None. kept: the states, if they are known.
    """
    if kept is not None:
        return kept, None
    return _scan(across, through, left, right, X, S0, left.dtype)


def _states_forward(across, through, left, right, X, S0, kept):
    S, end = _states(across, through, left, right, X, S0, kept)
    return (S, end), (through, left, right, S, S0)


def _states_backward(across, saved, cotangents):
    through, left, right, S, S0 = saved
    dS, dend = cotangents
    # The same recurrence from the right, with left and right exchanged. Its state before a chunk is the gradient of the
    # state after the chunk, and of X.
    dX, dS0 = _scan(across, through, *((left, None) if right is None else (right, left)), dS, dend, left.dtype,
                       reverse=True)
    dthrough = jnp.sum(S.astype(jnp.float32) * dX, -1)
    dthrough = dthrough if through.shape[-1] > 1 else jnp.sum(dthrough, -1, keepdims=True)
    dleft, dright = jnp.zeros_like(left), None
    if right is not None:           # without `right`, `left` is not read
        heads = "ZBKG"[:left.ndim - 2]
        read = products.einsum("ZBKGCH,ZBKGHV->ZBKGCV", right, S).astype(left.dtype)
        dread = products.einsum(f"{heads}CH,ZBKGHV->ZBKGCV", left, dX)
        dleft = -products.einsum(f"ZBKGCV,ZBKGHV->{heads}CH", read, dX, jnp.float32).astype(left.dtype)
        dright = -products.einsum("ZBKGCV,ZBKGHV->ZBKGCH", dread, S, jnp.float32).astype(right.dtype)
    return dthrough, dleft, dright, dX.astype(jnp.float32), None if S0 is None else dS0, None


_states.defvjp(_states_forward, _states_backward)


def _scan(across, through, left, right, X, S0, dtype, reverse: bool = False):
    """Compute `_states` from the left, or from the right if reverse."""
    def after(S, through, left, right):
        new = through[..., None] * S
        if right is None:
            return new
        heads = {4: "BK", 5: "BKG"}
        read = products.einsum(f"{heads[right.ndim]}CH,BKGHV->BKGCV", right, S.astype(dtype), jnp.float32)
        return new - products.einsum(f"{heads[left.ndim]}CH,BKGCV->BKGHV", left, read.astype(dtype), jnp.float32)

    def one(S, chunk):
        *linear, X = chunk
        return after(S, *linear) + X, S.astype(dtype)

    zeros = jnp.zeros(X.shape[1:], jnp.float32)
    chunks = through, left, right, X
    if across is not None:
        S0 = across(*_summary(after, chunks, zeros, reverse), reverse)
    end, S = lax.scan(one, zeros if S0 is None else S0, chunks, reverse=reverse)
    return S, end


def _summary(after, chunks, zeros, reverse: bool):
    """Return (M, X), which summarize the chunks of a row: together they map the state S to M S + X.

    M is [B, K, G, H, H]. If chunks have no `right` (`_states`), M is diagonal, and its factors are returned: [B, K, G,
    1 or H].
    """
    through, _, right, _ = chunks
    if right is None:
        def advance(S, chunk):
            return (after(S, *chunk[:3]) + chunk[3], None)
        return jnp.prod(through, 0), lax.scan(advance, zeros, chunks, reverse=reverse)[0]
    V, H = zeros.shape[-1], zeros.shape[-2]
    eye = jnp.broadcast_to(jnp.eye(H, dtype=jnp.float32), (*zeros.shape[:-1], H))

    def advance_both(wide, chunk):      # X beside M, so that one matmul serves both
        *linear, X = chunk
        return after(wide, *linear).at[..., :V].add(X), None
    wide, _ = lax.scan(advance_both, jnp.concatenate([zeros, eye], -1), chunks, reverse=reverse)
    return wide[..., V:], wide[..., :V]
