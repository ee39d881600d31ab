"""Optimizers and learning-rate schedules, as one optax transformation that the training step applies.

Every optimizer is a chain of three transformations: its own rule, decoupled weight decay, and the learning rate of this
step. So `learning_rate` and `weight_decay` mean the same for all optimizers. The learning rate follows the run's count
of steps, which includes skipped ones. A rule's own count (Adam's bias correction) counts applied updates. Layers are
stacked [L, …]. A rule for whole matrices (muon, adafactor) gets the dims that form a matrix, and treats each layer's
matrix separately. `step` clips gradients and skips bad steps.

Sources: arXiv:1711.05101 (AdamW), 2302.06675 (Lion), 1804.04235 (Adafactor), 2502.16982 (Muon at scale, "Moonlight").
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshtrain import custom
from meshtrain.config.sections import OPTIMIZER, SCHEDULE, Experts, Optimizer
from meshtrain.names import LAYERS, ROLES
from meshtrain.training import adafactor, groups, muon

# The root mean square of AdamW's updates (arXiv:2502.16982, section 2.2), so that one learning rate serves both.
MUON_RMS = 0.2


def build(cfg: Any, steps: int, roles: Any, matrix_dims: Any, placements: Any = None, dtype: Any = jnp.float32,
          experts: Experts = Experts(), treatments: Any = None) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a run of `steps` steps. All its state is float32, whatever the dtype of the parameters;
    `rounding.store_moments` stores moments in bfloat16.

    update(grads, state, params, step=n): n is the number of steps that the run has taken. n determines the learning
    rate; the state has no such count.

    cfg: name, learning_rate, b1, b2, eps, weight_decay, and the fields that `learning_rate_schedule` reads.

    roles: a tree like params, each leaf one of `ROLES`. Weight decay applies to `matrix`, `head`, `embedding` and
    `router`, not to `norm` and `bias`. (Megatron-LM, GPT-NeoX and nanoGPT decay everything with two dims, including
    embeddings; OLMo 2 leaves embeddings out.)

    matrix_dims: a tree like params, each leaf None or (input dims, output dims): indices into the stacked array.
    [L,D,N,H] has ((1,), (2, 3)). Dims in neither are a batch of independent matrices. Every `matrix` needs one.

    placements: a tree of NamedShardings like params, the sharding of each leaf's state; None: on one device. dtype: the
    dtype of muon's matmuls and of the matrices that muon sends.

    experts: bias_rate is the size of a step's change of the biases of role `balance`, in favour of experts with too few
    tokens. The "gradients" of these biases are the number of tokens of each expert. No optimizer, learning rate or
    decay applies to these biases. bias_rule: "sign" changes a bias by the rate. "error" changes it by the rate times
    the fraction of the mean that an expert lacks, which is negative if the expert has too many tokens (arXiv:2408.15664
    compares the two).

    treatments: a tree of `groups.Treatment` like params; None: each role's treatment without groups.

    adamw uses b1, b2, eps. lion uses b1, b2. adafactor has no first moment; b2 bounds the decay of its second moment.
    muon updates every `matrix`; adamw updates the other weights, including embeddings and head. A group may choose
    between muon and adamw.
    """
    assert {*jax.tree.leaves(roles)} <= {*ROLES}, roles
    if treatments is None:
        treatments = jax.tree.map(lambda role: groups.treat(cfg, role), roles)
    schedule = learning_rate_schedule(cfg, steps)
    if custom.is_path(cfg.schedule):
        schedule = _from_first_step(schedule)
    rule = optax.chain(
        _rule(cfg, roles, matrix_dims, placements, dtype, treatments),
        _add_decayed_weights(treatments),
        _scale_by_learning_rate(schedule, treatments),
    )
    return _in_float32(_balance(rule, roles, experts.bias_rate, experts.bias_rule))


