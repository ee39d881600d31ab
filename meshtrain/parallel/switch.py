"""The executor for schedules of the switch family (experimental): in a tick every stage does one op, F, B or W, in a branch of
its own, so that true ZB-H1 order runs inside one program and a stage without work does none.

Devices take different branches, hence three rules. No collective over `stage` and no permute may stand in a branch: a
permute waits for all devices, or pairs with one of another branch and gives wrong numbers without a word; the compiled
program is to be searched for them (`cost.audit`). Embedding and head cannot be shared: the first and the last stage have
them whole. Buffers stay outside the branches, which return what is new: passed through one, XLA copies them.
Sources: `schedules`; arXiv:2401.10241.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshtrain.parallel import split
from meshtrain.parallel.pipeline import STAGE, Model, after, ordered, over_stages, part_of, unflattened
from meshtrain.parallel.schedules import Schedule
from meshtrain.parallel.split import put, take


def gradients(schedule: Schedule, model: Model, mesh, once, ws, ends, batch, extra, *, ends_specs, batch_specs):
    """As `pipeline.gradients`, for schedules of the switch family; `ends` are whole, the same on all stages."""
    execute = partial(_execute, schedule, model, ordered(mesh))
    return over_stages(execute, True, mesh, once, ws, ends, batch, extra, ends_specs, batch_specs)


def _execute(schedule: Schedule, model: Model, in_order: bool, stage, ws, ends, batch, extra):
    weights, microbatch, prepare, x, parts, c, rows, row_of, named = part_of(schedule, model, True, stage, ws, ends, batch, extra)
    num_stages, w = schedule.num_stages, weights(0)                       # the family has one chunk
    wait = after if in_order else lambda values, _: values
    zeros = lambda avals: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals)
    nothing = dict(y=zeros(x), dx=zeros(x), dy=zeros(x), R=zeros(parts.r), Q=zeros(parts.q), Z=zeros(parts.z))
    add = lambda total, new: jax.tree.map(jnp.add, total, new)

    def idle(c, row, sums):
        return sums, nothing

    def forward(c, row, sums):
        embed = lambda: model.embed(ends, microbatch(row["F_mb"]), extra)
        x = _branch(row["F_first"], [lambda: take(c["X"], row["F_x"]), embed])
        y, (r, q) = parts.forward(w, x, row["F_e"])

        def loss():
            head = lambda ends, y: model.head(ends, y, microbatch(row["F_mb"]), extra)
            (_, metric), (d_ends, dy) = jax.value_and_grad(head, (0, 1), has_aux=True)(split.wide(ends), y)
            return sums | dict(ends=add(sums["ends"], d_ends), metric=sums["metric"] + metric), dy
        sums, dy = _branch(row["loss_here"], [lambda: (sums, nothing["dy"]), loss])
        return sums, nothing | dict(y=y, dy=dy, R=r, Q=q)

    def backward(c, row, sums):
        kept = take(c["R"], row["B_r"]), take(c["Q"], row["B_q"])
        dx, z = parts.backward_input(w, row["B_e"], *kept, take(c["D"], row["B_d"]))

        def embed_grad():
            embed = lambda ends: model.embed(ends, microbatch(row["B_mb"]), extra)
            return add(sums["ends"], jax.vjp(embed, split.wide(ends))[1](dx)[0])
        sums = sums | dict(ends=_branch(row["B_first"], [lambda: sums["ends"], embed_grad]))
        return sums, nothing | dict(dx=dx, Z=z)

    def weight(c, row, sums):
        kept = take(c["Q"], row["W_q"]), take(c["Z"], row["W_z"])
        return sums | dict(ws=parts.backward_weight(w, prepare(row["W_mb"]), *kept, sums["ws"], True)), nothing

    def tick(c, following):
        row = named(c["row"])
        # Made in the tick before. The switch comes after it, and the other permute after the switch.
        dx = lax.ppermute(c["dx"], STAGE, [(i, (i - 1) % num_stages) for i in range(num_stages)])
        c, row = c | dict(D=put(c["D"], row["dx_in"], dx)), wait(row, dx)
        sums, new = _branch(row["op"], [partial(op, c, row) for op in (idle, forward, backward, weight)],
                            {name: c[name] for name in ("ws", "ends", "metric")})
        y = lax.ppermute(new["y"], STAGE, [(i, (i + 1) % num_stages) for i in range(num_stages)])
        # What an op does not make is written, too, into slots that nobody holds.
        return c | sums | dict(
            X=put(c["X"], row["y_in"], y), R=put(c["R"], row["F_r"], new["R"]), Q=put(c["Q"], row["F_q"], new["Q"]),
            D=put(c["D"], row["loss_d"], new["dy"]), Z=put(c["Z"], row["B_z"], new["Z"]), dx=new["dx"],
            row=row_of(following)), None

    c, _ = lax.scan(tick, c | dict(dx=zeros(x)), rows)
    # Once a step, in float32: the first stage's gradients and the last one's, whole embedding and head.
    metric, d_ends = lax.psum((c["metric"], c["ends"]), STAGE)
    return metric[None], unflattened(c["ws"], 1), jax.tree.map(lambda a: a[None], d_ends)


def _branch(number, branches, *args):
    """lax.switch. The barriers keep apart what automatic axes make of each branch's results: XLA refuses branches whose
    results are pinned to different layouts ("Inconsistent conditional sharding")."""
    return lax.switch(number, [lambda *args, f=f: lax.optimization_barrier(f(*args)) for f in branches], *args)
