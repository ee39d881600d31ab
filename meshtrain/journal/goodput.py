"""Goodput: how the seconds of a run divide into steps, waits and losses, over all its attempts.

An attempt is one start of the command. Its seconds come from a monotonic clock. The time between two attempts is the
difference in the host's uptime if both ran on one boot of one host, else the difference of wall clocks. The end of an
attempt that was killed (kill -9, a power cut) is its last heartbeat in `history`. Reads and writes no files.
"""
from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Reversible, Sequence

from meshtrain.units import duration

LOOP = "loop"       # a part within an Account; lines of the history divide it into steps, data and rest
# The parts that all seconds divide into, with their names in messages. The last three are known after an attempt.
PARTS = {"steps": "steps", "start": "start", "compile": "compile", "restore": "restore", "data": "data",
         "checkpoint": "checkpoints", "validation": "validation", "sync": "weight sync", "sampling": "sampling",
         "rewards": "rewards", "rest": "the rest", "hang": "hang",
         "again": "steps taken again", "down": "between tries"}
# An attempt hung if it ended more than this long, and more than this many of its step times, after its last step.
HANG_S, HANG_STEPS = 60.0, 10.0
STEPPED_S = 2.0     # a wall clock that differs by more from the monotonic clock was set; slewing stays below
SHORT_S = 600.0
UNKNOWN = "ended without a message"


class Account:
    """Counts each second of this attempt in one part. began: time.perf_counter when the command began; None: now."""

    def __init__(self, began: float | None = None):
        self.began = self._mark = self._progress = time.perf_counter() if began is None else began
        self.part, self._spent, self._waited_s = "start", dict.fromkeys((*PARTS, LOOP), 0.0), 0.0
        # of the run: its age when this attempt began, its seconds in steps that count, its step
        self.elapsed_s, self.counted_s, self.step = 0.0, 0.0, 0
        self.steps = 0      # number of steps of this attempt

    def go_back(self, step: int, counted_s: float) -> None:
        """Record that this attempt will repeat the steps after `step`. counted_s: seconds of the steps up to `step`."""
        lost_s = max(0.0, self.counted_s - counted_s)
        self._spent["steps"] -= lost_s
        self._spent["again"] += lost_s
        self.step, self.counted_s = step, self.counted_s - lost_s

    @contextlib.contextmanager
    def count_as(self, part: str) -> Iterator[None]:
        """Context: count the time inside it as this part. If an exception leaves the context, the attempt ends, and the
        time after the exception also belongs to this part."""
        before = self._enter(part)
        yield
        self._enter(before)

    def _enter(self, part: str) -> str:
        now = time.perf_counter()
        self._spent[self.part] += now - self._mark
        before, self.part, self._mark, self._progress = self.part, part, now, now
        return before

    def add_step(self, step: int, step_time_s: float, waited_s: float) -> None:
        """Count a finished step. step_time_s includes waited_s, the time that the step waited for data."""
        counts_s = max(0.0, step_time_s - waited_s)
        self._spent["steps"] += counts_s
        self._waited_s += waited_s
        self.counted_s += counts_s
        self.step, self.steps, self._progress = step, self.steps + 1, time.perf_counter()

    def columns(self, moment: float) -> dict[str, float]:
        """Return the goodput columns of the metrics row of a step that ended at `moment` (time.perf_counter)."""
        elapsed_s = self.elapsed_s + max(1e-9, moment - self.began)
        return {"time": time.time() - (time.perf_counter() - moment), "elapsed_s": elapsed_s,
                "goodput": min(1.0, self.counted_s / elapsed_s)}

    def snapshot(self) -> dict:
        """Return the account so far, as fields of a line of the history."""
        now, spent = time.perf_counter(), dict(self._spent)
        spent[self.part] += now - self._mark
        loop_s = spent.pop(LOOP)
        spent["data"] += self._waited_s
        spent["rest"] += max(0.0, loop_s - spent["steps"] - spent["again"] - self._waited_s)
        return {"time": time.time(), "run_s": now - self.began, "step": self.step, "steps": self.steps,
                "counted_s": self.counted_s, "spent_s": {part: value for part, value in spent.items() if value},
                "part": self.part, "idle_s": now - self._progress}


def end_line(state: Mapping, how: str, *, stuck: bool = False, **more) -> dict:
    """Return the history line of an attempt's end.

    state: `Account.snapshot` at the end, or the attempt's last line in the history. how: how it ended, as text. stuck:
    whether the attempt is known to have hung; if False, HANG_S and HANG_STEPS decide. more: further fields.
    """
    if state.get("event") == "start":
        state = {**state, "time": state["time"] + state["run_s"], "steps": 0, "idle_s": 0.0, "part": "start"}
    spent, idle_s, steps = collections.Counter(state["spent_s"]), state["idle_s"], state["steps"]
    part = "rest" if state["part"] == LOOP else state["part"]
    if stuck or part == "rest" and steps and idle_s > max(HANG_S, HANG_STEPS * spent["steps"] / steps):
        hung_s = min(idle_s, spent[part])
        spent[part] -= hung_s
        spent["hang"] += hung_s
        how = how if stuck else f"{how}, stuck for {duration(idle_s)} after step {state['step']}"
    return {"event": "end", "how": how, **{key: state[key] for key in ("time", "run_s", "step", "counted_s")},
            "spent_s": spent, **more}


