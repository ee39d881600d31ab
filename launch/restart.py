"""Whether and when to restart a run that has ended: one rule for all launchers.

Exit codes 0, 2 and 75 end a run: done, the user's mistake, stopped on request. After any other, the run restarts from
its newest complete checkpoint, after 5, 10, 20 … 300 s; after too many failures in a row without a newer checkpoint it
is given up, with the last words of each. If a scheduler stops the run, it should restart: then 75 counts like a
failure, unless there is a newer checkpoint. Credentials that are refused are a failure here, too: they expire. This
module starts and ends nothing, and imports no jax.

meshtrain launch restart CODE -- [RUN.toml] [--section.key value ...] is the rule for shell scripts, with the count in
run.dir/restarts.json. It prints the seconds to wait and exits with 0 if the run should restart, else with 1, after a
mistake with 2. Where run.dir does not answer for a moment, Slurm's own count of restarts is the limit. Without one
run.dir is asked again, with --scheduled, after the waits of as many failures; then the exit code is 1.
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
from meshtrain import config, files
from meshtrain.cluster import lost
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, contents, say, stops
from meshtrain.storage import messages

OPTIONS = {"max-restarts": config.Option("restarts in a row without a newer checkpoint", "R", "5", config.whole(), 0)}
COMMAND = config.Command("meshtrain.launch.restart", {
    "max-restarts": dataclasses.replace(OPTIONS["max-restarts"], default=5),
    "scheduled": config.Option("a scheduler stops the run and starts it again: exit code 75 also restarts"),
    "said": config.Option("file with the run's stderr, for the report of a failure", "FILE", "stderr.txt", Path),
}, "CODE", (1, 1), launcher=True)
ENDS = (stops.DONE, stops.USER_ERROR, stops.STOPPED)
FIRST_S, LONGEST_S = 5.0, 300.0
# in run.dir: the count of the command below, and which parts of local checkpoints are valid
KEPT, LINEAGE = contents.RESTARTS, "local.json"
INDEX = "index.json"        # of a part: a line with its checksum, then JSON
TASK_ENDED = re.compile(r"^srun: error: (\S+: tasks? .*)$", re.MULTILINE)
READ_BYTES = 1 << 20    # the end of a start's output
UNCOUNTED = "a start whose end was not counted"


def newest(run: Run) -> int:
    """The step of the newest checkpoint, this host's local ones included; 0: none. Incomplete ones are named otherwise.
    Raises: ConfigError, and FileSystemError where it cannot be told for a moment."""
    steps = [0]
    with config.user_errors("run.dir: "):
        try:
            steps += contents.steps(run.run.dir)
            if run.checkpoint.local_dir and (text := messages.read(run.run.dir, LINEAGE)):
                with contextlib.suppress(ValueError, KeyError, TypeError):      # truncated: there is none yet
                    lineage = json.loads(text)
                    steps += _kept(Path(run.checkpoint.local_dir) / lineage["run"], lineage)
        except OSError as error:
            raise files.judged(error, f"{run.run.dir}'s checkpoints cannot be listed", messages.REMEDY) from None
    return max(steps)


def _kept(home: Path, lineage: dict) -> Iterator[int]:
    """Steps of this host's local checkpoints that the next start may use: not those of a start that was rolled back."""
    for place in home.glob("process-*/*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            step, start = int(place.name), json.loads((place / INDEX).read_text(encoding="utf-8").partition("\n")[2])[
                "start"]
            if start == lineage["start"] or [start, step] == lineage["from"]:
                yield step


@dataclasses.dataclass
class Failures:
    """Failures in a row without a newer checkpoint. said: the last words of each. step: of that checkpoint.

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
        """Seconds until the next start, after one ended with this code and these last words (one line). None: the run
        has ended or is given up, after a message. Raises: ConfigError, and FileSystemError where the run would be
        given up although a newer checkpoint may be there: for a moment it cannot be seen."""
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
                say.err(f"given up after {count} failures in a row without a newer checkpoint than "
                        f"{f'that of step {reached}' if reached else 'none'}:")
                for number, one in enumerate(self.said, 1):
                    say.err(f"  {number}: {one}")
            return None
        if reached > before:        # it will come that far again
            say.err(f"starting again from step {reached}")
            return 0.0
        wait_s = pause_s(count)
        say.err(f"starting again from {at} in {wait_s:g} s "
                f"({'stop' if stopped else 'failure'} {count} without a newer checkpoint; given up after "
                f"{self.most + 1})")
        return wait_s


def pause_s(count: int) -> float:
    """Seconds before the next start after so many failures in a row."""
    return min(FIRST_S * 2 ** (count - 1), LONGEST_S)


@command.entry(COMMAND, __doc__)
@config.restarting()
def main(given: config.Arguments) -> int:
    """Raises: ConfigError."""
    try:
        code = int(*given.names)
    except ValueError:
        raise ConfigError(f"{given.names[0]} is not an exit code; give that of the run, e.g. 1") from None
    run, most, scheduled = config.load(given.run), given["max-restarts"], bool(given["scheduled"])
    # Slurm sets it from the first restart on.
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1 if "SLURM_JOB_ID" in os.environ else None
    for tries in itertools.count(1):
        try:
            wait_s = count(Failures(run, most, scheduled=scheduled), code, _last_words(code, given["said"]), restarts)
            break
        except files.FileSystemError as error:
            if not scheduled or restarts is not None or tries > most:
                raise
            say.err(f"{error}; asked again in {pause_s(tries):g} s")
            wait(pause_s(tries))
    if wait_s is None:
        return 1
    say.out(f"{wait_s:g}")
    return 0


def _last_words(code: int, said: Path | None) -> str:
    """The exit code, the task that ended first according to srun, and the last line that is not a peer's."""
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
    """`Failures.wait_s`, with the count in run.dir/restarts.json, and the wall-clock time of the next start, `begins`.

    restarts: the scheduler's count, the next start included; None: it has none. It stands for ours where the file
    cannot be read or written for a moment, and starts that left no count are failures. Raises: ConfigError;
    FileSystemError where nothing would limit the restarts.
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
            raise files.FileSystemError(f"{error}; until then it is not started again") from None
        say.err(f"{error}. The scheduler's count of restarts, {restarts}, is used instead")
    return wait_s


def read(run: Run) -> dict:
    """The content of run.dir/restarts.json; empty if nothing has failed yet or the file is truncated. Raises:
    ConfigError, FileSystemError."""
    with config.user_errors("run.dir: "):
        text = messages.read(run.run.dir, KEPT)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        kept = json.loads(text)
        return kept | {"step": int(kept["step"]), "said": [str(words) for words in kept["said"]]}
    return {}


def wait(seconds: float) -> None:
    """Sleep, and handle a signal within a second. The kernel may deliver it to another thread, and then time.sleep goes
    on to its end."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 1.0))


def leave_on_request() -> None:
    """From now on a signal ends this process at once, with 75: there is no child to forward it to."""
    for number in stops.heeded():
        signal.signal(number, _leave)


def _leave(number, frame) -> None:
    """Does not use `say`: the signal may arrive in the middle of a line."""
    with contextlib.suppress(OSError):
        os.write(2,
                 f"{signal.Signals(number).name}: nothing runs; the same command starts or resumes the run\n".encode())
    os._exit(stops.STOPPED)


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
