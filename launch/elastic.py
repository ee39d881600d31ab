"""Finds how many processes (or hosts) with D devices each can train a run meant for F devices: meshtrain launch elastic
--processes N --devices D -- [RUN.toml].

Tries N processes, then fewer, down to K. Prints the first number that can train the run, followed by the options that
the processes then need. Exit codes: 0, or 2 with the reason if no number can. Starts no devices.
"""
from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

from meshtrain import config, run_files
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, say

OPTIONS = {
    "processes": config.Option("number of processes", "N", "2", config.whole(1), required="it has no default"),
    "min-processes": config.Option("continue with fewer processes, down to K, if the same one fails twice in a row or "
                                   "the cluster has no room for all; the mesh axis with -1 shrinks, the batch does not "
                                   "(default N)", "K",
                                   "1", config.whole(), 0),
}
COMMAND = config.Command("meshtrain.launch.elastic", {
    "processes": dataclasses.replace(OPTIONS["processes"], help="number of available processes"),
    "min-processes": config.Option("smallest number of processes that is tried", "K", "1", config.whole(1), 1),
    "devices": config.Option("devices of each process", "D", "8", config.whole(1), required="it has no default"),
    "full": config.Option("number of devices for which the run file is written (default: its mesh.full_devices; if "
                          "that is 0, all N processes run)", "F", "64", config.whole(1)),
}, launcher=True)
LONGEST_S = 300.0       # limit of `most`, which takes seconds


def overrides(processes: int, devices: int, full: int, simulated: bool) -> list[str]:
    """Return the options for `processes` with `devices` each, in a run meant for `full` devices."""
    simulate = [f"--mesh.simulated_devices={processes * devices}"] if simulated else []
    return [f"--mesh.full_devices={full}", *simulate] if processes * devices < full else []


def run_of(given: config.Arguments) -> Run:
    """Return the run of a launcher's command line. Raises: ConfigError."""
    count, least = given["processes"], given["min-processes"]
    if least > count:
        raise ConfigError(f"--min-processes {least} must be from 1 to --processes {count}")
    run = run_files.load(given.run)
    if run.distributed != run.distributed.without_place():
        raise ConfigError("[distributed] is set here by the launcher; leave it out of the run file and the command "
                          "line")
    if least not in (0, count) and -1 not in (run.mesh.data, run.mesh.fsdp):
        raise ConfigError("--min-processes needs a mesh axis that shrinks with the devices (-1), but there is none; "
                          "use mesh.data=-1 or mesh.fsdp=-1")
    return run


def most(words: Sequence[str], processes: int, least: int, devices: int, full: int) -> tuple[int, str]:
    """Return (number of processes that can train the run of these words, ""), or (0, the reason). The search runs in a
    subprocess, because it imports jax and a launcher does not. A time limit covers file systems that hang."""
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "meshtrain.launch.elastic", f"--processes={processes}", f"--min-processes={least}",
             f"--devices={devices}", f"--full={full}", "--", *words], capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return 0, f"the check whether fewer processes can train the run did not end within {LONGEST_S:g} s"
    printed = ran.stdout.split()
    if ran.returncode or not printed or not printed[0].isdecimal():
        return 0, (ran.stderr.strip().splitlines() or ["?"])[-1].removeprefix("error: ")
    return int(printed[0]), ""


@command.entry(COMMAND, __doc__)
def main(given: config.Arguments) -> None:
    """Print the number and its options. Raises: ConfigError if no number of processes can train the run."""
    words, processes, least, devices = given.run, given["processes"], given["min-processes"], given["devices"]
    run = run_files.load(words)
    full = given["full"] or run.mesh.full_devices

    def tell(count: int) -> None:
        say.out(" ".join([str(count), *overrides(count, devices, full, bool(run.mesh.simulated_devices))]))

    if processes * devices >= full:
        return tell(processes)
    with say.without_noise():
        from meshtrain import elastic       # jax takes seconds: only if something shrinks
    fault = "none was tried"
    for count in range(processes, least - 1, -1):
        try:
            elastic.check(run_files.load([*words, f"--mesh.full_devices={full}"]), count * devices)
        except ConfigError as error:
            fault = str(error)
            continue
        return tell(count)
    raise ConfigError(f"no number of processes from {least} to {processes} can train this run: {fault}")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"     # the GPUs are the run's
    say.begin()
    sys.exit(main(sys.argv[1:]))
