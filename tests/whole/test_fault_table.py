"""What a run does when something fails: each fault for real, who is named, with which code it ends, and that it takes
no longer than a minute. docs/pods.md lists the seconds.

A GPU's own faults cannot be had here: a process that hangs does so in Python or C, on the host.
"""
import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from checkpoints import names, small_disk  # noqa: F401
from meshtrain.launch import supervise
from meshtrain.cluster import stacks
from tests import injected

# from the fault to the end of the launcher: the longest that any of them may take, busy machine or not
ENDED_S = 60.0
STEP, COMPILE = ("--training.step_timeout_s", 6), ("--training.phase_timeout_s", 20)
SAVING = ("--checkpoint.every", 10)
FOUR = ("--mesh.data", 4, "--mesh.simulated_devices", 4)
HANGS = r"{} failed first, [\d.]+ s after the start: exit code 1; it hangs in {} since \S+ in fault \("
KILLED, FIRST = (r"{} failed first, [\d.]+ s after the start: killed by SIG{}",
                 r"{} failed first, [\d.]+ s after the start: {}")
STOPPED = r"{} failed first: it was stopped \(SIGSTOP, or a debugger\), and the others lost it"
# it waits for its thread
SAVES = r"{} failed first, .*: exit code 1; it hangs in checkpoint after step \d+ since \S+ in save \("
NOTED = r"step \d"       # the last that it noted, ten seconds ago at most: nothing of Python runs any more

# name: (processes, fault as in `injected`, words of the run, what the launcher says of whom, with {} for the process's
# name)
ROWS = {
    "kill 1": (2, "1 step:8 SIGKILL", (), KILLED.format("{}", "KILL")),
    "kill 0": (2, "0 step:8 SIGKILL", (), KILLED.format("{}", "KILL")),
    "kill 2 of 4": (4, "2 step:8 SIGKILL", FOUR, KILLED.format("{}", "KILL")),
    "kill 0 of 4": (4, "0 step:8 SIGKILL", FOUR, KILLED.format("{}", "KILL")),
    "kill while it compiles": (2, "1 compile SIGKILL", (), KILLED.format("{}", "KILL")),
    "segmentation fault": (2, "1 step:8 SIGSEGV", (),
                           KILLED.format("{}", "SEGV") + r".*; it crashed in step .*: Segmentation fault"),
    "abort": (2, "1 step:8 SIGABRT", (), KILLED.format("{}", "ABRT")),
    "exception": (2, "1 step:8 raise", (),
                  FIRST.format("{}", "exit code 1; it failed in step 8: RuntimeError: a fault that was injected")),
    "exception in the first": (2, "0 step:8 raise", (),
                               FIRST.format("{}", "exit code 1; it failed in step 8: RuntimeError")),
    "stop 1": (2, "1 step:8 SIGSTOP", (), STOPPED),
    "stop 0": (2, "0 step:8 SIGSTOP", (), STOPPED),
    "stop 3 of 4": (4, "3 step:8 SIGSTOP", FOUR, STOPPED),
    "stop while it compiles": (2, "1 compile SIGSTOP", (), STOPPED),
    "stop the only one": (1, "0 step:8 SIGSTOP", (), r"{} failed first: it was stopped \(SIGSTOP, or a debugger\)$"),
    "hang in a step": (2, "1 step:8 sleep", STEP, HANGS.format("{}", "step 8")),
    "hang in a step of the first": (2, "0 step:8 sleep", STEP, HANGS.format("{}", "step 8")),
    "hang in a step of 3 of 4": (4, "3 step:8 sleep", (*FOUR, *STEP), HANGS.format("{}", "step 8")),
    "hang of the only one": (1, "0 step:8 sleep", STEP, HANGS.format("{}", "step 8")),
    "hang with the lock": (2, "1 step:8 lock", STEP,
                           HANGS.format("{}", NOTED) + ".*, and holds the interpreter's lock"),
    "hang with the lock of the first": (2, "0 step:8 lock", STEP,
                                        HANGS.format("{}", NOTED) + ".*, and holds the interpreter's lock"),
    "stuck before run.dir is claimed": (2, "1 agree sleep", ("--distributed.timeout_s", 20),
                                        FIRST.format("{}", "exit code 1")),
    "hang while it compiles": (2, "1 compile sleep", COMPILE, HANGS.format("{}", "compile")),
    "hang while it restores": (2, "1 restore sleep", ("--training.phase_timeout_s", 20), HANGS.format("{}", r"[\w ]+")),
    "hang while it saves": (2, "1 save sleep", ("--training.phase_timeout_s", 6, *SAVING), SAVES),
    "hang that XLA ends": (2, "1 step:8 sleep", (), r"{} failed first: the others lost contact with it"),
}
FAST = "hang in a step"
FIRST_OF_SLOW = "kill 1"
XLA_ENDS = {"hang that XLA ends": {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=20"}}
# Faults of which the others' stacks, or those of the process itself, tell.
LEFT = {"segmentation fault", "exception", "exception in the first"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("faults")
    injected.prepare(home)
    return home


def place(home: Path, name: str) -> Path:
    return home / name.replace(" ", "_")


def within(ended: injected.Ended, name: str, record_property) -> None:
    record_property("seconds", round(ended.seconds, 1))
    print(f"{name}: {ended.seconds:.1f} s")
    assert ended.seconds < ENDED_S, ended.said


def named(pattern: str, process: int, text: str) -> None:
    assert re.search("^" + pattern.format(rf"process {process} \(pid \d+\)"), text, re.MULTILINE), text


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == FAST else pytest.mark.full if name == FIRST_OF_SLOW else
                 pytest.mark.long) for name in ROWS])
