"""python -m benchmarks.start [--rounds N] [--devices N]

Measures the cost of a start in CPU seconds, compared with a trainer written by hand
(benchmarks/contenders/plain_flax.py). Both train the same Llama on simulated devices with an empty compilation cache,
in turns, from the command to the first loss. Also measures the parts of a start, --help of each command, and the trace
of configs/llama3-70b-pipeline.toml for 64 absent H100. Prints tables. benchmarks/start.md has the results.
"""
from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, words

SHAPE = dict(vocab_size=2048, embed_dim=256, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, mlp_dim=1024)
SEQ_LEN, ROWS = 256, 2          # rows per device
TICKS = os.sysconf("SC_CLK_TCK")
POLL_S, LIMIT_S = 0.01, 1800.0
PIPELINE = ROOT / "configs" / "llama3-70b-pipeline.toml"


def words_of_run(devices: int, directory: Path, *more: str) -> list[str]:
    """Return the arguments of the command, for the run that the handwritten trainer trains."""
    keys = {f"model.{name}": value for name, value in SHAPE.items()} | {
        "model.compute_dtype": "float32", "mesh.data": 1, "mesh.fsdp": devices, "mesh.tensor": 1,
        "mesh.simulated_devices": devices, "data.seq_len": SEQ_LEN, "data.global_batch": ROWS * devices,
        "data.document_mask": "false", "training.remat": "none", "training.steps": 1000, "optimizer.name": "adamw",
        "checkpoint.every": 0, "run.dir": directory / "run", "run.compilation_cache": directory / "cache"}
    return [str(ROOT / "configs" / "quickstart.toml"), *(word for name, value in keys.items()
                                                         for word in (f"--{name}", str(value))), *more]


# ---- the real processes ----------------------------------------------------------------------------------------------

