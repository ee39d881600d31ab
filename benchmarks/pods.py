"""python -m benchmarks.pods: the cost of supervision to a step: watchdog, agreement, checks of replicas, and the
account of all seconds.

Times are CPU seconds per call of each function that a step calls, because wall seconds mean nothing on a machine with
other users. CPU seconds of the thread that drives the steps make a step longer. Those of other threads run beside it.
The agreement runs in real processes over loopback. The checks of replicas are compared with `x + 1` over the same
arrays. Writes benchmarks/pods.md.
"""
from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, words

PROCESSES, DEVICES, CALLS, ROUNDS = 2, 4, 2000, 5
STEP_S, EVERY = 1.0, 100        # seconds of the steps with which all is compared; steps between two checks of replicas
HBM_BYTES, HBM_BYTES_PER_S = 80e9, 3.35e12     # of an H100
WIDTH, ARRAYS = 1024, 12        # of the state whose replicas are checked: ARRAYS × 8 × WIDTH², float32


def cpu_s(call, calls: int = CALLS) -> tuple[float, float]:
    """Return the CPU seconds per call, of this thread and of all other threads of the process; medians of ROUNDS."""
    found = []
    for _ in range(ROUNDS):
        own, all_ = time.thread_time(), time.process_time()
        for number in range(calls):
            call(number)
        own, all_ = time.thread_time() - own, time.process_time() - all_
        found.append((own / calls, max(0.0, all_ - own) / calls))
    return tuple(map(statistics.median, zip(*found)))


def watched() -> dict[str, tuple[float, float]]:
    from meshtrain.cluster import watch
    from meshtrain.run import contents
    with tempfile.TemporaryDirectory() as home, watch.on(watch.PhaseLimits(), 0, 1, print) as dog, dog.keep_in(
            Path(home) / contents.STACKS):
        step = cpu_s(lambda number: (watch.step(number), watch.progress()))
        start = time.process_time()
        time.sleep(10 * STEP_S)
        return {"watchdog: its calls in a step": step,
                "watchdog: its thread, in a step": (0.0, (time.process_time() - start) / 10)}


def accounted() -> dict[str, tuple[float, float]]:
    from meshtrain.journal import goodput, history
    with tempfile.TemporaryDirectory() as home:
        account = goodput.Account()
        with history.record_attempt(Path(home), 0, account, {"on": "", "cause": ""}) as this:
            row = cpu_s(lambda number: (account.add_step(number, 1.0, 0.0), account.columns(time.perf_counter())))
            beat = sum(cpu_s(lambda number: this.beat(), 200)) * STEP_S / history.BEAT_S
            this.end("finished")
        return {"goodput: its share of a row": row, "goodput: the heartbeat, in a step": (0.0, beat)}


def agreeing(address: str, index: int) -> dict[str, tuple[float, float]]:
    import jax

    from meshtrain.cluster import agree, find, meet
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    meet.start(find.Cluster(address, PROCESSES, index), 120, 100)
    agreement = agree.StopAgreement()
    return {"agreement: no process is late": cpu_s(lambda number: agreement.ask(False, 0.0), 300),
            "agreement: each process reports how late it is": cpu_s(
                lambda number: agreement.ask(False, 1e-3 * (1 + number % 50)), 300)}


def checked() -> dict[str, tuple[float, float]]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from meshtrain.run import replicas
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((2, DEVICES // 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    make = jax.jit(lambda key: {f"w{k}": jax.random.normal(jax.random.fold_in(key, k), (8, WIDTH, WIDTH))
                                for k in range(ARRAYS)},
                   out_shardings=NamedSharding(mesh, P(None, "fsdp")))
    state = make(jax.random.key(0))
    found = replicas.Replicas(state, mesh).compile()
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + jnp.float32(1), state))

    def check(number):
        return found.check(1, state)

    def plain(number):
        return jax.block_until_ready(add(state))
    for warm in (check, plain):
        warm(0)
    return {"check": cpu_s(check, 2), "x + 1": cpu_s(plain, 2),
            "bytes": (2.0 * sum(x.nbytes for x in state.values()), 0.0)}


def alone(name: str, *given: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.pods", "--alone", name, *given],
                            text=True, stdout=subprocess.PIPE,
                            env=os.environ | {"XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false"})


def answer(*children: subprocess.Popen) -> dict[str, tuple[float, float]]:
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children][0]


def main(argv) -> None:
    parser = words.Parser(__doc__)
    parser.add_alone()
    if asked := parser.parse_args(argv).alone:
        print(json.dumps({"watched": watched, "accounted": accounted, "checked": checked,
                          "agreeing": lambda address, index: agreeing(address, int(index))}[asked[0]](*asked[1:])))
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    rows = answer(alone("watched")) | answer(*[alone("agreeing", address, str(index))
                                               for index in range(PROCESSES)]) | answer(alone("accounted"))
    check = answer(alone("checked"))
    times = sum(check["check"]) / sum(check["x + 1"])
    rows[f"check of replicas every {EVERY} steps"] = times * 2 * HBM_BYTES / HBM_BYTES_PER_S / EVERY, 0.0
    late = sum(own for name, (own, _) in rows.items() if name != "agreement: no process is late")
    lines = ["# What it costs to be watched", "",
             "The overhead of the watchdog, of the agreement between processes, of goodput and of replica checks.", "",
             "Written by `python -m benchmarks.pods`. The first lines of this script say what is measured and how.", "",
             machine.line("", "jax"), "", "| | µs, the step's thread | of a step of 1 s | µs, other threads |",
             "|---|---:|---:|---:|"]
    lines += [f"| {name} | {1e6 * own:,.1f} | {own / STEP_S:.4%} | {1e6 * others:,.1f} |"
              for name, (own, others) in rows.items()]
    lines += [f"| **all, with each process reporting how late it is** | {1e6 * late:,.1f} | **{late / STEP_S:.3%}** | |", "",
              f"A check of replicas took {times:.2f} times the CPU seconds of `x + 1` over the same arrays "
              f"({check['bytes'][0] / 1e6:,.0f} MB on {DEVICES} simulated devices). Its row is computed: {times:.2f} "
              f"times the time of `x + 1` over the 80 GB of an H100 at 3.35 TB/s, if all of it is replicated. The check "
              f"delays the step; all other work is done while the device computes. The other threads of the agreement "
              f"are those of the simulated devices and of Gloo.", ""]
    Path(__file__).with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
