"""A profiler trace of some steps, as a hook of the loop, where TensorBoard looks for one.

The device is idle at both ends, so the trace holds these steps alone. A trace that fails never stops the run.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain.run import say
from meshtrain.run.loop import Hook
from meshtrain.training.state import State


class Trace:
    """The trace of `steps` (first, last; from 1, both included; empty: none) of a run that resumes after step `after`.

    Written to directory/plugins/profile by the first process, of its own devices. A resume between first and last
    traces the rest. It ends with the context if the run ends before `last`.
    """

    def __init__(self, steps: Sequence[int], directory: Path, after: int):
        self.directory, self.after, self.running = directory, after, False
        self.first, self.last = max(steps[0], after + 1) if steps else 0, steps[1] if steps else 0
        if self.last < self.first or jax.process_index():
            self.first = self.last = 0

    def hook(self) -> Hook:
        return Hook(lambda step, ending: self.first > 0 and step in (self.first - 1, self.last), self._act)

    def _act(self, step: int, state: State) -> dict:
        jax.block_until_ready(state)
        (self._stop if step == self.last else self._start)()
        return {}

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # every Python call would be an event: slower steps, and a trace too long to open
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self.directory, create_perfetto_trace=True, profiler_options=options)
            self.running = True
        except Exception as error:
            say.err(f"metrics.profile_steps: no profile can be taken: {error}")

    def _stop(self) -> None:
        if not self.running:
            return
        self.running = False
        try:
            jax.profiler.stop_trace()
            where = max((self.directory / "plugins" / "profile").iterdir())   # named by their times
            say.out(f"profile from step {self.first}: tensorboard --logdir {self.directory} (with the package xprof), "
                    f"or {where}/perfetto_trace.json.gz in ui.perfetto.dev")
        except Exception as error:
            say.err(f"metrics.profile_steps: the profile could not be written: {error}")

    def __enter__(self) -> Trace:
        if self.first and self.first == self.after + 1:     # no step before it whose hook could begin it
            self._start()
        return self

    def __exit__(self, *_):
        self._stop()
