"""One executor for every schedule of the phase family: a whole pipelined step inside one `shard_map`.

In a tick all stages do the same slots in the same order (receive, embedding, F, send, loss, B, W), each on the
microbatch and the buffer slots that the schedule gives it; a stage that has nothing to do works masked, so no control flow
differs between devices and collectives may stand anywhere. Ticks with the same slots are one scan. The executor makes
the gradients itself: jax never differentiates through it. It is given the model as four functions and knows none of it.
Manual are `stage` and the axes over which gradients are summed once, after the step; whatever else is automatic.
Sources: `schedules`; arXiv:1811.06965, 2104.04473, 2401.10241.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from meshtrain.layout.mesh import psum
from meshtrain.parallel import schedules, split
from meshtrain.parallel.schedules import Phase, Schedule
from meshtrain.parallel.split import put, take

STAGE = "stage"
READ_BY_F, READ_BY_B = ("embed_mb", "F_e", "F_x"), ("B_e", "B_r", "B_q", "B_d")       # of a row


@dataclasses.dataclass(frozen=True)
class Model:
    """What is pipelined; every function runs inside the shard_map, on this device's part.

    prepare(microbatch, extra) -> e: what all layers see beside the stream, made again where it is needed.
    embed(ends, microbatch, extra) -> x, before the first layer. layer(w, x, (number, e)) -> x.
    head(ends, x, microbatch, extra) -> (objective, metric), after the last; the objective is differentiated.
    `ends` are the weights of embed and head, which all stages work on together: where they are split over the stages,
    embed and head gather and sum over them, and return the same on every stage.
    """
    prepare: Callable
    embed: Callable
    layer: Callable
    head: Callable


def gradients(schedule: Schedule, model: Model, mesh, once, ws, ends, batch, extra, *, ends_specs, batch_specs):
    """(metric [R], gradients of ws [R, V, P, n, …], gradients of ends [R, …]), float32 and unsummed over replicas.

    R = product of the sizes of `once`, the axes over which the batch is split and the caller sums; the leading dim lies
    on them. ws: layers [V, P, n, …], dim 1 over stage; layer (v, s, i) has the number (v·P + s)·n + i. batch: [M, R, …].
    extra: replicated. ends_specs, batch_specs: how these are split over `stage` and `once`, PartitionSpecs by leaf.
    """
    execute = partial(_execute, schedule, model, ordered(mesh), True)
    return over_stages(execute, True, mesh, once, ws, ends, batch, extra, ends_specs, batch_specs)


def evaluate(model: Model, mesh, once, ws, ends, batch, extra, *, ends_specs, batch_specs):
    """The metric [R] of `gradients` alone, by the forward ticks of GPipe's schedule: ws [1, P, n, …], nothing is kept."""
    microbatches, stages = jax.tree.leaves(batch)[0].shape[0], jax.tree.leaves(ws)[0].shape[1]
    schedule = schedules.make("gpipe", stages, microbatches)
    execute = partial(_execute, schedule, model, ordered(mesh), False)
    return over_stages(execute, False, mesh, once, ws, ends, batch, extra, ends_specs, batch_specs)[0]


def ordered(mesh) -> bool:
    """Whether permutes need the order that `after` makes."""
    return mesh.devices.flat[0].platform == "cpu"


def over_stages(execute, differentiate: bool, mesh, once, ws, ends, batch, extra, ends_specs, batch_specs):
    """execute(stage [1], ws, ends, batch, extra) on every device's part. Returns as `gradients`, or (metric,)."""
    grads_specs = (jax.tree.map(lambda _: P(once or None, None, STAGE), ws),
                   jax.tree.map(lambda spec: P(once or None, *spec), ends_specs)) if differentiate else ()
    specs = (P(STAGE), jax.tree.map(lambda _: P(None, STAGE), ws), ends_specs, batch_specs, jax.tree.map(lambda _: P(), extra))
    run = jax.shard_map(execute, mesh=mesh, axis_names={STAGE, *once}, in_specs=specs, out_specs=(P(once or None), *grads_specs),
                        check_vma=False)
    return run(jnp.arange(mesh.shape[STAGE]), ws, ends, batch, extra)


class Part(NamedTuple):
    """A device's part of a step."""
    weights: Callable            # chunk -> what `parts` takes as w
    microbatch: Callable         # number -> its batch
    prepare: Callable            # number -> what all layers see of it
    x: jax.ShapeDtypeStruct      # the stream between stages
    parts: split.Split | None    # F, B and W of a chunk
    carry: dict                  # buffers X R Q D (Z) and the sums metric, ws, ends, all zero; row: of the first tick
    rows: jax.Array              # [T, columns]: in each tick, those of the next
    row: Callable                # the columns of a tick -> its row: them, and what F and B see of their microbatches
    named: Callable              # a row -> {name: value}


