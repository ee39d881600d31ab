"""A process that comes late to its steps is named; a hiccup, a checkpoint and a compile name nobody. Who came last is
measured in test_agree."""
import contextlib
import io

import injected
import pytest

from meshtrain.journal.rows import MetricRows
from meshtrain.journal.guards import MOSTLY, WINDOW, Stragglers


def told(*steps):
    """Who is named after these steps, and at which steps a line named another one than before."""
    found, news = Stragglers(), []
    for k, (late, step_s) in enumerate(steps):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            found.add_step(late, step_s)
        news += [k] * ("delays the others" in out.getvalue())
    return found.named, news


def test_the_latest_of_most_steps_is_named_once_with_what_it_costs():
    named, news = told(*[((3, 1.0), 1.25)] * 30)
    assert named == (3, 1.0, 0.8) and news == [WINDOW - 1]


def test_it_is_named_until_it_comes_in_time_again_and_another_one_anew():
    late, other, fine = ((1, 0.2), 1.0), ((2, 0.3), 1.0), ((2, 0.0), 1.0)
    assert told(*[late] * 10, *[fine] * 3) == (None, [9])
    named, news = told(*[late] * 10, *[other] * 10)
    assert named[0] == 2 and len(news) == 2
    assert told(*[late, (None, 1.0)] * 10)[0][0] == 1, "steps after a checkpoint say nothing"


@pytest.mark.parametrize("steps", [
    [((1, 0.04), 1.0)] * 20,                                # 4 % of a step
    [((k % 2, 0.5), 1.0) for k in range(20)],               # now one, now the other
    [((1, 9.0), 10.0)] * (MOSTLY - 1) + [((2, 0.0), 1.0)] * 3,  # a disk that stood still for some steps
    [(None, 1.0)] * 20, [((2, 0.0), 1.0)] * 20, [((1, 1.0), 1.0)] * (WINDOW - 1)])
def test_nobody_is_named_for_little_or_for_now_and_then(steps):
    assert told(*steps) == (None, [])


SLOW = '''
import os, sys, threading, time
def slow():
    while not hasattr(sys.modules.get("meshtrain.commands.train"), "main"):
        time.sleep(0.002)
    module = sys.modules["meshtrain.cluster.watch"]
    real = module.step
    module.step = lambda number: (time.sleep(1.0), real(number))
if any(word == "--distributed.process_id=1" for word in sys.argv) and os.environ.get("SLOW"):
    threading.Thread(target=slow, daemon=True).start()
'''


@pytest.mark.long
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_process_that_is_a_second_slower_a_step_is_named(is_slow, tmp_path, monkeypatch):
    injected.prepare(tmp_path)
    (tmp_path / "inject" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("SLOW", "1" if is_slow else "")
    run = injected.launched(tmp_path, tmp_path / "run", 2, "--training.steps", 26, "--checkpoint.every",
                            8, "--validation.every", 10,
                            "--data.validation_fraction", 0.2)
    assert run.wait(600) == 0, (tmp_path / "run.log").read_text()
    said, rows = (tmp_path / "run.log").read_text(), [*MetricRows(tmp_path / "run" / "metrics.jsonl")]
    named = {row["step"]: (row["straggler"], row["straggler_s"]) for row in rows if "straggler" in row}
    assert ("process 1 on " in said and "delays the others" in said) == is_slow, said
    assert {index for index, _ in named.values()} == ({1} if is_slow else set()) and all(
        0.8 < late_s < 3 for _, late_s in named.values())
