"""`recurrence` as Pallas GPU kernels, lowered through Triton: the choice, and the kernels of decays per head.

The kernels of decays per channel are in `recurrence_channels`. The forward has two kernels. One inverts every chunk's
triangular matrix (delta rule only). The other visits a row's chunks in order, with a block of the state's columns in
registers. The backward has four kernels: the first kernel again, one that visits the chunks from the right for the
gradients of the states, and two that compute all other gradients of all chunks at once. Of the last two, one computes
the gradients of the inputs of the forward's second kernel, and the other those of the forward's first kernel. Arrays in
global memory between the kernels have v's dtype, except for the inverses in the backward, which are float32. The
kernels use no atomics, so they are deterministic. As with `pallas`, all mesh axes must be manual.

Source: the split into kernels is that of flash-linear-attention (arXiv:2406.06484, 3.3). This module knows no mesh.
"""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels import recurrence_channels
from meshtrain.kernels.recurrence import (BEFORE_ALL, LEAF, Recurred, RecurrentState, documents_of, pad, recurrence,
                                          since_document)
from meshtrain.kernels.recurrence_blocks import (
    CHANNELS, CLOSE, MIN_WIDTH, ROWS, Launch, call, chunks, dot, spec_for, inverse, split_dot,
)  # fmt: skip

COMPILED = (9, 10)      # major compute capabilities for which registers and shared memory were checked
WIDEST = 128            # widest head for which the kernels are compiled and their registers checked


def engine(launch: Launch = Launch()):
    """Return a function like `recurrence.recurrence`, for bfloat16. Heads wider than WIDEST use
    `recurrence.recurrence`.
    """
    return partial(_recurrence, launch)


