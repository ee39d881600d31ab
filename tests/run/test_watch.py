"""The watchdog: it fires in every process, its stacks are left, and the one that the others wait for is named."""
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.cluster import agree, lost, stacks, watch
from meshtrain.cluster.lost import PeerError
from meshtrain.cluster.stacks import ProcessState
from meshtrain.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
JAX, AGREE = "/site-packages/jax/_src/array.py", "/home/u/meshtrain/cluster/agree.py"
IN_DATA = [("/home/u/my/data.py", "read"), ("/home/u/meshtrain/run/loop.py", "train")]
IN_COLLECTIVE = [(JAX, "_value"), ("/home/u/meshtrain/journal/journal.py", "settle")]
IN_AGREEMENT = [("/usr/lib/python3.11/selectors.py", "select"), (AGREE, "exchange")]
JOINING = [("/usr/lib/python3.11/threading.py", "join"), ("/home/u/meshtrain/checkpoint/checkpoint.py", "_join")]
IN_BARRIER = [("/site-packages/orbax/checkpoint/_src/multihost/multihost.py", "_fn"),
              ("/home/u/meshtrain/checkpoint/checkpoint.py", "_save")]


def left(directory: Path, index: int, threads=(), state="hangs", moment=7, attempt="a",
         first="", phase="step 5", host="gpu07") -> None:
    """What process `index` leaves in `directory`: frames of its threads, those of the main thread first."""
    told = ProcessState(index, 3, host, 100 + index, attempt, phase, 1.7e9, moment, "7f0", state)
    text = first + "".join(f"Thread 0x{0x7f0 + i:016x} [{i}] (most recent call first):\n"
                           + "".join(f'  File "{file}", line 7 in {name}\n' for file, name in frames) + "\n"
                           for i, frames in enumerate(threads))
    directory.mkdir(exist_ok=True)
    (directory / f"process-{index}.txt").write_bytes(told.head() + text.encode())


@pytest.mark.parametrize("waiting", [[IN_COLLECTIVE], [IN_AGREEMENT], [JOINING, IN_BARRIER],
                                     [JOINING, IN_DATA, IN_COLLECTIVE]])
@pytest.mark.parametrize("stuck", [[IN_DATA], [IN_DATA, IN_BARRIER], [JOINING, IN_DATA]])
def test_the_culprit_is_the_one_that_does_not_wait_for_the_others(waiting, stuck, tmp_path):
    left(tmp_path, 0, waiting)
    left(tmp_path, 1, stuck)
    left(tmp_path, 2, waiting)
    index, words = stacks.culprit(tmp_path)
    assert index == 1 and words.startswith("hangs in step 5 since 2023-11-14T22:13:20Z in ")
    assert "threading.py" not in words


def test_of_several_that_do_not_wait_the_one_that_is_behind_is_the_culprit(tmp_path):
    left(tmp_path, 0, [IN_DATA], moment=8)
    left(tmp_path, 1, [IN_COLLECTIVE], moment=6)
    left(tmp_path, 2, [IN_DATA], moment=7)
    assert stacks.culprit(tmp_path)[0] == 2


def test_one_that_left_no_stacks_while_all_others_wait_is_the_culprit(tmp_path):
    left(tmp_path, 0, [IN_COLLECTIVE])
    left(tmp_path, 1, state="runs")
    assert stacks.culprit(tmp_path) == (1,
                                        "left no stacks of step 5: it is stopped, or its host is gone (pid 101 on "
                                        "gpu07)")


def test_one_that_holds_the_interpreters_lock_is_the_culprit_wherever_it_stands(tmp_path):
    left(tmp_path, 0, [IN_COLLECTIVE])
    left(tmp_path, 1, [IN_COLLECTIVE], state="runs", first="Timeout (0:01:04)!\n")
    index, words = stacks.culprit(tmp_path)
    assert index == 1 and words.endswith(", and holds the interpreter's lock")