def test_a_fault_ends_the_run_within_a_minute_and_the_one_that_had_it_is_named(name, home, record_property):
    processes, fault, words, pattern = ROWS[name]
    directory = place(home, name)
    ended = injected.ended(injected.launched(home, directory, processes, *words, fault=fault,
                                             environ=XLA_ENDS.get(name)), directory)
    assert ended.code == 1, ended.said
    within(ended, name, record_property)
    named(pattern, int(fault[0]), ended.said)
    assert len(re.findall("failed first", ended.said)) == 1
    found = stacks.culprit(directory / "stacks", since=ended.began - ENDED_S)
    if name.startswith("hang") and name not in XLA_ENDS or name in LEFT:
        assert found is not None and found[0] == int(fault[0]), (found, ended.said)
    else:
        assert found is None, found
    if name.startswith("hang") and name not in XLA_ENDS:
        assert set(stacks.read(directory / "stacks")) == set(range(processes)), "the stacks of all"


@pytest.mark.long
def test_a_hang_is_told_after_a_minute_and_has_ended_the_run_soon_after(home, record_property):
    directory = home / "default"
    ended = injected.ended(injected.launched(home, directory, 2, fault="1 step:8 sleep"), directory)
    record_property("seconds", round(ended.seconds, 1))
    print(f"hang with the default limit: {ended.seconds:.1f} s")
    # 3 s alone; the window of those that are not heard is 9
    assert ended.code == 1 and 60 <= ended.seconds < 60 + 15, ended.said
    named(HANGS.format("{}", "step 8"), 1, ended.said)
    assert "error: the culprit is process 1: it hangs in step 8" in ended.said