def products_of(what: str, H: int, V: int, delta: bool, launch: Launch = Launch()) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of each bfloat16 matmul that a kernel runs for a chunk of a value head; for cost estimates.

    what: the kernel's name without NAME and DELTA. H, V: widths with padding. delta: with the delta rule.
    """
    C, exact, close, split = launch.chunk, 6, 3, 2      # bfloat16 matmuls per float32 matmul
    pairs, of_pairs, read, written, by_key = (C, C, H), (C, V, C), (C, V, H), (H, V, C), (C, H, C)
    levels, by_columns = (C // ROWS).bit_length() - 1, -(-V // launch.columns)
    inverted, decayed = [(C, C, C)] * (2 * exact * levels), (C // LEAF).bit_length() - 1
    inside = [pairs, *inverted, *[of_pairs] * split, *[by_key] * split]
    of_channels = [*[pairs] * (2 * decayed), *inverted, *[of_pairs] * split, *[by_key] * close]
    backward = [of_pairs, read, written, written]
    reverse = [*[pairs] * by_columns, of_pairs, read, written, *[written] * delta]
    return {"inside": inside, "inside_again": [*inside, read],
            "forward": [*[pairs] * by_columns, read, of_pairs, written, *[read] * delta],
            "summary": [written, *[read] * delta], "reverse": reverse, "reverse_end": reverse,
            "gradients": [*[(C, C, V)] * -(-H // launch.key_columns), *[(C, H, V)] * (2 + delta), by_key, by_key],
            "inside_gradients": [pairs, pairs, (C, C, V), *[of_pairs] * split, *[(C, C, C)] * (2 * close), by_key,
                                 by_key],
            CHANNELS + "inside": of_channels, CHANNELS + "inside_again": [*of_channels, read],
            CHANNELS + "forward": [read, read, of_pairs, written], CHANNELS + "summary": [read, written],
            CHANNELS + "reverse": backward, CHANNELS + "reverse_end": backward,
            CHANNELS + "inside_gradients": [(C, H, V), by_key, pairs, (C, C, V), (C, C, V), *[of_pairs] * split,
                                          *[(C, C, C)] * (2 * close)],
            CHANNELS + "gradients": [(C, H, V), (C, H, V), *[by_key] * (4 * decayed)]}[what]


def _recurrence(launch: Launch, q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT,
                start: RecurrentState | None = None, *, across=None, states_ZBNHV=None, chunk: int = 0) -> Recurred:
    if max(k_BTKH.shape[3], v_BTNV.shape[3]) > WIDEST:
        return recurrence(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT, start, across=across,
                          states_ZBNHV=states_ZBNHV, chunk=chunk)
    (B, T, _, H), V, C = k_BTKH.shape, v_BTNV.shape[3], chunk or launch.chunk
    launch, wide = launch._replace(chunk=C), lambda n: max(MIN_WIDTH, pl.next_power_of_2(n))
    if start is None:
        start = RecurrentState(None, jnp.full(B, BEFORE_ALL, segments_BT.dtype))
    segments_BT = pad(segments_BT, C, "edge").astype(jnp.int32)
    segments_ZBC = segments_BT.reshape(B, -1, C).swapaxes(0, 1)
    documents = documents_of(segments_ZBC, start.segment_B)
    ends_BZ = segments_ZBC[..., -1].T
    starts_BZ = jnp.concatenate([start.segment_B[:, None].astype(jnp.int32), ends_BZ[:, :-1]], 1)
    decay = since_document(g, documents)
    beta_BNT = None if beta_BTN is None else pad(beta_BTN.astype(jnp.float32), C).swapaxes(1, 2)
    q, k, v = (_widen(pad(x.astype(v_BTNV.dtype), C), wide(x.shape[-1])) for x in (q_BTKH, k_BTKH, v_BTNV))
    S0, kept = (x if x is None else _widen(_widen(x, wide(V)).swapaxes(-1, -2), wide(H)).swapaxes(-1, -2)
                for x in (start.S_BNHV, states_ZBNHV))
    core, decay = ((_core, decay.swapaxes(1, 2)) if g.ndim == 3 else
                   (recurrence_channels.core, _widen(decay, wide(H))))
    o, states, end = core(launch, across, q, k, v, decay, beta_BNT, (segments_BT, starts_BZ, ends_BZ), S0, kept)
    return Recurred(o[:, :T, :, :V], end if end is None else end[..., :H, :V], states[..., :H, :V])


def _widen(x, width: int):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _core(launch, across, q, k, v, decay, beta, segments, S0, kept):
    """Return (o, states, end) of whole chunks.

    q, k: [B, T, K, H]. v: [B, T, N, V]. decay: [B, N, T] since the start of the document or chunk. beta: [B, N, T].
    segments: (of tokens, of the token before each chunk, of each chunk's last token).
    """
    u, w = (v, None) if beta is None else _inside(launch, k, v, decay, beta, segments)
    if across is not None and kept is None:
        _, _, X = _forward(launch, None, k, u, w, decay, segments, None, None)
        S0 = across(_multiplier(launch, k, w, decay, segments), X[:, :, None], False)[:, :, 0]
    return _forward(launch, q, k, u, w, decay, segments, S0, kept)


def _core_forward(launch, across, q, k, v, decay, beta, segments, S0, kept):
    o, states, end = _core(launch, across, q, k, v, decay, beta, segments, S0, kept)
    return (o, states, end), (q, k, v, decay, beta, segments, S0, states)


def _core_backward(launch, across, saved, cotangents):
    q, k, v, decay, beta, segments, S0, states = saved
    do, _, dend = cotangents            # the model does not use the states as an output
    new, w, T = (v, None, None) if beta is None else _inside(launch, k, v, decay, beta, segments, states)
    if across is not None:
        M = _multiplier(launch, k, w, decay, segments)      # M is transposed from the right
        M = M if w is None else M.swapaxes(-1, -2)
        _, _, dX = _reverse(launch, q, k, w, decay, do, segments, None, only_end=True)
        dend = across(M, dX[:, :, None], True)[:, :, 0]
    dnew, dstates, dS0 = _reverse(launch, q, k, w, decay, do, segments, dend)
    dq, dk, dw, ddecay = _gradients(launch, q, k, decay, segments, do, new, dnew, states, dstates, beta is not None)
    dv, dbeta = dnew, None
    if beta is not None:
        more_dk, dv, more_ddecay, dbeta = _inside_gradients(launch, k, v, decay, beta, segments, T, dnew, dw)
        more_dk = more_dk.reshape(*k.shape[:3], -1, k.shape[3]).sum(3, dtype=jnp.float32)
        dk, ddecay = (dk + more_dk).astype(k.dtype), ddecay + more_ddecay
    return dq, dk, dv, ddecay, dbeta, None, None if S0 is None else dS0, None


_core.defvjp(_core_forward, _core_backward)


def _multiplier(launch, k, w, decay, segments):
    if w is None:
        _, starts_BZ, ends_BZ = segments
        through = jnp.where((starts_BZ == ends_BZ)[:, None], jnp.exp(decay[..., launch.chunk - 1::launch.chunk]), 0)
        return jnp.prod(through, -1)[:, :, None, None]
    (B, N, _), H = decay.shape, k.shape[3]
    eye = jnp.broadcast_to(jnp.eye(H, dtype=jnp.float32), (B, N, H, H))
    _, _, M = _forward(launch, None, k, None, w, decay, segments, eye, None)
    return M[:, :, None]


# ---- shared by the kernels: refs are of one row and one head ---------------------------------------------------------


class _Chunk(NamedTuple):
    """The decays of a chunk; 0 between documents."""
    between: jax.Array      # [I, J] from token J to token I
    since: jax.Array        # [C] from the state before the chunk
    until: jax.Array        # [C] to the chunk's end
    through: jax.Array      # from the state before to the chunk's end


def _chunk(decay, last, segment, start, end) -> _Chunk:
    """Return the decays of a chunk. decay: [C]. last: its last element. segment: [C].

    start, end: the segments of the token before the chunk and of its last token.
    """
    C = decay.shape[0]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]
    visible = (segment[:, None] == segment[None, :]) & (i >= j)
    # Masked before exp, because other differences may be positive.
    between = jnp.exp(jnp.where(visible, decay[:, None] - decay[None, :], -jnp.inf))
    until = jnp.exp(jnp.where(segment == end, last - decay, -jnp.inf))
    return _Chunk(between, jnp.where(segment == start, jnp.exp(decay), 0.0), until,
                  jnp.where(start == end, jnp.exp(last), 0.0))


def _of_row(z, C: int, decay_ref, segments) -> tuple:
    """Return (the tokens, `_Chunk`) of chunk z. The refs are whole rows."""
    segment_ref, start_ref, end_ref = segments
    at = pl.ds(z * C, C)
    return at, _chunk(decay_ref[at], decay_ref[z * C + C - 1], segment_ref[at], start_ref[z], end_ref[z])


def _rows(launch: Launch, k, N: int, columns: int):
    """Return the specs of whole rows for a grid (blocks of columns, N, B).

    They are the specs of keys, of w, of `columns` of the values, of decays, of segments, of states [Z, B, N, H, V], and
    of one state.
    """
    (B, T, K, H), G = k.shape, N // k.shape[2]
    Z = T // launch.chunk
    by_chunk = pl.BlockSpec((None, Z), lambda i, n, b: (b, 0))
    return (pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n // G, 0)),
            pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, T, None, columns), lambda i, n, b: (b, 0, n, i)),
            pl.BlockSpec((None, None, T), lambda i, n, b: (b, n, 0)),
            (pl.BlockSpec((None, T), lambda i, n, b: (b, 0)), by_chunk, by_chunk),
            pl.BlockSpec((Z, None, None, H, columns), lambda i, n, b: (0, b, n, 0, i)),
            pl.BlockSpec((None, None, H, columns), lambda i, n, b: (b, n, 0, i)))


# ---- the triangular matrix of every chunk ----------------------------------------------------------------------------


def _inside_kernel(k_ref, v_ref, decay_ref, beta_ref, segments, states_ref, u_ref, w_ref, T_ref):
    """Compute u and w of one chunk and head. If the state is given, compute u - w S instead of u, and the inverse."""
    segment_ref, start_ref, end_ref = segments
    z, C = pl.program_id(0), k_ref.shape[0]
    k, beta = k_ref[...], beta_ref[...]
    chunk = _chunk(decay_ref[...], decay_ref[C - 1], segment_ref[...], start_ref[z], end_ref[z])
    below = jnp.arange(C)[:, None] > jnp.arange(C)[None, :]
    T = inverse(jnp.where(below, dot(k, k.T) * chunk.between * beta[:, None], 0.0))
    if T_ref is not None:
        T_ref[...] = T
    T *= beta[None, :]
    w = split_dot(T * chunk.since[None, :], k).astype(w_ref.dtype)
    w_ref[...] = w
    u = split_dot(T, v_ref[...])
    u = u if states_ref is None else u - dot(w, states_ref[...])
    u_ref[...] = u.astype(u_ref.dtype)


def _inside(launch: Launch, k, v, decay, beta, segments, states=None):
    """Return u [B, T, N, V], w [B, T, N, H]. With states: u - w S, w, and the inverses [B, N, Z, C, C] float32."""
    (B, T, _, H), (N, V), C, array = k.shape, v.shape[2:], launch.chunk, jax.ShapeDtypeStruct
    of, row, rows, state, inverse = chunks(launch, k, N)
    known = partial(spec_for, states)
    outputs = call(
        launch, _inside_kernel, "inside" if states is None else "inside_again", 4, 1,
        grid=(T // C, N, B), in_specs=[of(H, True), of(V), row, row, rows, known(state(H, V))],
        out_specs=(of(V), of(H), known(inverse)),
        out_shape=(array(v.shape, v.dtype), array((B, T, N, H), v.dtype),
                   known(array((B, N, T // C, C, C), jnp.float32))))(k, v, decay, beta, segments, states)
    return outputs[:2] if states is None else outputs


# ---- from chunk to chunk ---------------------------------------------------------------------------------------------


def _forward_kernel(q_ref, k_ref, u_ref, w_ref, decay_ref, segments, S0_ref, o_ref, states_ref, end_ref, *, C: int):
    def visit(z, S):
        at, chunk = _of_row(z, C, decay_ref, segments)
        k = k_ref[at, :]
        low = S.astype(k.dtype)
        new = u_ref[at, :].astype(jnp.float32) if u_ref is not None else 0.0
        if w_ref is not None:
            new -= dot(w_ref[at, :], low)
        if q_ref is not None:
            q = q_ref[at, :]
            scores = (dot(q, k.T) * chunk.between).astype(k.dtype)
            o = dot(q, low) * chunk.since[:, None] + dot(scores, new.astype(k.dtype))
            o_ref[at, :] = o.astype(o_ref.dtype)
            states_ref[z] = low
        return chunk.through * S + dot(k.T, (new * chunk.until[:, None]).astype(k.dtype))

    S0 = jnp.zeros(end_ref.shape, jnp.float32) if S0_ref is None else S0_ref[...]
    end_ref[...] = lax.fori_loop(0, k_ref.shape[0] // C, visit, S0)


def _forward(launch: Launch, q, k, u, w, decay, segments, S0, kept):
    """Return (o, states [Z, B, N, H, V], end [B, N, H, V]); without q only the end. u None means zeros."""
    (B, T, _, H), N = k.shape, decay.shape[1]
    V, Z = (H if u is None else u.shape[3]), T // launch.chunk
    columns = min(launch.columns, V)
    key, key_of_w, value, row, rows, states, state = _rows(launch, k, N, columns)
    array, out = jax.ShapeDtypeStruct, partial(spec_for, q)
    o, passed, end = call(
        launch, partial(_forward_kernel, C=launch.chunk), "summary" if q is None else "forward", 4, 2, w is not None,
        grid=(V // columns, N, B),
        in_specs=[out(key), key, spec_for(u, value), spec_for(w, key_of_w), row, rows, spec_for(S0, state)],
        out_specs=(out(value), out(states), state),
        out_shape=(out(array((B, T, N, V), k.dtype)), out(array((Z, B, N, H, V), k.dtype)),
                   array((B, N, H, V), jnp.float32)))(q, k, u, w, decay, segments, S0)
    return (o, passed, end) if kept is None else (o, kept, None)


def _reverse_kernel(q_ref, k_ref, w_ref, decay_ref, do_ref, segments, dend_ref, dnew_ref, dstates_ref, dS_ref, *,
                    C: int):
    Z = k_ref.shape[0] // C

    def visit(n, dS):
        z = Z - 1 - n
        at, chunk = _of_row(z, C, decay_ref, segments)
        q, k, do = q_ref[at, :], k_ref[at, :], do_ref[at, :]
        low = dS.astype(k.dtype)
        scores = (dot(q, k.T) * chunk.between).astype(k.dtype)
        dnew = (dot(scores.T, do) + dot(k, low) * chunk.until[:, None]).astype(k.dtype)
        if dnew_ref is not None:
            dnew_ref[at, :] = dnew
            dstates_ref[z] = low
        dS = chunk.through * dS + dot(q.T, (do * chunk.since[:, None]).astype(k.dtype))
        return dS if w_ref is None else dS - dot(w_ref[at, :].T, dnew)

    dS = jnp.zeros(dS_ref.shape, jnp.float32) if dend_ref is None else dend_ref[...]
    dS_ref[...] = lax.fori_loop(0, Z, visit, dS)


def _reverse(launch: Launch, q, k, w, decay, do, segments, dend, only_end: bool = False):
    """Return the gradients of new values [B, T, N, V], of states after chunks [Z, B, N, H, V], of S0 [B, N, H, V]."""
    (B, T, _, H), (N, V) = k.shape, do.shape[2:]
    Z, columns, array = T // launch.chunk, min(launch.columns, V), jax.ShapeDtypeStruct
    key, key_of_w, value, row, rows, states, state = _rows(launch, k, N, columns)
    out = partial(spec_for, None if only_end else do)
    return call(
        launch, partial(_reverse_kernel, C=launch.chunk), "reverse" + "_end" * only_end, 4, 2, w is not None,
        grid=(V // columns, N, B),
        in_specs=[key, key, spec_for(w, key_of_w), row, value, rows, spec_for(dend, state)],
        out_specs=(out(value), out(states), state),
        out_shape=(out(array(do.shape, k.dtype)), out(array((Z, B, N, H, V), k.dtype)),
                   array((B, N, H, V), jnp.float32)))(q, k, w, decay, do.astype(k.dtype), segments, dend)


# ---- all other gradients ---------------------------------------------------------------------------------------------


def _gradients_kernel(q_ref, k_ref, decay_ref, segments, do_ref, new_ref, dnew_ref, states_ref, dstates_ref, dq_ref,
                      dk_ref, dw_ref, ddecay_ref, *, heads: int):
    """Compute the gradients of some columns of q, k and w, for one key head and all of its value heads.

    They are the gradients through o = since · (q S) + (q kᵀ · between) new and S' = through · S + kᵀ (until · new),
    where new = u - w S. since, between, until and through are the decays of `_Chunk`.
    """
    segment_ref, start_ref, end_ref = segments
    z, C = pl.program_id(0), k_ref.shape[0]
    q, k, at = q_ref[...], k_ref[...], jnp.arange(C)
    start, end, segment = start_ref[z], end_ref[z], segment_ref[...]

    def head(n, sums):
        dq_sum, dk_sum = sums
        chunk = _chunk(decay_ref[n, :], decay_ref[n, C - 1], segment, start, end)
        do, new, S, dS = do_ref[:, n, :], new_ref[:, n, :], states_ref[n], dstates_ref[n]
        through = chunk.through * jnp.sum(jnp.sum(S.astype(jnp.float32) * dS.astype(jnp.float32), 1), 0)
        dqk = (dot(do, new.T) * chunk.between).astype(k.dtype)
        dq = dot(do, S.T) * chunk.since[:, None] + dot(dqk, k)
        dwritten = dot(new, dS.T) * chunk.until[:, None]
        dlast = through + jnp.sum(jnp.sum(k * dwritten, 1), 0)
        dk = dwritten + dot(dqk.T, q)
        if dw_ref is not None:
            dw_ref[:, n, :] = (-dot(dnew_ref[:, n, :], S.T)).astype(dw_ref.dtype)
        # A token's decay multiplies all that the token reads and divides all that it writes.
        ddecay_ref[n, :] = jnp.sum(q * dq, 1) - jnp.sum(k * dk, 1) + jnp.where(at == C - 1, dlast, 0.0)
        return dq_sum + dq, dk_sum + dk

    zeros = jnp.zeros(k_ref.shape, jnp.float32)
    dq, dk = lax.fori_loop(0, heads, head, (zeros, zeros)) if heads > 1 else head(0, (zeros, zeros))
    dq_ref[...], dk_ref[...] = dq.astype(dq_ref.dtype), dk.astype(dk_ref.dtype)


def _gradients(launch: Launch, q, k, decay, segments, do, new, dnew, states, dstates, delta: bool):
    """Return dq, dk, dw (None without the delta rule) and ddecay, without the parts that come through u and w."""
    (B, T, K, H), (N, V), array = k.shape, do.shape[2:], jax.ShapeDtypeStruct
    G, width = N // K, min(H, launch.key_columns)
    blocks = H // width
    of, row, rows, state, _ = chunks(launch, k, N, G, blocks)
    by_block = pl.BlockSpec((None, None, *row.block_shape[1:]), lambda z, n, b: (n % blocks, b, n // blocks, z))
    key = of(width, True, True)
    dq, dk, dw, ddecay = call(
        launch, partial(_gradients_kernel, heads=G), "gradients", 8, 1, delta, grid=(T // launch.chunk, K * blocks, B),
        in_specs=[key, key, row, rows, of(V), of(V), of(V) if delta else None, state(width, V), state(width, V)],
        out_specs=(key, key, of(width, part=True) if delta else None, by_block),
        out_shape=(array(q.shape, q.dtype), array(k.shape, k.dtype),
                   array((B, T, N, H), k.dtype) if delta else None, array((blocks, *decay.shape), jnp.float32)),
    )(q, k, decay, segments, do.astype(k.dtype), new, dnew if delta else None, states, dstates)
    return dq, dk, dw, ddecay.sum(0)


def _inside_gradients_kernel(k_ref, v_ref, decay_ref, beta_ref, segments, T_ref, du_ref, dw_ref, dk_ref, dv_ref,
                             ddecay_ref, dbeta_ref):
    """Compute gradients through u = T · beta · v and w = T · beta · since · k.

    T = (I + A)^-1, where A is beta · (k kᵀ) · between below the diagonal. since and between are the decays of `_Chunk`.
    """
    segment_ref, start_ref, end_ref = segments
    z, C = pl.program_id(0), k_ref.shape[0]
    k, beta, T, dw, at = k_ref[...], beta_ref[...], T_ref[...], dw_ref[...], jnp.arange(C)
    chunk = _chunk(decay_ref[...], decay_ref[C - 1], segment_ref[...], start_ref[z], end_ref[z])
    scaled = T * beta[None, :]
    since = scaled * chunk.since[None, :]
    dk = dot(since.T.astype(k.dtype), dw)
    dsince = dot(dw, k.T)
    ddecay = jnp.sum(dsince * since, 0)
    du = du_ref[...]
    dscaled = dot(du, v_ref[...].T) + dsince * chunk.since[None, :]
    dbeta = jnp.sum(dscaled * T, 0)
    dv_ref[...] = split_dot(scaled.T, du).astype(dv_ref.dtype)
    dA = -dot(dot(T.T, dscaled * beta[None, :], CLOSE), T.T, CLOSE) * chunk.between
    dA = jnp.where(at[:, None] > at[None, :], dA, 0.0)
    dA_kk = dA * dot(k, k.T)
    dbeta_ref[...] = dbeta + jnp.sum(dA_kk, 1)
    dA_kk *= beta[:, None]
    ddecay_ref[...] = ddecay + jnp.sum(dA_kk, 1) - jnp.sum(dA_kk, 0)
    dkk = dA * beta[:, None]
    dk_ref[...] = (dk + dot((dkk + dkk.T).astype(k.dtype), k)).astype(dk_ref.dtype)


def _inside_gradients(launch: Launch, k, v, decay, beta, segments, T, du, dw):
    """Return the summand for dk of each value head [B, T, N, H]; dv; the summand for ddecay; dbeta."""
    (B, length, _, H), (N, V), array = k.shape, v.shape[2:], jax.ShapeDtypeStruct
    of, row, rows, _, inverse = chunks(launch, k, N)
    decays = array(decay.shape, jnp.float32)
    return call(
        launch, _inside_gradients_kernel, "inside_gradients", 8, 1, grid=(length // launch.chunk, N, B),
        in_specs=[of(H, True), of(V), row, row, rows, inverse, of(V), of(H)], out_specs=(of(H), of(V), row, row),
        out_shape=(array((B, length, N, H), k.dtype), array(v.shape, v.dtype), decays, decays),
    )(k, v, decay, beta, segments, T, du, dw)
