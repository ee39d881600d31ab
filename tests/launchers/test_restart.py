"""Restarts: the rule alone, the launcher that goes by it, with stand-ins for the training command, and the command for
scripts."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import Ran, call

from meshtrain.launch import restart
from meshtrain import config, run_files
from meshtrain.run import rundir, stops

from tests import soak

ROOT = Path(__file__).resolve().parent.parent.parent


def run_in(directory: Path, *words: str) -> config.Run:
    return run_files.load(["--run.dir", str(directory), *words])


def saved(directory: Path, *steps: int | str) -> None:
    for step in steps:
        (directory / "checkpoints" / str(step)).mkdir(parents=True)


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 2, 75])
def test_done_a_mistake_and_a_stop_end_the_run(code, tmp_path, capfd):
    failures = restart.Failures(run_in(tmp_path), 3)
    assert failures.wait_s(1) == 5
    capfd.readouterr()
    assert failures.wait_s(code) is None and failures.said == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("code", [1, 3, 134, 137, 139, 255, -9, -6])
def test_anything_else_starts_it_again(code, tmp_path):
    assert restart.Failures(run_in(tmp_path), 1).wait_s(code) == 5


def test_waits_double_up_to_300_s(tmp_path):
    failures = restart.Failures(run_in(tmp_path), 9)
    assert [failures.wait_s(1) for _ in range(9)] == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_run_is_given_up_after_as_many_failures_in_a_row_with_the_last_words_of_each(tmp_path, capfd):
    saved(tmp_path, 20)
    failures = restart.Failures(run_in(tmp_path), 2, restart.newest(run_in(tmp_path)))
    assert [failures.wait_s(1, f"word {i}") for i in range(3)] == [5, 10, None]
    told = capfd.readouterr().err.splitlines()
    assert told[0].startswith("starting again from step 20 in 5 s") and "given up after 3" in told[0]
    assert told[2:] == ["given up after 3 failures in a row without a newer checkpoint than that of step 20:",
                        "  1: word 0", "  2: word 1", "  3: word 2"]


def test_a_newer_checkpoint_starts_the_count_and_the_waits_anew(tmp_path):
    failures = restart.Failures(run_in(tmp_path), 2)
    assert [failures.wait_s(1), failures.wait_s(1)] == [5, 10]
    for step in (10, 20, 30, 40):
        saved(tmp_path, step)
        assert failures.wait_s(1, str(step)) == 0 and failures.said == [str(step)]
    assert [failures.wait_s(1), failures.wait_s(1)] == [10, None]


def test_what_is_half_written_damaged_or_set_aside_is_no_newer_checkpoint(tmp_path):
    failures = restart.Failures(run_in(tmp_path), 1)
    assert failures.wait_s(1) == 5
    saved(tmp_path, ".10.saving", ".8.deleting", "12.damaged", "14.aside")
    assert failures.wait_s(1) is None


def test_what_this_host_keeps_of_the_fast_tier_is_a_newer_checkpoint(tmp_path):
    near, home = tmp_path / "near", tmp_path / "run"
    failures = restart.Failures(run_in(home, "--checkpoint.local_dir", str(near), "--checkpoint.local_every", "2"), 1)
    assert failures.wait_s(1) == 5
    home.mkdir()
    (home / restart.LINEAGE).write_text(json.dumps({"run": "abc", "start": "x", "from": ["before", 2]}))
    for kept, start in (("another/process-0/90", "x"), ("abc/process-0/.saving", "x"), ("abc/process-0/8", "before"),
                        # 8: of a start whose steps were taken back
                        ("abc/process-0/2", "before"), ("abc/process-1/4", "x")):
        (near / kept).mkdir(parents=True)
        (near / kept / restart.INDEX).write_text("sum\n" + json.dumps({"start": start}))
    assert failures.wait_s(1) == 0 and failures.step == 4
    assert failures.wait_s(1) is None


def test_a_scheduler_starts_again_what_it_stopped_unless_nothing_is_saved_in_between(tmp_path, capfd):
    failures = restart.Failures(run_in(tmp_path), 2, scheduled=True)
    for step in (10, 20, 30, 40):
        saved(tmp_path, step)
        assert failures.wait_s(75) == 0 and failures.said == []
    assert [failures.wait_s(75), failures.wait_s(1, "word"), failures.wait_s(75)] == [5, 10, None]
    told = capfd.readouterr().err
    assert "starting again from step 40 in 5 s (stop 1 without a newer checkpoint" in told
    assert told.endswith("  1: stopped on request, before anything newer was saved\n  2: word\n"
                         "  3: stopped on request, before anything newer was saved\n")
    assert [failures.wait_s(code) for code in (0, 2)] == [None, None]


def test_without_restarts_nothing_is_said(tmp_path, capfd):
    assert restart.Failures(run_in(tmp_path), 0).wait_s(1, "words") is None
    assert capfd.readouterr() == ("", "")


# ---- the launcher ----------------------------------------------------------------------------------------------------

LAUNCHER = """
import json, sys
from meshtrain.launch import local, restart
restart.FIRST_S = float(sys.argv[1])
bodies = json.loads(sys.argv[2])
local.commands = lambda rest, count, port: [[sys.executable, "-u", "-c", body, str(port)] for body in bodies]
restart.leave_on_request()
sys.exit(local.main(sys.argv[3:]))
"""
# A stand-in knows how many starts there were by the lines that it and its like have written.
STARTS = """
import os, sys, time
path = {home!r} + "/starts{index}"
with open(path, "a") as file:
    print(sys.argv[1], os.getpid(), file=file)
