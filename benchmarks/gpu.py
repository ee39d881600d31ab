"""python -m benchmarks.gpu [--minutes 8] [--checks] [--jobs N] [--items GLOB …] [--out DIR]: the first minutes on any
GPU machine, with one GPU or eight.

First come comparisons with the CPU: attention engines, other kernels, rule files, kinds of layers, and schedules. Two
runs must give the same bits. Then come speed, memory and kernels of a step compared with the roofline, and tiles. The
most useful items come first. Needs no network and no data. After every item it writes gpu-NAME.md and gpu-NAME.json. A
later call continues from them, unless the GPU, the versions or the code differ. Items run in separate processes: one
that raises, crashes or hangs is recorded, and the others continue. --jobs N runs the checks in N processes at once,
because most of their time is compilation; timed items follow one at a time. Exit codes: 0 · 1 a result is wrong or an
item failed · 2 no GPU, or no such item.
"""
from __future__ import annotations

import fnmatch
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax

from benchmarks import gpu_attention, gpu_flags, gpu_kernels, gpu_sampling, gpu_speed, gpu_steps, machine, words
from benchmarks.gpu_record import FAILED, GROUPS, RIGHT, WRONG, Item, Record, code_digest
from meshtrain import devices as local_devices
from meshtrain import hardware
from meshtrain.config import ConfigError

LONGEST_S = 240         # limit for an item, in addition to its own estimate; a hanging item is killed
START_S = 180           # limit for a process, before its first item and between two items
GRACE_S = 60            # extra time for the current item when the minutes are over
# Exit codes of a worker: no item is left to start; the next item needs an empty GPU; no item has such a key.
DONE, AGAIN, NOTHING = 0, 3, 4
CHECKS = ("attention", "kernel", "layout", "layers", "schedule", "deterministic")


# ---- in the process that computes ------------------------------------------------------------------------------------


def by_worth(devices, cpu, out: Path) -> list[Item]:
    """Return all items of these devices: first the most useful ones for a first run, then the other checks, then
    speed."""
    attention, steps = gpu_attention.items(devices, cpu), gpu_steps.items(devices, cpu)
    measured = gpu_speed.items(devices, out)
    bf16 = [item for item in steps if "bfloat16" in item.key]
    float32 = [item for item in steps if item not in bf16]
    first, rest = len(attention) // 3 + 1, 3            # items of one head_dim; rule files that most runs use
    return [*attention[:first], *bf16[:rest], *measured[:2], *attention[first:], *gpu_kernels.items(devices, cpu),
            *float32[:rest], *bf16[rest:], *measured[2:],
            *float32[rest:], *gpu_sampling.items(devices, out), *gpu_flags.items(devices)]


class Asked(NamedTuple):
    """The items of a process: those of these groups whose keys match one of the patterns. Of the items that may run
    beside others, the process takes number, number + jobs, …"""
    groups: tuple[str, ...] = tuple(GROUPS)
    patterns: tuple[str, ...] = ("*",)
    number: int = 0
    jobs: int = 1

    def planned(self, items: Sequence[Item]) -> list[Item]:
        return [item for item in items if item.group in self.groups and any(
            fnmatch.fnmatchcase(item.key, pattern) for pattern in self.patterns)]

    def share(self, planned: Sequence[Item]) -> list[Item]:
        """Return this process's share. Items with the same reference go to the same process."""
        if self.jobs == 1:
            return list(planned)
        beside = [item for item in planned if not item.alone]
        kinds = list(dict.fromkeys(item.kind for item in beside))
        return [item for item in beside if kinds.index(item.kind) % self.jobs == self.number]


def identity(devices) -> tuple[str, dict]:
    """Return (the name of the files, the machine and versions for which their numbers are valid)."""
    device = devices[0]
    gpu = hardware.from_device_kind(device.device_kind)
    name = f"{gpu.name if gpu else device.platform}-x{len(devices)}"
    platform = getattr(device.client, "platform_version", "").replace("\n", " ")
    try:
        asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = asked.stdout.strip()
    except OSError:
        commit = ""
    return name, {"date": machine.datetime.date.today().isoformat(), "gpu": device.device_kind, "count": len(devices),
                  "jax": jax.__version__, "jaxlib": machine.version("jaxlib"), "platform": platform,
                  "python": machine.platform.python_version(), "commit": commit, "code": code_digest()}


def usable(devices) -> bool:
    """Return whether this process can still compute on the devices. After an illegal memory access by a kernel, every
    later kernel fails."""
    try:
        return all(float(jax.device_put(1.0, device) + 1) == 2 for device in devices)
    except jax.errors.JaxRuntimeError:
        return False


def work(items: Sequence[Item], record: Record, until: float, devices, tell: Callable = lambda *news: None,
         planned: Sequence[Item] = ()) -> int:
    """Run the open items until time.time() reaches `until`. Return DONE, or AGAIN if the next item needs a new process.

    Calls tell("begin", key, seconds) and tell("end", key). Skips items that seem too long for the remaining time, so
    that shorter ones run.
    """
    used = spent = False        # used: an item ran in this process; spent: no other item may run in it
    for item in record.open(items, planned):
        if time.time() + item.seconds > until:
            continue
        if spent or used and item.alone:
            return AGAIN
        tell("begin", item.key, item.seconds)
        record.begin(item.key)
        started = time.perf_counter()
        try:
            found = item.measure()
        except Exception as error:
            found = {"errors": {"": f"{type(error).__name__}: {error}"}}
        seconds = time.perf_counter() - started
        status = record.end(item.key, found, seconds)
        tell("end", item.key)
        print(f"{status:7} {item.key} ({seconds:.0f} s)", flush=True)
        used, spent = True, item.alone or status == FAILED and not usable(devices)
    return DONE


