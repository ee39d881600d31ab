"""A process that comes late to its steps is named, in real processes; a hiccup, a checkpoint and a compile name
nobody."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import injected
import pytest

from meshtrain.run import metrics
from meshtrain.run.record import MOSTLY, WINDOW, Stragglers

ROOT = Path(__file__).resolve().parent.parent


def told(*steps):
    found = Stragglers()
    news = [found.step(late, step_s) for late, step_s in steps]
    return found.named, [k for k, new in enumerate(news) if new]


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


CHILD = '''
import json, sys, time
import jax
from meshtrain.cluster import agree, find, meet
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
address, index = sys.argv[1], int(sys.argv[2])
meet.start(find.Cluster(address, 3, index), 60, 100)
agreement, late = agree.StopAgreement(), []
#              on time, one late, all late, far too late, not known, a step later
for lates in [(0, 0, 0), (0, 0, 0.25), (0.5, 0.1, 0.2), (0, 1e6, 0), (None,) * 3, (0, 0, 0), (0, 0, 0)]:
    assert not agreement.reached(False, lates[index])
    late.append(agreement.late)
agreement.reached(index == 1, 0.125 * (index == 2))
assert agreement.reached(False, 0.0) and agreement.late[1] == 0.125
print("SAID " + json.dumps(late), flush=True)
'''


def test_all_processes_know_who_came_last_and_by_how_much(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    free = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")} | {
        "PYTHONPATH": str(ROOT)}
    children = [subprocess.Popen([sys.executable, tmp_path / "child.py", address, str(index)], env=free, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for index in range(3)]
    for child in children:
        out = child.communicate(timeout=300)[0]
        said = [json.loads(line.removeprefix("SAID ")) for line in out.splitlines() if line.startswith("SAID ")]
        assert said, out
        assert said[0] == [None, [2, 0.0], [2, 0.25], [0, pytest.approx(0.4)], [1, 65.535], None, [2, 0.0]], out


SLOW = '''
import os, sys, threading, time
def slow():
    while not hasattr(sys.modules.get("meshtrain.train"), "main") and not hasattr(sys.modules["__main__"], "_train"):
        time.sleep(0.002)
    module = sys.modules["meshtrain.cluster.watch"]
    real = module.step
    module.step = lambda number: (time.sleep(1.0), real(number))
if any(word == "--distributed.process_id=1" for word in sys.argv) and os.environ.get("SLOW"):
    threading.Thread(target=slow, daemon=True).start()
'''


@pytest.mark.slow
@pytest.mark.parametrize("is_slow", [True, False])
def test_a_process_that_is_a_second_slower_a_step_is_named(is_slow, tmp_path, monkeypatch):
    injected.prepare(tmp_path)
    (tmp_path / "inject" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("SLOW", "1" if is_slow else "")
    run = injected.launched(tmp_path, tmp_path / "run", 2, "--training.steps", 26, "--checkpoint.every",
                            8, "--validation.every", 10,
                            "--data.validation_fraction", 0.2)
    assert run.wait(600) == 0, (tmp_path / "run.log").read_text()
    said, rows = (tmp_path / "run.log").read_text(), metrics.read(tmp_path / "run" / "metrics.jsonl")
    named = {row["step"]: (row["straggler"], row["straggler_s"]) for row in rows if "straggler" in row}
    assert ("process 1 on " in said and "holds the others up" in said) == is_slow, said
    assert {index for index, _ in named.values()} == ({1} if is_slow else set()) and all(
        0.8 < late_s < 3 for _, late_s in named.values())
