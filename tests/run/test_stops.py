"""Stops on request, in real processes: each signal at each moment of a run ends it in order, and nothing is lost.

A moment is met by what the run has written by then, never by waiting. Where a signal comes a little late, it meets the
next moment, for which the same holds. Linux only: what a process listens to stands in /proc. Stops at each system call
of a save: see `disturbed`.
"""
import json
import os
import shlex
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.journal.rows import MetricRows
from meshtrain.run import stops
from tests import injected, tiny_run

ROOT = Path(__file__).resolve().parent.parent.parent
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
PATIENCE_S = 240    # on a machine that does much else


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("stops")
    (home / "run.toml").write_text(tiny_run.text(validation__batches=1_000_000))
    (home / "small.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(60_000)))
    with open(home / "large.jsonl", "w") as file:     # plain text needs no tokenizing: its bytes are the tokens
        file.writelines(f'{{"text": "{n * n} is the square of {n}"}}\n' for n in range(500_000))
    return home


def started(home: Path, directory: Path, *words, text: str = "small.txt", cache: str = "cache",
            command=("-m", "meshtrain.train"), **options) -> subprocess.Popen:
    free = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "NPROC")}
    command = [sys.executable, *command, home / "run.toml", "--data.paths", json.dumps([str(home / text)]),
               "--run.dir", directory, "--run.compilation_cache", home / cache, *words]
    with open(f"{directory}.log", "w") as log:
        return subprocess.Popen([str(word) for word in command], env=free | {"PYTHONPATH": str(ROOT)},
                                **{"stdout": log, "stderr": subprocess.STDOUT, "cwd": home} | options)


def said(directory: Path) -> str:
    return Path(f"{directory}.log").read_text()


def meet(child: subprocess.Popen, reached, directory: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached(directory):
        assert child.poll() is None and time.monotonic() < deadline, said(directory)
        time.sleep(0.002)


def rows(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def listens(child: subprocess.Popen) -> bool:
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())[1], 16)
    return all(caught >> signal.Signals[name] - 1 & 1 for name in SIGNALS)


# moment: (options of the run, whether the run has come to it)
MOMENTS = {
    "start": ({}, None),
    "tokenizing": ({"text": "large.jsonl", "words": ("--data.source", "jsonl", "--data.cache", "{directory}.tokens")},
                   lambda directory: "tokenizing" in said(directory)),
    "compiling": ({"cache": "none"}, lambda directory: "memory per device" in said(directory)),
    "step": ({"words": ("--checkpoint.every", "0")}, lambda directory: rows(directory) > 3),
    "validation": ({"words": ("--data.validation_fraction", "0.5", "--validation.every", "3")},
                   lambda directory: rows(directory) >= 2),
}
FEW = {("start", "SIGHUP"), ("compiling", "SIGINT"), ("validation", "SIGTERM"), ("step", "SIGUSR1")}
GRID = [pytest.param(moment, name, marks=() if (moment, name) in FEW else pytest.mark.long)
        for moment in MOMENTS for name in SIGNALS]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("moment, name", GRID)
def test_a_signal_at_any_moment_ends_the_run_with_75_and_its_state_saved(moment, name, home, tmp_path):
    options, reached = MOMENTS[moment]
    directory = tmp_path / "run"
    words = [word.format(directory=directory) for word in options.get("words", ())]
    child = started(home, directory, *words, text=options.get("text", "small.txt"), cache=options.get("cache", "cache"))
    try:
        meet(child, reached or (lambda _: listens(child)), directory)
        child.send_signal(signal.Signals[name])
        code = child.wait(60)       # at once, or a step, a save and a batch of validation later
    finally:
        child.kill()
    text = said(directory)
    assert code == 75 and name in text and "Traceback" not in text and "Fatal" not in text, (code, text)
    if rows(directory) == 0:
        assert "stopped before the first step" in text
        if moment == "compiling":       # the same command starts it
            again = started(home, directory, "--training.steps", 3, "--validation.batches", 1)
            assert again.wait(PATIENCE_S) == 0 and rows(directory) == 3, said(directory)
        return
    written = [*MetricRows(directory / "metrics.jsonl")]
    assert f"stopped after step {written[-1]['step']}, saved in {directory}" in text
    saved = [path.name for path in (directory / "checkpoints").iterdir()]
    assert str(written[-1]["step"]) in saved and not [name for name in saved if name.startswith(".")]
    if moment == "validation":
        last = written[-1]["step"]
        # 2: taken before the third
        assert last in (2, 3) and not any("val_loss" in row for row in written), "no further step"
        # Where the signal is taken at the end of the third step, its validation does not begin, and nothing is told of
        # it.
        assert last == 3 or "the validation was interrupted" not in text


