"""python -m launch.elastic --processes N --min-processes K --devices D --full F -- [RUN.toml] [--section.key value …]: how many
processes with D devices each, at most N and at least K, can train a run that is meant for F devices.

Prints the number; the processes then need --mesh.full_devices F, and as many --mesh.simulated_devices as they have. Exit codes: 0,
or 2 with the reason where none can. It starts no devices.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from meshtrain.run import say

USAGE = "python -m launch.elastic --processes N --min-processes K --devices D --full F -- [RUN.toml] [--section.key value ...]"


def overrides(processes: int, devices: int, full: int, simulated: bool) -> list[str]:
    """What `processes` of `devices` each must be told, of a run that is meant for `full` devices."""
    simulate = [f"--mesh.simulated_devices={processes * devices}"] if simulated else []
    return [f"--mesh.full_devices={full}", *simulate] if processes * devices < full else []


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m launch.elastic", usage=USAGE, allow_abbrev=False,
                                     description="How many processes can train the run, where not all are there.")
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="that are there")
    parser.add_argument("--min-processes", type=int, required=True, metavar="K", help="fewer are not worth it")
    parser.add_argument("--devices", type=int, required=True, metavar="D", help="of each process")
    parser.add_argument("--full", type=int, required=True, metavar="F", help="devices that the run is meant for")
    options = parser.parse_args(argv[:at])
    from meshtrain import config, elastic       # jax takes seconds: only once the words are right
    fault = "none was tried"
    for count in range(options.processes, options.min_processes - 1, -1):
        try:
            run = config.load([*argv[at + 1:], *overrides(count, options.devices, options.full, False)], USAGE)
            elastic.check(run, count * options.devices)
        except config.ConfigError as error:
            fault = str(error)
            continue
        say.out(str(count))
        return 0
    say.err(f"error: no number of processes from {options.min_processes} to {options.processes} can train this run: {fault}")
    return 2


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"     # the GPUs are the run's
    say.begin()
    sys.exit(main(sys.argv[1:]))
