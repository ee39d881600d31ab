"""Decides whether and when to restart a run that has ended: one rule for all launchers.

Exit codes 0, 2 and 75 end a run: it is done, the user made a mistake, or it was stopped on request. After any other
code, the run restarts from its newest complete checkpoint, after 5, 10, 20 … 300 s. After too many failures in a row
without a newer checkpoint it is given up, and the last words of each failure are printed. If a scheduler stops the run,
the run should restart: then 75 counts like a failure, unless there is a newer checkpoint. Refused credentials count as
a failure, because they may have expired. This module starts and ends nothing, and imports no jax.

meshtrain launch restart CODE -- [RUN.toml] [--section.key value ...] applies the rule in shell scripts, with the count
in run.dir/restarts.json. It prints the seconds to wait. The exit code is 0 if the run should restart, 2 after a
mistake, else 1. If run.dir does not answer for a moment, Slurm's own count of restarts is the limit. Without such a
count, --scheduled reads run.dir again after the waiting times of --max-restarts failures; if it still does not answer,
the exit code is 1.
"""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from meshtrain.launch import supervise
from meshtrain import config, files, run_files
from meshtrain.cluster import lost
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, contents, say, stops
from meshtrain.storage import messages

OPTIONS = {"max-restarts": config.Option("maximum number of restarts in a row without a newer checkpoint", "R", "5",
                                         config.whole(), 0)}
COMMAND = config.Command("meshtrain.launch.restart", {
    "max-restarts": dataclasses.replace(OPTIONS["max-restarts"], default=5),
    "scheduled": config.Option("for a scheduler that stops the run and starts it again: also restart after exit code "
                               "75"),
    "said": config.Option("file with the run's stderr, for the report of a failure", "FILE", "stderr.txt", Path),
}, "CODE", (1, 1), launcher=True)
ENDS = (stops.DONE, stops.USER_ERROR, stops.STOPPED)
FIRST_S, LONGEST_S = 5.0, 300.0
# in run.dir: the count of failures, and which local checkpoints are valid
KEPT, LINEAGE = contents.RESTARTS, "local.json"
INDEX = "index.json"        # of a process's local checkpoint: a line with its checksum, then JSON
TASK_ENDED = re.compile(r"^srun: error: (\S+: tasks? .*)$", re.MULTILINE)
READ_BYTES = 1 << 20    # the end of a start's output
UNCOUNTED = "a start whose end was not counted"


def newest(run: Run) -> int:
    """Return the step of the newest checkpoint, this host's local ones included; 0: none. Incomplete checkpoints have
    other names. Raises: ConfigError; FileSystemError if the directory does not answer for a moment."""
    steps = [0]
    with config.user_errors("run.dir: "):
        try:
            steps += contents.steps(run.run.dir)
            if run.checkpoint.local_dir and (text := messages.read(run.run.dir, LINEAGE)):
                with contextlib.suppress(ValueError, KeyError, TypeError):      # truncated: no local checkpoint yet
                    lineage = json.loads(text)
                    steps += _usable_steps(Path(run.checkpoint.local_dir) / lineage["run"], lineage)
        except OSError as error:
            raise files.error_to_raise(error, f"{run.run.dir}'s checkpoints cannot be listed",
                                       messages.REMEDY) from None
    return max(steps)


def _usable_steps(home: Path, lineage: dict) -> Iterator[int]:
    """Yield the steps of this host's local checkpoints that the next start may use. It uses none of a
    start that was rolled back."""
    for place in home.glob("process-*/*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            step, start = int(place.name), json.loads((place / INDEX).read_text(encoding="utf-8").partition("\n")[2])[
                "start"]
            if start == lineage["start"] or [start, step] == lineage["from"]:
                yield step


@dataclasses.dataclass
class Failures:
    """Counts failures in a row without a newer checkpoint. said: the last words of each failure. step: step of the
    newest checkpoint.

    scheduled: a scheduler stops and restarts the run. Stops then count like failures, because a time limit shorter than
    the start-up would repeat forever.
    """
    run: Run
    most: int                   # restarts; 0: none, without a message
    step: int = 0
    said: list[str] = dataclasses.field(default_factory=list)
    scheduled: bool = False

    @config.restarting()
    def wait_s(self, code: int, words: str = "") -> float | None:
        """Return the seconds until the next start, after a start that ended with this code and these last words (one
        line). None: the run has ended, or the run is given up after a message. Raises: ConfigError; FileSystemError if
        the run would be given up while its checkpoints cannot be seen for a moment."""
        stopped = code == stops.STOPPED
        if code in ENDS and not (stopped and self.scheduled):
            self.said = []
            return None
        reached = before = self.step
        at = "the newest checkpoint"
        try:
            self.step = reached = newest(self.run)
            at = f"step {reached}" if reached else "the beginning"
        except files.FileSystemError as error:
            if len(self.said) >= self.most:
                raise
            say.err(f"the newest checkpoint is unknown: {error}")
        if reached > before:
            self.said = []
            if stopped:
                return 0.0
        self.said.append(words or ("stopped on request, before anything newer was saved" if stopped else
                                   f"exit code {code}"))
        count = len(self.said)
        if count > self.most:
            if self.most:
                say.err(f"given up after {count} failures in a row without "
                        f"{f'a newer checkpoint than that of step {reached}' if reached else 'a checkpoint'}:")
                for number, failure in enumerate(self.said, 1):
                    say.err(f"  {number}: {failure}")
            return None
        if reached > before:        # it will come that far again
            say.err(f"starting again from step {reached}")
            return 0.0
        wait_s = pause_s(count)
        say.err(f"starting again from {at} in {wait_s:g} s ({'stop' if stopped else 'failure'} {count} without a newer "
                f"checkpoint; given up after {self.most + 1})")
        return wait_s