def test_a_crash_is_named_before_those_that_hang_of_it_and_an_abort_of_jax_is_none(tmp_path):
    left(tmp_path, 0, [IN_DATA], state="runs", first="Fatal Python error: Aborted\n\n")
    assert stacks.culprit(tmp_path) is None
    left(tmp_path, 1, [IN_DATA])
    left(tmp_path, 2, [IN_DATA], state="runs", first="Fatal Python error: Segmentation fault\n\n")
    assert stacks.culprit(tmp_path) == (2, "crashed in step 5 in read (u/my/data.py:7): Segmentation fault")


def test_nobody_is_the_culprit_where_all_wait_or_nothing_has_happened(tmp_path):
    assert stacks.culprit(tmp_path / "none") is None
    left(tmp_path, 0, state="runs")
    left(tmp_path, 1, state="runs")
    assert stacks.culprit(tmp_path) is None
    for index in range(3):
        left(tmp_path, index, [IN_COLLECTIVE])
    assert stacks.culprit(tmp_path) is None
    left(tmp_path, 1, [IN_DATA], state="lost")      # it failed of another
    assert stacks.culprit(tmp_path) is None


def test_stacks_of_an_earlier_try_do_not_mislead_and_the_newest_few_are_kept(tmp_path):
    before = time.time()
    left(tmp_path, 0, [IN_COLLECTIVE])
    left(tmp_path, 1, [IN_DATA])
    assert stacks.culprit(tmp_path,
                          since=before - 5)[0] == 1 and stacks.culprit(tmp_path, since=time.time() + 5) is None
    for k in range(1, stacks.KEPT_TRIES + 3):
        stacks.begin(tmp_path)
        assert stacks.culprit(tmp_path) is None and not list(tmp_path.glob("process-*"))
        assert stacks.culprit(tmp_path / f"try-{k}")[0] == 1
        left(tmp_path, 0, [IN_COLLECTIVE])
        left(tmp_path, 1, [IN_DATA])
    assert sorted(path.name for path in tmp_path.glob("try-*")) == [f"try-{k}" for k in range(3, stacks.KEPT_TRIES + 3)]
    left(tmp_path, 0, state="runs")
    left(tmp_path, 1, state="runs")
    stacks.begin(tmp_path)      # nothing had happened: nothing is kept
    assert len(list(tmp_path.glob("try-*"))) == stacks.KEPT_TRIES and not list(tmp_path.glob("process-*"))


def test_of_this_host_the_one_that_has_gone_without_a_word_is_known_by_the_lock_that_it_held(tmp_path):
    with contextlib.ExitStack() as stack:
        for index in range(3):
            left(tmp_path, index, state="runs", host=socket.gethostname())
            held = stack.enter_context(open(tmp_path / f"process-{index}.txt", "rb"))
            fcntl.flock(held, fcntl.LOCK_EX)
        left(tmp_path, 3, state="runs", host="another")
        left(tmp_path, 4, state="lost", host=socket.gethostname())
        assert stacks.find_dead(tmp_path) is None
        held.close()
        assert stacks.find_dead(tmp_path) == (2, "died in step 5 without a message (pid 102): it was killed")


def test_a_torn_file_is_nobodys(tmp_path):
    left(tmp_path, 0, [IN_COLLECTIVE])
    left(tmp_path, 1, [IN_DATA])
    for i, text in enumerate([b"", b"\n", b"words\n[]\n", b"words\n{}\n", b"\xff\n" * 600]):
        (tmp_path / f"process-{7 + i}.txt").write_bytes(text)
    assert stacks.culprit(tmp_path)[0] == 1


def test_a_head_has_its_length_whatever_it_says():
    head = ProcessState(16_383, 16_384, "h" * 63, 2**22, "0123abcd", "validation after step 1000000",
                        1.7e9, 10**6, "7f" * 8, "lost", "é\n" * 900).head()
    assert len(head) == stacks.HEAD and head.count(b"\n") == 3 and json.loads(head.splitlines()[1])["process"] == 16_383


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watchdog():
    with watch.on(watch.PhaseLimits(), 0, 1, print) as watchdog:
        yield watchdog


