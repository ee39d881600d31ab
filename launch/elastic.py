"""python -m launch.elastic --processes N [--min-processes K] --devices D [--full F] -- [RUN.toml] [--section.key value
…]: how many processes (or hosts) with D devices each, at most N and at least K, can train a run that is meant for F
devices.

Prints the number and, behind it, the options that the processes then need. Without --full: F is the run's
mesh.full_devices; where that is 0 nothing shrinks, and the number is N. Exit codes: 0, or 2 with the reason where none
can. It starts no devices.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from launch import options
from meshtrain import config
from meshtrain.config import ConfigError, Run
from meshtrain.run import say

USAGE = ("python -m launch.elastic --processes N [--min-processes K] --devices D [--full F] -- [RUN.toml] "
         "[--section.key value ...]")
LONGEST_S = 300.0       # to find out what fits, which takes seconds


def overrides(processes: int, devices: int, full: int, simulated: bool) -> list[str]:
    """What `processes` of `devices` each must be told, of a run that is meant for `full` devices."""
    simulate = [f"--mesh.simulated_devices={processes * devices}"] if simulated else []
    return [f"--mesh.full_devices={full}", *simulate] if processes * devices < full else []


def check(run: Run) -> None:
    """Raises: ConfigError where nothing in the run can shrink."""
    if -1 not in (run.mesh.data, run.mesh.fsdp):
        raise ConfigError("--min-processes needs an axis of the mesh that shrinks with the devices, and none is -1; "
                          "use mesh.data=-1 or mesh.fsdp=-1")


def most(words: Sequence[str], processes: int, least: int, devices: int, full: int) -> tuple[int, str]:
    """(how many can train the run of these words, ""), or (0, why none can). In a process of its own: it takes jax, and
    a launcher needs none, and with a limit: a file system may hang."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "launch.elastic", f"--processes={processes}", f"--min-processes={least}",
             f"--devices={devices}", f"--full={full}", "--", *words], capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return 0, f"whether fewer can train it was not found out within {LONGEST_S:g} s"
    found = ran.stdout.split()
    if ran.returncode or not found or not found[0].isdecimal():
        return 0, (ran.stderr.strip().splitlines() or ["?"])[-1].removeprefix("error: ")
    return int(found[0]), ""


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m launch.elastic", usage=USAGE, allow_abbrev=False,
                                     description="How many processes can train the run, where not all are there.")
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="that are there")
    parser.add_argument("--min-processes", type=int, default=1, metavar="K", help="fewer are not worth it (default 1)")
    parser.add_argument("--devices", type=int, required=True, metavar="D", help="of each process")
    parser.add_argument("--full", type=int, metavar="F",
                        help="devices that the run is meant for (default its mesh.full_devices)")
    given = options.known(parser, argv[:at], {"processes": 1, "min_processes": 1, "devices": 1, "full": 1})
    words = argv[at + 1:]
    try:
        run = config.load(words, USAGE)
    except ConfigError as error:
        say.err(f"error: {error}")
        return 2
    full = given.full or run.mesh.full_devices
    tell = lambda count: say.out(" ".join([str(count),
                                           *overrides(count, given.devices, full, bool(run.mesh.simulated_devices))]))
    if given.processes * given.devices >= full:
        tell(given.processes)
        return 0
    with say.without_noise():
        from meshtrain import elastic       # jax takes seconds: only where something shrinks
    fault = "none was tried"
    for count in range(given.processes, given.min_processes - 1, -1):
        try:
            elastic.check(config.load([*words, f"--mesh.full_devices={full}"], USAGE), count * given.devices)
        except ConfigError as error:
            fault = str(error)
            continue
        tell(count)
        return 0
    say.err(f"error: no number of processes from {given.min_processes} to {given.processes} can train this run: "
            f"{fault}")
    return 2


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"     # the GPUs are the run's
    say.begin()
    sys.exit(main(sys.argv[1:]))
