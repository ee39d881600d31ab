"""python benchmarks/context.py [SEQ_LEN ...]: bytes, memory and time of ring, gather and ulysses, by S and context.

One layer's attention, forward and backward, of one sequence, with the engine that a run would choose. It runs on 8
simulated devices, or on all GPUs of the machine. The outputs of the methods must agree before they are timed. The
methods are timed in turns. The bytes are read from the compiled program. Writes benchmarks/context.md.

When does the ring hide its communication? The chunks have c = S / (2·context) tokens; there are N heads and K key/value
heads of size H. A step of the forward computes two c × c blocks, 2 · 4·c²·N·H FLOPs. Meanwhile it sends K and V of two
chunks in bf16, 2 · 2c·K·H · 2 bytes. Dividing both by 8·c·H gives c·N / FLOPs per second ≥ K / bytes per second, so

    c ≥ FLOPs per second ÷ bytes per second × K/N.

A step of the backward computes 2.5 times as much (five products instead of two). It sends three times as much: K and V
again, and dK and dV in float32. So it needs 3 / 2.5 = 1.2 times this c. Tensor parallelism divides N and K equally and
changes nothing. Kernels do not reach their peak, so the true c is smaller.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np

from benchmarks import machine, words
from meshtrain import config
from meshtrain import devices as local_devices
from meshtrain import hardware
from meshtrain.choices import attention as choices
from meshtrain.choices.setting import Setting
from meshtrain.cost.program import audit
from meshtrain.parallel.context import attention
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec

ROUNDS = 5
SIMULATED = 8
SHAPES = {"cpu": (8, 2, 32, (1024, 4096)), "gpu": (32, 8, 128, (8192, 32768, 131072))}   # N, K, H, lengths
AGREE = {"float32": 1e-4, "bfloat16": 3e-2}       # share of the largest output
K_TO_N = 8 / 32                                   # Llama 3 8B; 70B and 405B have a smaller ratio
TABLE_CONTEXT = 8


class Contestant:
    """One method at one S and context. It is compiled, and its inputs are on the mesh in the method's order."""

    def __init__(self, method: str, S: int, cp: int, devices):
        on_cpu = devices[0].platform == "cpu"
        N, K, H, _ = SHAPES["cpu" if on_cpu else "gpu"]
        run = config.Run(mesh=dict(context=cp), sharding=dict(rules=str(ROOT / "sharding_rules" / "ddp.toml")),
                         model=dict(vocab_size=256, embed_dim=N * H, num_layers=1, num_heads=N,
                                    num_kv_heads=K, head_dim=H,
                                    mlp_dim=N * H, compute_dtype="float32" if on_cpu else "bfloat16"),
                         data=dict(seq_len=S, global_batch=1, document_mask=False), context=dict(method=method))
        mesh_spec = MeshSpec({"context": cp})
        self.method, self.S, self.cp, self.times = method, S, cp, []
        self.mesh, layout = mesh_spec.build(devices), rules.Layout(rules.load(run.sharding.rules), mesh_spec.sizes)
        gpu = hardware.from_device_kind(devices[0].device_kind)
        chosen = choices.choose(Setting(layout, devices[0].platform, gpu, run=run))
        attend, self.note = chosen.value, "".join(chosen.why)
        self.order = attention.METHODS[method].order(S, cp)
        self.dtype = run.model.compute_dtype

        # Two programs. In one program, XLA would share transfers that both need. A training step keeps the two apart.
        def forward(q, k, v, segments):
            return jax.vjp(lambda q, k, v: attend(layout, q, k, v, segments)[0], q, k, v)

        rng = np.random.default_rng(0)
        natural = [rng.standard_normal((1, S, n, H), np.float32).astype(self.dtype) for n in (N, K, K)]
        natural += [np.ones((1, S), np.int32), rng.standard_normal((1, S, N, H), np.float32).astype(self.dtype)]
        axes = [("batch", "seq", "heads", None)] + [("batch", "seq", "kv_heads", None)] * 2
        axes += [("batch", "seq"), ("batch", "seq", "heads", None)]
        with jax.set_mesh(self.mesh):
            def sharding(names: Sequence[str | None]) -> jax.NamedSharding:
                return jax.NamedSharding(self.mesh, layout.spec("activations", names))
            *args, self.do = [jax.device_put(x[:, self.order], sharding(names)) for x, names in zip(natural, axes)]
            started = time.perf_counter()
            compiled = jax.jit(forward).lower(*args).compile()
            self.forward = lambda: compiled(*args)
            self.backward = jax.jit(lambda back, do: back(do)).lower(self.forward()[1], self.do).compile()
        self.compile_s = time.perf_counter() - started
        self.sent_bytes = [sum(c.bytes for c in audit.read(program.as_text(), self.mesh).require_known().collectives)
                           for program in (compiled, self.backward)]
        self.temp_bytes = max(program.memory_analysis().temp_size_in_bytes for program in (compiled, self.backward))

    def results(self) -> list[np.ndarray]:
        """Return o, dq, dk and dv in natural order."""
        o, back = self.forward()
        return [np.asarray(x, np.float32)[:, np.argsort(self.order)] for x in (o, *self.backward(back, self.do))]

    def go(self, clock) -> None:
        started = clock()
        o, back = jax.block_until_ready(self.forward())
        half = clock()
        jax.block_until_ready(self.backward(back, self.do))
        self.times.append((half - started, clock() - half))

    def row(self) -> str:
        forward, backward = map(statistics.median, zip(*self.times))
        return (f"| {self.S:,} | {self.cp} | {self.method} | {self.sent_bytes[0] / 2**20:.2f} | "
                f"{self.sent_bytes[1] / 2**20:.2f} | {self.temp_bytes / 2**20:.1f} | {forward * 1e3:.0f} | "
                f"{backward * 1e3:.0f} | {self.compile_s:.1f} |")


