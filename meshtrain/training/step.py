"""The training step: loss, gradients (`accumulate`) and update, as one jitted program for every layout.

The update runs on the shards of [optimizer], in which parameters are stored.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P

from meshtrain import flags, jax_private
from meshtrain.model import float8, moe, mtp, params
from meshtrain.model.stats import EXPERT_LOAD, SCORE_BOUND
from meshtrain.names import PRNG
from meshtrain.training import accumulate, average, offload, pipelined, qk_clip, rounding
from meshtrain.training.optimizer import learning_rate_schedule, without_balance
from meshtrain.training.state import State

DROPOUT = 0x64726F70        # tag of the keys of dropout, larger than any number of keys that a seed is split into


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The jitted functions of a run, and the shardings of their arguments.

    `train(state, batch) -> (state, metrics)` donates the state; with `limited` it is `train(state, batch, limit)`.
    metrics: loss (nats per target token), grad_norm, learning_rate, tokens (with a target), skipped, and the
    numbers of the layers as `moe.report_load`, `mtp.report` and `qk_clip.report_bounds` return them.

    `evaluate(params, batch) -> (sum of the loss, number of targets or pairs in it)`.

    `scores(params, batch)`, replicated on every process: for DPO the model's margins [microbatches, replicas,
    sequences], for RL the log-probabilities of the targets [microbatches, replicas, sequences, T].

    `initialize() -> State`, a function of the seed alone.
    """
    train: jax.stages.Wrapped
    # the step takes a third argument, the largest loss with which the update is applied (see `limit`)
    limited: bool
    # (params, batch, dropout key, shares of experts) -> (gradients of trained parameters, sharded as in [optimizer];
    # loss; count; metrics)
    gradients: Callable
    evaluate: Callable
    initialize: Callable
    scores: Callable | None
    step: accumulate.StepSpec
    compiler_options: dict
    deviceless: bool        # compiled for GPUs that the machine does not have

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The rows of the global batch that lie on this process's devices, int64, ascending."""
        sequence = self.step.batch["sequence"]
        numbers = np.arange(math.prod(sequence.shape)).reshape(sequence.shape)
        held = sequence.sharding.addressable_devices_indices_map(sequence.shape).values()
        return np.unique(np.concatenate([numbers[index].ravel() for index in held]))

    def place(self, rows: dict) -> dict:
        """Put this process's rows [len(self.rows), …] of a step on its devices, sharded as `batch`.

        rows: arrays by name; arrays that are computed on the devices may be missing."""
        rows = self.step.objective.extend(rows)
        if (order := self.step.order) is not None:
            rows = {name: x[:, order] if x.ndim > 1 else x for name, x in rows.items()}

        def put(name, abstract):
            if jax.process_count() == 1:
                return jax.device_put(rows[name].reshape(abstract.shape), abstract.sharding)
            numbers = np.arange(math.prod(abstract.shape[:3])).reshape(abstract.shape[:3])

            def block(index):
                return rows[name][np.searchsorted(self.rows, numbers[index[:3]])][(..., *index[3:])]
            return jax.make_array_from_callback(abstract.shape, abstract.sharding, block)
        wanted = {name: self.step.batch[name] for name in self.step.batch if name in rows} | self.step.rows
        return {name: put(name, abstract) for name, abstract in wanted.items()}

    def lower_step(self) -> jax.stages.Lowered:
        """Return the training step before XLA compiles it: (state, batch) -> (state, metrics)."""
        whole = NamedSharding(self.step.mesh, P())
        limit = [jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)] * self.limited
        with jax.set_mesh(self.step.mesh):
            lowered = self.train.lower(self.step.state.abstract, self.step.batch, *limit)
        if (off := self.step.state.offload) and self.deviceless:
            leaves = jax.tree.leaves_with_path(self.step.state.abstract)
            states = [number for number, (path, _) in enumerate(leaves) if path[0].name == "opt_state"]
            hosted = [number for number, owner in zip(states, off.owners, strict=True) if owner is not None]
            jax_private.put_arguments_on_host(lowered, hosted)
        return lowered

    def compile(self):
        """Return the compiled training step, ready to call."""
        return self.lower_step().compile(compiler_options=self.compiler_options)

    def limit(self, loss: float) -> list[jax.Array]:
        """Return further arguments of the compiled step.

        With `limited`, the argument is the largest loss with which the update is applied."""
        whole = NamedSharding(self.step.mesh, P())
        return [jax.make_array_from_callback((), whole, lambda index: np.float32(loss))] * self.limited

    def lower(self, function: jax.stages.Wrapped, *args) -> jax.stages.Lowered:
        """Return a jitted function lowered for these arguments (or ShapeDtypeStructs)."""
        with jax.set_mesh(self.step.mesh):
            return function.lower(*args)

    def compile_function(self, function: jax.stages.Wrapped, *args):
        """Return a jitted function compiled for these arguments with the options of the run."""
        return self.lower(function, *args).compile(compiler_options=self.compiler_options)


