"""Compares a run's compiled step with the same step on one device: losses, metrics, every gradient leaf.

The compared step is the compiled training step itself. After the first step, the optimizer state is linear or quadratic
in every gradient leaf, so gradients are compared through it and no separate gradient program is needed.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from meshtrain import assembly, config, design
from meshtrain.cost.program import audit
from meshtrain.model import params as params_of
from meshtrain.names import AXES, CHOSEN, NO_TARGET, PADDING, REJECTED, TEACHER_IDS, TEACHER_LOGP
from meshtrain.sharding.rules import Layout
from meshtrain.shipped import locate_shipped
from meshtrain.training import objective
from meshtrain.training.state import State

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A run assembled on simulated devices, and its step."""
    made: assembly.Assembly
    step: jax.stages.Compiled

    @functools.cached_property
    def audit(self) -> audit.ProgramAudit:
        return audit.read(self.step.as_text(), self.made.mesh)


class Tolerance(NamedTuple):
    """Largest allowed relative differences.

    state: the tolerance of a leaf of the optimizer state after the first step, relative to the leaf's largest element,
    or to `floor` times the largest element of all leaves if that is larger. The floor serves leaves whose true value is
    zero (the bias of keys) and that hold only rounding errors. metrics: the tolerance of the other metrics of the first
    step, relative to the metric, or to SMALL_METRIC if that is larger.
    """
    loss: float
    norm: float
    state: float
    later_losses: float
    floor: float
    metrics: float


# float32: sums are in another order. A norm over six numbers can amplify the rounding of a gradient; the largest
# observed difference is 2.2e-5. Later steps differ more: Adam divides by roots of tiny moments, and lion takes signs.
FLOAT32 = Tolerance(2e-5, 6e-5, 2e-4, 1e-3, 1e-5, 1e-3)
# Half a unit in the last of bfloat16's 8 places, relative.
BFLOAT16_ROUNDS = 2.0 ** -8
SMALL_METRIC = 0.01     # a divergence near 0 consists of rounding errors


def check_finite(numbers: Mapping[str, np.ndarray], where: str) -> None:
    """Check the numbers of one device, with which layouts are compared. where: their source, for the message. Raises:
    ConfigError for numbers that are not finite: every layout would differ from them."""
    if wrong := [name for name, array in numbers.items() if not np.isfinite(array).all()]:
        more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        raise config.ConfigError(f"{where}: {wrong[0]}{more}: not finite on one device, so no layout can be compared; "
                                 f"give parameters and rows with finite losses and gradients")


class NotFiniteError(AssertionError):
    """A step was skipped: its loss or gradients are not finite."""


@dataclasses.dataclass(frozen=True)
class Differences:
    """Relative differences of three steps from those on one device; inf for values that are not finite.

    loss, norm: differences in the first step. leaves: leaves of the optimizer state after the first step, by path.
    losses: one difference per step. metrics: other metrics of the first step, by name; inf if only one side has the
    metric or an entry of it.
    """
    loss: float
    norm: float
    leaves: dict[str, float]
    losses: tuple[float, ...]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def beyond(self, tolerance: Tolerance, leaves: Mapping[str, float] | None = None) -> list[str]:
        """Return "name: difference" for each number beyond the tolerance, the worst leaves first. leaves: used instead
        of self.leaves, e.g. with names of parameters."""
        worst = sorted((self.leaves if leaves is None else leaves).items(), key=lambda item: -item[1])
        rows = [("loss", self.loss, tolerance.loss), ("gradient norm", self.norm, tolerance.norm),
                *((f"gradient of {name}", off, tolerance.state) for name, off in worst),
                *((f"metric {name}", off, tolerance.metrics) for name, off in self.metrics.items()),
                *((f"loss of step {n}", off, tolerance.later_losses) for n, off in enumerate(self.losses, 1))]
        return [f"{name}: {off:.1e}" for name, off, most in rows if not off <= most]

    def by_parameter(self, names: Iterable[str]) -> dict[str, float]:
        """Return the largest difference in the optimizer state of each parameter, by its name. Leaves that belong to no
        parameter keep their paths."""
        worst: dict[str, float] = {}
        for path, off in self.leaves.items():
            keys = re.findall(r"\['([^']*)'\]", path)
            name = next((name for i in range(len(keys)) if (name := "/".join(keys[i:])) in names), path)
            worst[name] = max(off, worst.get(name, 0.0))
        return worst


def allow_reduction(tolerance: Tolerance, layout: Layout) -> Tolerance:
    """Return the tolerance for a layout that may reduce gradients in bfloat16 over n devices.

    Each summand and each partial sum is rounded: 2n - 1 roundings of numbers that are rarely larger than the largest
    element of the leaf. Rounding errors mostly have opposite signs, so n roundings are allowed. They count twice,
    because the second moment of the optimizer has the square of the gradient. The norm is the norm of the reduced
    gradients. Its error is less than one rounding, because the errors of its terms are independent. The loss of the
    first step has no such error.
    """
    if layout.rules.reduce == "float32":
        return tolerance
    off = layout.num_shards(layout.token_axes) * BFLOAT16_ROUNDS
    return tolerance._replace(state=tolerance.state + 2 * off, norm=tolerance.norm + BFLOAT16_ROUNDS,
                              later_losses=tolerance.later_losses + BFLOAT16_ROUNDS)


