"""Faults in real processes of a run: one of them sleeps, crashes or stops at a moment that the test names.

FAULT="PROCESS WHERE KIND" in the environment, and `sitecustomize` of a directory on PYTHONPATH: no code of the project
knows of it. WHERE: step:N (its beginning), compile, save (the writing thread), commit (process 0, a checkpoint is whole
but for its name), restore, agree (an agreement of the start), price (the costs of the step, before the loop). KIND:
sleep, lock (the interpreter's lock is held and nothing of Python runs any more), raise, mistake (a ConfigError), small
(files of this process can have no more than a kilobyte), clock (it is set five minutes ahead, for this process), or a
signal's name.
"""
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

from tests import tiny_run

ROOT = Path(__file__).resolve().parent.parent

SITECUSTOMIZE = '''
import os, sys, threading, time

def index():
    return next((int(word.split("=")[1]) for word in sys.argv if word.startswith("--distributed.process_id=")), 0)

def fault(kind):
    import ctypes, signal
    with open(os.environ["FAULT_LOG"], "a") as log:
        log.write(f"{time.time()} {os.getpid()}\\n")
    if kind == "sleep":
        time.sleep(1000)
    elif kind == "lock":
        ctypes.PyDLL(None).sleep(1000)
    elif kind == "raise":
        raise RuntimeError("a fault that was injected")
    elif kind == "mistake":
        from meshtrain.config import ConfigError
        raise ConfigError("a mistake that only this process can see")
    elif kind == "small":
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    elif kind == "clock":
        with open(os.environ["FAULT_CLOCK"], "r+") as file:
            file.write(str(os.getpid()))
    else:
        os.kill(os.getpid(), getattr(signal, kind))

def at(module, name, kind, when=lambda *args: True, after=False):
    real = getattr(module, name)
    def faulty(*args, **options):
        value = real(*args, **options) if after else None
        if when(*args):
            fault(kind)
        return value if after else real(*args, **options)
    setattr(module, name, faulty)

def inject(process, where, kind):
    while not hasattr(sys.modules.get("meshtrain.commands.train"), "main"):
        time.sleep(0.002)
    if index() != int(process):
        return
    place, _, number = where.partition(":")
    modules = {"step": ("meshtrain.cluster.watch", "step"), "compile": ("meshtrain.assembly", "compile_step"),
               "save": ("meshtrain.checkpoint.checkpoint", "Checkpoints"), "restore": ("meshtrain.assembly", "initialize"),
               "agree": ("meshtrain.assembly", "assemble"), "price": ("meshtrain.inspection.step_costs", "write_cost"),
               "commit": ("meshtrain.checkpoint.commit", "commit")}
    name, function = modules[place]
    if place == "save":
        checkpoints = sys.modules[name].Checkpoints
        at(checkpoints, "_save", kind)
    elif place == "step":
        at(sys.modules[name], function, kind, lambda n: n == int(number), after=True)
    elif place == "commit":
        at(sys.modules[name], function, kind, after=True)
    else:
        at(sys.modules[name], function, kind)

if "FAULT" in os.environ:
    threading.Thread(target=inject, args=os.environ["FAULT"].split(), daemon=True).start()
'''


def prepare(home: Path) -> None:
    """What all runs in `home` share: the run file, a text, the compiled programs, the injection."""
    (home / "run.toml").write_text(tiny_run.text(data__validation_fraction=0.0, metrics__tensorboard=False))
    (home / "small.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    (home / "inject").mkdir()
    (home / "inject" / "sitecustomize.py").write_text(SITECUSTOMIZE)


def launched(home: Path, directory: Path, processes: int, *words, fault: str = "", own=(),
             environ=None) -> subprocess.Popen:
    """The run under the launcher, its output in `directory`.log; fault: as FAULT; own: words of the launcher's own."""
    command = ["meshtrain.launch.local", "--processes", str(processes), *own, "--"]
    with open(f"{directory}.log", "w") as log:
        return started(home, directory, command, words, fault, log, environ or {})


def without_launcher(home: Path, directory: Path, processes: int, port: int, *words,
                     fault: str = "") -> list[subprocess.Popen]:
    """The processes of the run, each told its place by flags, its output in `directory`.<index>.log."""
    place = ["--distributed.coordinator_address", f"127.0.0.1:{port}", "--distributed.num_processes", processes]
    children = []
    for index in range(processes):
        with open(f"{directory}.{index}.log", "w") as log:
            more = [*place, f"--distributed.process_id={index}", *words]
            children.append(started(home, directory, ["meshtrain.train"], more, fault, log, {}))
    return children


def started(home: Path, directory: Path, command, words, fault: str, log, environ) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if name not in (
        "XLA_FLAGS", "JAX_PLATFORMS", "NPROC", "FAULT")}
    kept |= {"PYTHONPATH": f"{home / 'inject'}:{ROOT}",
             "FAULT_LOG": f"{directory}.fault"} | ({"FAULT": fault} if fault else {}) | environ
    command = [sys.executable, "-m", *command, home / "run.toml", "--data.paths", f'["{home / "small.txt"}"]',
               "--run.dir", directory,
               "--run.compilation_cache", home / "cache", *words]
    return subprocess.Popen([str(word) for word in command], env=kept, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of a run: its exit code, all that it said, when the fault came (wall clock) and the seconds from then
    to the end."""
    code: int
    said: str
    began: float
    seconds: float


def ended(child: subprocess.Popen, directory: Path, limit_s: float = 400.0) -> Ended:
    try:
        code = child.wait(limit_s)
        end = time.time()
    finally:
        child.kill()
    fault = Path(f"{directory}.fault")
    began = float(fault.read_text().split()[0]) if fault.exists() else 0.0
    return Ended(code, Path(f"{directory}.log").read_text(), began, end - began)


def victim(directory: Path) -> int:
    """The pid of the process that had the fault; waits until it has."""
    deadline = time.monotonic() + 300
    while not (text := Path(f"{directory}.fault").read_text() if Path(f"{directory}.fault").exists() else "").endswith(
            "\n"):
        assert time.monotonic() < deadline, Path(f"{directory}.log").read_text()
        time.sleep(0.05)
    return int(text.split()[1])
