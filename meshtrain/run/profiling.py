"""A trace of a few steps of a run, for TensorBoard's profile plugin and for Perfetto.

The device has finished everything before the trace begins and everything in it before it ends, so the trace holds these
steps and nothing else. It must not know what a step computes; a trace that fails never stops the run.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax


class Trace:
    """The trace of `steps` (first, last; from 1, both included; empty: none) of a run that goes on after step `after`.

    It lies in directory/plugins/profile. A resume between first and last traces the rest. Only the first process of a
    run writes one, of its own devices. Used in a `with` statement, it ends with the run if the run ends before it.
    """

    def __init__(self, steps: Sequence[int], directory: Path, after: int):
        self.directory, self.running = directory, False
        self.first, self.last = max(steps[0], after + 1) if steps else 0, steps[1] if steps else 0
        if self.last < self.first or jax.process_index():
            self.first = self.last = 0

    def start(self) -> float:
        """Begins to trace; returns the seconds that took. Nothing may be running on the device."""
        started = time.perf_counter()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0   # every Python call would be an event: slower steps, and a trace too long to open
        try:
            jax.profiler.start_trace(self.directory, create_perfetto_trace=True, profiler_options=options)
            self.running = True
        except Exception as error:
            print(f"metrics.profile_steps: no profile can be taken: {error}", file=sys.stderr, flush=True)
        return time.perf_counter() - started

    def stop(self) -> float:
        """Writes the trace and says where it lies; returns the seconds that took. The device must have finished."""
        started = time.perf_counter()
        if self.running:
            self.running = False
            try:
                jax.profiler.stop_trace()
                where = max((self.directory / "plugins" / "profile").iterdir())   # named by their times
                print(f"profile from step {self.first}: tensorboard --logdir {self.directory} (with the package xprof), or "
                      f"{where}/perfetto_trace.json.gz in ui.perfetto.dev", flush=True)
            except Exception as error:
                print(f"metrics.profile_steps: the profile could not be written: {error}", file=sys.stderr, flush=True)
        return time.perf_counter() - started

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