def differences(case: Compiled, seed: int = 0, floor: float = FLOAT32.floor) -> Differences:
    """Run three steps, and three on one device from the same parameters and batches. Return the relative differences.
    Raises: NotFiniteError."""
    params, expected, expected_metrics, expected_state = one_device(
        on_one_device(case.made.run).model_dump_json(), seed)
    numbers, metrics, state = train(case, params)
    off = np.abs(numbers - expected) / np.abs(expected)
    return Differences(off[0, 0], off[0, 1], leaf_differences(state, expected_state, floor), tuple(off[:, 0]),
                       metric_differences(metrics, expected_metrics))


@functools.lru_cache(8)
def one_device(run: str, seed: int):
    """Return (parameters, *the results of `train`) for a run on one device. run: the run as JSON, so that the results
    are cached for all layouts of a run."""
    one = _compile_on_one(run)
    params = draw_parameters(one.made, seed)
    return params, *train(one, params)


@functools.lru_cache(2)
def _compile_on_one(run: str) -> Compiled:
    return compile_run(config.Run.model_validate_json(run))


def leaf_differences(found, expected, floor: float) -> dict[str, float]:
    """Return path -> difference for each leaf: the largest absolute difference, divided by the leaf's largest element,
    or by `floor` times the largest element of all leaves if that is larger."""
    scales = [np.abs(e).max(initial=0) for e in jax.tree.leaves(expected)]
    leaves = {}
    for (path, a), e, scale in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), scales, strict=True):
        off, scale = np.abs(a - e).max(initial=0), max(scale, floor * max(scales))
        leaves[jax.tree_util.keystr(path)] = float(off / scale) if off else 0.0
    return {path: off if np.isfinite(off) else math.inf for path, off in leaves.items()}


def metric_differences(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the largest relative difference of each metric; inf if one side lacks the metric or an entry of it (NaN).
    """
    worst = {}
    for name in sorted({*found, *expected}):
        if name not in found or name not in expected or (
                np.isfinite(found[name]) != np.isfinite(expected[name])).any():
            worst[name] = math.inf
            continue
        off = np.abs(found[name] - expected[name]) / np.maximum(np.abs(expected[name]), SMALL_METRIC)
        worst[name] = float(np.nanmax(off, initial=0))
    return worst


def compile_run(run: config.Run, devices: Sequence[jax.Device] | None = None) -> Compiled:
    """Compile a run's step for the first devices of `devices`, as many as its mesh needs. None: jax.devices()."""
    made = assembly.assemble(run, (devices or jax.devices())[:num_devices(run)])
    with jax.default_matmul_precision("highest"):
        return Compiled(made, made.program.compile())


def num_devices(run: config.Run) -> int:
    return math.prod(getattr(run.mesh, axis) for axis in AXES)


def on_one_device(run: config.Run) -> config.Run:
    """Return the run on one device: no mesh, one microbatch, no remat."""
    return run.model_copy(update=dict(
        mesh=config.Mesh(), sharding=config.Sharding(rules=str(locate_shipped("sharding_rules/ddp.toml"))),
        pipeline=config.Pipeline(), context=config.Context(),
        experts=run.experts.model_copy(update=dict(dispatch="auto")),
        training=run.training.model_copy(update=dict(microbatches=1, remat="none"))))


def draw_parameters(made: assembly.Assembly, seed: int):
    """Return random parameters, other than the model's initial ones: biases and norm scales are random, too, since
    constants would hide wrong gradients of what they scale."""
    rng = np.random.default_rng(seed)
    # Norm scales stay near their initial value: twice that value in every norm would amplify rounding errors in
    # gradients.

    def mean(info: params_of.ParamInfo) -> float:
        return (info.role == "norm") * (1 - made.run.model.norm_offset)
    return params_of.tree(made.model.parameters(), lambda info: (
        mean(info) + rng.standard_normal(info.shape) * (0.2 if "matrix" in info.role else 0.05)).astype(info.dtype))


def train(case: Compiled, params, steps: int = STEPS):
    """Train for some steps. Return (numbers [steps, 2] with loss and gradient norm, the other metrics of the first
    step, the optimizer state after the first step). Raises: NotFiniteError."""
    spec = case.made.program.step.state
    opt_state, ema = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), (spec.abstract.opt_state, spec.abstract.ema))
    # unequal shares of experts: with equal ones the balance loss has no gradient
    shares = jax.tree.map(lambda a: np.linspace(0, 2 / a.shape[-1], a.size, dtype=a.dtype).reshape(a.shape),
                          spec.abstract.shares)
    state = jax.device_put(State(np.int32(0), params, opt_state, ema, shares), spec.sharding)
    numbers: list[tuple[float, float]] = []
    first: tuple = ()
    for n in range(steps):
        state, metrics = case.step(state, case.made.program.place(batch_of(case.made.run, n)))
        if metrics["skipped"]:
            raise NotFiniteError(f"step {n + 1}: loss {float(metrics['loss'])}, gradient norm "
                                 f"{float(metrics['grad_norm'])}")
        numbers.append((float(metrics.pop("loss")), float(metrics.pop("grad_norm"))))
        first = first or ({name: np.asarray(value, float) for name, value in metrics.items()},
                          jax.device_get(state.opt_state))
    return np.array(numbers), *first


