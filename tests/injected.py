"""Faults in real processes of a run: one of them sleeps, crashes or stops at a moment that the test names.

FAULT="PROCESS WHERE KIND" in the environment, and `sitecustomize` of a directory on PYTHONPATH: no code of the project knows
of it. WHERE: step:N (its beginning), compile, save (the writing thread), restore, agree (an agreement of the start). KIND: sleep, lock (the
interpreter's lock is held and nothing of Python runs any more), raise, or a signal's name.
"""
import os
import subprocess
import sys
from pathlib import Path

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
    while not hasattr(sys.modules.get("meshtrain.train"), "main") and not hasattr(sys.modules["__main__"], "_train"):
        time.sleep(0.002)
    if index() != int(process):
        return
    place, _, number = where.partition(":")
    modules = {"step": ("meshtrain.cluster.watch", "step"), "compile": ("meshtrain.assembly", "compile_step"),
               "save": ("meshtrain.run.checkpoint", "_nested"), "restore": ("meshtrain.assembly", "initialize"),
               "agree": ("meshtrain.assembly", "assemble")}
    name, function = modules[place]
    if place == "save":
        checkpoints = sys.modules[name].Checkpoints
        at(checkpoints, "_save", kind)
    elif place == "step":
        at(sys.modules[name], function, kind, lambda n: n == int(number), after=True)
    else:
        at(sys.modules[name], function, kind)

if "FAULT" in os.environ:
    threading.Thread(target=inject, args=os.environ["FAULT"].split(), daemon=True).start()
'''
RUN = """
[run]
sample_tokens = 0
[mesh]
data = 2
simulated_devices = 2
[model]
vocab_size = 257
embed_dim = 32
num_layers = 1
num_heads = 2
mlp_dim = 64
compute_dtype = "float32"
[data]
source = "text"
seq_len = 32
global_batch = 8
validation_fraction = 0.0
[training]
steps = 1000000
[optimizer]
schedule = "constant"
[metrics]
tensorboard = false
"""


def prepare(home: Path) -> None:
    """What all runs in `home` share: the run file, a text, the compiled programs, the injection."""
    (home / "run.toml").write_text(RUN)
    (home / "small.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    (home / "inject").mkdir()
    (home / "inject" / "sitecustomize.py").write_text(SITECUSTOMIZE)


def launched(home: Path, directory: Path, processes: int, *words, fault: str = "") -> subprocess.Popen:
    """The run under the launcher, its output in `directory`.log; fault: as FAULT."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "NPROC", "FAULT")}
    kept |= {"PYTHONPATH": f"{home / 'inject'}:{ROOT}", "FAULT_LOG": f"{directory}.fault"} | ({"FAULT": fault} if fault else {})
    start = ["meshtrain.train"] if processes == 1 else ["launch.local", "--processes", str(processes), "--"]
    command = [sys.executable, "-m", *start, home / "run.toml", "--data.paths", f'["{home / "small.txt"}"]', "--run.dir", directory,
               "--run.compilation_cache", home / "cache", *words]
    with open(f"{directory}.log", "w") as log:
        return subprocess.Popen([str(word) for word in command], env=kept, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