def pause_s(count: int) -> float:
    """Return the seconds before the next start after so many failures in a row."""
    return min(FIRST_S * 2 ** (count - 1), LONGEST_S)


@command.entry(COMMAND, __doc__)
@config.restarting()
def main(given: config.Arguments) -> int:
    """Print the seconds to wait. Raises: ConfigError."""
    try:
        code = int(*given.names)
    except ValueError:
        raise ConfigError(f"{given.names[0]} is not an exit code; give that of the run, e.g. 1") from None
    run, most, scheduled = run_files.load(given.run), given["max-restarts"], bool(given["scheduled"])
    # Slurm sets it from the first restart on.
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1 if "SLURM_JOB_ID" in os.environ else None
    for tries in itertools.count(1):
        try:
            wait_s = count(Failures(run, most, scheduled=scheduled), code, _last_words(code, given["said"]), restarts)
            break
        except files.FileSystemError as error:
            if not scheduled or restarts is not None or tries > most:
                raise
            say.err(f"{error}; trying again in {pause_s(tries):g} s")
            wait(pause_s(tries))
    if wait_s is None:
        return 1
    say.out(f"{wait_s:g}")
    return 0


def _last_words(code: int, said: Path | None) -> str:
    """Return the exit code, the task that ended first according to srun, and the last line of output that is no
    consequence of another process's failure."""
    if said is None or code in ENDS:
        return ""
    with contextlib.suppress(OSError), open(said, "rb") as file:
        file.seek(-min(READ_BYTES, said.stat().st_size), os.SEEK_END)
        text = file.read()
        ended = TASK_ENDED.search(text.decode(errors="replace"))
        lines = [line for line in text.splitlines() if line.strip()
                 and not line.startswith((b"srun: ", b"slurmstepd: "))
                 and not supervise.NOISE.search(line) and not lost.SECONDARY.search(line)]
        return "; ".join([f"exit code {code}", *([ended[1]] if ended else []),
                          *([f"the last line: {lines[-1].decode(errors='replace')}"] if lines else [])])
    return ""


@config.restarting()
def count(failures: Failures, code: int, words: str = "", restarts: int | None = None) -> float | None:
    """Return `Failures.wait_s`, and keep the count and the wall-clock time of the next start (`begins`) in
    run.dir/restarts.json.

    restarts: the scheduler's count of restarts, the next start included; None: it has none. If the file cannot be read
    or written for a moment, this count is used instead. Starts that left no count are failures. Raises: ConfigError;
    FileSystemError if nothing would limit the restarts.
    """
    run_dir = failures.run.run.dir
    try:
        if kept := read(failures.run):
            missed = restarts - kept["restarts"] - 1 if restarts and kept.get("restarts") else 0
            failures.step, failures.said = kept["step"], kept["said"] + [UNCOUNTED] * missed
    except files.FileSystemError as error:
        if restarts is None or restarts > failures.most:
            raise
        say.err(f"{error}. Earlier failures are not known: this is restart {restarts} of the scheduler")
        failures.said = [UNCOUNTED] * (restarts - 1)
    wait_s = failures.wait_s(code, words)
    try:
        with config.user_errors("run.dir: "):
            if wait_s is None:
                messages.remove(run_dir, KEPT)
            else:
                messages.write(run_dir, KEPT, json.dumps({"step": failures.step, "said": failures.said,
                                                          "begins": time.time() + wait_s, "restarts": restarts}))
    except files.FileSystemError as error:
        if restarts is None:
            raise files.FileSystemError(f"{error}; the run is not started again until this is fixed") from None
        say.err(f"{error}. The scheduler's count of restarts, {restarts}, is used instead")
    return wait_s


def read(run: Run) -> dict:
    """Return the content of run.dir/restarts.json; empty if nothing has failed yet or the file is truncated. Raises:
    ConfigError, FileSystemError."""
    with config.user_errors("run.dir: "):
        text = messages.read(run.run.dir, KEPT)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        kept = json.loads(text)
        return kept | {"step": int(kept["step"]), "said": [str(words) for words in kept["said"]]}
    return {}


def wait(seconds: float) -> None:
    """Sleep; a signal is handled within a second. The kernel may deliver a signal to another thread, and then a single
    time.sleep would not end early."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))


def leave_on_request() -> None:
    """Make each stop signal end this process, which has no child, at once with exit code 75."""
    for number in stops.stop_signals():
        signal.signal(number, _leave)


def _leave(number, frame) -> None:
    """Print a line and exit. It does not use `say`: the signal may arrive in the middle of a line."""
    with contextlib.suppress(OSError):
        os.write(2,
                 f"{signal.Signals(number).name}: no process is running; the same command starts or resumes the "
                 "run\n".encode())
    os._exit(stops.STOPPED)


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