def dropout_key(seed: int, step) -> jax.Array:
    """Return the key of a step's dropout.

    The tag makes the key different from fold_in(…, 0) and fold_in(…, 1) of the seed, which `Transformer.init` uses."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=PRNG), DROPOUT), step)


def build(step: accumulate.StepSpec, memory_share: float = flags.MEMORY_SHARE) -> Program:
    """Build the jitted functions of a run. memory_share: see `flags.options`."""
    run, model, layout, mesh, state_spec = step.run, step.model, step.layout, step.mesh, step.state
    split = any(layout.sizes[axis] > 1 for axis in ("stage", "tensor", "context"))
    training, goal, numerics = run.training, step.objective, step.ex.numerics
    platform = mesh.devices.flat[0].platform
    deviceless = platform != "cpu" and jax.default_backend() == "cpu"
    facts = {fact for fact, holds in (
        (flags.DEVICELESS, deviceless),
        (flags.DEVICELESS_11, deviceless and (0, 11) <= jax.__version_info__ < (0, 12)),
        (flags.DETERMINISTIC, training.deterministic),
        (flags.OFFLOAD, training.remat == "offload" or run.optimizer.offload),
        (flags.EXPERTS_OLD, run.model.num_experts > 0 and jax.__version_info__ < (0, 11)),
        (flags.SEVERAL, step.schedule is not None or run.model.num_experts > 0),
        (flags.CUBLAS, not split and not run.model.num_experts or numerics.float8 is float8.BY_CUBLAS)) if holds}
    trained_infos = [info for info in model.parameters() if info.trainable]
    roles = [info.role for info in trained_infos]
    gradients, sum_losses = pipelined.build(step) if step.schedule else (
        functools.partial(accumulate.gradients, step), functools.partial(accumulate.evaluate, step))

    def train(state: State, batch: dict, *loss_limit):
        key = dropout_key(run.run.seed, state.step) if accumulate.drops(run) else None
        grads, loss, count, of_layers = gradients(state.params, batch, key, state.shares)
        of_weights = without_balance(roles, jax.tree.leaves(grads))
        grad_norm = optax.global_norm(of_weights)
        if training.grad_clip:
            clip = jnp.minimum(1.0, training.grad_clip / (grad_norm + 1e-12))
            clipped = [count if g is None else g * clip
                       for g, count in zip(of_weights, jax.tree.leaves(grads), strict=True)]
            grads = jax.tree.unflatten(jax.tree.structure(grads), clipped)
        trained, frozen = model.divide(state.params)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if loss_limit:
            finite &= loss <= loss_limit[0]
        # A step that is not finite, or a spike, changes only the count of steps, which sets the learning rate. It
        # selects the old values instead of applying updates of zero, because XLA would allocate zeros for these
        # together with the accumulators' zeros, and keep them.

        def select(new, old):
            return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        if state_spec.offload:
            updates, opt_state = state_spec.offload.update(
                grads, state.opt_state, trained, step=state.step, finite=finite)
        else:
            updates, opt_state = state_spec.tx.update(grads, state.opt_state, trained, step=state.step)
            opt_state = select(opt_state, state.opt_state)
        moved = optax.apply_updates(optax.tree.cast(trained, jnp.float32), updates)
        if step.ex.bounds:      # not before the first step, where only the balance biases change
            bound_LN = jnp.where(state.step < 0, 0.0, of_layers[SCORE_BOUND])
            moved = qk_clip.clip(model, moved, bound_LN, run.optimizer.qk_clip)
        moved = rounding.round_weights(trained_infos, moved, run.run.seed, state.step)
        trained = select(moved, trained)
        p = params.join(trained, frozen)
        ema = state.ema and average.update(model, state.ema, p, training.ema, finite)
        shares = None if state.shares is None else select(moe.shares(of_layers[EXPERT_LOAD]), state.shares)
        new = State(state.step + 1, p, opt_state, ema, shares)
        rate = learning_rate_schedule(run.optimizer, training.steps)(state.step)
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": jnp.asarray(rate, jnp.float32),
                   "tokens": count, "skipped": ~finite}
        return new, metrics | qk_clip.report_bounds(mtp.report(moe.report_load(of_layers)), run.optimizer.qk_clip)

    def evaluate(p, batch: dict):
        total = sum_losses(p, batch)
        return total, goal.count(step.ex.after(batch, total))

    def initialize():
        p = model.init(jax.random.key(run.run.seed, impl=PRNG))
        ema = average.begin(model, p) if training.ema else None
        opt_state = state_spec.tx.init(model.divide(p)[0])
        if state_spec.offload:
            opt_state = state_spec.offload.map_moments(offload.to_host, opt_state)
        return State(jnp.int32(0), p, opt_state, ema, state_spec.begin_shares())

    batch_shardings, rows_shardings = ({name: abstract.sharding for name, abstract in arrays.items()}
                                       for arrays in (step.batch, step.rows))
    whole, limited = NamedSharding(mesh, P()), training.loss_spike == "skip"
    return Program(
        train=jax.jit(train, in_shardings=(state_spec.sharding, batch_shardings, *[whole] * limited),
                      out_shardings=(state_spec.sharding, whole),
                      donate_argnums=0),
        limited=limited,
        gradients=gradients,
        evaluate=jax.jit(evaluate, in_shardings=(state_spec.sharding.params, rows_shardings), out_shardings=whole),
        initialize=jax.jit(initialize, out_shardings=state_spec.sharding),
        scores=jax.jit(functools.partial(accumulate.scores, step), out_shardings=whole,
                       in_shardings=(state_spec.sharding.params, batch_shardings)) if goal.scores else None,
        step=step,
        compiler_options=flags.options(platform, facts, memory_share),
        deviceless=deviceless)
