"""What is said while a run trains: rare lines, always the last, and a live line between them on a terminal."""
import pytest

from meshtrain.journal.progress import INTERVALS_S, Progress, fit_width
from meshtrain.run import say


def row(step: int, **more) -> dict:
    return {"step": step, "loss": 2.0, "tokens_per_s": 1000.0, "mfu": None, "step_time_s": 1.0} | more


def run_of(seconds: int, monkeypatch, memory=lambda: None, **more) -> list[tuple[int, str]]:
    """(step, line) of a run whose steps take a second each, into a file."""
    said, now = [], [0.0]
    monkeypatch.setattr(say, "out", lambda text: said.append((int(now[0]), text)))
    progress = Progress(seconds, memory, clock=lambda: now[0])
    for step in range(1, seconds + 1):
        now[0] = float(step)
        progress.step(row(step, **more))
    return said


def test_a_file_gets_the_first_steps_then_lines_at_growing_intervals_and_the_last(monkeypatch):
    steps = [step for step, _ in run_of(20_000, monkeypatch)]
    assert steps[:5] == [1, 2, 3, 4, 5] and steps[-1] == 20_000
    gaps = [b - a for a, b in zip(steps[4:-1], steps[5:-1])]
    assert gaps == sorted(gaps) and set(gaps) == {interval for _, interval in INTERVALS_S} == {10, 30, 60, 600}


def test_a_month_in_a_file_is_some_thousand_lines(monkeypatch):
    """2.6 million steps of a second each."""
    said, now = [], [0.0]
    monkeypatch.setattr(say, "out", said.append)
    progress = Progress(10**9, clock=lambda: now[0])
    for step in range(0, 30 * 86400, 5):
        now[0] = float(step)
        progress.step(row(step + 1))
    assert 4_000 < len(said) < 5_000


@pytest.mark.parametrize("held, shown", [(None, None), (5 * 2**20, "5.0 MiB"), (36 * 2**30, "36.0 GiB")])
def test_a_line_tells_loss_speed_mfu_memory_and_time_left(held, shown, monkeypatch):
    _, line = run_of(3, monkeypatch, memory=lambda: held, mfu=0.412)[0]
    assert line == "  ".join(filter(None, ["step 1/3", "loss 2.0000", "0:00:02 left", "1,000 tokens/s", "mfu 41.2%",
                                           shown]))


def test_a_terminal_keeps_the_lines_of_a_file_and_has_a_live_one_between_them(monkeypatch):
    in_a_file, now = run_of(400, monkeypatch), [0.0]
    kept, live = [], []
    monkeypatch.setattr(say, "on_terminal", lambda stream=None: True)
    monkeypatch.setattr(say, "live", lambda text, passing=False: live.append((int(now[0]), text)))
    monkeypatch.setattr(say, "out", lambda text: kept.append((int(now[0]), text)))
    progress = Progress(400, clock=lambda: now[0])
    for step in range(1, 401):
        now[0] = float(step)
        progress.step(row(step))
    assert kept == in_a_file and len(kept) + len(live) == 400 and {at for at, _ in kept}.isdisjoint(dict(live))
    now[0] += 1
    for _ in range(16):         # faster than anyone reads
        progress.step(row(1))
        now[0] += 0.125
    assert len(kept) + len(live) - 400 == 8


@pytest.mark.parametrize("width, shown", [(120, 6), (66, 5), (65, 4), (40, 3), (20, 1), (5, 1)])
def test_a_narrow_window_shows_whole_parts(width, shown):
    parts = ["step 400/400", "loss 2.0000", "0:00:02 left", "1,000 tokens/s", "mfu 41.2%", "36.0 GiB"]
    line = fit_width(parts, width)
    assert line == "  ".join(parts[:shown]) and (len(line) <= width or shown == 1)
