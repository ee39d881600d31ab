"""Processes of contenders, as benchmarks/peers.py starts, asks and ends them."""
from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders.case import Case

ROOT = Path(__file__).resolve().parent.parent.parent
SHARE = 0.45                # of a GPU's memory for each of two contenders
ANSWER_S = 200              # the longest that a contender may take to start or to answer


class Contender(NamedTuple):
    """module: in benchmarks/contenders. needs: modules it imports. gpu: why a CPU cannot run it."""
    name: str
    module: str
    part: int
    packed: bool
    variant: str = ""
    needs: tuple[str, ...] = ()
    gpu: str = ""
    flags: str = ""


class Failure(Exception):
    """A contender cannot run, or a check fails; the message is the reason."""


class CheckFailure(Failure):
    """A contender computes something else than it should."""


def environment_of(contender: Contender, on_gpu: bool) -> dict[str, str]:
    """Return the environment of its process. On a GPU jax must fail rather than compute on the CPU, where this process
    keeps its own jax."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]      # also where wheels were unpacked
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XLA_CLIENT_MEM_FRACTION": str(SHARE),
                   "JAX_PLATFORMS": "cuda" if on_gpu else "cpu"}
    if contender.flags or not on_gpu:
        environment["XLA_FLAGS"] = contender.flags if on_gpu else ""
    return environment


class Child:
    """A contender's process (benchmarks/contenders/child.py) between its start and its end."""

    def __init__(self, contender: Contender, case: Case, folder: Path, on_gpu: bool):
        self.contender, self.log = contender, folder / f"{contender.module}{contender.variant}{case.packed}.log"
        command = [sys.executable, "-m", "benchmarks.contenders.child", contender.module, contender.variant,
                   case.as_json()]
        with self.log.open("w") as log:
            environment = environment_of(contender, on_gpu)
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, bufsize=1,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self.started: dict = {}         # the answer to "build"
        self.first_step_s = 0.0         # with all that torch compiles then

    def build(self) -> None:
        """Raises: as `answer`, also if its libraries cannot be imported."""
        self.answer()
        self.started = self.ask("build")

    def ask(self, command: str) -> dict:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
        except BrokenPipeError:
            pass                                # `answer` says why it has ended
        answer = self.answer()
        if command.startswith("go") and not self.first_step_s:
            self.first_step_s = answer["seconds"]
        return answer

    def answer(self) -> dict:
        """Raises: Failure with the last line that the process wrote."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if waiting.select(ANSWER_S) else None
        if line is None:
            raise Failure(f"no answer in {ANSWER_S} s")
        if not line:
            lines = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            raise Failure(lines[-1].strip()[:200] if lines else f"ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """A second call has no effect."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def start(child: Child) -> Iterator[Child]:
    """Context: a contender on the device. Its memory there is free afterwards."""
    try:
        child.build()
        yield child
    finally:
        child.end()
