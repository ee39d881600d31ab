"""One small language model as a dict, as a module of nnx and as one of linen, with logical axes."""
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from meshtrain.library import unpack
from meshtrain.library.layouts import Layout
from meshtrain.library.stack import Stack

V, D, F, L, B, T = 64, 32, 64, 2, 32, 8
AXES = {"table": ("vocab", "embed"), "blocks": {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")},
        "head": ("embed", "vocab")}


def rows(n: int) -> dict[str, np.ndarray]:
    x_BT = np.random.default_rng(n).integers(0, V, (B, T), dtype=np.int32)
    return {"x": x_BT, "y": (3 * x_BT + 1) % V}


def sum_nats(logits_BTV: jax.Array, y_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of the loss, number of tokens); a token 0 is masked."""
    picked = jnp.take_along_axis(logits_BTV, y_BT[..., None], -1)[..., 0]
    counted = y_BT > 0
    return jnp.sum((jax.nn.logsumexp(logits_BTV, -1) - picked) * counted), counted.sum().astype(jnp.float32)


def build_dict(layout: Layout) -> tuple[unpack.Parts, Callable]:
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: 0.2 * jax.random.normal(key, shape, jnp.float32)
    params = {"table": draw(keys[0], V, D), "blocks": {"up": draw(keys[1], L, D, F), "down": draw(keys[2], L, F, D)},
              "head": draw(keys[3], D, V)}

    def loss(p, rows):
        h = layout.constrain(p["table"][rows["x"]], "batch", "seq", None)

        def layer(h, w):
            w = layout.gathered(w, {"up": ("embed", "mlp"), "down": ("mlp", "embed")})
            u = layout.constrain(jax.nn.relu(h @ w["up"]), "batch", "seq", "mlp")
            return layout.constrain(h + u @ w["down"], "batch", "seq", None), None
        h, _ = jax.lax.scan(layer, h, p["blocks"])
        return sum_nats(layout.constrain(h @ p["head"], "batch", "seq", "vocab"), rows["y"])
    return unpack.unpack(params, AXES), loss


def build_stack(layout: Layout) -> tuple[unpack.Parts, Callable]:
    """The model of `build_dict` as three functions."""
    parts, _ = build_dict(layout)

    def layer(w, h):
        u = layout.constrain(jax.nn.relu(h @ w["up"]), "batch", "seq", "mlp")
        return layout.constrain(h + u @ w["down"], "batch", "seq", None)
    return parts, Stack(lambda ends, rows: layout.constrain(ends["table"][rows["x"]], "batch", "seq", None), layer,
                        lambda ends, h, rows: sum_nats(h @ ends["head"], rows["y"]))


def build_nnx(layout: Layout) -> tuple[unpack.Parts, Callable]:
    draw = nnx.initializers.normal(0.2)

    def linear(n: int, m: int, rngs: nnx.Rngs, *axes: str) -> nnx.Linear:
        return nnx.Linear(n, m, use_bias=False, kernel_init=nnx.with_metadata(draw, logical_axes=axes), rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.table = nnx.Embed(V, D, embedding_init=nnx.with_metadata(draw, logical_axes=("vocab", "embed")), rngs=rngs)
            self.ups = nnx.List([linear(D, F, rngs, "embed", "mlp") for _ in range(L)])
            self.downs = nnx.List([linear(F, D, rngs, "mlp", "embed") for _ in range(L)])
            self.norm, self.head = nnx.RMSNorm(D, rngs=rngs), linear(D, V, rngs, "embed", "vocab")

        def __call__(self, x):
            h = layout.constrain(self.table(x), "batch", "seq", None)
            for up, down in zip(self.ups, self.downs):
                h = layout.constrain(h + down(layout.constrain(jax.nn.relu(up(h)), "batch", "seq", "mlp")),
                                     "batch", "seq", None)
            return self.head(self.norm(h))
    parts = unpack.unpack(Model(nnx.Rngs(0)))
    return parts, lambda p, rows: sum_nats(parts.join(p)(rows["x"]), rows["y"])


def build_linen(layout: Layout) -> tuple[unpack.Parts, Callable]:
    def dense(width: int, *axes: str) -> linen.Dense:
        return linen.Dense(width, use_bias=False,
                           kernel_init=linen.with_logical_partitioning(linen.initializers.normal(0.2), axes))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            draw = linen.with_logical_partitioning(linen.initializers.normal(0.2), ("vocab", "embed"))
            h = linen.Embed(V, D, embedding_init=draw)(x)
            for _ in range(L):
                u = layout.constrain(jax.nn.relu(dense(F, "embed", "mlp")(h)), "batch", "seq", "mlp")
                h = layout.constrain(h + dense(D, "mlp", "embed")(u), "batch", "seq", None)
            return dense(V, "embed", "vocab")(linen.LayerNorm()(h))
    model = Model()
    parts = unpack.unpack(model.init(jax.random.key(0), jnp.zeros((B, T), jnp.int32)))
    return parts, lambda p, rows: sum_nats(model.apply(p, rows["x"]), rows["y"])


BUILD = {"dict": build_dict, "nnx": build_nnx, "linen": build_linen, "stack": build_stack}
