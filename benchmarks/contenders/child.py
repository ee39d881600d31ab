"""python -m benchmarks.contenders.child MODULE VARIANT CASE: a contender in a process of its own.

CASE is the JSON of a `case.Case`. Answers once its libraries are imported. Then reads a command a line and answers each
with one line of JSON: "build" (before it nothing is on the device), "load FILE" (a batch of `case.save`), "reset", "go N" (seconds and CPU seconds of N steps, the loss before and after them), "read" (what the
roofline says of its program, its peak memory). All else that its libraries print goes to stderr.
"""
from __future__ import annotations

import importlib
import json
import os
import sys
import time


def take_answers():
    """Return a file for answers, and let stdout mean stderr from now on, also for libraries in C."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def go(trainer, placed, count: int) -> dict:
    wall, cpu, losses = time.perf_counter(), time.process_time(), []
    for _ in range(count):
        losses.append(trainer.step(placed))
    trainer.wait()
    took = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return took | {"losses": [float(losses[0]), float(losses[-1])]}


def read(trainer, case) -> dict:
    """predicted_s: None without a program in JAX or on a device whose speed is unknown."""
    predicted = None
    if trainer.program is not None:
        from meshtrain.cost.program.compiled import CompiledProgram
        from meshtrain.cost.program.roofline import Workload
        workload = Workload(case.tokens, 1.0, case.dtype, case.packed)
        line = CompiledProgram(trainer.program, trainer.mesh, workload).roofline
        predicted = line and line.step_s
    return {"predicted_s": predicted, "peak_bytes": trainer.peak_bytes(), "settings": trainer.settings}


def serve(module: str, variant: str, text: str) -> None:
    from benchmarks.contenders import case as cases
    answers, case = take_answers(), cases.Case(**json.loads(text))

    def answer(**what) -> None:
        answers.write(json.dumps(what) + "\n")
    imported = importlib.import_module(f"benchmarks.contenders.{module}")
    answer()
    trainer = placed = told = None
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "build":
            begun = time.perf_counter()
            trainer = imported.Trainer(case, variant)
            trainer.reset()
            answer(params=trainer.num_params, ready_s=time.perf_counter() - begun)
        elif word == "load":
            placed = trainer.place(cases.load(rest))
            answer()
        elif word == "reset":
            trainer.reset()
            answer()
        elif word == "go":
            answer(**go(trainer, placed, int(rest)))
        elif word == "read":
            told = told or read(trainer, case)
            answer(**told)


if __name__ == "__main__":
    serve(*sys.argv[1:])
