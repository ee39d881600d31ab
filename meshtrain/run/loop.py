"""The loop: batches in, metrics and checkpoints out. The device is never waited for except to read the metrics of the
step before, while the next one runs. Stops, faults and what a directory of a run holds are decided in `rundir`."""
from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from meshtrain.cluster import agree
from meshtrain.run.checkpoint import Checkpoints
from meshtrain.data.packing import Data
from meshtrain.run.metrics import Writers
from meshtrain.run.profiling import Trace
from meshtrain.training.state import State
from meshtrain.training.step import Program

PROGRESS_EVERY_S = 2.0


class TooManySkippedSteps(RuntimeError):
    """The run stopped because step after step had no finite loss or gradient."""


class StopRequest:
    """SIGINT or SIGTERM: the step is finished, the state saved; a second signal stops at once."""

    def __init__(self):
        self.signal: int | None = None

    @contextlib.contextmanager
    def listening(self):
        def receive(number, frame):
            if self.signal is not None:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self.signal = number
            print(f"{signal.Signals(number).name}: finishing this step and saving; once more stops at once", flush=True)
        old = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def train(run, program: Program, step: Callable, state: State, data: Data, checkpoints: Checkpoints,
          writer: Writers, metadata: dict, stop: StopRequest, flops_per_step: float,
          peak_flops: float | None) -> tuple[State, int, float | None]:
    """Trains from state.step to run.training.steps. Returns (state, steps taken in all, last validation loss).

    Every process of the run calls it alike; a stop request to one of them stops all after the same step.

    step: the compiled training step. peak_flops: of all devices together; None: mfu is null.
    Raises: TooManySkippedSteps; a stop request ends the loop early, with the state saved.
    """
    first, last = int(state.step), run.training.steps
    tokens_per_step = run.data.global_batch * run.data.seq_len
    rows = _Rows(writer, run.metrics.every, tokens_per_step, flops_per_step, peak_flops)
    progress = _Progress(last)
    trace = Trace(run.metrics.profile_steps, Path(run.run.dir) / "tensorboard", first)
    batches = data.iterate(first, rows=program.rows, prefetch=run.data.prefetch)
    agreement = agree.StopAgreement()
    skipped_in_a_row, val_loss, pending, done = 0, None, None, first

    def settle(pending, val_loss=None):
        """Reads the metrics of a step that was dispatched earlier; only here the host waits for the device."""
        nonlocal skipped_in_a_row
        if pending is None:
            return
        number, metrics, data_wait_s, ended = pending
        row = rows.write(number, jax.device_get(metrics), data_wait_s, ended.result(), val_loss)
        skipped_in_a_row = skipped_in_a_row + 1 if row["skipped"] else 0
        if row["skipped"]:
            progress.tell(f"step {number}: loss {row['loss']}, gradient norm {row['grad_norm']}: not finite, skipped "
                          f"({skipped_in_a_row} in a row, the run stops at {run.training.max_skipped_steps})")
        progress.step(number, row)
        if skipped_in_a_row >= run.training.max_skipped_steps:
            raise TooManySkippedSteps(
                f"{skipped_in_a_row} steps in a row, the last of them {number}, had no finite loss or gradient norm; "
                f"nothing of them was applied. Lower optimizer.learning_rate={run.optimizer.learning_rate}, lengthen "
                f"optimizer.warmup_steps={run.optimizer.warmup_steps}, or go on from an earlier checkpoint")

    with contextlib.closing(batches), trace, concurrent.futures.ThreadPoolExecutor(1) as watch:
        ended = watch.submit(_time_when_ready, ())  # when the device ended the step before
        for number in range(first + 1, last + 1):
            if number == trace.first:
                settle(pending)
                pending = None
                jax.block_until_ready(state)
                rows.pause(trace.start())
            asked = time.perf_counter()
            batch = program.place(next(batches))
            # While the step before still runs, nobody waits for the batch of the next.
            data_wait_s = max(0.0, time.perf_counter() - max(asked, ended.result())) if ended.done() else 0.0
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, metrics = step(state, batch)
            ended = watch.submit(_time_when_ready, metrics)
            validate = number == last or (run.validation.every > 0 and number % run.validation.every == 0)
            settle(pending)
            pending, done = (number, metrics, data_wait_s, ended), number
            stopping = agreement.reached(stop.signal is not None)
            if validate and data.num_validation_batches:
                jax.block_until_ready(metrics)      # so that the pause below is the validation's alone
                measured = time.perf_counter()
                val_loss = validation_loss(run, program, state, data)
                progress.tell(f"step {number}: validation loss {val_loss:.4f} nats per token")
                settle(pending, val_loss)
                pending = None
                rows.pause(time.perf_counter() - measured)
            if number == trace.last:
                settle(pending)
                pending = None
                jax.block_until_ready(state)
                rows.pause(trace.stop())
            if checkpoints.due(number) or number == last or stopping:
                settle(pending)         # before it is saved: a run that must stop does not overwrite good checkpoints
                pending = None
                rows.pause(checkpoint_wait_s=checkpoints.save(number, state, metadata))
            if stopping:
                break
        settle(pending)
    progress.end()
    checkpoints.wait()
    return state, done, val_loss


