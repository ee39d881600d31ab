"""`recurrence` with decays per channel of the key (KDA) as Pallas GPU kernels; `recurrence_pallas` chooses them.

    pairs_ij = sum_h x_ih y_jh e^{decay_ih - decay_jh}, i >= j, where x = q or k, and y = k

The forward has two kernels. One computes the parts of each chunk that do not depend on its state: pairs, inverse, and
the decayed operands of later matmuls. The other visits a row's chunks in order. The backward has four kernels: the
first kernel again, one that visits the chunks from the right, and two for all other gradients. Of the last two, the
first computes the gradients of the inverse, and the second the gradients of the pairs, by columns of keys. Pairs are
exact however strong the decays, because no exponent is positive (`_between`, `_neighbours`). Arrays in global memory
have v's dtype, except for the inverses, which are float32. The kernels use no atomics, so they are deterministic.

Sources: KDA arXiv:2510.26692; blocks that measure decays from a token between them, arXiv:2312.06635. This module knows
no mesh.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from meshtrain.kernels.recurrence import LEAF
from meshtrain.kernels.recurrence_blocks import CHANNELS, CLOSE, Launch, call, chunks, dot, inverse, spec_for, split_dot


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(launch: Launch, across, q, k, v, decay, beta, segments, S0, kept):
    """Return (o [B, T, N, V], states [Z, B, N, H, V], end [B, N, H, V]) of whole chunks.

    q, k: [B, T, N, H]. v: [B, T, N, V]. decay: [B, T, N, H] since the start of the document or chunk, float32. beta:
    [B, N, T], float32. segments: (of tokens, of the token before each chunk, of each chunk's last token). S0: the state
    before the row, or None. kept: the states before each chunk, or None. across: see `recurrence.recurrence`.
    """
    u, w, reads, writes, scores = _inside(launch, q, k, v, decay, beta, segments)
    through = _through(launch, decay, segments)
    if across is not None and kept is None:
        _, _, X = _forward(launch, None, writes, u, w, None, through, None)
        S0 = across(_multiplier(launch, writes, w, through), X[:, :, None], False)[:, :, 0]
    o, states, end = _forward(launch, reads, writes, u, w, scores, through, S0)
    return (o, states, end) if kept is None else (o, kept, None)


def _core_forward(launch, across, q, k, v, decay, beta, segments, S0, kept):
    o, states, end = core(launch, across, q, k, v, decay, beta, segments, S0, kept)
    return (o, states, end), (q, k, v, decay, beta, segments, S0, states)


def _core_backward(launch, across, saved, cotangents):
    q, k, v, decay, beta, segments, S0, states = saved
    do, _, dend = cotangents            # the model does not use the states as an output
    do = do.astype(k.dtype)
    new, w, reads, writes, scores, T = _inside(launch, q, k, v, decay, beta, segments, states)
    through = _through(launch, decay, segments)
    reverse = partial(_reverse, launch, reads, writes, w, scores, through, do)
    if across is not None:
        M = _multiplier(launch, writes, w, through).swapaxes(-1, -2)        # M is transposed from the right
        dend = across(M, reverse(None, only_end=True)[2][:, :, None], True)[:, :, 0]
    dnew, dstates, dS0 = reverse(dend)
    dv, dsince, dkk, dqk, dbeta = _inside_gradients(launch, k, v, decay, beta, segments, do, new, dnew, T, states)
    dq, dk, ddecay, more_dbeta = _gradients(launch, q, k, decay, beta, segments, do, new, dsince, dkk, dqk, states,
                                            dstates)
    return dq, dk, dv, ddecay, dbeta + more_dbeta, None, None if S0 is None else dS0, None


core.defvjp(_core_forward, _core_backward)


def _through(launch: Launch, decay, segments):
    """Return the decays from the state before each chunk to its end [B, N, Z, H]; 0 between documents."""
    _, starts_BZ, ends_BZ = segments
    last = decay[:, launch.chunk - 1::launch.chunk]
    return jnp.where((starts_BZ == ends_BZ)[..., None, None], jnp.exp(last), 0).swapaxes(1, 2)


def _multiplier(launch: Launch, writes, w, through):
    (B, N, _, H) = through.shape
    eye = jnp.broadcast_to(jnp.eye(H, dtype=jnp.float32), (B, N, H, H))
    return _forward(launch, None, writes, None, w, None, through, eye)[2][:, :, None]


# ---- pairs of a chunk's tokens: refs are of one row, chunk and head --------------------------------------------------


def _levels(C: int) -> tuple[int, int]:
    """Return (first, stop) of the levels. A level has halves of 2^level tokens, from LEAF up to half the chunk."""
    return LEAF.bit_length() - 1, C.bit_length() - 1


def _between(level: int, columns, decay_ref, segment_ref):
    """Return (e [C, H], joined [I, J]) for halves of 2^level tokens.

    joined: the pairs of a token in a later half with a token in the earlier half before it. Their decay is e_i e_j. e_i
    is the decay from the later half's first token to the reader i. e_j is the decay from the writer j to that first
    token. A document that reaches both halves contains the first token.
    """
    C = decay_ref.shape[0]
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]
    row = jnp.arange(C)
    anchor = ((row >> level + 1) << level + 1) + (1 << level)
    apart = decay_ref[:, columns] - decay_ref[anchor, columns]
    apart = jnp.where((i & (1 << level)) != 0, apart, -apart)
    e = jnp.exp(jnp.where((segment_ref[...] == segment_ref[anchor])[:, None], apart, -jnp.inf))
    joined = ((i >> level + 1) == (j >> level + 1)) & ((i & (1 << level)) != 0) & ((j & (1 << level)) == 0)
    return e, joined


def _neighbours(back: int, columns, decay_ref, segment_ref):
    """Return (other, e [C, H]), where e is the decay between each token and the token `other`.

    other: the token `back` before it, or after it if `back` is negative. e is 0 if `other` is in another block of LEAF
    or in another document.
    """
    row = jnp.arange(decay_ref.shape[0])
    other = (row & -LEAF) + ((row - back) & LEAF - 1)
    there = ((other < row) if back > 0 else (other > row)) & (segment_ref[...] == segment_ref[other])
    apart = decay_ref[:, columns] - decay_ref[other, columns]
    return other, jnp.exp(jnp.where(there[:, None], apart if back > 0 else -apart, -jnp.inf))


def _pairs(q_ref, k_ref, decay_ref, segment_ref, width: int):
    """Return (pairs of queries with keys, pairs of keys with keys below the diagonal), each [C, C] float32. width:
    columns of the keys that are read at a time."""
    C, H = k_ref.shape
    i, j = jnp.arange(C)[:, None], jnp.arange(C)[None, :]

    def some(n, sums):
        of_queries, of_keys = sums
        columns = pl.ds(n * width, width)
        q, k = q_ref[:, columns].astype(jnp.float32), k_ref[:, columns].astype(jnp.float32)
        of_queries += jnp.where(i == j, jnp.sum(q * k, 1)[:, None], 0.0)
        for back in range(1, LEAF):
            other, e = _neighbours(back, columns, decay_ref, segment_ref)
            writer, own = k_ref[other, columns] * e, j == i - back
            of_queries += jnp.where(own, jnp.sum(q * writer, 1)[:, None], 0.0)
            of_keys += jnp.where(own, jnp.sum(k * writer, 1)[:, None], 0.0)
        def level(level, sums):
            e, joined = _between(level, columns, decay_ref, segment_ref)
            reader, writer = (q * e).astype(k_ref.dtype), (k * e).astype(k_ref.dtype)
            return (sums[0] + jnp.where(joined, dot(reader, writer.T), 0.0),
                    sums[1] + jnp.where(joined, dot(writer, writer.T), 0.0))
        return lax.fori_loop(*_levels(C), level, (of_queries, of_keys))
    zeros = jnp.zeros((C, C), jnp.float32)
    return lax.fori_loop(0, H // width, some, (zeros, zeros))


def _ends(segments):
    """Return which tokens [C, 1] are of the document before the chunk, and which of the document at its end."""
    segment_ref, start_ref, end_ref = segments
    z, segment = pl.program_id(0), segment_ref[...][:, None]
    return segment == start_ref[z], segment == end_ref[z]


def _edges(columns, decay_ref, ends):
    """Return the decays [C, H] from the state before the chunk, and to the chunk's end; 0 between documents."""
    of_start, of_end = ends
    decay, last = decay_ref[:, columns], decay_ref[decay_ref.shape[0] - 1, columns][None, :]
    return jnp.where(of_start, jnp.exp(decay), 0.0), jnp.exp(jnp.where(of_end, last - decay, -jnp.inf))


# ---- inside a chunk --------------------------------------------------------------------------------------------------


def _inside_kernel(q_ref, k_ref, v_ref, decay_ref, beta_ref, segments, states_ref, u_ref, w_ref, reads_ref, writes_ref,
                   scores_ref, T_ref, *, width: int):
    """Compute u, w, decayed queries and keys, and scores of one chunk. With the state: u - w S, and the inverse."""
    H, beta, dtype, ends = k_ref.shape[1], beta_ref[...], w_ref.dtype, _ends(segments)
    scores, of_keys = _pairs(q_ref, k_ref, decay_ref, segments[0], width)
    scores_ref[...] = scores.astype(dtype)
    T = inverse(of_keys * beta[:, None])
    if T_ref is not None:
        T_ref[...] = T
    T *= beta[None, :]

    def some(n, u):
        columns = pl.ds(n * width, width)
        since, until = _edges(columns, decay_ref, ends)
        k = k_ref[:, columns]
        reads_ref[:, columns] = (q_ref[:, columns] * since).astype(dtype)
        writes_ref[:, columns] = (k * until).astype(dtype)
        w = dot(T, k * since, CLOSE).astype(dtype)
        w_ref[:, columns] = w
        return u if states_ref is None else u - dot(w, states_ref[columns, :])
    u_ref[...] = lax.fori_loop(0, H // width, some, split_dot(T, v_ref[...])).astype(u_ref.dtype)


def _inside(launch: Launch, q, k, v, decay, beta, segments, states=None):
    """Return u [B, T, N, V], w, decayed queries and keys [B, T, N, H], and scores [B, N, Z, C, C].

    If the states are given, u - w S replaces u, and the inverses [B, N, Z, C, C] float32 are added at the end.
    """
    (B, T, N, H), V, C, array = k.shape, v.shape[3], launch.chunk, jax.ShapeDtypeStruct
    of, row, rows, state, square = chunks(launch, k, N)
    known, keys = partial(spec_for, states), array(k.shape, v.dtype)
    outputs = call(
        launch, partial(_inside_kernel, width=min(H, launch.key_columns)),
        CHANNELS + ("inside" if states is None else "inside_again"), 8, 1, grid=(T // C, N, B),
        in_specs=[of(H), of(H), of(V), of(H), row, rows, known(state(H, V))],
        out_specs=(of(V), of(H), of(H), of(H), square, known(square)),
        out_shape=(array(v.shape, v.dtype), keys, keys, keys, array((B, N, T // C, C, C), v.dtype),
                   known(array((B, N, T // C, C, C), jnp.float32))))(q, k, v, decay, beta, segments, states)
    return outputs[:5] if states is None else outputs


# ---- from chunk to chunk ---------------------------------------------------------------------------------------------


def _forward_kernel(reads_ref, writes_ref, u_ref, w_ref, scores_ref, through_ref, S0_ref, o_ref, states_ref, end_ref,
                    *, C: int):
    def visit(z, S):
        at, low = pl.ds(z * C, C), S.astype(writes_ref.dtype)
        new = (0.0 if u_ref is None else u_ref[at, :].astype(jnp.float32)) - dot(w_ref[at, :], low)
        new = new.astype(low.dtype)
        if reads_ref is not None:
            o_ref[at, :] = (dot(reads_ref[at, :], low) + dot(scores_ref[z], new)).astype(o_ref.dtype)
            states_ref[z] = low
        return through_ref[z, :][:, None] * S + dot(writes_ref[at, :].T, new)

    S0 = jnp.zeros(end_ref.shape, jnp.float32) if S0_ref is None else S0_ref[...]
    end_ref[...] = lax.fori_loop(0, writes_ref.shape[0] // C, visit, S0)


def _rows(T: int, Z: int, H: int, columns: int):
    """Return the specs of whole rows for a grid (blocks of columns, N, B).

    They are the specs of keys, of `columns` of the values, of scores [B, N, Z, C, C], of decays of chunks [B, N, Z, H],
    of states [Z, B, N, H, V], and of one state.
    """
    C = T // Z
    return (pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, T, None, columns), lambda i, n, b: (b, 0, n, i)),
            pl.BlockSpec((None, None, Z, C, C), lambda i, n, b: (b, n, 0, 0, 0)),
            pl.BlockSpec((None, None, Z, H), lambda i, n, b: (b, n, 0, 0)),
            pl.BlockSpec((Z, None, None, H, columns), lambda i, n, b: (0, b, n, 0, i)),
            pl.BlockSpec((None, None, H, columns), lambda i, n, b: (b, n, 0, i)))


def _forward(launch: Launch, reads, writes, u, w, scores, through, S0):
    """Return (o, states [Z, B, N, H, V], end [B, N, H, V]); without reads only the end. u None means zeros."""
    (B, T, N, H), Z, array = writes.shape, through.shape[2], jax.ShapeDtypeStruct
    V = H if u is None else u.shape[3]
    columns = min(launch.columns, V)
    key, value, square, decays, states, state = _rows(T, Z, H, columns)
    out = partial(spec_for, reads)
    return call(
        launch, partial(_forward_kernel, C=launch.chunk), CHANNELS + ("summary" if reads is None else "forward"), 4, 2,
        grid=(V // columns, N, B),
        in_specs=[out(key), key, spec_for(u, value), key, out(square), decays, spec_for(S0, state)],
        out_specs=(out(value), out(states), state),
        out_shape=(out(array((B, T, N, V), writes.dtype)), out(array((Z, B, N, H, V), writes.dtype)),
                   array((B, N, H, V), jnp.float32)))(reads, writes, u, w, scores, through, S0)


def _reverse_kernel(reads_ref, writes_ref, w_ref, scores_ref, through_ref, do_ref, dend_ref, dnew_ref, dstates_ref,
                    dS_ref, *, C: int):
    Z = writes_ref.shape[0] // C

    def visit(n, dS):
        z = Z - 1 - n
        at, low, do = pl.ds(z * C, C), dS.astype(writes_ref.dtype), do_ref[pl.ds(z * C, C), :]
        dnew = (dot(scores_ref[z].T, do) + dot(writes_ref[at, :], low)).astype(low.dtype)
        if dnew_ref is not None:
            dnew_ref[at, :] = dnew
            dstates_ref[z] = low
        return through_ref[z, :][:, None] * dS + dot(reads_ref[at, :].T, do) - dot(w_ref[at, :].T, dnew)

    dS = jnp.zeros(dS_ref.shape, jnp.float32) if dend_ref is None else dend_ref[...]
    dS_ref[...] = lax.fori_loop(0, Z, visit, dS)


def _reverse(launch: Launch, reads, writes, w, scores, through, do, dend, only_end: bool = False):
    """Return the gradients of new values [B, T, N, V], of states after chunks [Z, B, N, H, V], of S0 [B, N, H, V]."""
    (B, T, N, H), Z, V, array = writes.shape, through.shape[2], do.shape[3], jax.ShapeDtypeStruct
    columns = min(launch.columns, V)
    key, value, square, decays, states, state = _rows(T, Z, H, columns)
    out = partial(spec_for, None if only_end else do)
    return call(
        launch, partial(_reverse_kernel, C=launch.chunk), CHANNELS + "reverse" + "_end" * only_end, 4, 2,
        grid=(V // columns, N, B),
        in_specs=[key, key, key, square, decays, value, spec_for(dend, state)],
        out_specs=(out(value), out(states), state),
        out_shape=(out(array(do.shape, do.dtype)), out(array((Z, B, N, H, V), do.dtype)),
                   array((B, N, H, V), jnp.float32)))(reads, writes, w, scores, through, do, dend)


# ---- all other gradients ---------------------------------------------------------------------------------------------


def _inside_gradients_kernel(k_ref, v_ref, decay_ref, beta_ref, segments, do_ref, new_ref, dnew_ref, T_ref, states_ref,
                             dv_ref, dsince_ref, dkk_ref, dqk_ref, dbeta_ref, *, width: int):
    """Compute gradients through new = T · beta · (v - (since · k) S).

    T = (I + A)^-1, where A = beta · pairs of keys. The gradients are those of v, of since · k, of A / beta, of the
    pairs of queries, and of the factor beta next to T. since: the decays from the state before the chunk.
    """
    H, dtype, ends = k_ref.shape[1], k_ref.dtype, _ends(segments)
    beta, T, dnew = beta_ref[...], T_ref[...], dnew_ref[...]
    scaled = T * beta[None, :]
    dv_ref[...] = split_dot(scaled.T, dnew).astype(dv_ref.dtype)
    dqk_ref[...] = dot(do_ref[...], new_ref[...].T).astype(dtype)

    def some(n, dscaled):
        columns = pl.ds(n * width, width)
        since, _ = _edges(columns, decay_ref, ends)
        dw = -dot(dnew, states_ref[columns, :].T).astype(dtype)
        dsince_ref[:, columns] = dot(scaled.T.astype(dtype), dw).astype(dtype)
        return dscaled + dot(dw, (k_ref[:, columns] * since).astype(dtype).T)
    dscaled = lax.fori_loop(0, H // width, some, dot(dnew, v_ref[...].T))
    dbeta_ref[...] = jnp.sum(dscaled * T, 0)
    dkk_ref[...] = -dot(dot(T.T, dscaled * beta[None, :], CLOSE), T.T, CLOSE).astype(dtype)


def _inside_gradients(launch: Launch, k, v, decay, beta, segments, do, new, dnew, T, states):
    """Return the gradients that `_inside_gradients_kernel` computes.

    They are dv; that of since · k [B, T, N, H]; those of A / beta and of pairs of queries [B, N, Z, C, C], without a
    mask; and a part of dbeta.
    """
    (B, length, N, H), V, C, array = k.shape, v.shape[3], launch.chunk, jax.ShapeDtypeStruct
    of, row, rows, state, square = chunks(launch, k, N)
    pairs = array((B, N, length // C, C, C), k.dtype)
    return call(
        launch, partial(_inside_gradients_kernel, width=min(H, launch.key_columns)), CHANNELS + "inside_gradients",
        8, 1, grid=(length // C, N, B),
        in_specs=[of(H), of(V), of(H), row, rows, of(V), of(V), of(V), square, state(H, V)],
        out_specs=(of(V), of(H), square, square, row),
        out_shape=(array(v.shape, v.dtype), array(k.shape, k.dtype), pairs, pairs, array(beta.shape, jnp.float32)),
    )(k, v, decay, beta, segments, do, new, dnew, T, states)


def _gradients_kernel(q_ref, k_ref, decay_ref, beta_ref, segments, do_ref, new_ref, dsince_ref, dkk_ref, dqk_ref,
                      states_ref, dstates_ref, dq_ref, dk_ref, ddecay_ref, dbeta_ref):
    """Compute the gradients of some columns of q, k and their decays, and the summands of these columns for dbeta."""
    segment_ref, start_ref, end_ref = segments
    z, (C, H), dtype = pl.program_id(0), k_ref.shape, k_ref.dtype
    i, j, whole, at = jnp.arange(C)[:, None], jnp.arange(C)[None, :], slice(None), jnp.arange(C)
    q, k, beta = q_ref[...].astype(jnp.float32), k_ref[...].astype(jnp.float32), beta_ref[...]
    S, dS = states_ref[...], dstates_ref[...]
    ends = _ends(segments)
    since, until = _edges(whole, decay_ref, ends)
    through = jnp.where(start_ref[z] == end_ref[z], jnp.exp(decay_ref[C - 1, :]), 0.0)
    # dk has two parts. dk_read is the gradient of keys that read, at first without beta and since k. dk_written is that
    # of keys as written.
    dq, dk_written = dot(do_ref[...], S.T) * since, dot(new_ref[...], dS.T) * until
    dk_read = jnp.zeros((C, H), jnp.float32)
    dlast = through * jnp.sum(S.astype(jnp.float32) * dS.astype(jnp.float32), 1) + jnp.sum(k * dk_written, 0)

    def keep_where(ref, mask):
        return jnp.where(mask, ref[...].astype(jnp.float32), 0.0)
    same = jnp.sum(keep_where(dqk_ref, i == j), 1)[:, None]
    dq += same * k
    dk_written += same * q
    for back in range(1, LEAF):
        own = j == i - back
        kk, qk = keep_where(dkk_ref, own), keep_where(dqk_ref, own)
        other, e = _neighbours(back, whole, decay_ref, segment_ref)
        writer = k_ref[other, :] * e
        dk_read += jnp.sum(kk, 1)[:, None] * writer
        dq += jnp.sum(qk, 1)[:, None] * writer
        other, e = _neighbours(-back, whole, decay_ref, segment_ref)
        of_keys, of_queries = jnp.sum(kk * beta[:, None], 0)[:, None], jnp.sum(qk, 0)[:, None]
        dk_written += (of_keys * k_ref[other, :] + of_queries * q_ref[other, :]) * e

    def level(level, sums):
        dq, dk_read, dk_written = sums
        e, joined = _between(level, whole, decay_ref, segment_ref)
        # Read again, as below, so that fewer registers spill.
        kk, qk = keep_where(dkk_ref, joined), keep_where(dqk_ref, joined).astype(dtype)
        ke, qe = (k_ref[...] * e).astype(dtype), (q_ref[...] * e).astype(dtype)
        written = dot((kk * beta[:, None]).T.astype(dtype), ke) + dot(qk.T, qe)
        return dq + dot(qk, ke) * e, dk_read + dot(kk.astype(dtype), ke) * e, dk_written + written * e
    dq, dk_read, dk_written = lax.fori_loop(*_levels(C), level, (dq, dk_read, dk_written))
    q, k = q_ref[...].astype(jnp.float32), k_ref[...].astype(jnp.float32)
    dbeta_ref[...] = jnp.sum(k * dk_read, 1)
    dk_read = dk_read * beta[:, None] + dsince_ref[...] * _edges(whole, decay_ref, ends)[0]
    # A token's decay multiplies all that the token reads and divides all that it writes.
    ddecay_ref[...] = q * dq + k * (dk_read - dk_written) + jnp.where(at[:, None] == C - 1, dlast[None, :], 0.0)
    dq_ref[...], dk_ref[...] = dq.astype(dq_ref.dtype), (dk_read + dk_written).astype(dk_ref.dtype)


def _gradients(launch: Launch, q, k, decay, beta, segments, do, new, dsince, dkk, dqk, states, dstates):
    """Return dq, dk, ddecay, and the part of dbeta that comes through A."""
    (B, T, N, H), V, array = k.shape, do.shape[3], jax.ShapeDtypeStruct
    width = min(H, launch.key_columns // 2)     # with all columns, 750 bytes of a thread spill
    blocks = H // width
    of, row, rows, state, square = chunks(launch, k, N, None, blocks)
    by_block = pl.BlockSpec((None, None, *row.block_shape[1:]), lambda z, n, b: (n % blocks, b, n // blocks, z))
    key, states_part = of(width, part=True), state(width, V)
    dq, dk, ddecay, dbeta = call(
        launch, _gradients_kernel, CHANNELS + "gradients", 8, 1, grid=(T // launch.chunk, N * blocks, B),
        in_specs=[key, key, key, row, rows, of(V), of(V), key, square, square, states_part, states_part],
        out_specs=(key, key, key, by_block),
        out_shape=(array(q.shape, q.dtype), array(k.shape, k.dtype), array(k.shape, jnp.float32),
                   array((blocks, *beta.shape), jnp.float32)),
    )(q, k, decay, beta, segments, do, new, dsince, dkk, dqk, states, dstates)
    return dq, dk, ddecay, dbeta.sum(0)