def test_a_step_may_last_ten_times_the_median_and_a_minute_at_least(watchdog):
    watchdog.step(1)
    watchdog.step(2)
    assert watchdog._now.limit_s == watch.PhaseLimits().compile, "they load programs and connect devices"
    watchdog.step(3)
    assert watchdog._now.limit_s == watch.LEAST_STEP_S
    watchdog._steps_s.extend([1.0, 12.0, 12.0, 12.0, 12.0, 12.0, 900.0])
    watchdog.step(4)
    assert watchdog._now.limit_s == 120 and watchdog._now.phase == "step 4"


def test_what_is_done_within_a_step_has_its_own_limit_and_is_none_of_its_time(watchdog):
    for number in (1, 2, 3):
        watchdog.step(number)
        with watch.phase(f"save after step {number}", "save"):
            assert (watchdog._now.phase, watchdog._now.limit_s) == (f"save after step {number}", 3600)
            time.sleep(0.05)
    assert len(watchdog._steps_s) == 3 and max(watchdog._steps_s) < 0.05 and watchdog._now.phase == "step 3"
    with watch.phase("opening the data", watch.UNLIMITED):
        assert watchdog._now.limit_s == float("inf")


def test_a_key_says_how_long_and_a_negative_one_that_nothing_ends_it():
    with watch.on(watch.PhaseLimits(step=5, save=-1), 0, 1, print) as watchdog:
        watchdog._steps_s.extend([100.0, 100.0])
        watchdog.step(9)
        assert watchdog._now.limit_s == 5
        with watch.phase("save", "save"):
            assert watchdog._now.limit_s == float("inf")


def test_outside_a_command_nothing_is_watched():
    watch.step(1)
    watch.progress()
    with watch.phase("save", "save"):
        assert watch._watchdog is None


# ---- firing ----------------------------------------------------------------------------------------------------------

ALONE = """
import ctypes, sys, time
from pathlib import Path
from meshtrain.cluster import watch
watch.LOOK_S = 0.1
with watch.on(watch.PhaseLimits(save=0.5), 0, 1, lambda text: print(text, file=sys.stderr, flush=True)) as watchdog:
  with watchdog.keep_in(Path(sys.argv[1])):
    with watch.phase("save after step 3", "save"):
        {body}
"""


@pytest.mark.parametrize("body, locked", [("time.sleep(60)", False), ("ctypes.PyDLL(None).sleep(60)", True)],
                         ids=["asleep", "lock"])
def test_a_process_that_hangs_leaves_its_stacks_and_ends_with_1(body, locked, tmp_path):
    code = ALONE.format(body=body)
    if locked:
        code = code.replace("watch.LOOK_S = 0.1", "watch.LOOK_S, watch.LOCK_HELD_S = 0.1, 1")
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path / "stacks"], cwd=ROOT, text=True,
                             stderr=subprocess.PIPE)
    _, err = child.communicate(timeout=50)
    assert child.returncode == 1, err
    index, words = stacks.culprit(tmp_path / "stacks")
    assert index == 0 and words.startswith("hangs in save after step 3 since ") and "in <module> (" in words
    assert words.endswith("lock") == locked
    assert "hangs in save after step 3" in err and f"its stacks: {tmp_path / 'stacks'}" in err
    assert ("training.phase_timeout_s allows 0.5 s" if locked else "more than training.phase_timeout_s allows (0.5 s)"
            ) in err


OF_TWO = """
import time
from pathlib import Path
from meshtrain.cluster import stacks, watch
watch.LOOK_S, watch.WINDOW_S = 0.1, 1000
stacks.begin = lambda directory: "a"
with watch.on(watch.PhaseLimits(save=0.5), {index}, 2, lambda text: None) as watchdog, watchdog.keep_in(Path({directory!r})):
    with watch.phase("save after step 3", "save"):
        time.sleep(100)
"""