def sum_steps_s(rows: Reversible[Mapping], step: int, unwritten: Sequence[Mapping] = ()) -> float:
    """Return the seconds of the steps up to `step`, without the steps' waits for data.

    rows: metrics rows, read from the last one back to the step. unwritten: at most one row that follows them. A step
    without a row is taken to be as long as its neighbours.
    """
    def productive_s(row: Mapping) -> float:
        return row["goodput"] * row["elapsed_s"]

    before = after = None
    for row in itertools.chain(reversed(unwritten), reversed(rows)):
        if row.get("goodput") is None:
            continue
        if row["step"] <= step:
            before = row
            break
        after = row
    first, until_s = (before["step"], productive_s(before)) if before else (0, 0.0)
    if after:
        return until_s + (productive_s(after) - until_s) * (step - first) / (after["step"] - first)
    return until_s * step / first if first else 0.0


def list_attempts(lines: Sequence[Mapping]) -> list[dict]:
    """Return a dict for each attempt in the history.

    began, ended: wall clock. how: how it ended; "" if it recorded no end, or still runs. elapsed_s: age of the run when
    the attempt began. run_s: its duration. down_s: time since the end of the previous attempt. spent_s: part ->
    seconds. steps_again: number of steps of earlier attempts that the attempt repeats. again_s: the seconds of these
    steps. clock_s: the seconds by which the wall clock was set during the attempt.
    """
    attempts: list[dict] = []
    for number, start in enumerate(lines):
        if start["event"] != "start":
            continue
        *_, end = start, *itertools.takewhile(lambda line: line["event"] != "start", lines[number + 1:])
        if end["event"] != "end":
            end = end_line(end, "")
        stepped_s = end["time"] - start["time"] - end["run_s"]
        attempts.append(
            {"began": start["time"], "ended": end["time"], "from_step": start["step"], "to_step": end["step"],
             **{key: start[key] for key in ("steps_again", "again_s", "on", "cause", "elapsed_s", "down_s")},
             **{key: end[key] for key in ("how", "run_s", "spent_s", "counted_s")},
             "clock_s": stepped_s if abs(stepped_s) > STEPPED_S else 0.0})
    return attempts


def derive_start(attempts: Sequence[Mapping], start: Mapping, lines: Sequence[Mapping],
                 rows: Reversible[Mapping]) -> dict:
    """Return the fields of a start's history line that follow from earlier attempts: the run's age, the time since the
    last attempt, the steps that this start repeats.

    attempts: earlier ones, see `list_attempts`. start: the other fields of the line. lines: the history. rows: metrics.
    """
    if not attempts:
        return {"elapsed_s": 0.0, "down_s": 0.0, "counted_s": sum_steps_s(rows, start["step"]),
                "steps_again": 0, "again_s": 0.0}
    last, line = attempts[-1], next(line for line in reversed(lines) if line["event"] == "start")
    done = last["to_step"] or last["from_step"]
    written = next((row["step"] for row in reversed(rows)), -1)
    unwritten = [{"step": done, "goodput": 1.0, "elapsed_s": last["counted_s"]}] if written < done else []
    counts_s = sum_steps_s(rows, start["step"], unwritten)
    down_s = start["time"] - last["ended"]
    if start["boot"] and line.get("boot") == start["boot"]:
        down_s = start["uptime_s"] - line["uptime_s"] - last["run_s"]
    down_s = max(0.0, down_s)
    return {"elapsed_s": last["elapsed_s"] + last["run_s"] + down_s, "down_s": down_s, "counted_s": counts_s,
            "steps_again": max(0, done - start["step"]), "again_s": max(0.0, last["counted_s"] - counts_s)}


def sum_parts_s(attempts: Sequence[Mapping]) -> dict[str, float]:
    """Return part (a value of PARTS) -> its seconds over all attempts; in sum, the time since the first began."""
    total = {part: sum(attempt["spent_s"].get(part, 0.0) for attempt in attempts) for part in PARTS}
    again_s = min(total["steps"], sum(attempt["again_s"] for attempt in attempts))
    total |= {"steps": total["steps"] - again_s, "again": total["again"] + again_s,
              "down": sum(attempt["down_s"] for attempt in attempts)}
    # Seconds of no part, because lines of the history were lost.
    total["rest"] += max(0.0, sum(attempt["run_s"] + attempt["down_s"] for attempt in attempts) - sum(total.values()))
    return {name: total[part] for part, name in PARTS.items()}


def describe(spent: Mapping[str, float]) -> str:
    """Return a line of text with the time in steps that counted and the other parts; "" for no time. spent: see
    `spent_s`. Below SHORT_S it gives seconds instead of shares, because a new run spends most of its time starting."""
    total = sum(spent.values())
    if not total:
        return ""
    others = sorted(((value, name) for name, value in spent.items() if name != PARTS["steps"]
                     and value >= 0.0005 * total), reverse=True)
    if total < SHORT_S:
        parts = ", ".join(f"{name} {duration(value)}" for value, name in others)
        return f"of {duration(total)}, {duration(spent[PARTS['steps']])} were steps" + (f"; {parts}" if parts else "")
    shares = ", ".join(f"{name} {value / total:.1%}" for value, name in others)
    return f"goodput {spent[PARTS['steps']] / total:.1%} of {duration(total)}" + (f"; {shares}" if shares else "")