@pytest.mark.long
@pytest.mark.parametrize("name", ["kill while it saves", "kill the first before it renames"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before_and_the_rest_is_gone_at_the_next_start(
        name, home, record_property):
    directory, process = home / name.replace(" ", "_"), 1 if name == "kill while it saves" else 0
    fault = f"{process} {'save' if process else 'commit'} SIGKILL"
    ended = injected.ended(injected.launched(home, directory, 2, *SAVING, fault=fault), directory)
    assert ended.code == 1, ended.said
    within(ended, name, record_property)
    named(KILLED.format("{}", "KILL"), process, ended.said)
    assert names(directory / "checkpoints") == [".10.saving"]
    again = injected.ended(injected.launched(home, directory, 2, *SAVING, "--training.steps", 12), directory)
    assert again.code == 0 and {"10", "12"} == set(names(directory / "checkpoints")), again.said


@pytest.mark.long
@pytest.mark.parametrize("name, fault, words", [
    ("kill", "SIGKILL",
     r"error: process 0 of 2 has lost process 1: it died in step \d+ without a message \(pid \d+\): it was killed$"),
    ("exception", "raise",
     r"error: process 0 of 2 has lost process 1: it failed in step 8: RuntimeError: a fault that was injected$"),
    # jax's own words: it aborts us
    ("stop", "SIGSTOP", r"The following tasks are unhealthy \(stopped sending heartbeats\):\n1$")])
def test_without_a_launcher_the_others_end_within_a_minute_and_say_whom_they_have_lost(
        name, fault, words, home, record_property):
    directory = home / f"alone_{name}"
    first, second = injected.without_launcher(home, directory, 2, supervise.free_port(), fault=f"1 step:8 {fault}")
    try:
        code = first.wait(400)
        end = time.time()
    finally:
        second.kill()
        first.kill()
    seconds = end - float(Path(f"{directory}.fault").read_text().split()[0])
    said = Path(f"{directory}.0.log").read_text()
    record_property("seconds", round(seconds, 1))
    print(f"{name} without a launcher: {seconds:.1f} s, exit code {code}")
    assert code in (1, -signal.SIGABRT) and seconds < ENDED_S, said
    assert re.search(words, said, re.MULTILINE), said


@pytest.mark.long
def test_a_mistake_that_one_process_alone_sees_ends_the_run_with_2_and_starts_nothing_again(home, record_property):
    directory = home / "mistake"
    ended = injected.ended(injected.launched(home, directory, 2, fault="1 step:4 mistake",
                                             own=("--max-restarts", 3)), directory)
    within(ended, "mistake", record_property)
    assert ended.code == 2 and "starting again" not in ended.said, ended.said
    named(FIRST.format("{}", "exit code 2"), 1, ended.said)
    last_lines = ended.said.partition("its last lines:\n")[2].partition("\nthen ")[0]
    assert last_lines.endswith("[1] error: a mistake that only this process can see"), ended.said
    assert "Traceback" not in last_lines


@pytest.mark.long
def test_a_run_that_fails_at_the_same_step_again_and_again_is_given_up_with_the_last_words_of_each(home):
    directory = home / "again"
    ended = injected.ended(injected.launched(home, directory, 2, fault="1 step:4 raise",
                                             own=("--max-restarts", 1)), directory)
    assert ended.code == 1
    assert "starting again from the beginning in 5 s (failure 1 without a newer checkpoint" in ended.said
    given_up = ended.said[ended.said.index("given up after 2 failures in a row without a checkpoint:"):]
    for count in (1, 2):
        assert re.search(rf"^  {count}: process 1 \(pid \d+\) failed first, .*it failed in step 4: RuntimeError: a "
                         rf"fault that was injected"
                         r".*; its last line: RuntimeError: a fault that was injected$",
                         given_up, re.MULTILINE), given_up


# ---- pauses, requests, the clock -------------------------------------------------------------------------------------


def goes_on(child: subprocess.Popen, directory: Path, rows: int = 20) -> None:
    """Waits until so many more steps are done."""
    wanted, deadline = count(directory) + rows, time.monotonic() + 200
    while count(directory) < wanted:
        assert child.poll() is None and time.monotonic() < deadline, Path(f"{directory}.log").read_text()
        time.sleep(0.1)


def count(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def waited_for(child: subprocess.Popen, directory: Path, condition, limit_s: float = 200) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert child.poll() is None and time.monotonic() < deadline, Path(f"{directory}.log").read_text()
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_pause_that_the_key_allows_is_survived(processes, home):
    directory = home / f"paused_{processes}"
    child = injected.launched(home, directory, processes, "--distributed.heartbeat_timeout_s", 90,
                              fault=f"{processes - 1} step:8 SIGSTOP")
    try:
        victim = injected.victim(directory)
        time.sleep(40)      # more than is allowed unless told
        assert child.poll() is None
        os.kill(victim, signal.SIGCONT)
        goes_on(child, directory)
        child.terminate()
        assert child.wait(120) == 75
    finally:
        child.kill()


@pytest.mark.long
def test_a_request_to_a_stuck_step_ends_the_run_and_a_second_one_at_once(home):
    directory = home / "asked"
    child = injected.launched(home, directory, 2, fault="1 step:8 sleep")
    try:
        injected.victim(directory)
        child.terminate()
        time.sleep(3)
        assert child.poll() is None, "the step may still end"
        child.terminate()
        assert child.wait(30) == 1
    finally:
        child.kill()
    assert "SIGTERM again: stopped at once, without saving" in Path(f"{directory}.log").read_text()


CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static char *set;
__attribute__((constructor)) static void find(void) {
    int file = open(getenv("FAULT_CLOCK"), O_RDONLY);
    set = mmap(0, 64, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME && set && atoi(set) == getpid()) now->tv_sec += 300;
    return code;
}
"""


@pytest.mark.long
def test_a_clock_that_is_set_ahead_under_process_0_is_told_for_what_it_is(home, tmp_path, record_property):
    (tmp_path / "clock.c").write_text(CLOCK)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", tmp_path / "clock.so", tmp_path / "clock.c"],
                       check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a clock of its own for a process needs a C compiler")
    (tmp_path / "set").write_bytes(bytes(64))
    directory = home / "clock"
    environ = {"FAULT_CLOCK": str(tmp_path / "set"), "LD_PRELOAD": str(tmp_path / "clock.so")}
    ended = injected.ended(injected.launched(home, directory, 2, fault="0 step:8 clock", environ=environ), directory)
    assert ended.code == 1, ended.said
    within(ended, "clock", record_property)
    named(r"{} failed first: its clock was set, or its machine was suspended", 0, ended.said)
    assert re.search(r"the clock of \S+ jumped by \+300 s",
                     ended.said) and "all processes will seem dead" in ended.said, ended.said


# ---- the disk --------------------------------------------------------------------------------------------------------


def saved(directory: Path) -> int:
    return max((int(name) for name in names(directory / "checkpoints") if name.isdecimal()), default=0)


NOT_SAVED = r"checkpoint of step \d+ not saved in \S+: (process \d+ .*)?{}"


@pytest.mark.long
@pytest.mark.parametrize("room_again", [True, False])
# noqa: F811
def test_a_full_disk_is_told_at_every_save_and_ends_the_run_only_after_three_in_a_row(room_again, home, small_disk):
    directory, ballast = home / f"full_{room_again}", small_disk / "ballast"
    (small_disk / "run").mkdir()
    directory.symlink_to(small_disk / "run")
    child = injected.launched(home, directory, 2, "--checkpoint.every", 100, "--checkpoint.keep", 1)
    log = Path(f"{directory}.log")
    try:
        waited_for(child, directory, lambda: (directory / "checkpoints").exists() and saved(directory))
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        waited_for(child, directory, lambda: re.search(NOT_SAVED.format("No space left on device"), log.read_text()))
        if room_again:
            ballast.unlink()
            before = saved(directory)
            waited_for(child, directory, lambda: saved(directory) > before)
            child.terminate()
        code = child.wait(200)
    finally:
        child.kill()
    said = log.read_text()
    assert code == (75 if room_again else 1), said
    if not room_again:
        assert "3 saves in a row have failed" in said and re.search("^process [01] .*failed first",
                                                                    said, re.MULTILINE), said
        assert len(set(re.findall(r"checkpoint of step (\d+) not saved", said))) >= 3, "each was told"


@pytest.mark.long
def test_a_process_alone_whose_files_the_system_refuses_is_named_with_the_reason(home):
    directory = home / "small"
    ended = injected.ended(injected.launched(home, directory, 2, *SAVING, fault="1 save small"), directory)
    assert ended.code == 1 and "3 saves in a row have failed" in ended.said, ended.said
    named(FIRST.format("{}", "exit code 1"), 1, ended.said)
    assert re.search(r"^process 1: checkpoint of step 10 not saved in \S+: .*File too large",
                     ended.said, re.MULTILINE), ended.said


@pytest.mark.long
def test_checkpoints_that_have_become_read_only_are_told_and_the_run_ends_after_three_saves(home):
    directory = home / "read_only"
    checkpoints = directory / "checkpoints"
    child = injected.launched(home, directory, 2, "--checkpoint.every", 100)
    mounted = False
    try:
        waited_for(child, directory, lambda: checkpoints.exists() and saved(directory))
        if subprocess.run(["mount", "--bind", checkpoints, checkpoints], capture_output=True).returncode:
            pytest.skip("mounting needs root")
        mounted = True
        subprocess.run(["mount", "-o", "remount,bind,ro", checkpoints], check=True)
        code = child.wait(200)
    finally:
        child.kill()
        if mounted:
            subprocess.run(["umount", checkpoints], check=True)
    said = Path(f"{directory}.log").read_text()
    assert code == 1 and re.search(NOT_SAVED.format("Read-only file system"),
                                   said) and "3 saves in a row have failed" in said, said
    again = injected.ended(injected.launched(home, directory, 2, "--training.steps", saved(directory) + 5), directory)
    assert again.code == 0 and "resuming after step" in again.said, again.said
