"""Scores answers by functions that run in processes of their own. A function that hangs, crashes or uses too much
memory costs its answer's reward, but never the run.

Each process scores one answer at a time. After `timeout_s` it is killed with every process that it has started, and
another process takes its place. This contains accidents. It is no sandbox: a function has the user's rights.
"""
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import math
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain import environment
from meshtrain.rl.rewards import builtin, worker

TIMEOUT = "timeout"         # first word of the failure after a timeout; other failures begin with an exception's name
START_S = 60.0              # time limit for imports of the user's file
LOOK_S = 0.2                # between checks that a process lives: another one may hold its pipe open
KILLS_S = 5.0               # time limit for killing all processes that a function has started
MOST_REPLY_BYTES = 1 << 16


@dataclasses.dataclass
class Reward:
    """The result for one answer. reward: None if the function failed. parts: the function's other values, by name.
    failure: the reason in one line. unsteady: whether the answer was scored twice with different results."""
    reward: float | None
    parts: dict[str, float]
    failure: str = ""
    unsteady: bool = False


def check(reward: str, lines: Mapping[str, dict], memory_gb: float = 2.0) -> None:
    """Check that the reward can be used with these prompts. lines: where a prompt is -> its line. Raises: ValueError if
    `rl.reward` names no function that can be loaded, or if a line lacks its column."""
    path, _, _ = reward.rpartition(":")
    if not path:
        if reward not in builtin.COLUMNS:
            near = difflib.get_close_matches(reward, builtin.COLUMNS, n=1)
            raise ValueError(f'rl.reward="{reward}" is neither {", ".join(builtin.COLUMNS)} nor a function in a '
                             'file; ' + (f'did you mean "{near[0]}"?' if near else 'give it as "rewards.py:score"'))
        column = builtin.COLUMNS[reward]
        if lacking := [place for place, line in lines.items() if column not in line]:
            raise ValueError(f'rl.reward="{reward}" reads "{column}" of each prompt\'s line, but {lacking[0]} has '
                             f'{", ".join(map(repr, lines[lacking[0]]))} ({len(lacking)} of {len(lines)} lines lack '
                             f'it); add it, or use a function of your own')
        faults = ((place, builtin.fault(reward, line)) for place, line in lines.items())
        if wrong := [(place, fault) for place, fault in faults if fault]:
            raise ValueError(f'{wrong[0][0]}: "{column}" {wrong[0][1]} ({len(wrong)} of {len(lines)} lines have such '
                             f'a fault); fix it')
        return
    if not os.path.isfile(os.path.expanduser(path)):
        raise ValueError(f'rl.reward="{reward}": {path} is not a file (relative to {os.getcwd()}); name one as '
                         f'"rewards.py:score"')
    with contextlib.closing(_Process(reward, memory_gb, threading.Event())) as process:
        if failure := process.wait_for_start():
            raise ValueError(f'rl.reward="{reward}" cannot be loaded: {failure}; fix the file, or name another '
                             f'function')


def digest(reward: str) -> str:
    """Return a hash of the file that has the function; empty for a built-in reward, or if the file is missing."""
    path, _, _ = reward.rpartition(":")
    try:
        return hashlib.blake2b(Path(path).expanduser().read_bytes(), digest_size=10).hexdigest() if path else ""
    except OSError:
        return ""


