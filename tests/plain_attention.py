"""Attention as plainly as it stands, for comparison: whole scores. `attend` is differentiated by jax, in any dtype;
`forward` and `backward` are numpy in float64, of chunks of queries and keys, and compile nothing."""
import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.kernels import products
from meshtrain.kernels.engine import CAUSAL, MASKED, Mask, Scores
from meshtrain.parallel.context.attention import RunAttention


def attend(q_BTNH, k_BSKH, v_BSKV, segments_BT, mask: Mask = CAUSAL, scores: Scores = Scores(), sinks_N=None):
    """Attention [B, T, N, V]."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    s_BKGTS = products.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, jnp.float32) * scores.scale_for(H)
    s_BKGTS = scores.softcap * jnp.tanh(s_BKGTS / scores.softcap) if scores.softcap else s_BKGTS
    apart = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_BTS = (apart >= 0) & (apart < (mask.window or T)) & (segments_BT[:, :, None] == segments_BT[:, None, :])
    s_BKGTS = jnp.where(seen_BTS[:, None, None], s_BKGTS, MASKED)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.reshape(K, -1, 1, 1), (*s_BKGTS.shape[:4], 1))
        s_BKGTS = jnp.concatenate([s_BKGTS, sinks], -1)
    p_BKGTS = jax.nn.softmax(s_BKGTS, -1)[..., :T].astype(q_BTNH.dtype)
    return products.einsum("BKGTS,BSKV->BTKGV", p_BKGTS, v_BSKV).reshape(B, T, N, -1)


def by_engine(engine, method, layout, *operands, **more):
    """Attention of a run in which one engine computes all layers. method: None if sequences are not split."""
    return RunAttention(lambda *_: engine, method)(layout, *operands, **more)[0]


def seen_pairs(q_segments, k_segments, mask: Mask) -> np.ndarray:
    """bool [B, T, S]."""
    seen = (q_segments[:, :, None] == k_segments[:, None, :]) | (not mask.documents)
    T, S = seen.shape[1:]
    apart = mask.ahead + np.arange(T)[:, None] - np.arange(S)
    return seen & ((apart >= 0) | (not mask.causal)) & (apart < (mask.window or T + S + mask.ahead))


def scored(q_BTNH, k_BSKH, scores: Scores) -> np.ndarray:
    """[B, N, T, S]."""
    s = np.einsum("btnh,bsnh->bnts", q_BTNH, np.repeat(k_BSKH, q_BTNH.shape[2] // k_BSKH.shape[2], 2), optimize=True)
    s = s * scores.scale_for(q_BTNH.shape[3])
    return scores.softcap * np.tanh(s / scores.softcap) if scores.softcap else s


def forward(q_BTNH, k_BSKH, v_BSKV, seen_BTS, scores: Scores = Scores()):
    """o and lse; zeros and MASKED of queries that see nothing."""
    s = np.where(seen_BTS[:, None], scored(q_BTNH, k_BSKH, scores), -np.inf)
    some = seen_BTS.any(2)[:, None, :, None]
    top = np.where(some, s.max(-1, keepdims=True), 0)
    p = np.exp(s - top)
    total = np.where(some, p.sum(-1, keepdims=True), 1)
    lse = np.where(some, top + np.log(total), MASKED)[..., 0].swapaxes(1, 2)
    v = np.repeat(v_BSKV, q_BTNH.shape[2] // v_BSKV.shape[2], 2)
    return np.einsum("bnts,bsnv->btnv", p / total, v, optimize=True), lse


def backward(q_BTNH, k_BSKH, v_BSKV, seen_BTS, o_BTNV, lse_BTN, do_BTNV, scores: Scores = Scores()):
    """dq, dk, dv of these pairs, given o and lse over all keys, these and others."""
    (B, S, K, _), (H, G) = k_BSKH.shape, (q_BTNH.shape[3], q_BTNH.shape[2] // k_BSKH.shape[2])
    many, once = lambda x: np.repeat(x, G, 2), lambda x: x.reshape(B, S, K, G, -1).sum(3)
    s = scored(q_BTNH, k_BSKH, scores)
    p = np.exp(np.where(seen_BTS[:, None], s - lse_BTN.swapaxes(1, 2)[..., None], -np.inf))
    dp = np.einsum("btnv,bsnv->bnts", do_BTNV, many(v_BSKV), optimize=True)
    ds = p * (dp - (do_BTNV * o_BTNV).sum(-1).swapaxes(1, 2)[..., None]) * scores.scale_for(H)
    ds = ds * (1 - (s / scores.softcap) ** 2) if scores.softcap else ds
    return (np.einsum("bnts,bsnh->btnh", ds, many(k_BSKH), optimize=True),
            once(np.einsum("bnts,btnh->bsnh", ds, q_BTNH, optimize=True)),
            once(np.einsum("bnts,btnv->bsnv", p, do_BTNV, optimize=True)))


# ---- segments of queries and keys ------------------------------------------------------------------------------------


def documents(rng, B: int, length: int, mean: float, edges=()) -> np.ndarray:
    """int32 [B, length]: documents numbered from 1, of `mean` tokens, that end at `edges` as well."""
    starts = rng.random((B, length)) < 1 / mean
    starts[:, [edge for edge in edges if edge < length]] = True
    return (1 + np.cumsum(starts, 1)).astype(np.int32)


EDGES = (15, 16, 17, 31, 32, 33, 48, 64, 80, 96)        # beside and at those of blocks of 16 and 32
# In all but the last the tokens of a document are neighbours.
KINDS = ("one document", "short documents", "documents of half a row", "borders on block edges",
         "borders on chunk edges", "padding", "rows that see nothing", "nothing in common", "no order")


def hidden(segments: np.ndarray, to: int) -> np.ndarray:
    """The tokens of the second quarter see nothing that has another id; another document begins behind them."""
    length = segments.shape[1]
    out = segments + np.where(np.arange(length) >= length // 2, 1000, 0)
    out[:, length // 4:length // 2] = to
    return out


def drawn_segments(kind: str, rng, B: int, T: int, S: int, mask: Mask):
    """int32 [B, T] and [B, S] of queries and keys: the same tokens if causal, else the last T and the S before them."""
    if kind == "no order":
        q = rng.integers(0, 4, (B, T)).astype(np.int32)
        return q, q if mask.causal else rng.integers(0, 4, (B, S)).astype(np.int32)
    if kind == "nothing in common" and not mask.causal:
        return np.full((B, T), 5, np.int32), np.full((B, S), 3, np.int32)
    mean = {"short documents": 4, "nothing in common": 1, "documents of half a row": S / 2, "padding": S / 3,
            "rows that see nothing": S / 3}.get(kind, 1e9)
    edges = {"borders on block edges": EDGES, "borders on chunk edges": range(0, T, max(1, T // 8))}     # of four devices
    line = documents(rng, B, T + S, mean, edges.get(kind, ()))
    q, k = (line[:, :T].copy(), line[:, :T].copy()) if mask.causal else (line[:, S:].copy(), line[:, :S].copy())
    if kind == "padding":           # the end of a row is no document; its tokens see each other
        q[:, -T // 3 + 3:] = k[:, -S // 3 + 3:] = 0
    if kind == "rows that see nothing":
        q, k = hidden(q, -1), hidden(k, -2)
        if B > 1:
            q[-1], k[-1] = -1, -2
    return q, k