def learning_rate_schedule(cfg: Any, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the number of steps already taken (0 in the first step).

    Skipped steps count. cfg: learning_rate (the peak), schedule, warmup_steps, decay_steps, final_fraction.

    Step n, counted from 1, has n/warmup_steps of the peak during the warm-up. The first step has a rate above 0, the
    last step of the warm-up has the peak, and the last step of the run has `final_fraction` of it. `cosine` and
    `linear` fall over all steps after the warm-up. `wsd` (warm-up, stable, decay: arXiv:2404.06395, here with a linear
    fall) falls over the last `decay_steps`. `constant` stays at the peak.

    A warm-up that is longer than the run is cut to the run, which then ends at the peak. A decay that is longer than
    the steps after the warm-up is cut to these steps.

    A schedule from the run's own code is called with (cfg, steps) and returns the whole function."""
    if custom.is_path(cfg.schedule):
        return custom.call("optimizer.schedule", cfg.schedule, SCHEDULE, cfg, steps)
    warmup = min(cfg.warmup_steps, steps)
    decay = min(cfg.decay_steps, steps - warmup) if cfg.schedule == "wsd" else steps - warmup

    def learning_rate(count):
        step = jnp.asarray(count, jnp.float32) + 1  # exact up to 2^24 steps
        rise = jnp.minimum(1.0, step / max(warmup, 1))
        progress = jnp.clip((step - (steps - decay)) / max(decay, 1), 0.0, 1.0)
        if cfg.schedule == "cosine":
            fall = 0.5 * (1 - jnp.cos(math.pi * progress))
        else:
            fall = 0.0 if cfg.schedule == "constant" else progress
        return cfg.learning_rate * rise * (1 - (1 - cfg.final_fraction) * fall)

    return learning_rate


def _from_first_step(schedule: optax.Schedule) -> optax.Schedule:
    """Return the schedule, but 0 before the first step, as the built-in schedules are. At step -1, `run.bias_warmup`
    moves only the biases that balance experts."""
    def learning_rate(count):
        return jnp.where(count < 0, 0.0, schedule(count))

    return learning_rate


def load_rule(cfg: Optimizer, roles: Any) -> optax.GradientTransformation:
    """Return the transformation that the run's own code makes for the direction of the update. Raises: ValueError."""
    rule = custom.call("optimizer.name", cfg.name, OPTIMIZER, cfg, roles)
    if not isinstance(rule, optax.GradientTransformation):
        raise custom.refuse("optimizer.name", cfg.name, OPTIMIZER, f"returned a {type(rule).__name__}")
    return rule


def _rule(cfg: Optimizer, roles, matrix_dims, placements, dtype, treatments):
    """Return the transformation for the direction of the update, before weight decay and learning rate."""
    if custom.is_path(cfg.name):
        return load_rule(cfg, roles)
    if cfg.name == "lion":
        return optax.scale_by_lion(cfg.b1, cfg.b2)
    if cfg.name == "adafactor":
        return adafactor.scale_by_factored_rms(
            lambda tree: jax.tree_util.tree_map_with_path(_adafactor_dims, tree, roles, matrix_dims), max_decay=cfg.b2
        )
    assert cfg.name in ("adamw", "muon"), cfg.name
    labels = jax.tree.map(lambda of: "muon" if of.rule == "muon" else "adam", treatments)
    adam = _scale_by_adam(cfg, jax.tree.map(
        lambda of: optax.MaskedNode() if of.rule == "muon" else cfg.eps * of.eps, treatments))
    if cfg.name == "adamw" and "muon" not in jax.tree.leaves(labels):
        return adam
    # optax.contrib.muon is not used as a whole: it runs its Adam with Nesterov momentum and decays norms and biases.
    return optax.partition({"muon": _muon(labels, matrix_dims, placements, dtype), "adam": adam}, labels)


def _scale_by_adam(cfg: Optimizer, eps):
    """Return Adam with an eps for each weight; optax has one for all. eps: a tree like params."""
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    if {*jax.tree.leaves(eps)} <= {cfg.eps}:
        return adam

    def update(grads, state, params=None):
        _, state = adam.update(grads, state, params)
        mu, nu = (optax.tree.bias_correction(moment, decay, state.count)
                  for moment, decay in ((state.mu, cfg.b1), (state.nu, cfg.b2)))
        return jax.tree.map(lambda m, v, eps: m / (jnp.sqrt(v) + eps), mu, nu, eps), state

    return optax.GradientTransformation(adam.init, update)


def without_balance(roles, grads):
    """Return the gradients, with None in place of the gradients of role `balance`.

    The gradients of role `balance` are counts: the tokens of each expert, as exact whole numbers. No op may scale,
    clip, round or narrow these counts, because an expert with exactly the mean would then be above or below the mean.
    The gradient norm does not include them.
    """
    return jax.tree.map(lambda role, g: None if role == "balance" else g, roles, grads)


def _balance(rule, roles, rate: float, by: str):
    """Return `rule` for all leaves except those of role `balance`.

    Leaves of role `balance` change by rate · sign(mean − tokens), layer by layer, or, with by = "error", by rate ·
    (mean − tokens) / mean. The difference is computed in integers, because a rounded mean would change the bias of an
    expert that has exactly the mean. The integers are int32, because a step may have more choices than 2^24, the limit
    up to which float32 represents every integer.
    """
    if "balance" not in jax.tree.leaves(roles):
        return rule

    def towards(tokens):
        tokens, num_experts = tokens.astype(jnp.int32), tokens.shape[-1]
        total = tokens.sum(-1, keepdims=True)
        # total - num_experts · tokens, which may overflow int32. Its sign is exact, because the remainder is less than
        # num_experts.
        missing = num_experts * (total // num_experts - tokens).astype(jnp.float32) + (total % num_experts)
        return rate * (jnp.sign(missing) if by == "sign" else missing / jnp.maximum(total, 1))

    def update(grads, state, params=None, **extra):
        of_weights = without_balance(roles, grads)
        quiet = jax.tree.map(lambda g, kept: jnp.zeros_like(g) if kept is None else g, grads, of_weights)
        updates, state = rule.update(quiet, state, params, **extra)
        return jax.tree.map(lambda g, kept, u: towards(g) if kept is None else u, grads, of_weights, updates), state
    return optax.GradientTransformationExtraArgs(rule.init, update)


def _add_decayed_weights(treatments):
    """Add each weight times its decay."""

    def add(updates, params):
        return jax.tree.map(lambda u, w, of: u + of.decay * w if of.decay else u, updates, params, treatments)

    return optax.stateless(add)


def _scale_by_learning_rate(schedule, treatments):
    """Multiply by -schedule(step), and by each weight's own factor.

    optax's own version keeps a count in its state, which a skipped step would not increment.
    """

    def update(updates, state, params=None, *, step, **extra):
        rate = schedule(step)
        return jax.tree.map(lambda u, of: -(rate * of.rate) * u, updates, treatments), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _muon(labels, matrix_dims, placements, dtype):
    """Return the transformation to the orthogonalized momentum of every matrix, with the root mean square of AdamW's
    updates instead of 1/√max(fan_in, fan_out)."""

    def describe(label, dims, placement=None):
        return muon.MatrixDims(*map(tuple, dims), placement) if label == "muon" else optax.MaskedNode()

    matrices = jax.tree.map(describe, labels, matrix_dims, *([placements] if placements else []))

    def scale(update, of):
        fans = (math.prod(update.shape[dim] for dim in dims) for dims in (of.inputs, of.outputs))
        return MUON_RMS * math.sqrt(max(fans)) * update

    return optax.chain(
        muon.scale_by_muon(matrices, dtype),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates, matrices)),
    )


def _adafactor_dims(path, leaf, role, dims):
    """Return the `adafactor.Dims` of one leaf.

    A table is one matrix. A norm or bias of stacked layers has one block per layer."""
    if dims is not None:
        return adafactor.Dims(*(tuple(d) for d in dims))
    if role in ("embedding", "head"):
        return adafactor.Dims((0,), (1,))
    stacked = path[0].key == LAYERS
    return adafactor.Dims((), tuple(range(int(stacked), leaf.ndim)))


def _in_float32(tx):
    """Run `tx` on float32 copies. For bfloat16 parameters optax would keep bfloat16 moments, which lose small steps."""

    def init(params):
        return tx.init(optax.tree.cast(params, jnp.float32))

    def update(grads, state, params=None, **extra):
        return tx.update(optax.tree.cast(grads, jnp.float32), state, optax.tree.cast(params, jnp.float32), **extra)

    return optax.GradientTransformationExtraArgs(init, update)