def part_of(schedule: Schedule, model: Model, differentiate: bool, stage, ws, ends, batch, extra) -> Part:
    """For the arguments of an executor, inside its shard_map. Not differentiated: X and metric alone, and no `parts`."""
    stage = stage[0]
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    depth = jax.tree.leaves(ws)[0].shape[2]
    flat = jax.tree.map(lambda a: a.reshape(num_chunks * depth, *a.shape[3:]), ws)      # [V, 1, n, …] -> [V·n, …]
    numbers = ((jnp.arange(num_chunks) * num_stages + stage)[:, None] * depth + jnp.arange(depth)).reshape(-1)
    weights = lambda chunk: (flat, numbers, chunk * depth)
    batch = jax.tree.map(lambda a: a[:, 0], batch)                                      # [M, 1, …] -> [M, …]
    microbatch = lambda i: take(batch, i)
    prepare = lambda i: model.prepare(microbatch(i), extra)
    x = jax.eval_shape(lambda: model.embed(ends, microbatch(0), extra))
    parts = split.stack(model.layer, flat, depth, x, jax.eval_shape(prepare, 0)) if differentiate else None
    buffer = lambda avals, name: jax.tree.map(lambda a: jnp.zeros((schedule.slots[name], *a.shape), a.dtype), avals)
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)
    carry = dict(X=buffer(x, "X"), metric=jnp.float32(0))
    if differentiate:
        carry |= dict(R=buffer(parts.r, "R"), Q=buffer(parts.q, "Q"), D=buffer(x, "D"), ws=zeros(flat), ends=zeros(ends))
    if schedule.split:
        carry["Z"] = buffer(parts.z, "Z")
    columns = dict(schedule.columns) | {name: np.tile(a[:, None], num_stages) for name, a in schedule.shared.items()}
    columns["dx_in"] = np.roll(columns["dx_in"], 1, axis=0)           # the slot of what arrives one tick late
    rows = jnp.take(np.stack(list(columns.values()), axis=2), stage, axis=1)
    names = list(columns)

    def row(numbers):
        seen = lambda kind: prepare(numbers[names.index(f"{kind}_mb")])
        return numbers, {f"{kind}_e": seen(kind) for kind in ("FB" if differentiate else "F")}
    # Carried from tick to tick: picked or made where it is used, that would be done for every element of what it is
    # used for, attention's scores among them.
    carry["row"] = row(rows[0])
    return Part(weights, microbatch, prepare, x, parts, carry, jnp.roll(rows, -1, axis=0), row,
                lambda row: dict(zip(names, row[0])) | row[1])


def unflattened(ws, num_chunks: int):
    """[V·n, …] as [1, V, 1, n, …]: of one replica and one stage."""
    return jax.tree.map(lambda a: a.reshape(1, num_chunks, 1, -1, *a.shape[1:]), ws)


