"""A vision transformer (arXiv:2010.11929), trained on any layout with images that this file makes.

    python examples/vision_transformer.py --layout zero1 --mesh data=4,tensor=2

prints the loss of each step. An image shows a bright square in one of four quarters; the model predicts the quarter.

    python examples/vision_transformer.py --layout zero1 --mesh data=16,tensor=4 --topology h100:64

compiles a step for 64 GPUs, without any GPU, and prints its memory, traffic and time.
"""
import argparse

import meshtrain as mt

if __name__ == "__main__":
    mt.simulate(8)          # eight CPU devices; remove this line on GPUs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

SIZE, PATCH, CLASSES, D, N, H, F, L, B = 16, 4, 4, 32, 4, 8, 64, 3, 16
PATCHES, PIXELS = (SIZE // PATCH) ** 2, PATCH * PATCH
AXES = {"patch": (None, "embed"), "place": (None, "embed"), "classes": ("embed", None),
        "blocks": {**{name: ("layers", "embed", "heads", "head_dim") for name in "qkv"},
                   "out": ("layers", "heads", "head_dim", "embed"),
                   "up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}}


def draw_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)
    blocks = {**{name: draw(L, D, N, H) for name in "qkv"}, "out": draw(L, N, H, D),
              "up": draw(L, D, F), "down": draw(L, F, D)}
    return {"patch": draw(PIXELS, D), "place": draw(PATCHES, D), "classes": draw(D, CLASSES), "blocks": blocks}


def normalize(x):
    return x * jax.lax.rsqrt(jnp.mean(x ** 2, -1, keepdims=True) + 1e-6)


def embed(ends, rows):
    images = rows["image"].reshape(-1, SIZE // PATCH, PATCH, SIZE // PATCH, PATCH)
    return images.swapaxes(2, 3).reshape(-1, PATCHES, PIXELS) @ ends["patch"] + ends["place"]


def layer(w, x):
    q, k, v = (jnp.einsum("BTD,DNH->BTNH", normalize(x), w[name]) for name in "qkv")
    x = x + jnp.einsum("BTNH,NHD->BTD", jax.nn.dot_product_attention(q, k, v), w["out"])
    return x + jax.nn.gelu(normalize(x) @ w["up"]) @ w["down"]


def head(ends, x, rows):
    scores = normalize(x).mean(1) @ ends["classes"]
    nats = -jnp.sum(jax.nn.log_softmax(scores) * jax.nn.one_hot(rows["label"], CLASSES), -1)
    return nats.sum(), nats.size


def draw_rows(n):
    rng = np.random.default_rng(n)
    labels, half = rng.integers(0, CLASSES, B), SIZE // 2
    images = rng.standard_normal((B, SIZE, SIZE)).astype(np.float32)
    for image, label in zip(images, labels):
        top, left = half * (label // 2), half * (label % 2)
        image[top:top + half, left:left + half] += 2
    return {"image": images, "label": labels.astype(np.int32)}


def train(layout, steps):
    """Return the loss of each step."""
    done = mt.fit(mt.Stack(embed, layer, head), draw_params(), AXES, layout=layout, optimizer=optax.adam(1e-2),
                  data=draw_rows, steps=steps, microbatches=2)
    return [row["loss"] for row in done.history]


def price(rules, sizes, topology):
    """Return memory, traffic and time of a step on GPUs that may be absent. The batch has B images per GPU."""
    def make(mesh):
        layout, tx = mt.Layout(rules, dict(mesh.shape), mesh.devices.ravel()), optax.adam(1e-2)
        gradients = layout.gradients(mt.Stack(embed, layer, head), AXES)

        def step(params, state, rows):
            value, grads = gradients(params, rows)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        def describe(arrays, places):
            return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), arrays, places)
        params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draw_params()))
        state = describe(jax.eval_shape(tx.init, params), layout.states(tx, params, AXES))
        by_rows = NamedSharding(layout.mesh, P(("data", "fsdp")))
        rows = {name: jax.ShapeDtypeStruct((B * mesh.size, *x.shape[1:]), x.dtype, sharding=by_rows)
                for name, x in draw_rows(0).items()}
        return jax.jit(step, donate_argnums=(0, 1)), (layout.place(params, AXES), state, rows)
    return mt.inspect(make, mesh=sizes, topology=topology)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layout", default="zero1", help="a rule file: a shipped name or a path")
    options.add_argument("--mesh", default="data=4,tensor=2", help="sizes of mesh axes")
    options.add_argument("--steps", type=int, default=80)
    options.add_argument("--topology", help="price a step for these GPUs instead, e.g. h100:64")
    given = options.parse_args()
    sizes = {axis: int(n) for axis, n in (part.split("=") for part in given.mesh.split(",") if part)}
    if given.topology:
        raise SystemExit(print(price(given.layout, sizes, given.topology)))
    for step, loss in enumerate(train(mt.Layout(given.layout, sizes), given.steps), 1):
        print(f"step {step}: loss {loss:.4f}")
