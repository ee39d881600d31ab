"""Runs one process of a run on Kubernetes, in a pod of launch/kubernetes.yaml, which gives its index.

JobSet restarts all pods whatever ended one of them, and knows no checkpoints. This launcher applies the rule of all
launchers (`launch.restart`); K is JobSet's count of restarts. Before each start but the first, process 0 decides
whether and when to start, and the others wait for its decision in run.dir/restarts.json. A failing process writes its
last words to run.dir/last_words, because its log is deleted with its pod. If the run is given up, the exit code is 2,
which ends the JobSet. Imports no jax. Exit codes: the run's 0, 2 and 75; 2 also if the run is given up; else 1.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable

from meshtrain.launch import restart, supervise
from meshtrain import config, files, run_files
from meshtrain.cluster import find
from meshtrain.config import Run
from meshtrain.run import command, say, stops
from meshtrain.run.contents import LAST_WORDS
from meshtrain.storage import messages

COMMAND = config.Command("meshtrain.launch.pod", {
    "attempt": config.Option("JobSet's count of restarts", "K", "0", config.whole(),
                             required="without it every start counts as the first"),
    "max-restarts": dataclasses.replace(restart.OPTIONS["max-restarts"], default=5),
}, launcher=True)
LOOK_S = 1.0        # between polls for the decision of process 0


@command.entry(COMMAND, __doc__)
def main(given: config.Arguments) -> int:
    attempt = given["attempt"]
    with config.restarting(attempt > 0):
        run = run_files.load(given.run)
        place = find.cluster(run.distributed, os.environ)
        index = place.index if place else 0
        begins = _decide_start(run, attempt, given["max-restarts"]) if index == 0 else _await_start(run, attempt)
    if begins is None:
        return stops.USER_ERROR
    # Bounded, in case a clock is wrong.
    restart.wait(min(begins - time.time(), restart.LONGEST_S))
    train = [sys.executable, "-u", "-m", "meshtrain.train", *given.run]
    environ = os.environ | {"MESHTRAIN_START": str(attempt)}
    outcome = supervise.supervise([train], [environ], called=f"process {index}",
                                  still_s=run.distributed.heartbeat_timeout_s)
    if outcome.code not in (stops.DONE, stops.USER_ERROR):
        left = {"code": outcome.code, "victim": outcome.secondary, "time": time.time(), "words": outcome.words}
        try:
            messages.write(run.run.dir, f"{LAST_WORDS}/{attempt}-{index}", json.dumps(left))
        except (OSError, ValueError) as error:
            say.err(f"{run.run.dir}/{LAST_WORDS} cannot be written: {files.describe(error)}")
    return outcome.code


def _decide_start(run: Run, attempt: int, max_restarts: int) -> float | None:
    """Return the wall-clock time of this start; None: give up, after a message. Process 0 calls it. Raises:
    ConfigError, FileSystemError."""
    if attempt == 0:        # restarts.json and last words are those of another JobSet
        _remove(run, lambda name: True, restart.KEPT)
        return 0.0
    code, said = _last_words(run, attempt - 1)
    say.err(f"the previous start ended: {said}")
    failures = restart.Failures(run, max_restarts, scheduled=True)
    wait_s = restart.count(failures, code, said, attempt)
    with contextlib.suppress(files.FileSystemError):        # the next start removes them
        _remove(run, lambda name: not name.startswith(f"{LAST_WORDS}/{attempt}-"))
    return None if wait_s is None else time.time() + wait_s


def _await_start(run: Run, attempt: int) -> float:
    """Return the time at which process 0 starts; 0 if process 0 does not decide in time. Then the run itself meets
    process 0 or times out. Every other process calls it. Raises: ConfigError."""
    until = time.monotonic() + run.distributed.timeout_s
    while attempt and time.monotonic() < until:
        with contextlib.suppress(files.FileSystemError):    # it is read again
            kept = restart.read(run)
            if kept.get("restarts") == attempt:
                return kept["begins"]
        time.sleep(LOOK_S)
    return 0.0


def _remove(run: Run, is_old: Callable[[str], bool], *more: str) -> None:
    """Remove the last words for which is_old(name) is true, and the messages named in `more`. Raises: ConfigError,
    FileSystemError."""
    with config.user_errors("run.dir: "):
        for name in [*more, *filter(is_old, messages.names(run.run.dir, LAST_WORDS))]:
            messages.remove(run.run.dir, name)


def _last_words(run: Run, attempt: int) -> tuple[int, str]:
    """Return (exit code, words) of the process that failed first in that attempt, if it left any."""
    left = []
    try:
        with config.user_errors("run.dir: "):
            texts = [messages.read(run.run.dir, name) for name in messages.names(run.run.dir, LAST_WORDS)
                     if name.startswith(f"{LAST_WORDS}/{attempt}-")]
    except files.FileSystemError as error:
        return stops.FAILED, f"for an unknown reason: {error}"
    for text in texts:
        with contextlib.suppress(ValueError, KeyError, TypeError):      # truncated: its host was lost
            last = json.loads(text)
            left.append((bool(last["victim"]), last["code"] == stops.STOPPED, float(last["time"]), str(last["words"])))
    secondary, stopped, _, words = min(left, default=(True, False, 0.0, ""))
    if secondary:
        return stops.FAILED, "no process failed by itself: a pod was killed, or its host is lost"
    return (stops.STOPPED, "stopped on request") if stopped else (stops.FAILED, words)


if __name__ == "__main__":
    say.begin()
    restart.leave_on_request()
    sys.exit(main(sys.argv[1:]))