@pytest.mark.parametrize("index", [0, 1])
def test_nobody_waits_any_longer_once_the_first_has_seen_all_stacks(index, tmp_path):
    left(tmp_path, 1 - index, [IN_DATA], state="ends" if index else "hangs")
    child = subprocess.run([sys.executable, "-c", OF_TWO.format(index=index, directory=str(tmp_path))],
                           cwd=ROOT, timeout=50)
    assert child.returncode == 1 and stacks.read(tmp_path)[index].state.state == ("hangs" if index else "ends")


NOTES_LATE = """
from pathlib import Path
import time
from meshtrain.cluster import stacks, watch
watch.LOOK_S, watch.WINDOW_S, watch.NOTED_S = 0.1, 4, 2
stacks.begin = lambda directory: "a"
with watch.on(watch.PhaseLimits(save=0.5), 1, 2, lambda text: None) as watchdog, watchdog.keep_in(Path({directory!r})):
    with watch.phase("save after step 3", "save"):
        watch.progress()
        time.sleep(100)
"""


def test_what_a_watchdog_has_left_is_not_overwritten_by_what_its_process_did_before(tmp_path):
    child = subprocess.run([sys.executable, "-c", NOTES_LATE.format(directory=str(tmp_path))], cwd=ROOT, timeout=50)
    assert child.returncode == 1 and stacks.read(tmp_path)[1].state.state == "hangs"


# On a busy machine a process may wait more than a second for its turn, which is no hang.
WORKING = ALONE.replace("save=0.5", "save=2.5").replace("watch.LOOK_S = 0.1", "watch.LOOK_S, watch.LOCK_HELD_S = 0.1, 2")


def monitor_of(pid: int) -> int:
    return int(subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def ignores(pid: int, number: signal.Signals) -> bool:
    ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    return bool(int(ignored, 16) >> number - 1 & 1)


def is_zombie(pid: int) -> bool:
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("who, hang", [
    ("the process", "ctypes.PyDLL(None).sleep(60)"), ("the process and its monitor", "time.sleep(60)"),
    ("Ctrl-Z", "time.sleep(60)")])
def test_a_process_that_is_stopped_for_longer_than_every_limit_goes_on_and_a_hang_then_ends_it(who, hang, tmp_path):
    body = f"""
          while not Path(sys.argv[2]).exists():
              watch.progress()
              print("alive", flush=True)
              time.sleep(0.02)
          {hang}"""
    child = subprocess.Popen([sys.executable, "-c", WORKING.format(body=body), tmp_path / "stacks", tmp_path / "hang"],
                             cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             process_group=0)       # of an orphaned group the kernel stops no process by SIGTSTP
    monitor = None
    for _ in range(3):
        assert child.stdout.readline() == "alive\n"
        monitor = monitor or monitor_of(child.pid)
        stopped = [child.pid, monitor] if "monitor" in who else [child.pid]
        for pid in stopped:
            os.kill(pid, signal.SIGTSTP if who == "Ctrl-Z" else signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while not all(map(is_stopped, stopped)):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(2.5 + 2 + 0.5)        # longer than the limit, and than what the lock may be held for
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    (tmp_path / "hang").touch()
    _, err = child.communicate(timeout=50)
    assert child.returncode == 1 and err.count("error: process 0 of 1") == 1, err
    assert ("holds the interpreter's lock" in err) == ("PyDLL" in hang) and "hangs in save after step 3" in err
    assert stacks.culprit(tmp_path / "stacks")[0] == 0


def test_a_monitor_that_is_killed_is_started_again(tmp_path):
    body = "print('ready', flush=True); sys.stdin.readline(); ctypes.PyDLL(None).sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", WORKING.format(body=body), tmp_path],
                             cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    os.kill(first := monitor_of(child.pid), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True).stdout.strip() in ("", str(first)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    _, err = child.communicate("\n", timeout=50)
    assert child.returncode == 1 and "holds the interpreter's lock" in err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends a process that is stopped")
def test_a_monitor_that_is_stopped_ends_with_its_process(tmp_path):
    body = "print('ready', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", WORKING.format(body=body), tmp_path], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE)
    assert child.stdout.readline() == "ready\n"
    monitor, deadline = monitor_of(child.pid), time.monotonic() + 20
    while not ignores(monitor, signal.SIGTSTP):     # the last of the monitor's first lines
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(monitor, signal.SIGSTOP)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{monitor}").exists() and not is_zombie(monitor):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_thread_that_outlives_the_command_may_enter_phases():
    with watch.on(watch.PhaseLimits(save=0.1), 0, 1, print) as watchdog:
        pass
    watchdog.enter("save", "save")
    watchdog.progress()