# ---- several processes -----------------------------------------------------------------------------------------------

def launched(home: Path, directory: Path, *words, cache: str) -> subprocess.Popen:
    return started(home, directory, *words, cache=cache, command=["-m", "meshtrain.launch.local", "--processes", "2", "--"])


@pytest.mark.parametrize("moment, name", [
    pytest.param(moment, name, marks=() if (moment, name) == ("compiling", "SIGHUP") else pytest.mark.long)
    for moment in ("compiling", "validation") for name in SIGNALS])
def test_a_signal_to_the_launcher_ends_all_processes_with_75(moment, name, home, tmp_path):
    options, reached = MOMENTS[moment]
    directory = tmp_path / "run"
    child = launched(home, directory, *options.get("words", ()), cache=options.get("cache", "cache"))
    try:
        meet(child, reached, directory)
        child.send_signal(signal.Signals[name])
        code = child.wait(120)
    finally:
        child.kill()
    assert code == 75 and "Traceback" not in said(directory), said(directory)
    if rows(directory):
        last = [*MetricRows(directory / "metrics.jsonl")][-1]["step"]
        assert f"stopped after step {last}" in said(directory) and (directory / "checkpoints" / str(last)).is_dir()


@pytest.mark.long
def test_a_process_that_is_stopped_alone_before_the_first_step_leaves_none_hanging(home, tmp_path):
    directory = tmp_path / "run"
    child = launched(home, directory, cache="none")
    try:
        meet(child, MOMENTS["compiling"][1], directory)
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        last = next(int(pid) for pid in children if b"process_id=1" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(last, signal.SIGTERM)
        assert child.wait(120) == 1     # the heartbeat's 30 s, and what compiling takes
    finally:
        child.kill()
    assert "the processes ended in different ways" in said(directory) or "failed first" in said(directory)


def test_a_signal_while_process_0_prices_the_step_ends_all_processes_with_75(tmp_path):
    injected.prepare(tmp_path)
    directory = tmp_path / "run"
    child = injected.launched(tmp_path, directory, 2, fault="0 price sleep")
    try:
        meet(child, lambda directory: Path(f"{directory}.fault").exists(), directory)
        time.sleep(3)       # a process that does not wait is in the loop by then, where its stop is deferred
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 75, said(directory)
    finally:
        child.kill()
    assert "stopped before the first step" in said(directory) and "Traceback" not in said(directory)


# ---- readers that die, disks that are full, streams that are closed --------------------------------------------------

SILENCED = ["2>&1 | head -1 > /dev/null", "> /dev/full 2>&1", "2>&-", ">&-", ">&- 2>&-"]
ALWAYS = {"2>&1 | head -1 > /dev/null", ">&- 2>&-"}


@pytest.mark.parametrize("redirection", [pytest.param(r, marks=() if r in ALWAYS else pytest.mark.long)
                                         for r in SILENCED])
def test_a_run_that_nobody_hears_ends_normally_with_its_state_saved(redirection, home, tmp_path):
    directory = tmp_path / "run"
    command = shlex.join(map(str, [
        sys.executable, "-m", "meshtrain.train", home / "run.toml", "--data.paths", f'["{home}/small.txt"]', "--run.dir",
        directory, "--run.compilation_cache", home / "cache", "--training.steps", 8, "--validation.batches", 1,
        "--run.sample_tokens", 4]))
    line = f"{command} {redirection}; exit ${{PIPESTATUS[0]}}"
    free = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "NPROC")}
    ran = subprocess.run(["bash", "-c", line], env=free | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                         timeout=PATIENCE_S)
    assert ran.returncode == 0, ran
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, ran.stderr
    assert rows(directory) == 8 and (directory / "checkpoints" / "8").is_dir()


