"""python -m benchmarks.restart [--processes N] [--kills K] [RUN.toml] [--section.key value …]

Measures the cost of a restart by phase, from the kill of a process to the next step that counts. It starts the run
under launch.local and kills one process with SIGKILL after a checkpoint. The launcher's lines give the end of each
phase: the launcher noticed the kill; the new processes had imported everything and had met; the state was restored; the
programs were ready; the first step had its row. Prints a table of the medians.
"""
from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import words
from meshtrain import config, run_files

PHASES = (      # (name, the line that ends it)
    ("noticing it, ending the others", r"starting again"),
    ("imports, meeting, run.dir, data", r"planned: "),
    ("restore", r"resuming after step"),
    ("programs", r"compiled in"),
    ("first step and its row", r"\bstep \d+/"))


def main() -> None:
    parser = words.Parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    given, run_words = parser.parse_known_args()
    try:
        run_files.load(run_words)
    except config.ConfigError as error:
        parser.error(str(error))
    taken = measure(given.processes, given.kills, run_words)
    print("| phase | seconds, median |\n|---|---|")
    for number, (name, _) in enumerate(PHASES):
        print(f"| {name} | {statistics.median(one[number] for one in taken):.1f} |")
    print(f"| **from the kill to the next row** | **{statistics.median(map(sum, taken)):.1f}** |")
    print(f"\n{len(taken)} kills: {', '.join(f'{sum(one):.1f}' for one in taken)} s in all")


def measure(processes: int, kills: int, run_words: list[str]) -> list[list[float]]:
    """Return the seconds of each phase, for each kill except the first."""
    with tempfile.TemporaryDirectory() as home:
        argv = [sys.executable, "-u", "-m", "meshtrain.launch.local", "--processes", str(processes),
                "--max-restarts", str(kills + 2), "--", *run_words,
                "--run.dir", f"{home}/run", "--checkpoint.every", "3", "--training.steps", "100000"]
        run = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            return [one for number in range(kills + 1) if (one := _kill(run, Path(home) / "run", number))]
        finally:
            run.send_signal(signal.SIGTERM)
            for _ in run.stdout:
                pass
            run.wait()


def _find_newest(directory: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    return max((int(path.name) for path in (directory / "checkpoints").glob("[0-9]*")), default=0)


def _kill(run: subprocess.Popen, directory: Path, number: int) -> list[float]:
    """Kill one process. Return the seconds of the phases; none the first time, because there was no checkpoint to
    restore."""
    before = _find_newest(directory)
    while _find_newest(directory) <= before:
        if run.poll() is not None:
            raise SystemExit("the run has ended")
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(children[-1 if number % 2 else 0]), signal.SIGKILL)
    at, taken = time.monotonic(), []
    for _, over in PHASES:
        for line in run.stdout:
            if re.search(over, line):
                break
        else:
            raise SystemExit("the run has ended")
        taken.append(time.monotonic() - at)
        at += taken[-1]
    return taken if number else []


if __name__ == "__main__":
    main()
