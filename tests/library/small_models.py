"""One small language model of anybody, as a loss and as a `Stack`: targets are masked unevenly, so that a mean of means
is wrong."""
import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.library.stack import Stack

V, D, F, L, T = 64, 32, 64, 4, 8
AXES = {"blocks": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
        "table": ("vocab", "embed"), "out": ("embed", "vocab")}


def draw_params(seed: int = 0, D: int = D, F: int = F) -> dict:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    return {"blocks": {"up": draw(L, D, F), "down": draw(L, F, D)}, "table": draw(V, D), "out": draw(D, V)}


def draw_rows(B: int = 32, seed: int = 1) -> dict:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, V, (B, T + 1), dtype=np.int32)
    return {"x": ids[:, :-1], "y": ids[:, 1:], "real": rng.random((B, T)) < np.linspace(0.1, 0.9, B)[:, None]}


def embed(ends: dict, rows: dict):
    return ends["table"][rows["x"]]


def layer(w: dict, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def head(ends: dict, x, rows: dict):
    logits = (x @ ends["out"]).astype(jnp.float32)
    nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, rows["y"][..., None], -1)[..., 0]
    return jnp.sum(nats * rows["real"]), rows["real"].sum()


STACK = Stack(embed, layer, head)


def loss(params: dict, rows: dict):
    """The same as a loss."""
    return STACK(params, rows)


def plain(params: dict, rows: dict):
    """The mean loss over all rows and its gradients, on one device."""
    def mean(params):
        total, count = loss(params, rows)
        return total / count
    return jax.value_and_grad(mean)(params)
