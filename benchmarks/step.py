"""python benchmarks/step.py [RUN.toml] [--section.key value …]: the cost of meshtrain's step compared with a plain JAX
step.

Measures the training step on 1 device, on 8 simulated devices (or on all GPUs of the machine), the loop around it, and
the handwritten step in `baseline` below. The baseline has the same model and mathematics, without mesh and rules. All
are timed in turns of a few steps, so that other load on the machine affects all equally. Simulated devices run in a
separate process, since their threads and flags would slow one device down. Loss and gradient norm of the two
implementations must agree before anything is timed. Writes benchmarks/step.md.
"""
from __future__ import annotations

import contextlib
import dataclasses
import io
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import optax

from benchmarks import machine
from meshtrain import assembly, config, run_files
from meshtrain import devices as local_devices
from meshtrain import hardware
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import flops
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.journal.journal import Flops, Journal
from meshtrain.journal.metrics import MetricsWriter
from meshtrain.journal.progress import Progress
from meshtrain.run import loop
from meshtrain.run.feeds import BatchFeed
from meshtrain.training.optimizer import learning_rate_schedule

ROUNDS, STEPS = 15, 4
AGREE = 1e-4                   # relative: loss and gradient norm of the first step, float32
SIMULATED = 8


# --- the handwritten step --------------------------------------------------------------------------------------------