class RewardWorkers:
    """Scores submitted answers in the background. reward: as rl.reward. count: number of processes; 0: half of the
    host's cores. check: share of the answers that are scored twice, the same answers in every run."""

    def __init__(self, reward: str, count: int, timeout_s: float, memory_gb: float, check: float = 0.0):
        self.reward, self.timeout_s, self.memory_gb, self.check = reward, timeout_s, memory_gb, check
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._found: dict[int, list[Reward]] = {}
        self._left, self._changed, self._closing = 0, threading.Condition(), threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"rewards {i}")
                         for i in range(count or max(1, (os.cpu_count() or 2) // 2))]
        for thread in self._threads:
            thread.start()

    def submit(self, number: int, prompt: str, answer: str, line: dict) -> None:
        """Submit an answer to be scored. number: identifies it in `results`. line: the prompt's line."""
        request = json.dumps([prompt, answer, line]).encode() + b"\n"
        times = 2 if is_checked(request, self.check) else 1
        with self._changed:
            self._left += times
        for _ in range(times):
            self._jobs.put((number, request))

    def wait_for_scores(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether everything that was submitted is scored."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout_s)

    def results(self) -> dict[int, Reward]:
        """Wait for all answers that were submitted since the last call; return number -> reward."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)
            rewards, self._found = self._found, {}
        return {number: dataclasses.replace(first, unsteady=any(
            (other.reward, other.parts) != (first.reward, first.parts) for other in others))
            for number, (first, *others) in rewards.items()}

    def close(self) -> None:
        """Kill the processes. Waiting and unfinished answers are not scored. May be called twice."""
        self._closing.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(5)
        self._threads = []

    def _work(self) -> None:
        process = None
        while (job := self._jobs.get()) is not None:
            number, request = job
            reply: dict[str, Any]
            try:
                failure = ""
                if process is None:
                    process = _Process(self.reward, self.memory_gb, self._closing)
                    failure = process.wait_for_start()
                reply = process.ask(request, self.timeout_s) if not failure else {
                    "failure": f"its process did not start: {failure}"}
            except Exception as error:      # else the run would wait forever
                reply, failure = {"failure": f"its process failed: {type(error).__name__}: {error}"}, "failed"
            if process is not None and (not process.usable or failure):
                with contextlib.suppress(Exception):
                    process.close()
                process = None
            reward = Reward(reply.get("reward"), reply.get("parts", {}), reply.get("failure", ""))
            with self._changed:
                self._found.setdefault(number, []).append(reward)
                self._left -= 1
                self._changed.notify_all()
        if process is not None:
            process.close()


def is_checked(request: bytes, share: float) -> bool:
    """Return whether a request belongs to this share, by its hash."""
    return int.from_bytes(hashlib.blake2b(request, digest_size=6).digest(), "big") < share * 2**48


def _is_reply(reply: Any) -> bool:
    """Return whether a reply has the form that `worker` writes, because the function could write to the pipe itself."""
    match reply:
        case {"reward": reward, "parts": dict() as parts} if len(reply) == 2:
            return all(isinstance(value, float) and math.isfinite(value) for value in (reward, *parts.values()))
        case {"failure": str()}:
            return len(reply) == 1
    return reply == {}


class _Process:
    """A worker process. usable: whether it accepts another request. closing: set when no answer is needed."""

    def __init__(self, reward: str, memory_gb: float, closing: threading.Event):
        path, _, name = reward.rpartition(":")
        reward = f"{Path(path).expanduser().resolve()}:{name}" if path else name
        # sets of strings in the same order in every run; one thread, as there are processes enough
        environ = environment.select(os.environ) | {
            "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        source, self._requests = os.pipe()
        self._replies, target = os.pipe()
        self.usable, self._rest, self._closing = True, b"", closing
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__, reward, str(source), str(target), str(int(memory_gb * 2**30))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ,
            pass_fds=(source, target), start_new_session=True)
        os.close(source)
        os.close(target)
        os.set_blocking(self._requests, False)

    def wait_for_start(self) -> str:
        """Wait until the function is loaded. Return why it cannot be called; empty if it can."""
        return self.ask(b"", START_S).get("failure", "")

    def ask(self, request: bytes, timeout_s: float) -> dict:
        """Write the request and return the next line as its reply; after `timeout_s`, or for no reply, a failure."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closing.is_set():
                return self._fail(f"{TIMEOUT} after {timeout_s:g} s")
            poll = select.poll()        # select.select takes no descriptor above 1023
            poll.register(self._replies, select.POLLIN)
            if request:
                poll.register(self._requests, select.POLLOUT)
            ready = dict(poll.poll(1000 * min(left_s, LOOK_S)))
            try:
                if self._requests in ready:
                    request = request[os.write(self._requests, request):]
                data = os.read(self._replies, MOST_REPLY_BYTES) if self._replies in ready else None
            except BlockingIOError:
                data = None
            except OSError:     # a broken pipe
                data = b""
            if data == b"" or data is None and self._process.poll() is not None:
                return self._fail(self._ending(deadline))
            self._rest += data or b""
            if len(self._rest) > MOST_REPLY_BYTES:
                return self._fail("the function's process wrote an invalid reply")
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            reply = json.loads(line)
            if self._rest or not _is_reply(reply):
                raise ValueError
        except (ValueError, RecursionError):
            return self._fail("the function's process wrote an invalid reply")
        return reply

    def _fail(self, why: str) -> dict:
        self.usable = False
        return {"failure": why}

    def _ending(self, deadline: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(max(0.0, min(1.0, deadline - time.monotonic())))
            return f"its process ended, {f'killed by signal {-code}' if code < 0 else f'with exit code {code}'}"
        return "its process closed the pipe"

    def close(self) -> None:
        """Kill the process and every process that it has started."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLS_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