def _time_when_ready(arrays) -> float:
    jax.block_until_ready(arrays)
    return time.perf_counter()


def validation_loss(run, program: Program, state: State, data: Data) -> float:
    """Mean nats per target token over run.validation.batches batches of the held-out split."""
    total = count = 0.0
    for i in range(min(run.validation.batches, data.num_validation_batches)):
        nll, targets = program.evaluate(state.params, program.place(data.validation_batch(i, program.rows)))
        total, count = total + float(nll), count + int(targets)
    return total / max(count, 1)


class _Rows:
    """metrics.jsonl: a step's time is from the end of the one before to its own end on the device, pauses taken out; what
    was waited, since the row before."""

    def __init__(self, writer, every: int, tokens_per_step: int, flops_per_step: float, peak_flops: float | None):
        self.writer, self.every = writer, every
        self.tokens_per_step, self.flops_per_step, self.peak_flops = tokens_per_step, flops_per_step, peak_flops
        self.mark, self.paused = time.perf_counter(), 0.0
        self.data_wait_s = self.checkpoint_wait_s = 0.0

    def pause(self, seconds: float = 0.0, checkpoint_wait_s: float = 0.0) -> None:
        self.paused += seconds + checkpoint_wait_s
        self.checkpoint_wait_s += checkpoint_wait_s

    def write(self, number: int, metrics: dict, data_wait_s: float, ended: float, val_loss: float | None) -> dict:
        self.data_wait_s += data_wait_s
        step_time_s = max(ended - self.mark - self.paused, 1e-9)
        self.mark, self.paused = ended, 0.0
        row = {"step": number, "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"]),
               "learning_rate": float(metrics["learning_rate"]), "tokens": number * self.tokens_per_step,
               "step_time_s": step_time_s, "tokens_per_s": self.tokens_per_step / step_time_s,
               "mfu": self.flops_per_step / step_time_s / self.peak_flops if self.peak_flops else None,
               "skipped": bool(metrics["skipped"]), "data_wait_s": self.data_wait_s,
               "checkpoint_wait_s": self.checkpoint_wait_s}
        if val_loss is not None:
            row["val_loss"] = val_loss
        if number % self.every == 0 or val_loss is not None:
            self.writer.write(row)
            self.data_wait_s = self.checkpoint_wait_s = 0.0
        return row


class _Progress:
    """One line that is rewritten on a terminal, and a line every few seconds elsewhere."""

    def __init__(self, last: int):
        self.last, self.shown, self.rate = last, 0.0, None
        self.live = sys.stdout.isatty()

    def step(self, number: int, row: dict) -> None:
        time_s = row["step_time_s"]
        self.rate = time_s if self.rate is None else 0.9 * self.rate + 0.1 * time_s
        now = time.perf_counter()
        if now - self.shown < (0.2 if self.live else PROGRESS_EVERY_S) and number != self.last:
            return
        self.shown = now
        left = int((self.last - number) * self.rate)
        mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
        line = (f"step {number}/{self.last}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s{mfu}  "
                f"{left // 3600}:{left % 3600 // 60:02}:{left % 60:02} left")
        print(f"\r{line:<100}" if self.live else line, end="" if self.live else "\n", flush=True)

    def tell(self, text: str) -> None:
        print(f"\r{text:<100}" if self.live else text, flush=True)

    def end(self) -> None:
        if self.live:
            print()
