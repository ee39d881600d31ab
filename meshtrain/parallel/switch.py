"""The executor for schedules of the switch family (experimental): in a tick every stage does one op, F, B or W, in a branch of
its own, so that true ZB-H1 order is executed inside one program and a stage without work does none.

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
from meshtrain.parallel.pipeline import (
    STAGE, ModelFunctions, lead, lead_back, lead_next, led, needs_order, ordered, over_stages, shard, unflattened)
from meshtrain.layout.mesh import psum
from meshtrain.parallel.schedules import Schedule
from meshtrain.parallel.split import put, take


def gradients(schedule: Schedule, model: ModelFunctions, mesh, once, weights, batch, extra, *, ws_axes, ends_specs, batch_specs):
    """As `pipeline.gradients`, for schedules of the switch family; `ends` are whole, the same on all stages."""
    execute = partial(_execute, schedule, model, needs_order(mesh))
    return over_stages(execute, True, mesh, once, weights, batch, extra, ws_axes, ends_specs, batch_specs)


def _execute(schedule: Schedule, model: ModelFunctions, in_order: bool, stage, weights, batch, extra):
    this, c, following = shard(schedule, model, True, stage, weights, batch, extra)
    fbw, num_stages = split.stacked(this.fbw, this.depth), schedule.num_stages
    w = (*this.layers, 0)               # the family has one chunk
    wait = ordered if in_order else lambda values, _: values
    zeros = lambda avals: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), avals)
    if leading := model.leading is not None:
        c, saved = lead(this, c, together=False)
    nothing = dict(y=zeros(this.x), dx=zeros(this.x), dy=zeros(this.x), R=zeros(fbw.r), Q=zeros(fbw.q), Z=zeros(fbw.z))
    add = lambda total, new: jax.tree.map(jnp.add, total, new)

    def idle(c, tick, sums):
        return sums, nothing

    def forward(c, tick, sums):
        x = _branch(tick["F_first"], [lambda: take(c["X"], tick["F_x"]), lambda: tick["begin"] if leading else this.embed(this.ends, tick["F_mb"])])
        y, aux, (r, q) = fbw.forward(w, x, tick["F_e"])
        sums = sums | dict(aux=add(sums["aux"], aux))

        def loss():
            head = lambda ends, y: this.head(ends, y, tick["F_mb"])
            (_, metric), (d_ends, dy) = jax.value_and_grad(head, (0, 1), has_aux=True)(split.wide(this.ends), y)
            return sums | dict(ends=add(sums["ends"], d_ends), metric=sums["metric"] + metric), dy
        sums, dy = _branch(tick["loss_here"], [lambda: (sums, nothing["dy"]), loss])
        return sums, nothing | dict(y=y, dy=dy, R=r, Q=q)

    def backward(c, tick, sums):
        saved = take(c["R"], tick["B_r"]), take(c["Q"], tick["B_q"])
        dx, z = fbw.backward_input(w, tick["B_e"], *saved, take(c["D"], tick["B_d"]))

        def embed_grad():
            embed = lambda ends: this.embed(ends, tick["B_mb"])
            return add(sums["ends"], jax.vjp(embed, split.wide(this.ends))[1](dx)[0])
        if not leading:
            sums = sums | dict(ends=_branch(tick["B_first"], [lambda: sums["ends"], embed_grad]))
        return sums, nothing | dict(dx=dx, Z=z)

    def weight(c, tick, sums):
        saved = take(c["Q"], tick["W_q"]), take(c["Z"], tick["W_z"])
        return sums | dict(ws=fbw.backward_weight(w, this.prepare(tick["W_mb"]), *saved, sums["ws"], True)), nothing

    def one_tick(c, following):
        tick = this.named(c["tick"])
        if leading:
            tick = tick | dict(begin=led(this, c, tick["embed_mb"]))
        sums, new = _branch(tick["op"], [partial(op, c, tick) for op in (idle, forward, backward, weight)],
                            {name: c[name] for name in ("ws", "ends", "metric", "aux")})
        y = lax.ppermute(new["y"], STAGE, [(i, (i + 1) % num_stages) for i in range(num_stages)])
        dx = lax.ppermute(wait(new["dx"], y), STAGE, [(i, (i - 1) % num_stages) for i in range(num_stages)])
        following = wait(following, dx)
        if leading:
            c = lead_next(this, c, tick, psum(jnp.where(tick["B_first"] > 0, new["dx"], 0), STAGE))
        # What an op does not make is written, too, into slots that nobody holds.
        return c | sums | dict(
            X=put(c["X"], y, tick["y_in"]), R=put(c["R"], new["R"], tick["F_r"]), Q=put(c["Q"], new["Q"], tick["F_q"]),
            D=put(put(c["D"], new["dy"], tick["loss_d"]), dx, tick["dx_in"]), Z=put(c["Z"], new["Z"], tick["B_z"]),
            tick=this.prepared(following)), None

    c, _ = lax.scan(one_tick, c, following)
    c = lead_back(this, c, saved, together=False) if leading else c
    # Once a step, in float32: the first stage's gradients and the last one's, whole embedding and head.
    metric, d_ends = lax.psum((c["metric"], c["ends"]), STAGE)
    d_ends, d_leading, aux = jax.tree.map(lambda a: a[None], (d_ends, c["leading"], c["aux"]))
    return metric[None], unflattened(c["ws"], 1), d_ends, d_leading, aux


def _branch(number, branches, *args):
    """lax.switch. The barriers keep apart what automatic axes make of each branch's results: XLA refuses branches whose
    results are pinned to different layouts ("Inconsistent conditional sharding")."""
    return lax.switch(number, [lambda *args, f=f: lax.optimization_barrier(f(*args)) for f in branches], *args)