def _execute(schedule: Schedule, model: Model, ordered: bool, differentiate: bool, stage, ws, ends, batch, extra):
    part = part_of(schedule, model, differentiate, stage, ws, ends, batch, extra)
    weights, microbatch, prepare, x, parts, c, rows, row_of, named = part
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    wait = after if ordered else lambda values, _: values
    order = lambda row, done, *names: row | wait({name: row[name] for name in names if name in row}, done)

    def embed(row):
        return model.embed(ends, microbatch(row["embed_mb"]), extra)

    def forward(c, row, run):
        x = take(c["X"], row["F_x"])
        if run.embed != "never":
            first = _sometimes(run.embed, row["embed_on"], partial(embed, row), lambda: x)
            x = jnp.where(row["F_first"] > 0, first, x)
        if not differentiate:
            return c, lax.scan(lambda x, w: (model.layer(w[0], x, (w[1], row["F_e"])), None), x, weights(0)[:2])[0]
        y, (r, q) = parts.forward(weights(row["F_chunk"]), x, row["F_e"])
        return c | dict(R=put(c["R"], row["F_r"], r), Q=put(c["Q"], row["F_q"], q)), y

    def loss(c, row, y):
        """(sum of the metric, of the ends' gradients, dy) with the last stage's y: all stages work on it, each on its part
        of the vocabulary, and all get the whole dy."""
        y = _share(y, row["loss_here"])
        head = lambda ends, y: model.head(ends, y, microbatch(row["loss_mb"]), extra)
        on = row["loss_on"] > 0
        if not differentiate:
            return c["metric"] + jnp.where(on, head(ends, y)[1], 0.0)
        (_, metric), (d_ends, dy) = jax.value_and_grad(head, (0, 1), has_aux=True)(split.wide(ends), y)
        return c["metric"] + jnp.where(on, metric, 0.0), _add(c["ends"], d_ends, on), dy

    def backward(c, row):
        kept = take(c["R"], row["B_r"]), take(c["Q"], row["B_q"])
        args = weights(row["B_chunk"]), row["B_e"], *kept, take(c["D"], row["B_d"])
        if schedule.split:
            dx, z = parts.backward_input(*args)
            return c | dict(Z=put(c["Z"], row["B_z"], z)), dx
        dx, ws = parts.backward(*args, c["ws"], row["B_on"] > 0)
        return c | dict(ws=ws), dx

    def embed_grad(grads, row, dx):
        dx = _share(dx, row["B_first"])
        _, vjp = jax.vjp(lambda ends: model.embed(ends, microbatch(row["embed_grad_mb"]), extra), split.wide(ends))
        return _add(grads, vjp(dx)[0], row["embed_grad_on"] > 0), dx

    def weight(c, row):
        args = weights(row["W_chunk"]), prepare(row["W_mb"]), take(c["Q"], row["W_q"]), take(c["Z"], row["W_z"])
        return c | dict(ws=parts.backward_weight(*args, c["ws"], row["W_on"] > 0))

    def tick(run, c, following):
        row = named(c["row"])
        if "dx" in c:                          # made in the tick before; sent here, it can overlap F
            dx = lax.ppermute(c["dx"], STAGE, [(i, (i - 1) % num_stages) for i in range(num_stages)])
            c, row = c | dict(D=put(c["D"], row["dx_in"], dx)), order(row, dx, *(READ_BY_F if "F" in run.kinds else READ_BY_B))
        arrived = None
        if "F" in run.kinds:
            c, y = forward(c, row, run)
            # Needed by the next stage in the next tick: it can overlap the loss, B and W of this one.
            arrived = lax.ppermute(y, STAGE, [(i, (i + 1) % num_stages) for i in range(num_stages)])
            row = order(row, arrived, "loss_here", "loss_mb", *READ_BY_B)
            if run.loss != "never":
                # Only what is new goes through a condition: XLA would copy the buffers.
                if differentiate:
                    metric, d_ends, dy = _sometimes(run.loss, row["loss_on"], lambda: loss(c, row, y),
                                                    lambda: (c["metric"], c["ends"], y))
                    c = c | dict(metric=metric, ends=d_ends, D=put(c["D"], row["loss_d"], dy))
                else:
                    c = c | dict(metric=_sometimes(run.loss, row["loss_on"], lambda: loss(c, row, y), lambda: c["metric"]))
                row, following = order(row, c["metric"], *READ_BY_B), wait(following, c["metric"])
        if "B" in run.kinds:
            c, dx = backward(c, row)
            c, row = c | dict(dx=dx), order(row, dx, "B_first", "embed_grad_mb", "W_mb", "W_q", "W_z")
            if run.embed_grad != "never":
                on, grads = row["embed_grad_on"], c["ends"]
                ends_grads, shared = _sometimes(run.embed_grad, on, lambda: embed_grad(grads, row, dx), lambda: (grads, dx))
                c, following = c | dict(ends=ends_grads), wait(following, shared)
        if "W" in run.kinds:
            c = weight(c, row)
        if arrived is not None:
            c, following = c | dict(X=put(c["X"], row["y_in"], arrived)), wait(following, arrived)
        return c | dict(row=row_of(following)), None

    for run in _phases(schedule):
        if not differentiate and "B" in run.kinds:
            break
        if "B" in run.kinds and "dx" not in c:
            c["dx"] = take(c["X"], 0)          # nobody reads it; but it is sent, and on CPUs not before the run before ends
        c, _ = lax.scan(partial(tick, run), c, rows[run.start:run.stop])
    if not differentiate:
        return (c["metric"][None],)
    return c["metric"][None], unflattened(c["ws"], num_chunks), jax.tree.map(lambda a: a[None], c["ends"])


@dataclasses.dataclass(frozen=True)
class _Phase(Phase):
    """A scan, and how often the embedding is looked up and its gradient made in it, in the words of `loss`."""
    embed: str
    embed_grad: str


def _phases(schedule: Schedule) -> list[_Phase]:
    """An embedding costs little: where half of the ticks need it, and without chunks, all have it, masked, unconditioned."""
    def often(on):
        few = schedule.num_chunks > 1 and on.mean() < 0.5
        return "never" if not on.any() else "sometimes" if few else "always"
    return [_Phase(**dataclasses.asdict(run), **{name: often(schedule.shared[f"{name}_on"][run.start:run.stop])
                                               for name in ("embed", "embed_grad")}) for run in schedule.phases()]


def _sometimes(how: str, on, then, otherwise):
    """The condition is the same on all devices, so its branches may hold collectives."""
    return then() if how == "always" else lax.cond(on > 0, then, otherwise)


def _share(x, here):
    """x of the one stage where `here` is set, on all stages: all-reduce of x over stage; a sum with zeros is exact."""
    return psum(jnp.where(here > 0, x, 0), STAGE)


def after(values, done):
    """The values, a pytree, whose integers can be used only once the array `done` exists: a real data dependence, for CPUs
    alone.

    All permutes of one device share a rendezvous there, and XLA may start one while another is under way inside a loop
    that it does not depend on: they then pair with each other, which gives wrong numbers or a hang, once in a hundred
    runs. An optimization_barrier does not prevent that. Only one line of an array is read, and summed, because it may be
    split over an automatic axis. Of floats nothing is sent as it is.
    """
    line = done[0, :, 0].sum() if done.ndim == 3 else done
    zero = jnp.minimum(lax.bitcast_convert_type(line.astype(jnp.float32), jnp.int32) & 1, 0)
    return jax.tree.map(lambda a: a + zero if jnp.issubdtype(a.dtype, jnp.integer) else a, values)


def _add(total, new, on):
    return jax.tree.map(lambda a, b: a + jnp.where(on, b, 0), total, new)