def measure(S: int, cp: int, devices) -> list[Contestant]:
    """Time every method in turns. Raises: SystemExit if their outputs differ."""
    contestants = [Contestant(method, S, cp, devices) for method in attention.METHODS]
    results = [c.results() for c in contestants]
    for c, found in zip(contestants, results):
        off = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, results[0]))
        if not off <= AGREE[c.dtype]:
            raise SystemExit(f"error: {c.method} differs from {contestants[0].method} by {off:.1e} at S {S}, "
                             f"context {cp}")
    for _ in range(ROUNDS):
        for c in contestants:
            c.go(time.process_time if devices[0].platform == "cpu" else time.perf_counter)
    return contestants


def bounds() -> list[str]:
    """Return a table with the bound for every GPU whose peak and links are known."""
    out = ["## When the ring hides what it sends", "",
           "A chunk (S / (2 · context) tokens) must have at least FLOP/s ÷ bandwidth × K/N tokens for the forward, and "
           "1.2 times as many for the backward; `benchmarks/context.py` has the derivation. The last column is the "
           f"length S of the shortest sequence whose communication is hidden in the backward, at context {TABLE_CONTEXT} "
           f"and K/N = {K_TO_N:g} (Llama 3 8B). Across hosts, we assume that every GPU has its own link.", "",
           "| GPU | link | FLOP/s ÷ bandwidth | chunk, forward | chunk, backward | S, context 8 |",
           "|---|---|---|---|---|---|"]
    for gpu in hardware.GPUS.values():
        for link, rate in (("in a host", gpu.intra_host_bytes_per_s), ("across hosts", gpu.inter_host_bytes_per_s)):
            if rate and gpu.peak("bfloat16"):
                tokens = gpu.peak("bfloat16") / rate
                out.append(f"| {gpu.name} | {link} | {tokens:,.0f} | {tokens * K_TO_N:,.0f} | "
                           f"{1.2 * tokens * K_TO_N:,.0f} | {2 * TABLE_CONTEXT * 1.2 * tokens * K_TO_N:,.0f} |")
    return out


def _length(text: str) -> int:
    if not text.isdecimal() or not int(text) or int(text) % (2 * SIMULATED):
        raise argparse.ArgumentTypeError(f"{text}: sequence lengths are multiples of {2 * SIMULATED}")
    return int(text)


def main(argv) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("lengths", nargs="*", type=_length, metavar="SEQ_LEN", help=f"multiples of {2 * SIMULATED}")
    asked = parser.parse_args(argv).lengths
    few = config.Mesh(simulated_devices=0 if local_devices.gpus_expected() else SIMULATED)
    devices = local_devices.start(config.Run(mesh=few))
    on_cpu = devices[0].platform == "cpu"
    N, K, H, lengths = SHAPES["cpu" if on_cpu else "gpu"]
    rows, notes = [], []
    for S in asked or lengths:
        for cp in [n for n in (2, 4, 8) if n <= len(devices)]:
            contestants = measure(S, cp, devices)
            notes += [c.note for c in contestants if c.note]
            rows += [c.row() for c in contestants]
            print(*rows[-len(contestants):], sep="\n", file=sys.stderr)
    text = "\n".join([*heading(devices, on_cpu), *dict.fromkeys(notes), "",
                      f"One sequence, {N} heads of width {H}, {K} key/value heads, {contestants[0].dtype}. Values are "
                      f"for one device and one layer. Temporaries: the larger of forward and backward, including the "
                      f"keys and values that are gathered or sent on.", "",
                      "| S | context | method | sent forward, MiB | backward, MiB | temporaries, MiB | forward, {0} | "
                      "backward, {0} | compile, wall s |".format("CPU ms" if on_cpu else "ms"),
                      "|---|---|---|---|---|---|---|---|---|",
                      *rows, "", *bounds()] if rows else bounds()) + "\n"
    print(text)
    (ROOT / "benchmarks" / "context.md").write_text(text)
    return 0


def heading(devices, on_cpu: bool) -> list[str]:
    out = ["# Context parallelism", "",
           "Written by `python benchmarks/context.py`. The first lines of this script say what is measured and how.", "",
           machine.line(f"{len(devices)} {'simulated devices' if on_cpu else '× ' + devices[0].device_kind}",
                        "jax", "jaxlib"), ""]
    if on_cpu:
        out += ["Simulated devices share the cores, and their links are copies in memory. So the times, CPU seconds of all "
                "threads, compare only the work of the methods, not their speed on a network.", ""]
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
