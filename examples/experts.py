"""A mixture of experts in a pipeline with a schedule and a training loop of this file.

    python examples/experts.py --layout ddp --mesh stage=2,data=2

prints the loss of each step. Without stages the same loss is trained by `layout.gradients`.
"""
import argparse

import meshtrain as mt

if __name__ == "__main__":
    mt.simulate(8)          # eight CPU devices; remove this line on GPUs
import jax
import jax.numpy as jnp
import numpy as np
import optax

D, E, F, L, B, MICROBATCHES = 16, 4, 32, 4, 16, 4
AXES = {"read": (None, "embed"), "write": ("embed", None),
        "blocks": {"router": ("layers", "embed", None), "up": ("layers", None, "embed", "mlp"),
                   "down": ("layers", None, "mlp", "embed")}}
# A line for each stage, a word for each tick: F0 is the forward of microbatch 0, B0 its backward.
TABLE = """
F0 F1 F2    F3    ·  B0 B1 B2 B3
·  F0 F1+B0 F2+B1 F3+B2 B3 · · ·
"""


def draw_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)
    blocks = {"router": draw(L, D, E), "up": draw(L, E, D, F), "down": draw(L, E, F, D)}
    return {"read": draw(D, D), "write": draw(D, 1), "blocks": blocks}


def embed(ends, rows):
    return rows["x"] @ ends["read"]


def layer(w, x):
    """Send each row to its two best experts. All experts compute all rows; four small ones are fast enough."""
    scores = jax.nn.softmax(x @ w["router"])
    best = scores >= jax.lax.top_k(scores, 2)[0][:, -1:]
    h = jax.nn.relu(jnp.einsum("bd,edf->bef", x, w["up"]))
    return x + jnp.einsum("be,bef,efd->bd", scores * best, h, w["down"])


def head(ends, x, rows):
    off = (x @ ends["write"])[:, 0] - rows["y"]
    return jnp.sum(off ** 2), off.size


def draw_rows(n):
    x = np.random.default_rng(n).standard_normal((B, D)).astype(np.float32)
    return {"x": x, "y": np.abs(x[:, 0]) - x[:, 1] * (x[:, 2] > 0)}


def train(layout, steps):
    """Return the loss of each step."""
    stack, tx = mt.Stack(embed, layer, head), optax.adam(3e-3)
    stages = layout.mesh.shape["stage"]
    if stages > 1:
        schedule = mt.schedule(TABLE) if stages == 2 else mt.schedule("zero_bubble", stages, MICROBATCHES)
        summed = mt.pipeline(stack, schedule, layout)

        def differentiate(params, rows):
            ends, blocks = stack.divide(params)
            value, (d_blocks, d_ends) = jax.value_and_grad(
                lambda blocks, ends: summed(blocks, ends, rows) / B, (0, 1))(blocks, ends)
            return value, {**d_ends, stack.layers: d_blocks}
    else:
        differentiate = layout.gradients(stack, AXES)

    @jax.jit
    def step(params, state, rows):
        value, grads = differentiate(params, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses, params = [], layout.place(draw_params(), AXES)
    state = jax.jit(tx.init, out_shardings=layout.states(tx, params, AXES))(params)
    for n in range(steps):
        params, state, value = step(params, state, layout.batch(draw_rows(n), "batch"))
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layout", default="ddp", help="a rule file: a shipped name or a path")
    options.add_argument("--mesh", default="stage=2,data=2", help="sizes of mesh axes")
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()
    sizes = {axis: int(n) for axis, n in (part.split("=") for part in given.mesh.split(",") if part)}
    for step, loss in enumerate(train(mt.Layout(given.layout, sizes), given.steps), 1):
        print(f"step {step}: loss {loss:.4f}")
