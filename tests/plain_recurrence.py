"""Linear attention as plainly as it stands, for comparison: token by token, the state dropped at each document."""
import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("delta", "channels", "sum")        # the gated delta rule, KDA, Mamba-2


def recur(q_BTKH, k_BTKH, v_BTNV, g, beta_BTN, segments_BT):
    """o [B, T, N, V], in the dtype of the inputs."""
    N = v_BTNV.shape[2]
    q, k = (jnp.repeat(x, N // x.shape[2], 2) for x in (q_BTKH, k_BTKH))
    begins = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], [(0, 0), (1, 0)])

    def token(S, now):
        q, k, v, g, beta, begins = now
        S = jnp.exp(g if g.ndim == 3 else g[..., None])[..., None] * jnp.where(begins[:, None, None, None], 0, S)
        u = v if beta is None else beta[..., None] * (v - jnp.einsum("bnh,bnhv->bnv", k, S))
        S = S + k[..., None] * u[..., None, :]
        return S, jnp.einsum("bnh,bnhv->bnv", q, S)
    start = jnp.zeros((v_BTNV.shape[0], N, k.shape[-1], v_BTNV.shape[-1]), v_BTNV.dtype)
    rows_last = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v_BTNV, g, beta_BTN, begins))
    return jnp.moveaxis(jax.lax.scan(token, start, rows_last)[1], 0, 1)


def convolve(x_BTND, w_WND, segments_BT):
    W, T = w_WND.shape[0], x_BTND.shape[1]
    y = jnp.zeros_like(x_BTND)
    for back in range(min(W, T)):
        same = segments_BT[:, back:] == segments_BT[:, :T - back]
        tap = jnp.where(same[..., None, None], x_BTND[:, :T - back], 0) * w_WND[W - 1 - back]
        y = y.at[:, back:].add(tap)
    return y


def drawn(kind: str, T: int, seed: int = 0, B: int = 2, K: int = 2, G: int = 2, H: int = 8, V: int = 6,
          decay: float = 0.3, alike: float = 0.0, beta: float | None = None):
    """float64 (q, k, v, g, beta). decay: typical -g per token. alike: share of every key that is one fixed vector."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    N = K if kind == "channels" else K * G
    q, k, v = normal(B, T, K, H), normal(B, T, K, H) * (1 - alike) + alike * normal(1, 1, 1, H), normal(B, T, N, V)
    g = -decay * np.exp(normal(B, T, N, *[H] * (kind == "channels")))
    if kind == "sum":
        return q, k, v, g, None
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    betas = 1 / (1 + np.exp(-normal(B, T, N)))
    return q * H ** -0.5, k, v, g, betas if beta is None else np.full_like(betas, beta)


def segments_of(lengths, B: int = 2) -> np.ndarray:
    """int32 [B, T]: documents of these lengths, numbered from 1."""
    return np.tile(np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths), (B, 1))


def with_gradients(recur, inputs, *rest, do):
    """(o, gradients of the inputs for the cotangent do)."""
    o, back = jax.vjp(lambda inputs: recur(*inputs, *rest), inputs)
    return o, *back(do.astype(o.dtype))


def error(found, expected) -> float:
    """The largest |difference| of any array, relative to that array's largest value."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) and all(np.isfinite(np.asarray(x, np.float64)).all() for x in found)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() / max(np.abs(b).max(), 1e-30))
               for a, b in zip(found, expected))
