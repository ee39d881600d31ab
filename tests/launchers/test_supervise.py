"""Who failed first: the launcher's supervision, with stand-ins for the training command."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.cluster import stacks
from meshtrain.cluster.lost import LOST_PEERS
from meshtrain.run import stops

ROOT = Path(__file__).resolve().parent.parent.parent


def stand_in(pid_file: Path, body: str) -> str:
    return f"import os, signal, sys, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\n{body}"


def launched(tmp_path, *bodies: str, grace_s: float = 0.5, left: Path | None = None,
             still_s: float = 1e9) -> subprocess.Popen:
    """A launcher whose processes run these pieces of Python; each leaves its pid in a file."""
    argvs = [[sys.executable, "-u", "-c", stand_in(tmp_path / f"pid{i}", body)] for i, body in enumerate(bodies)]
    code = (f"import json, os, sys\nfrom pathlib import Path\nfrom meshtrain.launch import supervise\nleft = {str(left)!r} if "
            f"{left is not None} else None\nargvs = json.loads(sys.argv[1])\nsys.exit(supervise.supervise(argvs, "
            f"[dict(os.environ)] * {len(bodies)}, {grace_s}, left and Path(left), still_s={still_s}).code)")
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(argvs)], cwd=ROOT,
                            text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def ran(tmp_path, *bodies: str, **options) -> tuple[int, str, str]:
    launcher = launched(tmp_path, *bodies, **options)
    try:
        out, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert "Traceback" not in err, err
    return launcher.returncode, out, err


def pids(tmp_path, count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in sorted(tmp_path.glob("pid*"))]
        if len(texts) == count and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError("they did not start")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


FOREVER = "time.sleep(1000)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"


@pytest.mark.parametrize("code", [0, 2, 75])
def test_the_code_that_all_agree_on_is_the_launchers(code, tmp_path):
    assert ran(tmp_path, *[f"sys.exit({code})"] * 3) == (code, "", "")


@pytest.mark.parametrize("codes", [(0, 75), (75, 0), (3, 3), (2, 0), (1, 1)])
def test_other_codes_and_disagreement_are_1(codes, tmp_path):
    code, _, err = ran(tmp_path, *(f"sys.exit({code})" for code in codes))
    assert code == 1 and f"exit code {codes[1]}" in err


def test_the_last_words_of_a_run_that_ends_well_are_not_lost(tmp_path):
    """Its reader may come to them only after the process has ended."""
    code = """if True:
        import sys, time
        from meshtrain.launch import supervise
        read = supervise.Child._read
        supervise.Child._read = lambda child: (time.sleep(1), read(child))
        argv = [sys.executable, "-c", "import sys; sys.stderr.write('last words')"]
        sys.exit(supervise.supervise([argv] * 2, [{}] * 2, 0.5).code)
    """
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "last words\n")


def test_the_first_process_speaks_and_the_others_are_silent(tmp_path):
    code, out, err = ran(tmp_path,
                         "print('[Gloo] Rank 0 is connected'); print('\\033[Ka', end=''); sys.stderr.write('e\\n')",
                         "print('not shown'); sys.stderr.write('nor this\\n')")
    assert (code, out, err) == (0, "[Gloo] Rank 0 is connected\n\033[Ka", "e\n")


def test_who_failed_first_is_named_with_its_last_words(tmp_path):
    say = ("[print('line', i) for i in range(100)]; print('[Gloo] Rank 2 is connected to 2 peer ranks')\n"
           "sys.stderr.write('oh no\\n')")
    code, _, err = ran(tmp_path, STUBBORN, FOREVER, f"{say}; time.sleep(0.3); sys.exit(3)")
    pid = pids(tmp_path, 3)
    assert code == 1
    told = re.match(r"process 2 \(pid (\d+)\) failed first, ([\d.]+) s after the start: exit code 3\n", err)
    assert int(told[1]) == pid[2] and 0.3 <= float(told[2]) < 30
    assert "  line 99\n  oh no\n" in err and "line 0\n" not in err and "Gloo" not in err
    assert f"then process 0 (pid {pid[0]}): killed by SIGKILL (signal 9)\n" in err, "it did not heed SIGTERM"
    assert f"then process 1 (pid {pid[1]}): killed by SIGTERM (signal 15)\n" in err
    assert not any(map(alive, pid))


@pytest.mark.parametrize("which", [0, 1])
def test_collectives_that_gloo_cannot_match_are_told_with_their_remedy(which, tmp_path):
    aborts = "sys.stderr.write('terminate called: gloo::EnforceNotMet\\n'); sys.stderr.flush(); os.abort()"
    code, _, err = ran(tmp_path, *((aborts, FOREVER) if which == 0 else (FOREVER, aborts)))
    assert code == 1 and "SIGABRT" in err and "e.g. 1f1b (docs/limits.md)" in err


def test_a_killed_process_is_named_by_its_signal(tmp_path):
    launcher = launched(tmp_path, FOREVER, "print('working')\n" + FOREVER)
    pid = pids(tmp_path, 2)
    time.sleep(0.2)
    os.kill(pid[1], signal.SIGKILL)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and f"process 1 (pid {pid[1]}) failed first" in err and "SIGKILL (signal 9)" in err
    assert "  working\n" in err


def test_peers_that_die_of_it_are_not_blamed_nor_their_stack_shown(tmp_path):
    lost = (f"print({LOST_PEERS.decode()!r}); print('    @ 0x7fb176640634 absl::LogMessage'); os.abort()")
    code, _, err = ran(tmp_path, FOREVER, lost, "time.sleep(0.2); print('mine'); sys.exit(1)", grace_s=1)
    assert code == 1 and err.startswith("process 2 ") and "  mine\n" in err and "absl" not in err
    assert re.search(r"then process 1 .*SIGABRT", err)


STANDS_STILL = "os.kill(os.getpid(), signal.SIGSTOP)"
GLOO = ("sys.stderr.write('Gloo AllReduce failed: Connection closed by peer [127.0.0.1]:1\\n'); time.sleep(0.5); "
        "sys.exit(1)")


@pytest.mark.parametrize("which", [0, 1])
def test_a_stopped_process_is_named_whatever_died_first_of_it(which, tmp_path):
    lost = f"time.sleep(1); sys.stderr.write({LOST_PEERS.decode()!r}); sys.stderr.flush(); os.abort()"
    bodies = [lost, lost, GLOO.replace("0.5", "1")]
    bodies.insert(which, STANDS_STILL)
    code, _, err = ran(tmp_path, *bodies)
    assert code == 1
    assert f"process {which} (pid {pids(tmp_path, 4)[which]}) failed first: it was stopped (SIGSTOP" in err
    assert len(re.findall(r"^then process ", err, re.MULTILINE)) == 3


@pytest.mark.parametrize("bodies", [[STANDS_STILL], [FOREVER, STANDS_STILL]], ids=["alone", "of two"])
def test_a_process_that_stands_still_for_too_long_is_killed_and_named(bodies, tmp_path):
    code, _, err = ran(tmp_path, *bodies, still_s=1.5)
    name = rf"process {len(bodies) - 1} \(pid {pids(tmp_path, len(bodies))[-1]}\)"
    assert code == 1 and re.match(rf"{name} has been stopped for 1.5 s \(SIGSTOP, or a debugger\) and is killed",
                                  err), err
    assert re.search(rf"^{name} failed first: it was stopped", err, re.MULTILINE), err


def test_a_process_that_is_stopped_for_a_moment_again_and_again_goes_on(tmp_path):
    launcher = launched(tmp_path,
                        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0)); [time.sleep(0.1) for _ in range(1000)]",
                        still_s=1.8)
    for number in (signal.SIGSTOP, signal.SIGCONT) * 3:
        os.kill(pids(tmp_path, 1)[0], number)
        time.sleep(0.9 if number == signal.SIGSTOP else 0.2)
    os.kill(pids(tmp_path, 1)[0], signal.SIGUSR1)
    assert launcher.communicate(timeout=30) and launcher.returncode == 0


@pytest.mark.parametrize("other, whole", [(FOREVER, 2), (STUBBORN, 2), (GLOO, 2), ("sys.exit(2)", 2),
                                          ("sys.exit(3)", 1), ("sys.exit(0)", 1)])
@pytest.mark.parametrize("which", [0, 1])
def test_a_mistake_that_one_process_alone_has_seen_is_the_wholes_where_the_others_ended_of_it(
        which, other, whole, tmp_path):
    bodies = [other]
    bodies.insert(which, "sys.stderr.write('error: no such GPU\\n'); sys.exit(2)")
    code, _, err = ran(tmp_path, *bodies, grace_s=1)
    assert code == whole and (other == "sys.exit(2)" or f"process {which} " in err or whole == 1), err
    assert "no such GPU" in err or other == "sys.exit(2)"


def test_who_is_unheard_of_is_named_where_it_was_not_stopped(tmp_path):
    lost = ("time.sleep(0.5); sys.stderr.write('INTERNAL: Task 2 heartbeat timeout. This indicates that the remote "
            f"task has failed\\n{LOST_PEERS.decode()}'); sys.stderr.flush(); os.abort()")
    code, _, err = ran(tmp_path, lost, lost, FOREVER)
    assert code == 1 and re.search(r"^process 2 .* failed first: the others lost contact with it$",
                                   err, re.MULTILINE), err


def test_gloos_victims_are_not_blamed_though_they_ended_first(tmp_path):
    code, _, err = ran(tmp_path, GLOO, GLOO, "time.sleep(1.5); print('mine'); sys.exit(1)", grace_s=3)
    assert code == 1 and re.search(r"^process 2 .*failed first.*exit code 1$", err, re.MULTILINE) and "  mine\n" in err


@pytest.mark.parametrize("listed", ["0\\n10", "10\\n0", "2\\n10\\n0\\n1"])
def test_a_process_0_that_takes_itself_for_dead_had_its_clock_set(listed, tmp_path):
    dead = f"The following tasks are unhealthy (stopped sending heartbeats):\\n{listed}\\nThe tasks have crashed.\\n"
    lost = f"sys.stderr.write('{dead}' + {LOST_PEERS.decode()!r}); sys.stderr.flush(); os.abort()"
    code, _, err = ran(tmp_path, "time.sleep(0.5); " + lost, lost, grace_s=3)
    assert code == 1 and re.search(r"^process 0 \(pid \d+\) failed first: its clock was set, or its machine was "
                                   r"suspended", err, re.MULTILINE), err
    code, _, err = ran(tmp_path, lost.replace(listed, "10\\n1"), FOREVER)
    assert "clock" not in err


@pytest.mark.parametrize("which", [0, 1])
def test_who_lets_gloo_wait_in_vain_is_named_though_it_only_died_of_the_others(which, tmp_path):
    bodies = [GLOO.replace("Connection closed by peer", "Timed out waiting 20000ms")]
    bodies.insert(which,
                  f"time.sleep(1); sys.stderr.write({LOST_PEERS.decode()!r}); sys.stderr.flush(); os.abort()")
    code, _, err = ran(tmp_path, *bodies, grace_s=3)
    assert code == 1 and re.search(rf"^process {which} .*the others lost contact with it$",
                                   err, re.MULTILINE), err


def test_a_process_0_that_failed_of_itself_is_named_by_what_it_said(tmp_path):
    code, _, err = ran(tmp_path, f"print({LOST_PEERS.decode()!r}, file=sys.stderr); sys.exit(1)",
                       "time.sleep(0.3); sys.stderr.write('mine\\n'); sys.exit(1)", grace_s=3)
    assert code == 1 and re.search(r"^process 1 .*failed first", err, re.MULTILINE) and "  mine\n" in err


def test_a_reason_that_only_another_process_knows_is_shown_at_once_and_at_the_end(tmp_path):
    reason = "checkpoint of step 10 not saved in /d/checkpoints: No space left on device"
    second = f"time.sleep(0.3); sys.stderr.write({reason!r} + chr(10)); sys.stderr.flush(); time.sleep(1); sys.exit(1)"
    code, _, err = ran(tmp_path, "time.sleep(1); sys.exit(1)", second, grace_s=5)
    assert code == 1 and err.startswith(f"process 1: {reason}\n") and f"  {reason}\n" in err


def test_who_could_not_save_is_named_though_all_end_of_it_together(tmp_path):
    says = ("sys.stderr.write('error: checkpoint of step 30 not saved in /d/c: process 1: File too large; 3 saves in a "
            "row have failed\\n'); ")
    code, _, err = ran(tmp_path, says + "sys.exit(1)", "time.sleep(0.3); sys.exit(1)",
                       "time.sleep(0.3); sys.exit(1)", grace_s=5)
    assert code == 1 and re.search(r"^process 1 .*failed first", err, re.MULTILINE), err


def test_who_is_stuck_is_named_by_its_stacks_though_another_ended_first(tmp_path):
    state = {"count": 2, "host": "h", "pid": 1, "attempt": "a", "phase": "step 7", "since": 1e9,
             "moment": 9, "main": "1"}
    main = 'Thread 0x0000000000000001 [MainThread] (most recent call first):\n  File "{}", line 3 in {}\n'
    for index, where in enumerate((("/m/meshtrain/cluster/agree.py", "exchange"), ("/m/data/reader.py", "read"))):
        body = stacks.ProcessState(process=index, state="hangs", **state).head() + main.format(*where).encode()
        (tmp_path / f"process-{index}.txt").write_bytes(body)
    now = f"import pathlib; [path.touch() for path in pathlib.Path({str(tmp_path)!r}).glob('process-*')]; "
    code, _, err = ran(tmp_path, now + "sys.exit(1)", now + "time.sleep(0.3); sys.exit(1)", grace_s=5, left=tmp_path)
    assert code == 1 and re.search(r"^process 1 .* exit code 1; it hangs in step 7 since 2001-09-09T01:46:40Z in read",
                                   err, re.MULTILINE), err
    code, _, err = ran(tmp_path, now + "os.kill(os.getpid(), signal.SIGKILL)", now + "time.sleep(0.3); sys.exit(1)",
                       grace_s=5, left=tmp_path)
    assert err.startswith("process 0 "), "what was killed is no guess"


def test_peers_may_end_by_themselves_after_a_failure(tmp_path):
    code, out, err = ran(tmp_path, "time.sleep(1); print('saved'); sys.exit(0)", "sys.exit(1)", grace_s=20)
    assert code == 1 and out == "saved\n" and re.search(r"then process 0 .*exit code 0", err)


COUNTING = ("n = []\nfor number in {stops}: signal.signal(number, lambda s, f: n.append(s))\n"
            "open(os.environ['READY'] + str(os.getpid()), 'w').close()\n"
            "while len(n) < {count}: time.sleep(0.01)\n")


@pytest.mark.parametrize("numbers", [*((number,) for number in stops.SIGNALS),
                                     (signal.SIGINT, signal.SIGTERM)])
def test_every_process_gets_every_signal_once(numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("READY", f"{tmp_path}/ready")
    body = (COUNTING.format(count=len(numbers), stops=[int(n) for n in stops.SIGNALS])
            + f"time.sleep(0.3); sys.exit(75 if n == {[int(n) for n in numbers]} else 1)")
    launcher = launched(tmp_path, body, body, body)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    for number in numbers:
        launcher.send_signal(number)
        time.sleep(0.1)
    out, err = launcher.communicate(timeout=60)
    assert (launcher.returncode, out, err) == (75, "", "")


def test_a_terminals_interrupt_reaches_only_the_launcher(tmp_path):
    launcher = launched(tmp_path, FOREVER, FOREVER)
    sessions = {os.getsid(pid) for pid in pids(tmp_path, 2)}
    assert len(sessions) == 2 and os.getsid(launcher.pid) not in sessions
    launcher.terminate()
    assert launcher.wait(30) == 1


def test_no_process_outlives_a_killed_launcher(tmp_path):
    launcher = launched(tmp_path, STUBBORN, STUBBORN)
    pid = pids(tmp_path, 2)
    assert all(map(alive, pid))
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [one for one in pid if alive(one)]
    for one in left:
        os.kill(one, signal.SIGKILL)
    assert left == []


def test_a_command_that_cannot_start_leaves_nobody_behind(tmp_path):
    forever = [sys.executable, "-c", stand_in(tmp_path / "pid0", FOREVER)]
    code = ("import os, sys, time\nfrom meshtrain.launch import supervise\n"
            f"supervise.supervise([{forever!r}, ['/nowhere/python']], [dict(os.environ)] * 2)")
    launcher = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert launcher.returncode == 1 and "/nowhere/python" in launcher.stderr
    time.sleep(0.2)
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid*") if path.read_text())