def test_a_run_whose_reader_died_is_still_stopped_in_order(home, tmp_path):
    """`train | tee log` and Ctrl-C: tee dies first."""
    directory = tmp_path / "run"
    child = started(home, directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    child.stderr.close()
    meet(child, lambda _: rows(directory) > 3, directory)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 75
    assert (directory / "checkpoints" / str([*MetricRows(directory / "metrics.jsonl")][-1]["step"])).is_dir()


# ---- the listener alone ----------------------------------------------------------------------------------------------

ALONE = """
import sys, time
from meshtrain.run import say, stops
say.begin()
stops.listen()
{body}
"""


def alone(body: str, *numbers: int, pause_s: float = 0.0) -> tuple[int, str]:
    """(exit code, what was said) of a listening process that gets these signals after it has said `ready`."""
    child = subprocess.Popen([sys.executable, "-c", ALONE.format(body=body)], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert child.stdout.readline() == "ready\n"
    for i, number in enumerate(numbers):
        time.sleep(pause_s * (i > 0))
        child.send_signal(number)
    out, _ = child.communicate(timeout=60)
    return child.returncode, out


BUSY = "say.out('ready')\nwhile True: pass"
IN_C = "say.out('ready')\ntime.sleep(50)"
DEFERRED = """
with stops.defer() as listener:
    say.out('ready')
    while listener.number is None: pass
    time.sleep({longer})
sys.exit(75)
"""
STUCK = """
import os
os.set_blocking(1, False)
try:
    while True: os.write(1, bytes(65536))
except BlockingIOError:
    os.set_blocking(1, True)
say.err('ready')
say.out('nobody reads this')
"""


@pytest.mark.parametrize("body", [BUSY, IN_C])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_listening_process_ends_at_once_whatever_it_does(body, name):
    code, out = alone(body, signal.Signals[name])
    assert (code, out) == (75, f"{name}: stopped before the first step; run the same command again to start\n")


def test_signals_that_come_together_are_one_request():
    code, out = alone(DEFERRED.format(longer=0.2), signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)
    assert code == 75 and out.count("finishing this step and saving") == 1


def test_a_second_request_ends_the_process_at_once():
    code, out = alone(DEFERRED.format(longer=50), signal.SIGTERM, signal.SIGTERM, pause_s=stops.ONE_REQUEST_S + 0.3)
    assert code == 1 and "SIGTERM again: stopped at once, without saving" in out


def test_a_reader_that_is_stuck_holds_up_no_stop():
    """The pipe is full and nobody reads it: what is to be said cannot be."""
    child = subprocess.Popen([sys.executable, "-c",
                              ALONE.format(body="say.err('ready')\nwhile True: say.out('x' * 1000)")],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert child.stderr.readline() == b"ready\n"
    child.terminate()
    try:
        assert child.wait(30) == 75
    finally:
        child.kill()
        child.stdout.close()


def test_nohup_is_heeded():
    line = [sys.executable, "-c", ALONE.format(body=DEFERRED.format(longer=0))]
    child = subprocess.Popen(["nohup", *line], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGTERM)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 75 and "SIGTERM" in out and "SIGHUP" not in out


def test_outside_a_command_handlers_come_back_after_the_loop():
    before = [signal.getsignal(signal.Signals[name]) for name in SIGNALS]
    with stops.defer() as listener:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 30
        while listener.number is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert listener.number == signal.SIGTERM
    assert [signal.getsignal(signal.Signals[name]) for name in SIGNALS] == before


def test_inspect_is_stopped_in_order_too(tmp_path):
    child = subprocess.Popen([sys.executable, "-m", "meshtrain.inspect", "--run.compilation_cache", ""],
                             cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not listens(child) and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        text, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, text) == (75, "SIGINT: stopped\n")
