"""The watchdog's clock on a busy machine: a process that waits for a CPU does not hang."""
import os
import subprocess
import sys
import time

import pytest
from test_watch import ALONE, ROOT

from meshtrain.cluster import monitor


@pytest.mark.parametrize("ran, ready, counted", [
    (0.0, False, 1.0), (0.1, False, 1.0), (0.7, True, 1.0), (6.0, True, 1.0), (0.2, True, 0.2),
    (0.0, True, 1 / monitor.SLOWEST)], ids=["hangs", "waits", "runs", "many threads", "starved", "gets nothing"])
def test_a_clock_counts_a_second_without_a_cpu_by_what_ran(ran, ready, counted, monkeypatch):
    """ran: of the threads together, in a second. ready: whether one waits for a CPU at its end."""
    at, cpu_s = [100.0], [5.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: at[0])
    monkeypatch.setattr(monitor.time, "process_time", lambda: cpu_s[0])
    monkeypatch.setattr(monitor, "other_thread_is_ready", lambda: ready)
    clock = monitor.Clock(look_s=0.8)
    at[0], cpu_s[0] = 101.0, 5.0 + ran
    assert clock.now() == 1.0 and clock.look() == clock.now() == pytest.approx(counted)
    at[0], cpu_s[0] = 110.0, cpu_s[0] + 9.0
    assert clock.now() == pytest.approx(counted + 1.6) and clock.look() == pytest.approx(counted + 1.6)


STARVED = """
        import hashlib, os
        content = bytes(1 << 26)
        os.sched_setaffinity(0, [int(sys.argv[2])])     # of this thread, not of the watchdog's
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        print("ready", flush=True)
        while not Path(sys.argv[3]).exists():
            hashlib.sha256(content)     # without the interpreter's lock, as a program of XLA"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell")
def test_a_process_that_gets_no_cpu_is_not_ended(tmp_path):
    cpu, done = str(min(os.sched_getaffinity(0))), tmp_path / "done"
    code = ALONE.replace("save=0.5", "save=3").format(body=STARVED)
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "stacks", cpu, done], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    spin = f"import os; os.sched_setaffinity(0, [{cpu}]); sum(iter(int, 1))"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    time.sleep(8)
    for other in others:
        other.kill()
        other.wait()
    done.touch()
    _, err = child.communicate(timeout=50)
    assert child.returncode == 0, err
