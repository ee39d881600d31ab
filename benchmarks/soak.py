"""python -m benchmarks.soak [--faults N] [--parts A,B] [--seed S] [--json FILE]

Fault after fault, N in all (default 100), at random moments of starts, restores, steps, saves and exports of a tiny
run; each run that was hit is compared with one that was not: rows, order of the data, every array of its final state,
its exports. Four parts:

processes   runs under launch.local, in one, two and four processes: kill -9 of one, of all or of the launcher, SIGTERM,
            SIGSTOP for good or for seconds
calls       system calls on files that fail, one or all from then on, or at which the run is killed or stopped: ENOSPC,
            EIO, ESTALE; a sixth of them in the command itself, the others with a stand-in for its compiled step
bucket      run.dir in a bucket on loopback: the server answers 500, says SlowDown, breaks off or is slow; kills, after
            which an empty machine goes on
hosts       two hosts with a name and a disk each, which are namespaces: one is killed, or is killed and loses its disk

Prints one table and ends with 1 if anything was lost, repeated or wrong. Its seconds: from the fault to the next row
that counts; of calls from the start of the run that goes on to its end. Not named: nobody was left who could, or asking
again was enough. Linux only; hosts need root.
"""
from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

from benchmarks import words
from tests import disturbed, soak

SHARES = {"processes": 0.075, "calls": 0.7, "bucket": 0.195, "hosts": 0.03}
REAL = 1 / 6        # of the calls, in the command itself
KILLS = {"kill": 5, "kill all": 1, "kill launcher": 1, "terminate": 2}
MOMENTS = {"save": "saving", "local": "saving", "export": "exporting", "export last": "exporting", "start": "starting",
           "resume": "compiling", "rollback": "compiling", "reference": "starting"}
CALLS = {"kill": "kill", "stop": "terminate", "full": "ENOSPC from then on", "stale": "ESTALE", "io": "EIO",
         "gone": "ESTALE from then on"}
TOLD = {"compiling": "restoring, compiling"}
SAID = re.compile(r"^error: |not saved|failed|cannot be|asked again|could not|is not used|^stopp", re.MULTILINE)


@dataclasses.dataclass
class Line:
    """Of the table."""
    met: int = 0
    moments: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    named: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    wrong: int = 0

    def add(self, moment: str, named: bool | None, after_s: float | None, wrong: bool = False) -> None:
        self.met += 1
        self.moments[moment] += 1
        self.named[named] += 1
        self.seconds += [after_s] if after_s is not None else []
        self.wrong += wrong


def main() -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.faults < 1:
        parser.error(f"--faults {given.faults} must be at least 1")
    parts = given.parts.split(",")
    if unknown := set(parts) - set(SHARES):
        parser.error(f"--parts {', '.join(sorted(unknown))}: known are {', '.join(SHARES)}")
    counts = dict(zip(parts, _parted(given.faults, *map(SHARES.get, parts)), strict=True))
    table: dict[tuple[str, str], Line] = collections.defaultdict(Line)
    began, runs = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as home:
        for part, count in counts.items():
            runs += PARTS[part](Path(home) / part, count, given.seed, table)
            if given.json:
                given.json.write_text(json.dumps([[*key, vars(line)] for key, line in table.items()]))
    print(f"\n{sum(line.met for line in table.values())} faults, {runs} runs compared, "
          f"{(time.monotonic() - began) / 60:.0f} minutes\n\n{as_text(table)}")
    return 1 if any(line.wrong for line in table.values()) else 0


def _parted(count: int, *shares: float) -> list[int]:
    """The count, divided; the first has what is left over."""
    rest = [round(count * share / sum(shares)) for share in shares[1:]]
    return [count - sum(rest), *rest]


def processes(home: Path, count: int, seed: int, table: dict) -> int:
    draw, runs = random.Random(f"processes {seed}"), 0
    for some, number in zip(_parted(count, 0.4, 0.4, 0.2), (1, 2, 4), strict=True):
        kinds = KILLS | {"hang": 1, "pause": 1}
        faults = draw.choices(list(kinds), kinds.values(), k=some)
        runs += _torment(home / str(number), soak.Setting(number), faults, seed, table, "processes")
    return runs


def bucket(home: Path, count: int, seed: int, table: dict) -> int:
    import stores
    server, draw, runs = stores.Server(), random.Random(f"bucket {seed}"), 0
    home.mkdir(parents=True)
    os.environ |= stores.environment(server, home)
    kinds = {fault: 0.3 * weight for fault, weight in KILLS.items()} | dict.fromkeys(soak.SERVER, 3)
    for some, number in zip(_parted(count, 0.7, 0.3), (1, 2), strict=True):
        faults = draw.choices(list(kinds), kinds.values(), k=some)
        setting = soak.Setting(number, bucket=f"s3://{stores.BUCKET}/{number}", steps=80)
        runs += _torment(home / str(number), setting, faults, seed, table, "bucket", server)
    server.close()
    return runs


def hosts(home: Path, count: int, seed: int, table: dict) -> int:
    if subprocess.run(["unshare", "--uts", "--mount", "true"], stderr=subprocess.DEVNULL).returncode:
        raise SystemExit("--parts hosts needs root, whose processes may have namespaces of their own")
    faults = random.Random(f"hosts {seed}").choices(["lose disk", "kill"], (3, 1), k=count)
    return _torment(home, soak.Setting(2, hosts=True), faults, seed, table, "hosts")


def _torment(home: Path, setting: soak.Setting, faults: list[str], seed: int, table: dict, part: str,
             server=None) -> int:
    home.parent.mkdir(parents=True, exist_ok=True)
    met, runs = soak.torment(home, setting, faults, seed, server)
    for one in met:
        table[part, one.fault].add(one.moment, one.named, one.after_s)
    return runs


def calls(home: Path, count: int, seed: int, table: dict) -> int:
    draw, runs = random.Random(f"calls {seed}"), 0
    for real, share in ((False, count - round(REAL * count)), (True, round(REAL * count))):
        where = home.with_name(f"calls{'-real' * real}")
        harness = disturbed.Harness(where, real)
        places = [name for name in disturbed.PLACES if not (real and name == "rollback")]
        done = 0
        while done < share:
            for cell in harness.drawn(places, list(disturbed.FAULTS), share - done, draw):
                wrong, met = harness.check(cell)
                if not met:         # of threads the order of calls is not always the same
                    continue
                done, runs = done + 1, runs + 1
                named = None if cell.fault == "kill" or not SAID.search(harness.first.said) else True
                table["calls", CALLS[cell.fault]].add(
                    MOMENTS[cell.place], named, harness.to_the_end_s if real else None, bool(wrong))
                print(f"{done}, {'the command' if real else 'stand-in'}: {cell}: {'; '.join(wrong) or 'held'}",
                      flush=True)
    return runs


def as_text(table: dict) -> str:
    lines = ["| part | fault | met | at moments | named | not named | seconds: median, longest | wrong |",
             "|---|---|---|---|---|---|---|---|"]
    for (part, fault), line in sorted(table.items()):
        moments = ", ".join(f"{TOLD.get(name, name)} {number}" for name, number in line.moments.most_common())
        seconds = f"{statistics.median(line.seconds):.1f}, {max(line.seconds):.1f}" if line.seconds else ""
        lines.append(f"| {part} | {fault} | {line.met} | {moments} | {line.named[True]} | "
                     f"{line.met - line.named[True]} | {seconds} | {line.wrong} |")
    return "\n".join(lines)


PARTS = {"processes": processes, "calls": calls, "bucket": bucket, "hosts": hosts}

if __name__ == "__main__":
    sys.exit(main())