def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def until(command: list[str], sign: Path) -> float:
    """Start a process, wait until the file `sign` has content, and end it. Return its CPU seconds until then."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    began = time.monotonic()
    try:
        while not (sign.exists() and sign.stat().st_size):
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                process.kill()
                raise SystemExit(f"no first step: {process.communicate()[1].decode()[-2000:]}")
            time.sleep(POLL_S)
        process.send_signal(signal.SIGSTOP)
        return cpu_s(process.pid)
    finally:
        process.kill()
        process.wait()


def first_steps(rounds: int, devices: int) -> dict[str, list[float]]:
    """Return the CPU seconds to the first loss, by turns. "as it is": the run also validates, which no other run
    does."""
    taken: dict[str, list[float]] = {"meshtrain": [], "meshtrain, without validation": [], "plain flax": []}
    for _ in range(rounds):
        for name, seconds in taken.items():
            with tempfile.TemporaryDirectory() as home:
                place = Path(home)
                more = ("--data.validation_fraction", "0") if "without" in name else ()
                command = ["-m", "benchmarks.start", "--alone", "plain", str(devices), str(place / "first")] \
                    if name == "plain flax" else ["-m", "meshtrain.train", *words_of_run(devices, place, *more)]
                sign = place / ("first" if name == "plain flax" else "run/metrics.jsonl")
                seconds.append(until([sys.executable, *command], sign))
        print(" · ".join(f"{name} {s[-1]:.1f}" for name, s in taken.items()), file=sys.stderr)
    return taken


def answer_help() -> dict[str, float]:
    """Return the CPU seconds of --help of each command."""
    from meshtrain.__main__ import COMMANDS
    taken = {}
    for name in COMMANDS:
        before = os.times()
        subprocess.run([sys.executable, "-m", f"meshtrain.{name}", "--help"], cwd=ROOT, check=True, capture_output=True,
                       env={**os.environ, "PYTHONPATH": str(ROOT)})
        after = os.times()
        taken[name] = after.children_user + after.children_system - before.children_user - before.children_system
    return taken


# ---- separate processes, which print a JSON object of CPU seconds ----------------------------------------------------

class Parts:
    """CPU seconds of the parts of a start. Each part begins at the end of the previous one."""

    def __init__(self):
        self.taken, self._last = {}, 0.0

    def end(self, name: str) -> None:
        now = time.process_time()
        self.taken[name], self._last = self.taken.get(name, 0.0) + now - self._last, now


def alone_plain(devices: int, sign: str) -> dict[str, float]:
    """Start the handwritten trainer and take its first step. sign: a file that gets its loss; "": none."""
    # With XLA's default scheduler its collectives may wait for one another for ever on two cores.
    os.environ["XLA_FLAGS"] = (f"--xla_force_host_platform_device_count={devices} "
                               "--xla_cpu_enable_concurrency_optimized_scheduler=false")
    parts = Parts()
    import jax
    import numpy as np

    from benchmarks.contenders import case, plain_flax
    parts.end("imports")
    of = case.Case(**SHAPE, rope_theta=1e4, norm_eps=1e-5, seq_len=SEQ_LEN, microbatches=1, rows=ROWS, dtype="float32",
                   packed=False)
    mesh = plain_flax.mesh_of(jax.devices()[:devices])
    step, init, args = plain_flax.build(of, mesh, plain_flax.attend_by("xla"))
    parts.end("assembling")
    carry = jax.block_until_ready(init())
    parts.end("initialization")
    lowered = step.lower(*args)
    parts.end("trace and lower")
    compiled = lowered.compile()
    parts.end("XLA")
    tokens = np.random.default_rng(0).integers(0, of.vocab_size, (*args[-1].shape[:2], SEQ_LEN + 1), np.int32)
    placed = [jax.device_put(rows, args[-1].sharding) for rows in (tokens[..., :-1], tokens[..., 1:])]
    parts.end("data")
    *carry, loss = compiled(*carry, *placed)
    loss = float(loss)
    parts.end("first step")
    if sign:
        Path(sign).write_text(f"{loss}\n")
        signal.pause()
    return parts.taken


def alone_ours(devices: int) -> dict[str, float]:
    """Execute a start until its first step, in the order of the command."""
    parts = Parts()
    with tempfile.TemporaryDirectory() as home:
        import jax

        import meshtrain.commands.train     # noqa: F401  imported by the command
        from meshtrain import assembly, devices as local, run_files
        from meshtrain.data import sources
        from meshtrain.data.batches import packing
        parts.end("imports")
        run = run_files.load(words_of_run(devices, Path(home)))
        made = assembly.assemble(run, local.start(run))
        parts.end("assembling")
        corpus = sources.open_corpus(run.data, vocab_size=run.model.vocab_size, cache_dir=Path(home))
        rows = packing.open_batches(run.data, corpus, run.run.seed).batch(0)
        parts.end("data")
        with jax.set_mesh(made.mesh):
            state = jax.block_until_ready(assembly.initialize(made))
            parts.end("initialization")
            lowered = made.program.lower_step()
            parts.end("trace and lower")
            compiled = lowered.compile(compiler_options=made.program.compiler_options)
            parts.end("XLA")
            _, metrics = compiled(state, made.program.place(rows))
            float(metrics["loss"])
        parts.end("first step")
    return parts.taken


def alone_pipeline() -> dict[str, float]:
    """Trace and lower a step of a pipeline of 70B parameters."""
    parts = Parts()
    from meshtrain import assembly, run_files
    from meshtrain.inspection import topologies
    parts.end("imports")
    run = run_files.load([str(PIPELINE)])
    made = assembly.assemble(run, topologies.find_devices(run, "h100:64"))
    parts.end("assembling")
    made.program.lower_step()
    parts.end("trace and lower")
    return parts.taken


ALONE = {"plain": alone_plain, "ours": alone_ours, "pipeline": alone_pipeline}


def parts_of(rounds: int, kind: str, *given: str) -> dict[str, float]:
    """Return the smallest CPU seconds of each part over `rounds` processes."""
    each = []
    for _ in range(rounds):
        done = subprocess.run([sys.executable, "-m", "benchmarks.start", "--alone", kind, *given], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": str(ROOT),
                                                                       "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"})
        each.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: min(one[name] for one in each) for name in each[0]}


def table(parts: dict[str, dict[str, float]]) -> list[str]:
    names = list(dict.fromkeys(name for taken in parts.values() for name in taken))
    return ["| CPU seconds, least | " + " | ".join(names) + " | sum |", "|---" * (len(names) + 2) + "|",
            *(f"| {who} | " + " | ".join(f"{taken[name]:.2f}" if name in taken else "–" for name in names)
              + f" | {sum(taken.values()):.1f} |" for who, taken in parts.items())]


def main() -> None:
    parser = words.Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_alone()
    given = parser.parse_args()
    if given.alone:
        kind, *rest = given.alone
        print(json.dumps(ALONE[kind](*(int(word) if word.isdecimal() else word for word in rest))))
        return
    print(machine.line("", "jax", "flax", "optax"), "\n")
    plain = (taken := first_steps(given.rounds, given.devices))["plain flax"]
    print("| to the first loss | CPU seconds, median | each | ÷ plain flax, median of pairs |\n|---|---|---|---|")
    for name, seconds in taken.items():
        ratios = sorted(a / b for a, b in zip(seconds, plain))
        print(f"| {name} | {statistics.median(seconds):.1f} | {', '.join(f'{s:.1f}' for s in seconds)} | "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
    count = str(given.devices)
    print("\n" + "\n".join(table({"meshtrain": parts_of(given.rounds, "ours", count),
                                  "plain flax": parts_of(given.rounds, "plain", count, "")})))
    print("\n" + "\n".join(table({"70B pipeline on h100:64": parts_of(given.rounds, "pipeline")})))
    print("\n--help: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in answer_help().items()) + " CPU s")


if __name__ == "__main__":
    main()