start = len(open(path).readlines())
"""


def launcher(home: Path, *bodies: str, restarts: int = 5, wait_s: float = 0.05) -> subprocess.Popen:
    """The launcher, started, with these pieces of Python as its processes; they know `start`, from 1."""
    bodies = [STARTS.format(home=str(home), index=index) + body for index, body in enumerate(bodies)]
    argv = ["--processes", str(len(bodies)), "--max-restarts", str(restarts), "--", "--run.dir", str(home / "run"),
            "--mesh.simulated_devices", str(len(bodies)), "--mesh.fsdp", str(len(bodies)), "--mesh.tensor", "1"]
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, str(wait_s), json.dumps(bodies), *argv],
                            cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(child: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, out, err


def starts(home: Path, index: int = 0) -> list[list[str]]:
    path = home / f"starts{index}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def waited_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_launcher_starts_again_until_the_run_ends(code, tmp_path):
    done, _, err = ended(launcher(tmp_path, f"sys.exit({code} if start == 3 else 7)",
                                  f"sys.exit({code} if start == 3 else 7)"))
    assert done == code and len(starts(tmp_path)) == len(starts(tmp_path, 1)) == 3, err
    assert err.count("starting again") == 2 and "given up after 6" in err
    ports = {port for port, _ in starts(tmp_path)}
    assert len(ports) > 1, "each start has a port of its own"


def test_each_start_knows_its_number(tmp_path):
    code, _, err = ended(launcher(tmp_path, "print(os.environ['MESHTRAIN_START'], file=open(path + 'n', 'a')); "
                                            "sys.exit(start < 3)"))
    assert code == 0 and (tmp_path / "starts0n").read_text() == "0\n1\n2\n", err


def test_a_killed_process_starts_all_again(tmp_path):
    body = "time.sleep(1000 if start == 1 else 0)"
    child = launcher(tmp_path, body, body)
    waited_for(lambda: starts(tmp_path) and starts(tmp_path, 1))
    os.kill(int(starts(tmp_path, 1)[0][1]), signal.SIGKILL)
    code, _, err = ended(child)
    assert code == 0 and "process 1" in err and "killed by SIGKILL" in err and len(starts(tmp_path)) == 2


def test_the_launcher_gives_up_with_the_last_words_of_each_failure(tmp_path):
    say = "sys.stderr.write(f'what {start} said\\n'); sys.exit(3)"
    for name, bodies in (("one", [say]), ("second", ["time.sleep(1000)", say])):
        (tmp_path / name).mkdir()
        code, out, err = ended(launcher(tmp_path / name, *bodies, restarts=1))
        assert code == 1 and out == "" and len(starts(tmp_path / name)) == 2
        given_up = err[err.index("given up after 2 failures in a row"):]
        assert re.search(r"  1: process \d \(pid \d+\) failed first, .*exit code 3; its last line: what 1 said\n",
                         given_up), err
        assert re.search(r"  2: .*what 2 said\n", given_up), err


def test_a_newer_checkpoint_lets_the_launcher_go_on_for_ever(tmp_path):
    body = f"os.makedirs({str(tmp_path)!r} + f'/run/checkpoints/{{start}}'); sys.exit(9 if start < 6 else 0)"
    code, _, err = ended(launcher(tmp_path, body, restarts=1))
    assert code == 0 and len(starts(tmp_path)) == 6 and "starting again from step 5" in err


@pytest.mark.parametrize("number", stops.SIGNALS)
def test_a_signal_while_the_launcher_waits_ends_it_at_once_with_75(number, tmp_path):
    child = launcher(tmp_path, "sys.exit(1)", wait_s=300)
    first = next(line for line in child.stderr if "starting again" in line)
    assert "in 300 s" in first
    child.send_signal(number)
    code, _, err = ended(child)
    assert code == 75 and signal.Signals(number).name in err and "resumes the run" in err and len(starts(tmp_path)) == 1


def test_what_fails_after_a_signal_to_the_launcher_is_not_started_again(tmp_path):
    child = launcher(tmp_path,
                     "import signal; signal.signal(signal.SIGTERM, lambda n, f: sys.exit(1)); print('ready'); "
                     "time.sleep(1000)")
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    code, _, err = ended(child)
    assert code == 1 and "starting again" not in err and len(starts(tmp_path)) == 1


# ---- for scripts -----------------------------------------------------------------------------------------------------


def asked(home: Path, code: int, *words: str, restarts: int = 2) -> Ran:
    own, run = (words, ()) if "--said" in words else ((), words)
    return call(restart.main, code, *own, "--max-restarts", restarts, "--", *run, "--run.dir", home)


def test_a_script_is_told_the_seconds_and_the_count_is_kept_in_run_dir(tmp_path):
    home = tmp_path / "run"
    told = [asked(home, code) for code in (1, 137, 1)]
    assert [(one.code, one.out) for one in told] == [(0, "5\n"), (0, "10\n"), (1, "")]
    assert "  1: exit code 1\n  2: exit code 137\n  3: exit code 1\n" in told[2].err
    assert asked(home, 1).out == "5\n", "given up, and started by hand: the count is new"
    saved(home, 10)
    assert asked(home, 1).out == "0\n"
    assert asked(home, 75).code == 1 and not (home / restart.KEPT).exists()


def test_a_script_gives_the_last_words_of_who_was_no_victim(tmp_path):
    said = tmp_path / "said"
    said.write_text("Traceback:\nValueError: bad weather\nGloo AllReduce failed: Connection closed by peer [1]:1\n"
                    "srun: error: n2: task 9: Killed\nsrun: error: n1: tasks 0-7: Exited with exit code 1\nsrun: "
                    "Terminating\n")
    told = [asked(tmp_path / "run", 137, "--said", str(file), restarts=1) for file in (said, tmp_path / "none")]
    assert "  1: exit code 137; n2: task 9: Killed; the last line: ValueError: bad weather\n  2: exit code 137\n" in told[1].err


def test_a_run_whose_first_start_failed_is_still_begun_in_its_directory(tmp_path):
    assert asked(tmp_path / "run", 1).code == 0
    with rundir.claim(run_files.load(["--run.dir", str(tmp_path / "run")])):
        pass


def test_a_count_that_cannot_be_kept_starts_nothing(tmp_path):
    (tmp_path / "run").write_text("a file")
    told = asked(tmp_path / "run", 1)
    assert told.code == 2 and told.out == "" and "cannot be written" in told.err


# ---- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_real_run_whose_process_is_killed_goes_on_by_itself_after_five_seconds(tmp_path):
    soak.prepare(tmp_path)
    directory = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-m", "meshtrain.launch.local", "--processes", "2", "--max-restarts", "1", "--",
                              str(tmp_path / "run.toml"), "--run.dir", str(directory)], cwd=ROOT, text=True,
                             env={name: value for name, value in os.environ.items() if name != "NPROC"} | {
                                 "PYTHONPATH": str(ROOT)},
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + soak.PATIENCE_S
    while not soak.steps(directory):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    victim = next(int(pid) for pid in children if b"process_id=1\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(victim, signal.SIGKILL)
    out, err = child.communicate(timeout=soak.PATIENCE_S)
    assert child.returncode == 0, err
    assert f"process 1 (pid {victim}) failed first" in err and "killed by SIGKILL" in err
    again = int(re.search(r"starting again from step (\d+) in 5 s \(failure 1 ", err)[1])
    assert f"resuming after step {again}" in out
    assert [row["step"] for row in soak.rows(directory)] == list(range(1, soak.STEPS + 1))
