"""Training objectives: next-token loss (pretraining, SFT), preferences (DPO), distillation or policy gradient (RL).

From the last layer's output of a microbatch, an objective computes sums, and the count by which these sums are divided.
An objective also states what else depends on it: the kind of data, support of stages, spikes, the column of
metrics.jsonl. A new objective is a class here and a row of OBJECTIVES. Source of DPO: arXiv:2305.18290, equation 7,
where the log-probabilities of answers are summed, not averaged. RL: `policy`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp

from meshtrain import custom
from meshtrain.config.sections import OBJECTIVE, Run
from meshtrain.model import mtp
from meshtrain.model.divergence import DivergenceSpec, distillation_sums
from meshtrain.model.execution import Execution
from meshtrain.model.loss import token_losses
from meshtrain.model.stats import LayerStats
from meshtrain.model.transformer import Transformer
from meshtrain.names import CHOSEN, MISMATCH_MAX, NO_TARGET, PADDING, REJECTED, TEACHER_IDS, TEACHER_LOGP
from meshtrain.training.policy import Policy

NATS = "nats per token"
# the arrays of a batch, with their number of dims after [batch]
FIELDS = {"tokens": 1, "targets": 1, "segments": 1, "positions": 1, "index": 1, "sequence": 0}


class Objective:
    """What a run minimizes, and what depends on it.

    fields: array of a batch -> (its number of dims after [batch], dtype). device_fields: array -> (dims, dtype,
    *further dims), for the arrays that the devices compute from the others before the step. fills_all: whether every
    microbatch has targets; if not, microbatches after the last target are skipped. data: what batches are made of:
    "documents", documents with a teacher's predictions ("taught"), "pairs" of answers with the margins of a reference
    model, or "answers" that the run samples and scores. pipelined: whether the objective supports pipeline stages,
    which all call `head` on the output of the last stage. spikes: whether an unusually large loss is a fault. column,
    unit: the column of metrics.jsonl that shows progress.
    """
    fields = {name: (dims, jnp.int32) for name, dims in FIELDS.items()}
    fills_all = True
    device_fields: Mapping[str, tuple] = MappingProxyType({})
    data: Literal["documents", "taught", "pairs", "answers"] = "documents"
    pipelined = True
    spikes = True
    column, unit = "loss", NATS
    # (model, ex, params, x_BTD, batch) -> what `Program.scores` returns of a microbatch
    scores: Callable[..., jax.Array] | None = None

    @classmethod
    def of(cls, run: Run) -> Objective:
        """Return the objective of a run."""
        return cls()

    @property
    def samples(self) -> bool:
        """Whether the run samples the answers that it trains on."""
        return self.data == "answers"

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """The names of the fields that `extend` adds to a batch."""
        return ()

    def extend(self, rows: dict) -> dict:
        """Return `rows` (arrays [B, …] on the host), plus the arrays that must be made from whole rows before the rows
        are split over devices."""
        return rows

    def count(self, batch: dict):
        """Return the number of tokens or pairs by which the sums of the batch are divided."""
        return jnp.sum(batch["targets"] != NO_TARGET)

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        """Return (objective, loss, stats), sums over the microbatch. The objective is differentiated.

        batch: the fields, and the step's `normalizers`."""
        raise NotImplementedError

    def loss(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        """Return the loss of `head` alone, for evaluations."""
        return self.head(model, ex, p, x_BTD, batch)[1]


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Negative log-likelihood of the targets, plus z_loss · Σ lse².

    With MTP, depth_weight times the mean of the depths' sums is added. All sums are divided by the number of the
    model's own targets, so that they depend on no layout.
    """
    z_loss: float
    chunk: int
    depths: int = 0
    depth_weight: float = 0.0

    @classmethod
    def of(cls, run: Run) -> NextToken:
        weight = run.training.mtp_weight
        return cls(run.training.z_loss, run.training.loss_chunk, run.model.mtp_layers if weight else 0, weight)

    @property
    def extra_fields(self) -> tuple[str, ...]:
        return tuple(f"{name}_{k}" for k in range(1, self.depths + 1) for name in ("tokens", "targets"))

    @property
    def fields(self):
        return Objective.fields | {name: (1, jnp.int32) for name in self.extra_fields}

    def extend(self, rows: dict) -> dict:
        return rows | mtp.shift(rows, self.depths)

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        objective, nll = model.head_loss(ex, p, x_BTD, batch["targets"], z_loss=self.z_loss, chunk=self.chunk)
        if not self.depths:
            return objective, nll, LayerStats()
        stats: dict[str, jax.Array] = {}
        sums, of_layers = model.depth_losses(ex, p, x_BTD, batch, self.chunk)
        for k, (total, (loss, hits)) in enumerate(sums, 1):
            objective = objective + self.depth_weight / self.depths * total
            targets = jnp.sum(batch[f"targets_{k}"] != NO_TARGET, dtype=jnp.float32)
            stats |= {f"mtp_loss_{k}": loss, f"mtp_accept_{k}": hits, f"mtp_targets_{k}": targets}
        return objective, nll, jax.lax.stop_gradient(of_layers | LayerStats.of("target", **stats))

    def loss(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        return model.head_loss(ex, p, x_BTD, batch["targets"], chunk=self.chunk)[1]


@dataclasses.dataclass(frozen=True)
class Preference(Objective):
    """The loss -log sigmoid(beta · (the model's margin - the reference's margin)). A margin is a difference of
    log-probabilities.

    A sequence holds a pair: segment CHOSEN and segment REJECTED. Its `reference` is the reference's log-probability of
    the chosen answer minus that of the rejected one. Sequences without a pair (padding) do not count.
    """
    beta: float
    chunk: int
    fields = Objective.fields | {"reference": (0, jnp.float32)}
    data = "pairs"
    pipelined = False
    unit = "a pair"

    @classmethod
    def of(cls, run: Run) -> Preference:
        return cls(run.training.dpo_beta, run.training.loss_chunk)

    def count(self, batch: dict):
        return jnp.sum(self._pairs(batch))

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        margin_B = self.beta * (self.scores(model, ex, p, x_BTD, batch) - batch["reference"])
        real_B = self._pairs(batch)

        def sum_real(values_B):
            return jnp.sum(jnp.where(real_B, values_B, 0.0))
        loss = sum_real(jax.nn.softplus(-margin_B))
        return loss, loss, LayerStats.of("target", reward_margin=sum_real(margin_B),
                                         reward_accuracy=sum_real(margin_B > 0))

    def scores(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        """Return [B]: the log-probability of the chosen answer minus that of the rejected one."""
        nll_BT = model.head_token_nll(ex, p, x_BTD, batch["targets"], self.chunk)

        def sum_of(segment: int):
            return jnp.sum(jnp.where(batch["segments"] == segment, nll_BT, 0.0), -1)
        return sum_of(REJECTED) - sum_of(CHOSEN)

    @staticmethod
    def _pairs(batch: dict):
        return jnp.any(batch["segments"] == REJECTED, -1)


@dataclasses.dataclass(frozen=True)
class Distillation(Objective):
    """The divergence from a teacher's predictions, and the negative log-likelihood of the targets (`DivergenceSpec`).

    A batch has the teacher's `top_tokens` most likely tokens, which `teacher` computes on the devices just before the
    step. Validation batches do not have these tokens, so the validation loss is the loss of the targets alone.
    """
    reverse: bool
    weight: float
    temperature: float
    top_tokens: int
    chunk: int
    data = "taught"
    pipelined = False

    @classmethod
    def of(cls, run: Run) -> Distillation:
        given = run.distill
        return cls(given.divergence == "reverse", given.weight, given.temperature, given.top_tokens,
                   run.training.loss_chunk)

    @property
    def device_fields(self):
        return {TEACHER_IDS: (1, jnp.int32, self.top_tokens), TEACHER_LOGP: (1, jnp.float32, self.top_tokens)}

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        if TEACHER_IDS not in batch:
            return *model.head_loss(ex, p, x_BTD, batch["targets"], chunk=self.chunk), LayerStats()
        spec, x_BTD, w = model.head_inputs(ex, p, x_BTD, self.chunk, temperature=self.temperature)
        objective, nll, divergence = distillation_sums(
            ex, DivergenceSpec(spec, self.reverse, self.weight), x_BTD, w, batch["targets"], batch[TEACHER_IDS],
            batch[TEACHER_LOGP])
        return objective, nll, LayerStats.of("target", divergence=jax.lax.stop_gradient(divergence))


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """The loss of sampled tokens. `Policy` computes it from their log-probabilities at this temperature. The loss stays
    around 0, so it shows neither spikes nor progress.

    A segment holds a prompt and its answer, whose tokens are the targets. A batch has these arrays besides those of
    NextToken. weight: the weight of each token's loss, times the step's number of targets. advantage. sampled: the
    sampler's log-probability. old: the trainer's log-probability before the first step on these answers. reference: the
    log-probability under the reference weights of KL.
    """
    policy: Policy
    temperature: float
    chunk: int
    fills_all = False
    data = "answers"
    pipelined = False
    spikes = False
    column, unit = "reward", ""

    @classmethod
    def of(cls, run: Run) -> PolicyGradient:
        return cls(Policy.of(run.rl), run.rl.temperature, run.training.loss_chunk)

    @property
    def fields(self):
        return Objective.fields | {name: (1, jnp.float32) for name in self.policy.reads}

    def head(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        targets_BT = batch["targets"]
        real_BT = targets_BT != NO_TARGET
        given = {name: jnp.where(real_BT, batch[name], 0.0) for name in self.policy.reads}
        of_answers = {} if self.policy.elementwise else self._of_answers(model, ex, p, x_BTD, batch, given)
        metrics = of_answers.pop("metrics", None)
        spec, x_BTD, w = model.head_inputs(ex, p, x_BTD, self.chunk, temperature=self.temperature)
        loss, logp_BT, entropy_BT = token_losses(ex, spec, self.policy.of_token, x_BTD, w, targets_BT,
                                                 of_answers or given)
        if metrics is None:
            _, _, metrics = self.policy.losses(logp_BT, given)
        # compares with the weights that sampled: after the first update these are the weights before it
        apart_BT = jnp.where(real_BT, jnp.abs(given.get("old", logp_BT) - given["sampled"]), 0.0)
        metrics |= {"entropy": entropy_BT, "mismatch_mean": apart_BT}
        sums = {name: jnp.sum(jnp.where(real_BT, value, 0.0)) for name, value in metrics.items()}
        stats = LayerStats.of("target", **sums) | LayerStats.of("step", **{MISMATCH_MAX: apart_BT.max()})
        return loss, loss, jax.lax.stop_gradient(stats)

    def _of_answers(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict, given: dict) -> dict:
        """Return weight, loss and slope of each token, and metrics, for a policy whose loss depends on the whole
        answer.

        The head's forward is computed twice. Answers cross the shards of sequences, so rows are gathered: 4·T bytes of
        each array, in one all-gather.
        """
        fixed_p, fixed_BTD = jax.lax.stop_gradient((p, x_BTD))
        logp_BT = self.scores(model, ex, fixed_p, fixed_BTD, batch)
        segments_BT = jnp.where(batch["targets"] != NO_TARGET, batch["segments"], PADDING)
        arrays = [logp_BT, segments_BT.astype(jnp.float32), *given.values()]        # segments stay exact up to 2**24
        logp_BT, segments_BT, *whole = jnp.moveaxis(ex.layout.act(jnp.stack(arrays, -1), "batch", None, None), -1, 0)
        given = dict(zip(given, whole, strict=True))
        loss, slope, metrics = self.policy.losses(logp_BT, given, answer_sums(segments_BT.astype(jnp.int32)))
        return {"weight": given["weight"], "loss": loss, "slope": slope, "metrics": metrics}

    def scores(self, model: Transformer, ex: Execution, p, x_BTD, batch: dict):
        """Return [B, T]: log-probabilities of the targets; 0 where there is no target."""
        return -model.head_token_nll(ex, p, x_BTD, batch["targets"], self.chunk, self.temperature)


def answer_sums(segments_BT):
    """Return a function x_BT -> [B, T]: at each token, the sum of x over its segment in its row.

    Segments are numbered up to T.
    """
    rows = jax.vmap(lambda x_T, segments_T: jax.ops.segment_sum(
        x_T, segments_T, num_segments=segments_T.size + 1)[segments_T])
    return lambda x_BT: rows(x_BT, segments_BT)


def tokens(batch: dict):
    """Return the tokens of a step without padding.

    The balance loss of experts is divided by these tokens, so that its weight does not depend on the share of tokens
    that are targets.
    """
    return jnp.maximum(jnp.sum(batch["segments"] != PADDING), 1).astype(jnp.float32)


# value of training.objective -> the objective of a run with it
OBJECTIVES: dict[str, Callable[[Run], Objective]] = {
    "next_token": NextToken.of, "dpo": Preference.of, "distill": Distillation.of, "rl": PolicyGradient.of}


def of_run(run: Run) -> Objective:
    """Return the run's objective. Raises: ValueError if code of the run's own is not an objective."""
    name = run.training.objective
    if not custom.is_path(name):
        return OBJECTIVES[name](run)
    given = custom.load(name)
    if not (isinstance(given, type) and issubclass(given, Objective)):
        raise custom.refuse("training.objective", name, OBJECTIVE, "is not an objective")
    try:
        made = given.of(run)
    except custom.ERRORS as error:
        raise custom.refuse("training.objective", name, OBJECTIVE, f"has an `of` that raised {custom.tell(error)}"
                            ) from error
    if not isinstance(made, Objective):
        raise custom.refuse("training.objective", name, OBJECTIVE, f"has an `of` that returned a {type(made).__name__}")
    if made.data != "documents" or set(made.fields) - set(FIELDS):
        raise ValueError(f'training.objective="{name}" has data="{made.data}" and the fields {", ".join(made.fields)}, '
                         f'but code of your own trains on documents with {", ".join(FIELDS)}')
    return made