def test_a_command_that_ends_takes_its_monitor_along():
    with watch.on(watch.PhaseLimits(), 0, 1, print) as watchdog:
        pid = watchdog._monitor._process.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("error", [None, ConfigError("a mistake"), agree.mark_agreed(ValueError("of all"))])
def test_a_command_that_ends_leaves_no_files(error, tmp_path):
    with contextlib.suppress(type(error or ())), watch.on(watch.PhaseLimits(), 0, 1, print) as watchdog:
        with watchdog.keep_in(tmp_path / "stacks"):
            assert [path.name for path in (tmp_path / "stacks").iterdir()] == ["process-0.txt"]
            if error:
                raise error
    assert not (tmp_path / "stacks").exists()


GLOO = ("UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[127.0.0.1]:3")
BARRIER = ("DEADLINE_EXCEEDED: Barrier timed out. Id: two::0.\n# of tasks that reached the barrier: 2/3.\nThe first "
           "task at the barrier: 1. Some timed out task names:\n2\n\n\nRPC: "
           "/xla.coordination.CoordinationService/Barrier")


@pytest.mark.parametrize("error, gone", [
    (RuntimeError(GLOO), []), (RuntimeError(BARRIER), [2]), (PeerError("process 1 did not come"), []),
    (RuntimeError("Gloo all-gather failed: Timed out waiting 20000ms for recv operation to complete"), []),
    (RuntimeError("NCCL operation ncclAllReduce failed: remote process exited or there was a network error"), []),
    (RuntimeError("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\n4\nThe tasks have "
                  "crashed."), [1, 4]),
    (RuntimeError("UNAVAILABLE: /job:jax_worker/replica:0/task:3 stopped sending heartbeats"), [3]),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), None), (ValueError("a shape"), None),
    (OSError(28, "No space left"), None)])
def test_who_has_lost_others_is_a_victim_and_who_fails_alone_is_the_culprit(error, gone, tmp_path):
    assert lost.others(error) == gone
    left(tmp_path / "stacks", 1, state="runs")
    with contextlib.suppress(Exception), watch.on(watch.PhaseLimits(), 0, 2, print) as watchdog, watchdog.keep_in(
            tmp_path / "stacks"):
        with watch.phase("save after step 3", "save"):
            raise error
    state = stacks.read(tmp_path / "stacks")[0].state
    assert state.state == ("failed" if gone is None else "lost") and state.phase == "save after step 3"
    found = stacks.culprit(tmp_path / "stacks")
    assert found == ((0, f"failed in save after step 3: {type(error).__name__}: {error}") if gone is None else None)


def test_a_clock_that_is_set_is_told_by_the_process_that_counts_the_heartbeats(monkeypatch):
    told = []
    monkeypatch.setattr(watch, "CLOCK_LOOK_S", 0.02)
    with watch.on(watch.PhaseLimits(), 0, 2, told.append):
        time.sleep(0.1)
        assert told == []
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 300)
        deadline = time.monotonic() + 20
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    assert len(told) == 1 and "jumped by +300 s" in told[0] and "all processes will seem dead" in told[0]
