"""Guards: each looks at the row of every step and prints a warning, or stops the run.

The guard of loss spikes is `spikes.Spikes`. Stragglers are found from the lateness of processes, which is in no row.
"""
from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Sequence
from typing import Protocol

import jax

from meshtrain.config import Run
from meshtrain.journal.rows import Row
from meshtrain.journal.spikes import describe
from meshtrain.names import MISMATCH_MAX
from meshtrain.run import say
from meshtrain.training import objective
from meshtrain.training.policy import Policy

WINDOW, MOSTLY = 10, 8      # a straggler is the latest process in at least MOSTLY of the last WINDOW steps
SHARE = 0.05                # a straggler costs more than this share of a step's time
# Limits for the difference between the log-probabilities of a sampled token by the sampler and by the training step,
# if only rounding differs. In float32 on CPUs the largest difference is 2e-6 to 1e-5. In bfloat16 the largest is 0.04
# or more, with experts 0.4 (a token may be routed to other experts), and the mean is 0.002 to 0.004. Float32 on GPUs
# is not measured.
LARGEST_IN_FLOAT32, MEAN = 1e-3, 0.05


class Halt(RuntimeError):
    """The run stops, because more steps would not help. All processes raise it together: they see the same metrics."""


class TooManySkippedSteps(Halt):
    """training.max_skipped_steps steps in a row were skipped."""


class TooManyRollbacks(Halt):
    """The run has reached its maximum number of rollbacks."""


class Guard(Protocol):
    def see(self, row: Row) -> None:
        """Look at the row of a step, which is already written. All processes see the same numbers.

        Raises: Halt, which ends the run; LossSpike, which rolls it back."""


class SkippedSteps:
    """Prints skipped steps, and stops the run after `most` in a row.

    remedy: what the user can change, for the message. in_a_row: the number of skipped steps up to the last row.
    """

    def __init__(self, most: int, remedy: str):
        self.most, self.remedy, self.in_a_row = most, remedy, 0

    @classmethod
    def of_run(cls, run: Run) -> SkippedSteps:
        return cls(run.training.max_skipped_steps, (
            f"Lower optimizer.learning_rate={run.optimizer.learning_rate}, lengthen "
            f"optimizer.warmup_steps={run.optimizer.warmup_steps}, leave these batches out by data.skip_batches, "
            f"or continue from an earlier checkpoint (checkpoint.step); all four are allowed on resume"))

    def see(self, row: Row) -> None:
        """Raises: TooManySkippedSteps."""
        if not row["skipped"]:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        limit = row.get("spike_limit")
        why = "not finite" if limit is None else f"a loss spike, {describe(row['loss'], limit)}"
        say.out(f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}: {why}, skipped "
                f"({self.in_a_row} in a row, the run stops at {self.most})")
        if self.in_a_row >= self.most:
            raise TooManySkippedSteps(
                f"{self.in_a_row} steps in a row, up to step {row['step']}, had a loss or gradient norm that "
                f"is not finite, or a loss spike; none of them was applied. {self.remedy}")


class Mismatch:
    """Warns once if the sampler and the training step compute different probabilities.

    A value above `limit` in `column` shows such a mismatch. The limit is infinite if sampler and training step have
    different weights (rl.lag, rl.updates) or matmuls are in float8.
    """

    def __init__(self, run: Run):
        rl, model = run.rl, run.model
        same_weights = not rl.lag and (rl.updates == 1 or Policy.of(rl).old == "trainer")
        exact = model.compute_dtype == "float32" and jax.default_backend() == "cpu" and not model.num_experts
        if not objective.of_run(run).samples or not same_weights or model.matmul_dtype == "float8":
            self.column, self.limit = MISMATCH_MAX, math.inf
        elif exact:
            self.column, self.limit = MISMATCH_MAX, LARGEST_IN_FLOAT32
        else:
            self.column, self.limit = "mismatch_mean", MEAN

    def see(self, row: Row) -> None:
        column, limit = self.column, self.limit
        if not (row.get(column) or 0.0) > limit:
            return
        if jax.process_index() == 0:
            say.err(f"step {row['step']}: {column}={row[column]:.2g}, but rounding explains at most {limit:g}: the "
                    f"sampler computes other probabilities than the training step, so the answers are not sampled from "
                    f"the policy. Look at {column} in metrics.jsonl: if it is large from the first step on, the two "
                    f"programs differ; if it grows, the sampler has old weights")
        self.limit = math.inf


class Stragglers:
    """Finds a straggler: a process whose host dispatches last in most steps, so that all devices wait for it. Single
    late steps (garbage collection, disk) do not count. A slow device is not found, because its host is on time.

    hosts: the host name of each process. named: (process, seconds it costs per step, share of a step's time), or None.
    """

    def __init__(self, hosts: Sequence[str] = ()):
        self.hosts = hosts
        self.named: tuple[int, float, float] | None = None
        self._late: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=WINDOW)

    def add_step(self, late: tuple[int, float] | None, step_time_s: float) -> None:
        """Add a step. Print a straggler that differs from the previous straggler.

        late: (process that came last, seconds), see `agree.StopAgreement`; None: unknown, and the step does not count.
        """
        if late is None:
            return
        before, self.named = self.named and self.named[0], None
        self._late.append((*late, step_time_s))
        if len(self._late) < WINDOW:
            return
        process = collections.Counter(process for process, _, _ in self._late).most_common(1)[0][0]
        own = [late_s for index, late_s, _ in self._late if index == process]
        costs_s, step_s = statistics.median(own), statistics.median(taken for _, _, taken in self._late)
        if len(own) >= MOSTLY and costs_s > SHARE * step_s:
            share = min(1.0, costs_s / step_s)
            self.named = process, costs_s, share
            if process != before:
                host = f" on {self.hosts[process]}" if process < len(self.hosts) else ""
                say.out(f"process {process}{host} delays the others: its host is {costs_s:.3f} s late per step, "
                        f"{share:.0%} of the step")

    def columns(self) -> dict[str, float]:
        """Return the columns of the metrics row."""
        return {"straggler": self.named[0], "straggler_s": self.named[1]} if self.named else {}