def worker(pipe: Connection, out: Path, until: float, asked: Asked) -> None:
    """Exit with the result of `work`, or with 2 if jax finds no GPU."""
    devices = jax.devices()
    sys.exit(2 if devices[0].platform == "cpu" else compute(pipe, devices, jax.devices("cpu")[0], out, until, asked))


def compute(pipe: Connection, devices, cpu, out: Path, until: float, asked: Asked) -> int:
    name, of = identity(devices)
    record = Record(out, name, of)
    pipe.send(("record", out, name, of))
    if not (planned := asked.planned(by_worth(devices, cpu, out / f"gpu-{name}-profiles"))):
        return NOTHING
    return work(asked.share(planned), record, until, devices, lambda *news: pipe.send(news), planned)


# ---- in the process that supervises ----------------------------------------------------------------------------------


def supervise(target: Callable, args: tuple, until: float, longest_s: float = LONGEST_S,
              grace_s: float = GRACE_S) -> tuple[int, Record | None]:
    """Run target(pipe, *args) in new processes until one is done. Return its exit code and the record that it named.

    An item fails if its process dies or hangs during it. If a process ends without having started an item, its exit
    code is final.
    """
    spawn = multiprocessing.get_context("spawn")
    while True:
        mine, theirs = spawn.Pipe(duplex=False)
        child = spawn.Process(target=target, args=(theirs, *args))
        child.start()
        theirs.close()
        record, begun, hung = _listen(mine, child, until, longest_s, grace_s)
        child.join()
        code = child.exitcode
        if time.time() > until + grace_s and hung:      # stopped at the time limit: the item may start again
            return DONE, record
        if begun:
            record.fail(begun, f"no end within {hung:.0f} s" if hung else f"its process ended with code {code}")
            print(f"{FAILED:7} {begun}", flush=True)
        elif code != AGAIN or time.time() > until:
            return DONE if code == AGAIN else code, record


def _listen(pipe: Connection, child, until: float, longest_s: float, grace_s: float) -> tuple[
        Record | None, str, float]:
    """Return (the record, the item that started and did not end, the seconds after which the child was killed for
    it)."""
    place, begun, since, limit = None, "", time.time(), START_S
    while True:
        try:
            while pipe.poll(1):
                what, *news = pipe.recv()
                if what == "record":
                    place = news
                elif what == "begin":
                    begun, since, limit = news[0], time.time(), longest_s + news[1]
                else:
                    begun, since, limit = "", time.time(), START_S
        except EOFError:            # the child has ended
            return place and Record(*place), begun, 0.0
        if time.time() > min(since + limit, until + grace_s):
            child.kill()
            child.join()
            return place and Record(*place), begun, time.time() - since


def side_by_side(target: Callable, out: Path, until: float, asked: Asked) -> None:
    """Run the items that may run beside others, in asked.jobs processes that share the GPUs' memory. They have half of
    the time, so that a hanging process leaves time for the measurements."""
    half = (time.time() + until) / 2
    jobs = [threading.Thread(target=supervise, args=(target, (out, half, asked._replace(number=number)), half))
            for number in range(asked.jobs)]
    before = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    try:
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    finally:
        os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE")
        if before is not None:
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = before


def main(argv: Sequence[str]) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("--minutes", type=float, default=8, help="no item is begun that would end later")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks",
                        help="where .md, .json and profiles come to lie")
    parser.add_argument("--checks", action="store_true", help="only what is right or wrong: no speed, no tiles")
    parser.add_argument("--jobs", type=int, default=1, help="processes that find side by side what is right or wrong")
    parser.add_argument("--items", nargs="+", default=("*",), metavar="GLOB",
                        help='these alone, e.g. "attention/mosaic*"')
    asked = parser.parse_args(argv)
    until = time.time() + 60 * asked.minutes
    code = 2
    if local_devices.gpus_expected():
        try:
            local_devices.prepare_gpus(os.environ)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if "cpu" not in (platforms := os.environ.get("JAX_PLATFORMS") or "cpu"):
            os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"        # the reference for the GPU
        asked.out.mkdir(parents=True, exist_ok=True)
        wanted = Asked(CHECKS if asked.checks else tuple(GROUPS), tuple(asked.items))
        if asked.jobs > 1:
            side_by_side(worker, asked.out, until, wanted._replace(jobs=asked.jobs))
        code, record = supervise(worker, (asked.out, until, wanted), until)
    if code == 2:
        print("error: benchmarks.gpu needs a GPU, and jax finds none here; run it where nvidia-smi shows one, with the "
              "extra 'gpu' installed", file=sys.stderr)
        return 2
    if code == NOTHING:
        print(f"error: no item fits --items {' '.join(asked.items)}; keys begin with {', '.join(GROUPS)}, e.g. "
              f"'attention/mosaic*'", file=sys.stderr)
        return 2
    if record is None:
        print(f"error: the process that computes ended with code {code} before it began", file=sys.stderr)
        return 1
    bad = [key for key, item in record.items.items() if item["status"] in (WRONG, FAILED)]
    right = sum(item["status"] == RIGHT for item in record.items.values())
    print(f"{right} right, {len(bad)} not{': ' if bad else ''}{', '.join(bad)}; {len(record.left)} still to do; "
          f"written: {record.path.with_suffix('.md')}")
    return 1 if bad or code else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
