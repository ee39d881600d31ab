"""python -m benchmarks.soak [--faults N] [--parts A,B] [--seed S] [--json FILE] [--add FILE,FILE]

Injects N faults (default 100), one after the other, at random moments of starts, restores, steps, saves and exports of
a tiny run. Each run with faults is compared with a run without: its rows, the order of its data, every array of its
final state, and its exports. There are seven parts:

processes   runs under launch.local in one, two and four processes: kill -9 of one process, of all or of the launcher;
            SIGTERM; SIGSTOP for good or for seconds; no compiled programs at the next start
calls       system calls on files: one call or all calls from then on fail (ENOSPC, EIO, ESTALE), or the run is killed
            or stopped at a call. A twentieth are in the command itself, the others with a stand-in for its compiled step
bucket      run.dir in a bucket on loopback: the server answers 500, says SlowDown, breaks off, is slow, refuses some
            requests or all for a while (403, an expired token), sends 200 kB/s, or has or returns damaged pieces. Also
            kills, after which the run continues on an empty machine or without its caches
requests    starts of a run in a bucket, with the stand-in: refused, a slow line, damaged pieces, no caches
stops       SIGSTOP for longer than every limit of the run: of one process, of all, of all and the launcher
samplers    a run that learns from rewards, with two separate samplers: one is killed, or its main thread stops for good
            or for some seconds, below or above its limit
hosts       two hosts, which are namespaces with their own name and disk: one is killed, or is killed and loses its disk

Prints one table. The exit code is 1 if anything was lost, repeated or wrong. Seconds: from the fault to the next row
that counts; for calls, from the start of the run that continues to its end. Not named: no message named the fault,
because no process was left or a retry was enough. Silent: the longest time without a line from the fault to that row;
for calls, in the whole run. --json writes the table to a file, and --add adds such files to it. Linux only; hosts need
root.
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
from tests import disturbed, refusing, soak

SHARES = {"processes": 0.07, "calls": 0.46, "bucket": 0.1, "requests": 0.2, "stops": 0.06, "samplers": 0.08, "hosts": 0.03}
REAL = 1 / 20       # share of the calls in the command itself
KILLS = {"kill": 5, "kill all": 1, "kill launcher": 1, "terminate": 2}
MOMENTS = {"save": "saving", "local": "saving", "export": "exporting", "export last": "exporting", "start": "starting",
           "resume": "compiling", "rollback": "compiling", "reference": "starting"}
CALLS = {"kill": "kill", "stop": "terminate", "full": "ENOSPC from then on", "stale": "ESTALE", "io": "EIO",
         "gone": "ESTALE from then on"}
TOLD = {"compiling": "restoring, compiling"}
SAID = re.compile(r"^error: |not saved|not kept|failed|cannot be|asked again|could not|is not used|^stopp", re.MULTILINE)


@dataclasses.dataclass
class Line:
    """A line of the table."""
    met: int = 0
    moments: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    named: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    silent_s: float = 0.0
    wrong: int = 0

    def add(self, moment: str, named: bool | None, after_s: float | None, silent_s: float, wrong: bool) -> None:
        self.met += 1
        self.moments[moment] += 1
        self.named[named] += 1
        self.seconds += [after_s] if after_s is not None else []
        self.silent_s = max(self.silent_s, silent_s)
        self.wrong += wrong

    def add_all(self, other: dict) -> None:
        """Add the counts of another line. other: as read from a file."""
        self.met, self.wrong = self.met + other["met"], self.wrong + other["wrong"]
        self.moments.update(other["moments"])
        self.named.update({json.loads(key): number for key, number in other["named"].items()})
        self.seconds += other["seconds"]
        self.silent_s = max(self.silent_s, other["silent_s"])


class Table(collections.defaultdict[tuple[str, str], Line]):
    """(part, fault) -> a line. path: the file to write."""

    def __init__(self, path: Path | None):
        super().__init__(Line)
        self.path = path

    def write(self) -> None:
        if self.path:
            self.path.write_text(json.dumps([[*key, vars(line)] for key, line in self.items()]))


def main() -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--parts", default=",".join(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--add", type=lambda text: text.split(","), default=[])
    given = parser.parse_args()
    if given.faults < (not given.add):
        parser.error(f"--faults {given.faults} must be at least 1, or 0 with --add")
    parts = given.parts.split(",")
    if unknown := set(parts) - set(SHARES):
        parser.error(f"--parts {', '.join(sorted(unknown))}: known are {', '.join(SHARES)}")
    counts = dict(zip(parts, _parted(given.faults, *map(SHARES.get, parts)), strict=True))
    table, began, runs = Table(given.json), time.monotonic(), 0
    for path in given.add:
        for part, fault, line in json.loads(Path(path).read_text()):
            table[part, fault].add_all(line)
    with tempfile.TemporaryDirectory() as home:
        for part, count in counts.items():
            runs += count and PARTS[part](Path(home) / part, count, given.seed, table)
            table.write()
    print(f"\n{sum(line.met for line in table.values())} faults, {runs} runs compared, "
          f"{(time.monotonic() - began) / 60:.0f} minutes\n\n{as_text(table)}")
    return 1 if any(line.wrong for line in table.values()) else 0


def _parted(count: int, *shares: float) -> list[int]:
    """Split the count by shares. The first part gets the remainder."""
    rest = [round(count * share / sum(shares)) for share in shares[1:]]
    return [count - sum(rest), *rest]


def processes(home: Path, count: int, seed: int, table: Table) -> int:
    draw, runs = random.Random(f"processes {seed}"), 0
    for some, number in zip(_parted(count, 0.4, 0.4, 0.2), (1, 2, 4), strict=True):
        kinds = KILLS | {"hang": 1, "pause": 1, "empty caches": 1}
        faults = draw.choices(list(kinds), kinds.values(), k=some)
        runs += _torment(home / str(number), soak.Setting(number), faults, seed, table, "processes")
    return runs


def bucket(home: Path, count: int, seed: int, table: Table) -> int:
    import stores
    server, draw, runs = stores.Server(), random.Random(f"bucket {seed}"), 0
    home.mkdir(parents=True)
    os.environ |= stores.environment(server, home)
    # one run has many of those faults that do not end a start
    kinds = {fault: 0.2 * weight for fault, weight in KILLS.items()} | dict.fromkeys(soak.SERVER, 3) | {
        "refused": 6, "expired": 6, "200 kB/s": 6, "damaged": 0.5, "damaged for good": 0.5, "empty caches": 0.5}
    for some, number in zip(_parted(count, 0.7, 0.3), (1, 2), strict=True):
        faults = draw.choices(list(kinds), kinds.values(), k=some)
        setting = soak.Setting(number, bucket=f"s3://{stores.BUCKET}/{number}", steps=320)
        runs += _torment(home / str(number), setting, faults, seed, table, "bucket", server)
    server.close()
    return runs


def requests(home: Path, count: int, seed: int, table: Table) -> int:
    import stores
    server, draw, done = stores.Server(), random.Random(f"requests {seed}"), 0
    home.mkdir(parents=True)
    os.environ |= stores.environment(server, home)
    harness = refusing.Harness(home, server)
    while done < count:
        fault = draw.choice(list(refusing.FAULTS))
        found = harness.check(fault, draw)
        if found.met:       # otherwise the run made no such request
            done += 1
            table["requests", fault].add(found.moment, found.named, None, found.silent_s, bool(found.wrong))
            table.write()
            print(f"{done}, a bucket: {fault} while {found.moment}: {'; '.join(found.wrong) or 'held'}"
                  + ", not named" * (found.named is None), flush=True)
    server.close()
    return done


def stops(home: Path, count: int, seed: int, table: Table) -> int:
    draw, runs = random.Random(f"stops {seed}"), 0
    for some, number in zip(_parted(count, 0.6, 0.4), (1, 2), strict=True):
        setting = soak.Setting(number, limited=True, steps=60)
        runs += _torment(home / str(number), setting, draw.choices(soak.STOPS, k=some), seed, table, "stops")
    return runs


def samplers(home: Path, count: int, seed: int, table: Table) -> int:
    faults = random.Random(f"samplers {seed}").choices(list(soak.SAMPLERS), (1, 3, 3), k=count)
    return _torment(home, soak.Setting(samplers=2, steps=240), faults, seed, table, "samplers")


def hosts(home: Path, count: int, seed: int, table: Table) -> int:
    if subprocess.run(["unshare", "--uts", "--mount", "true"], stderr=subprocess.DEVNULL).returncode:
        raise SystemExit("--parts hosts needs root, whose processes may have namespaces of their own")
    faults = random.Random(f"hosts {seed}").choices(["lose disk", "kill"], (3, 1), k=count)
    return _torment(home, soak.Setting(2, hosts=True), faults, seed, table, "hosts")


def _torment(home: Path, setting: soak.Setting, faults: list[str], seed: int, table: Table, part: str,
             server=None) -> int:
    if not faults:
        return 0
    home.parent.mkdir(parents=True, exist_ok=True)

    def keep(done: list[soak.Met]) -> None:
        for one in done:
            table[part, one.fault].add(one.moment, one.named, one.after_s, one.silent_s, one.wrong)
        table.write()
    return soak.torment(home, setting, faults, seed, server, keep=keep)[1]


def calls(home: Path, count: int, seed: int, table: Table) -> int:
    draw, runs = random.Random(f"calls {seed}"), 0
    for real, share in ((False, count - round(REAL * count)), (True, round(REAL * count))):
        where = home.with_name(f"calls{'-real' * real}")
        harness = disturbed.Harness(where, real)
        places = [name for name in disturbed.PLACES if not (real and name == "rollback")]
        done = 0
        while done < share:
            for cell in harness.drawn(places, list(disturbed.FAULTS), share - done, draw):
                wrong, met = harness.check(cell)
                if not met:         # the order of calls of threads can differ
                    continue
                done, runs = done + 1, runs + 1
                named = None if cell.fault == "kill" or not SAID.search(harness.first.said) else True
                table["calls", CALLS[cell.fault]].add(
                    MOMENTS[cell.place], named, harness.to_the_end_s if real else None, harness.first.silent_s,
                    bool(wrong))
                table.write()
                print(f"{done}, {'the command' if real else 'stand-in'}: {cell}: {'; '.join(wrong) or 'held'}"
                      + ", not named" * (named is None), flush=True)
    return runs


def as_text(table: Table) -> str:
    lines = ["| part | fault | faults | phase of the run | named | not named | seconds: median, longest | silent, seconds | "
             "wrong |", "|---|---|---|---|---|---|---|---|---|"]
    for (part, fault), line in sorted(table.items()):
        moments = ", ".join(f"{TOLD.get(name, name)} {number}" for name, number in line.moments.most_common())
        seconds = f"{statistics.median(line.seconds):.1f}, {max(line.seconds):.1f}" if line.seconds else ""
        lines.append(f"| {part} | {fault} | {line.met} | {moments} | {line.named[True]} | "
                     f"{line.met - line.named[True]} | {seconds} | {line.silent_s:.1f} | {line.wrong} |")
    return "\n".join(lines)


PARTS = {"processes": processes, "calls": calls, "bucket": bucket, "requests": requests, "stops": stops,
         "samplers": samplers, "hosts": hosts}

if __name__ == "__main__":
    sys.exit(main())