def baseline(run, roles):
    """Return (step, init) of the model in plain JAX for one device: step(params, opt_state, batch) -> (…, loss, grad
    norm).

    params: meshtrain's tree, so that both start from the same numbers. The loss computes whole logits. Attention
    computes whole scores.
    """
    cfg, dtype = run.model, jnp.dtype(run.model.compute_dtype)
    decayed = jax.tree.map(lambda role: role in ("matrix", "embedding", "head"), roles)
    rate = learning_rate_schedule(run.optimizer, run.training.steps)
    o = run.optimizer
    tx = optax.chain(optax.clip_by_global_norm(run.training.grad_clip) if run.training.grad_clip else optax.identity(),
                     optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=decayed))

    def norm(x, scale):
        x = x.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + cfg.norm_eps) * scale).astype(dtype)

    def rotate(x_BTNH, cos, sin):
        first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(dtype)

    def loss_fn(p, batch):
        T, N, K, H = batch["tokens"].shape[1], cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

        def w(leaf):
            return leaf["kernel"].astype(dtype)
        freq = cfg.rope_theta ** (-jnp.arange(H // 2, dtype=jnp.float32) / (H // 2))
        angle = batch["positions"][:, :, None, None] * freq
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        seen_BTS = jnp.tril(jnp.ones((T, T), bool)) & (batch["segments"][:, :, None] == batch["segments"][:, None, :])

        def layer(x_BTD, p):
            a, m = p["attention"], p["mlp"]
            h_BTD = norm(x_BTD, p["attention_norm"]["scale"])
            q_BTNH = rotate(jnp.einsum("BTD,DNH->BTNH", h_BTD, w(a["query"])), cos, sin)
            k_BSKH = rotate(jnp.einsum("BTD,DKH->BTKH", h_BTD, w(a["key"])), cos, sin)
            v_BSKH = jnp.einsum("BTD,DKH->BTKH", h_BTD, w(a["value"]))
            q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], K, N // K, H)
            s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32) * H ** -0.5
            s_BKGTS = jnp.where(seen_BTS[:, None, None], s_BKGTS, -1e30)
            o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(s_BKGTS, -1).astype(dtype), v_BSKH)
            x_BTD = x_BTD + jnp.einsum("BTNH,NHD->BTD", o_BTKGH.reshape(q_BTNH.shape), w(a["out"]))
            h_BTD = norm(x_BTD, p["mlp_norm"]["scale"])
            return x_BTD + (jax.nn.silu(h_BTD @ w(m["gate"])) * (h_BTD @ w(m["up"]))) @ w(m["down"]), None

        x_BTD = p["embedding"]["table"].astype(dtype)[batch["tokens"]]
        x_BTD, _ = jax.lax.scan(layer, x_BTD, p["layers"])
        x_BTD = norm(x_BTD, p["final_norm"]["scale"])
        head_DV = p["embedding"]["table"].astype(dtype).T if cfg.tie_embeddings else w(p["head"])
        logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV, preferred_element_type=jnp.float32)[..., :cfg.vocab_size]
        targets_BT, has_BT = jnp.maximum(batch["targets"], 0), batch["targets"] >= 0
        nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
        return jnp.sum(nll_BT * has_BT) / jnp.maximum(has_BT.sum(), 1)

    def step(p, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(p, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        return optax.apply_updates(p, updates), opt_state, loss, optax.global_norm(grads)

    return jax.jit(step, donate_argnums=(0, 1)), tx.init


def no_baseline(run) -> list[str]:
    """Return what the run has and the handwritten step does not support; empty if they can be compared."""
    m, t = run.model, run.training
    odd = {"model.norm": m.norm != "rmsnorm", "model.activation": m.activation != "swiglu",
           "model.position": m.position != "rope", "model.rope_scaling": m.rope_scaling.rope_type != "default",
           "model.qk_norm": m.qk_norm != "off", "model.attention_bias": m.attention_bias != "none",
           "model.mlp_bias": m.mlp_bias,
           "model dropout": m.embedding_dropout + m.residual_dropout > 0, "training.microbatches": t.microbatches > 1,
           "training.z_loss": t.z_loss > 0, "optimizer.name": run.optimizer.name != "adamw",
           "data.document_mask": not run.data.document_mask}
    return [name for name, differs in odd.items() if differs]


# --- what is timed ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Contestant:
    """One way to train: `go(n)` takes n steps and returns (wall seconds, CPU seconds or None) per step.

    first: loss and gradient norm of the first step.
    """
    name: str
    compile_s: float | None
    peak_bytes: int | None         # arguments + temporaries of the compiled step, per device
    first: tuple[float, float] | None
    go: object
    num_devices: int = 1
    times: list = dataclasses.field(default_factory=list)
    cpu_times: list = dataclasses.field(default_factory=list)


def hand_written(run, made, rows) -> Contestant:
    from meshtrain.model import params as declared
    step, init = baseline(run, declared.tree(made.model.parameters(), lambda info: info.role))
    device = made.mesh.devices.flat[0]
    with jax.set_mesh(made.mesh):
        p = jax.device_put(jax.device_get(made.program.initialize().params), device)
    batch = jax.device_put({name: rows[name] for name in ("tokens", "targets", "segments", "positions")}, device)
    carry = [p, jax.jit(init)(p)]
    started = time.perf_counter()
    compiled = step.lower(*carry, batch).compile()
    compile_s = time.perf_counter() - started
    carry[0], carry[1], loss, grad_norm = compiled(*carry, batch)
    first = float(loss), float(grad_norm)

    def steps(n):
        for _ in range(n):
            carry[0], carry[1], loss, _ = compiled(*carry, batch)
        jax.block_until_ready((carry, loss))

    return Contestant("plain JAX, 1 device", compile_s, peak_bytes(compiled), first, timed(steps))


def ours(name: str, made, rows) -> tuple[Contestant, list, object]:
    """Return the compiled step without the loop, on a batch that is placed once. Also return its state and step, for
    the loop."""
    with jax.set_mesh(made.mesh):
        started = time.perf_counter()
        compiled = made.program.compile()
        compile_s = time.perf_counter() - started
        batch = made.program.place(rows)
        carry = [made.program.initialize()]
        carry[0], metrics = compiled(carry[0], batch)
        first = float(metrics["loss"]), float(metrics["grad_norm"])

    def steps(n):
        with jax.set_mesh(made.mesh):
            for _ in range(n):
                carry[0], metrics = compiled(carry[0], batch)
            jax.block_until_ready((carry[0], metrics))

    contestant = Contestant(name, compile_s, peak_bytes(compiled), first, timed(steps), made.mesh_spec.num_devices)
    return contestant, carry, compiled


def looped(name: str, run, made, carry, compiled, corpus, directory) -> Contestant:
    """Return `training.loop.train` with its data pipeline and metrics, on the same compiled step and state."""
    warm_up = 2                        # the first rows include the start of the data threads

    def go(n):
        last = int(carry[0].step) + warm_up + n
        this = run.replace(training={"steps": last})
        rows = []
        with jax.set_mesh(made.mesh), MetricsWriter(directory / "metrics.jsonl") as writer:
            kept = SimpleNamespace(write=lambda row: (rows.append(row), writer.write(row)))
            with contextlib.redirect_stdout(io.StringIO()):
                log = Journal(this, kept, Progress(last), Flops(0.0))
                feed = BatchFeed(this, made.program, corpus, int(carry[0].step))
                carry[0], _ = loop.train(made.program.limit, compiled, carry[0], feed, last, log, (),
                                         loop.Stop())
        return sum(row["step_time_s"] for row in rows[warm_up:]) / n, None

    return Contestant(name, None, None, None, go, made.mesh_spec.num_devices)


def timed(steps):
    """Return go(n) of a Contestant from steps(n). CPU seconds include all threads of the process. One untimed step
    comes first, because the caches have the data of another program."""
    def go(n):
        steps(1)
        clock, cpu = time.perf_counter(), time.process_time()
        steps(n)
        return (time.perf_counter() - clock) / n, (time.process_time() - cpu) / n
    return go


def peak_bytes(compiled) -> int:
    analysis = compiled.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def first_step_s(directory: Path, cache: Path, run_file: Path = run_files.QUICKSTART) -> float:
    """Return the seconds from the start of `python -m meshtrain.train` to the first row of its metrics."""
    command = [sys.executable, "-m", "meshtrain.train", str(run_file), "--training.steps", "2", "--run.dir",
               str(directory), "--run.compilation_cache", str(cache), "--run.sample_tokens", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | {"XLA_FLAGS": ""}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    metrics = directory / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"{run_file} ended before its first step:\n{process.stderr.read().decode()}")
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    process.terminate()
    process.communicate()
    return seconds


# --- the run ---------------------------------------------------------------------------------------------------------

def main(argv) -> int:
    if not [arg for arg in argv if not arg.startswith("-")][:1] or argv[0].startswith("-"):
        argv = [str(ROOT / "benchmarks" / "step.toml"), *argv]
    try:
        run = run_files.load([*argv, "--run.compilation_cache", "", "--data.validation_fraction", "0"], __doc__)
        one = {axis: 1 for axis in config.AXES} | {"simulated_devices": 0}
        run = run.replace(mesh=one)
        with tempfile.TemporaryDirectory() as scratch:
            text = measure(run, Path(scratch))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    (ROOT / "benchmarks" / "step.md").write_text(text)
    return 0


def measure(run: config.Run, scratch: Path) -> str:
    """Return the page. Raises: SystemExit if the two implementations differ."""
    print("the quickstart, twice …", file=sys.stderr)
    starts = {"empty": first_step_s(scratch / "cold", scratch / "cache"),
              "filled": first_step_s(scratch / "warm", scratch / "cache")}
    print("\n".join(f"{cache} cache: {s:.1f} s" for cache, s in starts.items()) + "\ncompiling …", file=sys.stderr)
    devices = local_devices.start(run)
    d = run.data
    read = sources.open_corpus(d, vocab_size=run.model.vocab_size, cache_dir=scratch)
    corpus = packing.open_batches(d, read, run.run.seed)
    rows = corpus.batch(0)
    made = assembly.assemble(run, devices[:1])
    one, carry, compiled = ours("meshtrain, 1 device", made, rows)
    contestants = [one]
    lacking = no_baseline(run)
    if lacking:
        print(f"no baseline: the step by hand has no {', '.join(lacking)}")
    else:
        plain = hand_written(run, made, rows)
        for what, a, b in zip(("loss", "gradient norm"), one.first, plain.first):
            if abs(a - b) > AGREE * abs(b) * (1 if run.model.compute_dtype == "float32" else 100):
                raise SystemExit(f"error: {what} {a} against {b} in plain JAX: not the same model")
        contestants.insert(0, plain)
    around = looped("meshtrain's loop, 1 device", run, made, carry, compiled, corpus, scratch)
    contestants.append(around)
    if len(devices) > 1:
        contestants.append(ours(f"meshtrain, {len(devices)} devices (zero3)", assembly.assemble(
            sharded(run, len(devices)), devices), rows)[0])
    aims = [] if lacking else [("meshtrain ÷ plain JAX, 1 device", one, plain, "≤ 1.03")]
    aims.append(("loop ÷ bare step, 1 device", around, one, "1.00 ± 0.02"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        if devices[0].platform == "cpu":
            many = child.submit(simulated, run, rows).result()
            many.go = lambda n: child.submit(simulated_steps, n).result()
            contestants.append(many)
            aims.append((f"{SIMULATED} simulated devices (fsdp, zero3) ÷ 1 device, same global batch",
                         many, one, "≤ 1.15"))
        take_turns(contestants, ROUNDS, STEPS)
    return report(run, made, devices, contestants, aims, starts)


_simulated: list[Contestant] = []      # those of the process with the simulated devices


def simulated(run, rows) -> Contestant:
    """Return a Contestant with SIMULATED simulated devices in this process. It has no `go`, which cannot be pickled."""
    devices = local_devices.start(run.model_copy(
        update={"mesh": run.mesh.model_copy(update={"simulated_devices": SIMULATED})}))
    _simulated.append(ours(f"meshtrain, {SIMULATED} simulated devices (zero3)", assembly.assemble(
        sharded(run, SIMULATED), devices), rows)[0])
    return dataclasses.replace(_simulated[0], go=None)


def simulated_steps(n: int) -> tuple[float, float]:
    return _simulated[0].go(n)


def sharded(run, n: int):
    """Return the run with ZeRO-3 over n devices."""
    return run.model_copy(update={"mesh": run.mesh.model_copy(update={"fsdp": n}), "sharding":
                                  config.Sharding(rules=str(ROOT / "sharding_rules" / "zero3.toml"))})


def take_turns(contestants, rounds: int, steps: int) -> None:
    for _ in range(rounds):
        for contestant in contestants:
            wall, cpu = contestant.go(steps)
            contestant.times.append(wall)
            contestant.cpu_times.append(cpu)
        print(" · ".join(f"{c.name} {c.times[-1] * 1e3:.0f} ms" for c in contestants), file=sys.stderr)


def ratio(a: Contestant, b: Contestant, of: str = "times") -> float:
    """Return the median over the rounds of a's time divided by b's time in the same round."""
    return statistics.median(x / y for x, y in zip(getattr(a, of), getattr(b, of)))


def report(run: config.Run, made, devices, contestants, aims, starts) -> str:
    tokens = run.data.global_batch * run.data.seq_len
    gpu = hardware.from_device_kind(devices[0].device_kind)
    peak = gpu.peak(run.model.compute_dtype) if gpu and devices[0].platform != "cpu" else None
    needed = tokens * flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len)
    on_cpu, m = devices[0].platform == "cpu", run.model
    out = ["# The training step", "",
           "Written by `python benchmarks/step.py`. The first lines of this script say what is measured and how.", "",
           machine.line("" if on_cpu else devices[0].device_kind, "jax", "jaxlib", "optax"), "",
           f"Model: {sum(info.size for info in made.model.parameters()):,} parameters (embed {m.embed_dim}, "
           f"{m.num_layers} layers, heads {m.num_heads}/{m.num_kv_heads}, mlp {m.mlp_dim}, vocabulary {m.vocab_size}), "
           f"{m.compute_dtype}; {run.data.global_batch} sequences of {run.data.seq_len}; {run.optimizer.name}; remat "
           f"{run.training.remat}.", "",
           "| step | compile, wall | step, wall | step, CPU | tokens/s, wall | memory per device | MFU |",
           "|---|---|---|---|---|---|---|"]
    for c in contestants:
        seconds = statistics.median(c.times)
        cpu = f"{statistics.median(c.cpu_times) * 1e3:.1f} ms" if on_cpu and c.cpu_times[0] is not None else "–"
        mfu = f"{needed / seconds / peak / c.num_devices:.1%}" if peak else "–"
        out.append(f"| {c.name} | {f'{c.compile_s:.1f} s' if c.compile_s is not None else '–'} | {seconds * 1e3:.1f} "
                   f"ms | {cpu} | {tokens / seconds:,.0f} | "
                   f"{f'{c.peak_bytes / 2**20:.1f} MiB' if c.peak_bytes else '–'} | {mfu} |")
    stats = devices[0].memory_stats() or {}
    if stats.get("peak_bytes_in_use"):
        out += ["",
                f"Peak in use on {devices[0]}, all of the above alive at once: "
                f"{stats['peak_bytes_in_use'] / 2**20:.0f} MiB."]
    out += ["", "| ratio, median of rounds | of wall seconds | of CPU seconds | aim |", "|---|---|---|---|"]
    for name, a, b, aim in aims:
        cpu_ratio = f"{ratio(a, b, 'cpu_times'):.3f}" if on_cpu and None not in (a.cpu_times[0],
                                                                                 b.cpu_times[0]) else "–"
        out.append(f"| {name} | {ratio(a, b):.3f} | {cpu_ratio} | {aim} |")
    out += [f"| quickstart, command to first step, {cache} compilation cache | {s:.1f} s | – | < 20 s |"
            for cache, s in starts.items()]
    out += ["",
            "Wall: seconds of the clock, which other work on the machine makes longer. CPU: seconds of all threads. "
            f"All run in turns, {STEPS} steps each; values are medians of {ROUNDS} rounds. Memory: arguments and "
            f"temporaries of the compiled step. The loop runs the compiled step of 1 device."]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
