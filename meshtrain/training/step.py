"""The training step: loss, gradients (`accumulate`), update; one jitted program for every layout.

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

from meshtrain.model import float8, moe, params
from meshtrain.names import SCORE_BOUND
from meshtrain.training import accumulate, pipelined, qk_clip
from meshtrain.training.optimizer import learning_rate_schedule
from meshtrain.training.state import State

DROPOUT = 0x64726F70        # tag of the keys of dropout, larger than any number of keys that a seed is split into

# Options that every program of a run is compiled with, by platform. Each has its reason; nothing else is set.
COMPILER_OPTIONS = {
    "gpu": {
        # Overlaps collectives with the matmuls that do not need them.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Reduce-scatters of weights are not merged into one that waits for the last of them: llama3-70b, tensor 8 ×
        # fsdp 8 on 64 H100, 24.7 to 24.2 s by the roofline; elsewhere no change. Tried and left out: pipelined
        # all-gathers (8B 7.7 to 8.5 s, 70B 24.7 to 25.7), the same threshold for all-gathers (0.3%), the analytical
        # latency estimator (none).
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
        # Rewrites gather + slice into a permute that can have no pairs and then outputs zeros (openxla/xla 45218,
        # 47083).
        "xla_disable_hlo_passes": "all-gather-to-collective-permute-simplifier",
    },
    "cpu": {},
}
# On GPUs, with training.deterministic: the same bits in every run on the same GPUs. CPUs give them anyway.
DETERMINISTIC_OPTIONS = {
    # Scatters add in a fixed order (the embedding's gradient: sorted first), and no kernel with atomics is taken.
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_exclude_nondeterministic_ops": True,
    # No timing decides between kernels: one compilation may choose another than the next, and adds in another order.
    "xla_gpu_autotune_level": 0,
}
# On GPUs, with training.deterministic, since jax 0.12 finds no Triton configuration without timing; where nothing
# splits a layer's matmuls or its tokens, and it has no experts; and where no dot can ask for float8 by its algorithm
# (`float8.precision`).
CUBLAS_OPTIONS = {
    # cuBLAS adds what is added to a product as it makes it (the other products of one gradient, the residual stream).
    # llama3-8b on 8 H100 by the roofline: 7.15 to 7.07 s. With tensor 8 more of the tensor axis' traffic is exposed
    # (llama3-70b: 4.3 to 6.8%).
    "xla_gpu_enable_triton_gemm": False,
}
# On GPUs, with training.remat = "offload".
OFFLOAD_OPTIONS = {
    # A layer's input comes back from the host while the backward of the layer behind it runs, not before its own first
    # matmul; one more of them stands on the device.
    "xla_gpu_enable_pipelined_host_offloading": True,
    # One collective at a time, XLA's default, also with experts (SEVERAL_OPTIONS): copies to the host, the
    # latency-hiding scheduler and a higher limit are reported to corrupt training together, though no two of them do
    # (marin-community/marin, experiments/grug/moe_hero_ep, on GB200; not reproduced). It costs what is told there: 446
    # to 460 ms.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
}
# On GPUs, with stages or experts.
SEVERAL_OPTIONS = {
    # F, B and W of a layer stand beside each other, and gradients of experts beside their tokens: with one collective
    # under way at a time, one that is awaited soon waits for one that is not. llama3-70b-pipeline on 64 H100 by the
    # roofline: 19.8 s, with two 19.2, with four or eight 18.9. Qwen3-30B-A3B's layers on 8 H200, zero3_experts_fsdp,
    # data 4: 460 ms, with four 446; zero3 470 and 471. Without either it lost (llama3-70b 22.9 to 23.5 s, llama3-8b 7.7
    # to 7.9).
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
# The share of a GPU's memory beyond which XLA recomputes values by itself, in silence; its flag is in percent of that.
# Llama 3 8B without remat on 16 A100, 68 of 73 GiB, by the roofline: 10.8 s, and 8.9 s where the limit is what the
# process takes.
XLA_MEMORY_SHARE = 0.80


def compiler_options(platform: str, deterministic: bool, remat: str = "none", several: bool = False,
                     memory_share: float = XLA_MEMORY_SHARE, cublas: bool = False) -> dict:
    """XLA options of every program of a run on this platform (jax's name). several: see SEVERAL_OPTIONS. memory_share:
    of a GPU, for the process. cublas: see CUBLAS_OPTIONS."""
    if platform == "cpu":
        return COMPILER_OPTIONS["cpu"]
    limit = {"xla_gpu_memory_limit_slop_factor": round(100 * memory_share / XLA_MEMORY_SHARE)}
    return (COMPILER_OPTIONS["gpu"] | limit | (DETERMINISTIC_OPTIONS if deterministic else {})
            | (SEVERAL_OPTIONS if several else {}) | (OFFLOAD_OPTIONS if remat == "offload" else {})
            | (CUBLAS_OPTIONS if cublas or deterministic else {}))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The jitted functions of a run, and the shardings of their arguments.

    `train(state, batch) -> (state, metrics)` (with `limited` `train(state, batch, limit)`) donates the state; metrics:
    loss (nats per target token), grad_norm, learning_rate, tokens (with a target), skipped, and the aux of the layers
    as `moe.reported` has it. `evaluate(params, batch) -> (sum of the loss, number of targets, or pairs, in it)`.
    `preferred(params, batch)`, of DPO -> the model's margins [microbatches, replicas, sequences], replicated on every
    process. `initialize() -> State`, a function of the seed alone.
    """
    train: Callable
    # the step takes a third argument, the largest loss with which it is applied (see `limit`)
    limited: bool
    # (params, batch, dropout key) -> (grads of what is trained, placed as [optimizer], loss, count, aux)
    gradients: Callable
    evaluate: Callable
    initialize: Callable
    preferred: Callable | None
    step: accumulate.StepSpec
    compiler_options: dict

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """int64, ascending: the rows of the global batch that lie on devices of this process."""
        sequence = self.step.batch["sequence"]
        numbers = np.arange(math.prod(sequence.shape)).reshape(sequence.shape)
        held = sequence.sharding.addressable_devices_indices_map(sequence.shape).values()
        return np.unique(np.concatenate([numbers[index].ravel() for index in held]))

    def place(self, rows: dict) -> dict:
        """Puts this process's rows [len(self.rows), …] of a step on its devices, sharded as `batch`."""
        if (order := self.step.order) is not None:
            rows = {name: x[:, order] if x.ndim > 1 else x for name, x in rows.items()}

        def put(name, abstract):
            if jax.process_count() == 1:
                return jax.device_put(rows[name].reshape(abstract.shape), abstract.sharding)
            numbers = np.arange(math.prod(abstract.shape[:3])).reshape(abstract.shape[:3])
            block = lambda index: rows[name][np.searchsorted(self.rows, numbers[index[:3]])][(..., *index[3:])]
            return jax.make_array_from_callback(abstract.shape, abstract.sharding, block)
        return {name: put(name, abstract) for name, abstract in self.step.batch.items()}

    def compile(self):
        """The compiled training step, ready to call: (state, batch) -> (state, metrics)."""
        whole = NamedSharding(self.step.mesh, P())
        limit = [jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)] * self.limited
        return self.compiled(self.train, self.step.state.abstract, self.step.batch, *limit)

    def limit(self, loss: float) -> list[jax.Array]:
        """Further arguments of the compiled step: with `limited` the largest loss with which the update is applied."""
        whole = NamedSharding(self.step.mesh, P())
        return [jax.make_array_from_callback((), whole, lambda index: np.float32(loss))] * self.limited

    def compiled(self, function: Callable, *args):
        """A jitted function, compiled for these arguments (or ShapeDtypeStructs) with the options of the run."""
        with jax.set_mesh(self.step.mesh):
            return function.lower(*args).compile(compiler_options=self.compiler_options)