def batch_of(run: config.Run, step: int) -> dict:
    """Return a random batch of packed documents. Some targets are missing, some sequences have few targets or padding
    at the end. Most of the last quarter is padding, so that microbatches differ in their number of tokens."""
    B, T, rng = run.data.global_batch, run.data.seq_len, np.random.default_rng(step)
    starts = rng.random((B, T)) < 0.15
    starts[:, 0] = True
    index = np.tile(np.arange(T), (B, 1))
    targets = rng.integers(0, run.model.vocab_size, (B, T))
    targets[rng.random((B, T)) < rng.random((B, 1))] = NO_TARGET
    batch = {"tokens": rng.integers(0, run.model.vocab_size, (B, T)), "targets": targets, "index": index,
             "segments": np.cumsum(starts, 1),
             "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1),
             "sequence": step * B + np.arange(B)}  # fmt: skip
    padded = rng.random((B, 1)) < 0.3
    length = T - rng.integers(0, T, (B, 1)) * padded        # tokens before the padding
    length[B - B // 4:] = np.minimum(length[B - B // 4:], 1 + T // 4)
    padding = index >= length
    batch["segments"][padding], batch["targets"][padding] = PADDING, NO_TARGET
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    goal = objective.of_run(run)
    if goal.data == "taught":
        return batch | _predictions(run, rng)
    return {"documents": lambda batch, _: batch, "pairs": _pairs, "answers": _answers}[goal.data](batch, rng)


def _predictions(run: config.Run, rng: np.random.Generator) -> dict:
    """Return random predictions of a teacher: different tokens, with at most 0.9 of the probability."""
    k = run.distill.top_tokens
    ids = rng.random((run.data.global_batch, run.data.seq_len, run.model.vocab_size)).argpartition(k - 1)[..., :k]
    shares = rng.exponential(size=ids.shape)
    shares *= rng.uniform(0.1, 0.9, shares[..., :1].shape) / shares.sum(-1, keepdims=True)
    return {TEACHER_IDS: ids.astype(np.int32), TEACHER_LOGP: np.log(shares).astype(np.float32)}


def _pairs(batch: dict, rng: np.random.Generator) -> dict:
    """Return a DPO batch: each row has a chosen and a rejected answer, then padding. The last row is all padding."""
    index, (B, T) = batch["index"], batch["index"].shape
    ends = np.sort(rng.integers(2, T, (B, 2)), 1)
    ends[:, 1] = np.maximum(ends[:, 1], ends[:, 0] + 1)
    second = index >= ends[:, :1]
    segments = np.where(second, np.where(index < ends[:, 1:], REJECTED, PADDING), CHOSEN)
    segments[-1] = PADDING
    positions = np.where(second, index - ends[:, :1], index)
    targets = np.where((segments == PADDING) | (index == 0), NO_TARGET, np.maximum(batch["targets"], 0))
    made = {"segments": segments, "positions": positions, "targets": targets}
    return batch | {name: x.astype(np.int32) for name, x in made.items()} | {
        "reference": rng.normal(size=B, scale=3).astype(np.float32)}


def _answers(batch: dict, rng: np.random.Generator) -> dict:
    """Return an RL batch: each segment is a prompt with an answer, with random advantages and log-probabilities. The
    last quarter of the rows is empty."""
    B, T = batch["targets"].shape
    for name, nothing in (("segments", PADDING), ("targets", NO_TARGET)):
        batch[name][B - B // 4:] = nothing
    of_answers = rng.normal(size=(B, T + 1))[np.arange(B)[:, None], batch["segments"]]
    sampled = -rng.uniform(3, 8, (B, T))

    def near() -> np.ndarray:
        return sampled + rng.normal(size=(B, T), scale=0.2)
    made = {"weight": rng.uniform(0.5, 1.5, (B, T)), "advantage": of_answers, "sampled": sampled, "old": near(),
            "reference": near()}
    return batch | {name: x.astype(np.float32) for name, x in made.items()}


def check_accepted(run: config.Run) -> None:
    """Check that the program accepts the run. Raises: ConfigError with the reasons if not."""
    if faults := design.refusals(run, "cpu", None):
        raise config.ConfigError(*faults)
