"""A language model with linear attention (arXiv:2006.16236), trained on any layout.

    python examples/linear_attention.py --layout zero3 --mesh fsdp=4,tensor=2

prints the loss of each step. The model is three functions; nothing in them names a mesh axis.
"""
import argparse

import meshtrain as mt

if __name__ == "__main__":
    mt.simulate(8)          # eight CPU devices; remove this line on GPUs
import jax
import jax.numpy as jnp
import numpy as np
import optax

V, D, N, H, F, L, B, T = 64, 32, 4, 8, 64, 4, 16, 16
AXES = {"table": ("vocab", "embed"),
        "blocks": {**{name: ("layers", "embed", "heads", "head_dim") for name in "qkv"},
                   "out": ("layers", "heads", "head_dim", "embed"),
                   "up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}}


def draw_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    blocks = {**{name: draw(L, D, N, H) for name in "qkv"}, "out": draw(L, N, H, D),
              "up": draw(L, D, F), "down": draw(L, F, D)}
    return {"table": draw(V, D), "blocks": blocks}


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x ** 2, -1, keepdims=True) + 1e-6)


def attend(q, k, v):
    """Compute causal attention in time linear in T. It keeps sums over earlier tokens instead of scores."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    values = jnp.cumsum(jnp.einsum("BTNH,BTNV->BTNHV", k, v), 1)
    return jnp.einsum("BTNH,BTNHV->BTNV", q, values) / jnp.einsum("BTNH,BTNH->BTN", q, jnp.cumsum(k, 1))[..., None]


def embed(ends, rows):
    return ends["table"][rows["x"]]


def layer(w, x):
    q, k, v = (jnp.einsum("BTD,DNH->BTNH", normalize(x), w[name]) for name in "qkv")
    x = x + jnp.einsum("BTNH,NHD->BTD", attend(q, k, v), w["out"])
    return x + jax.nn.relu(normalize(x) @ w["up"]) @ w["down"]


def head(ends, x, rows):
    logits = normalize(x) @ ends["table"].T
    nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, rows["y"][..., None], -1)[..., 0]
    return nats.sum(), nats.size


def draw_rows(n):
    """Return rows in which each token is three times the previous one, plus one."""
    tokens = np.random.default_rng(n).integers(0, V, (B, 1))
    for _ in range(T):
        tokens = np.concatenate([tokens, (3 * tokens[:, -1:] + 1) % V], 1)
    return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


def train(layout, steps):
    """Return the loss of each step."""
    done = mt.fit(mt.Stack(embed, layer, head), draw_params(), AXES, layout=layout, optimizer=optax.adam(1e-2),
                  data=draw_rows, steps=steps, microbatches=2)
    return [row["loss"] for row in done.history]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layout", default="zero3", help="a rule file: a shipped name or a path")
    options.add_argument("--mesh", default="fsdp=4,tensor=2", help="sizes of mesh axes")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()
    sizes = {axis: int(n) for axis, n in (part.split("=") for part in given.mesh.split(",") if part)}
    for step, loss in enumerate(train(mt.Layout(given.layout, sizes), given.steps), 1):
        print(f"step {step}: loss {loss:.4f}")