def dropout_key(seed: int, step) -> jax.Array:
    """The key of a step's dropout. The tag keeps it apart from fold_in(…, 0) and fold_in(…, 1) of the seed, which
    `Transformer.init` uses."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), DROPOUT), step)


def build(step: accumulate.StepSpec, memory_share: float = XLA_MEMORY_SHARE) -> Program:
    """memory_share: see `compiler_options`."""
    run, model, layout, mesh, spec = step.run, step.model, step.layout, step.mesh, step.state
    split = any(layout.sizes[axis] > 1 for axis in ("stage", "tensor", "context"))
    training, goal = run.training, step.objective
    roles = [info.role for info in model.parameters() if info.trainable]
    gradients, loss_sum, *more = pipelined.pipelined(step) if step.schedule else accumulate.scanned(step)

    def train(state: State, batch, *loss_limit):
        key = dropout_key(run.run.seed, state.step) if accumulate.drops(run) else None
        grads, loss, count, aux = gradients(state.params, batch, key)
        grad_norm = optax.global_norm([g for g, role in zip(jax.tree.leaves(grads), roles, strict=True)
                                       if role != "balance"])
        # counts stay whole numbers: scaled, an expert with just the mean would be above or below it
        if training.grad_clip:
            clip = jnp.minimum(1.0, training.grad_clip / (grad_norm + 1e-12))
            clipped = [g if role == "balance" else g * clip
                       for g, role in zip(jax.tree.leaves(grads), roles, strict=True)]
            grads = jax.tree.unflatten(jax.tree.structure(grads), clipped)
        trained, frozen = model.divided(state.params)
        updates, opt_state = spec.tx.update(grads, state.opt_state, trained, step=state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        if loss_limit:
            finite &= loss <= loss_limit[0]
        # A step that is not finite, or a spike, changes nothing but the count of steps, from which the learning rate
        # follows. The old values and no updates of zero: XLA would make these where it makes the accumulators' zeros,
        # and keep them.
        kept = lambda new, old: jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        moved = optax.apply_updates(trained, updates)
        if step.ex.bounds:      # not before the first step, where only the balance moves
            bound_LN = jnp.where(state.step < 0, 0.0, aux[SCORE_BOUND])
            moved = qk_clip.clipped(model, moved, bound_LN, run.optimizer.qk_clip)
        trained, opt_state = kept(moved, trained), kept(opt_state, state.opt_state)
        new = State(state.step + 1, params.joined(trained, frozen), opt_state)
        rate = learning_rate_schedule(run.optimizer, training.steps)(state.step)
        metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": jnp.asarray(rate, jnp.float32),
                   "tokens": count,
                   "skipped": ~finite}
        return new, metrics | qk_clip.reported(moe.reported(aux), run.optimizer.qk_clip)

    def evaluate(p, batch):
        total = loss_sum(p, batch)
        return total, goal.count(step.ex.after(batch, total))

    def initialize():
        p = model.init(jax.random.key(run.run.seed))
        return State(jnp.int32(0), p, spec.tx.init(model.divided(p)[0]))

    batch_shardings = {name: abstract.sharding for name, abstract in step.batch.items()}
    whole, limited = NamedSharding(mesh, P()), training.loss_spike == "skip"
    return Program(
        train=jax.jit(train, in_shardings=(spec.sharding, batch_shardings, *[whole] * limited),
                      out_shardings=(spec.sharding, whole),
                      donate_argnums=0),
        limited=limited,
        gradients=gradients,
        evaluate=jax.jit(evaluate, in_shardings=(spec.sharding.params, batch_shardings), out_shardings=whole),
        initialize=jax.jit(initialize, out_shardings=spec.sharding),
        preferred=jax.jit(more[0], in_shardings=(spec.sharding.params, batch_shardings), out_shardings=whole)
        if training.objective == "dpo" else None,
        step=step,
        compiler_options=compiler_options(mesh.devices.flat[0].platform, training.deterministic, training.remat,
                                          step.schedule is not None or run.model.num_experts > 0, memory_share,
                                          cublas=not split and not run.model.num_experts
                                          or step.ex.float8 is float8.BY_CUBLAS))
