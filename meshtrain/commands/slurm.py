"""Prints a Slurm job for a run: meshtrain slurm RUN.toml --nodes 8 > job.sbatch, then sbatch job.sbatch.

First checks that the run has a layout on these GPUs. Then prints launch/slurm.sbatch with these options, for this run,
this directory and this Python environment. Creates the directory of the job's output, because Slurm drops the output
if the directory is missing. Exit codes: 0 · 2 a mistake in the settings.
"""
from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from meshtrain import config, elastic, files, run_files
from meshtrain.config import ConfigError
from meshtrain.run import command, say, stops
from meshtrain.shipped import locate_shipped

SCRIPT = "launch/slurm.sbatch"
OUTPUT = "runs"
MOST_SIGNAL_S = 65535       # of sbatch --signal


def _word(what: str, pattern: str) -> Callable[[str], str]:
    """Return a parser for one value of an #SBATCH line. what: names the expected value in messages."""
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"is not {what}")
        return text
    return parse


def _signal(text: str) -> str:
    """Return the value of --signal. Raises: ValueError unless it is a stop signal of the tasks, and when to send it."""
    names = [signal.name.removeprefix("SIG") for signal in stops.SIGNALS]
    name, at, seconds = text.partition("@")
    if name.startswith("B:"):
        raise ValueError("is sent only to the batch script, and the tasks would not save; leave B: out")
    if name.removeprefix("SIG") not in names or not at or not re.fullmatch("[1-9][0-9]{0,4}", seconds) or (
            int(seconds) > MOST_SIGNAL_S):
        raise ValueError(f"is not SIGNAL@SECONDS, with a signal that stops a run ({', '.join(names)}) and 1 to "
                         f"{MOST_SIGNAL_S} seconds before the time limit")
    return f"{name.removeprefix('SIG')}@{seconds}"


NAME = _word("a name that Slurm accepts", r"[\w.,@+-]+")
COMMAND = config.Command("meshtrain.slurm", {
    "nodes": config.Option("hosts of the job", "N", "8", config.whole(1), required="it has no default"),
    "gpus-per-node": config.Option("GPUs of a host", "G", "8", config.whole(1), 8),
    "cpus-per-task": config.Option("CPU cores of each GPU's process", "C", "8", config.whole(1), 8),
    "partition": config.Option("partition of the cluster", "NAME", "gpu", NAME),
    "account": config.Option("account that is charged", "NAME", "my-project", NAME),
    "qos": config.Option("quality of service", "NAME", "normal", NAME),
    "time": config.Option("time limit: [DAYS-]HOURS:MINUTES:SECONDS, or minutes", "TIME", "24:00:00",
                          _word("a time of Slurm", r"(\d+-)?\d+(:\d+){0,2}"), "24:00:00"),
    "signal": config.Option("the signal on which all tasks save and stop, and how many seconds before the time limit "
                            "Slurm sends it: longer than a step and a checkpoint take", "SIGNAL@SECONDS", "USR1@600",
                            _signal, "TERM@300"),
    "container": config.Option("image that the tasks run in (pyxis)", "IMAGE", "registry/meshtrain:1",
                               _word("the name of an image", r"[\w./:@#+-]+")),
}, "RUN.toml", (1, 8))      # run_files.load reports a second run file with its own message


@command.entry(COMMAND, __doc__)
def main(own: config.Arguments) -> None:
    """Print the job. Raises: ConfigError if the run has no layout on these GPUs."""
    run, num_gpus = run_files.load(own.names + own.keys), own["nodes"] * own["gpus-per-node"]
    if run.mesh.simulated_devices:
        raise ConfigError(f"mesh.simulated_devices={run.mesh.simulated_devices} requests CPU devices, but the job has "
                          f"{num_gpus} GPUs; add --mesh.simulated_devices 0")
    config.mesh_sizes(run, num_gpus, enough="--nodes and --gpus-per-node whose product is {}")
    elastic.check(run, num_gpus)
    here = Path.cwd()
    files.attempt(lambda: (here / OUTPUT).mkdir(exist_ok=True),
                  f"{here / OUTPUT}, for the job's output, cannot be created",
                  "run the command in a writable directory", ConfigError)
    say.answer(job(own, run.run.name, here).rstrip("\n"))


def job(own: config.Arguments, name: str, here: Path) -> str:
    """Return the text of the job. name: the run's name. here: the directory in which the job runs. Raises:
    ConfigError."""
    python = Path(sys.executable).parent
    if not (python / "python").exists():
        raise ConfigError(f"the job calls the program `python` next to {sys.executable}, but there is none; create an "
                          f"environment with python3 -m venv .venv, and install the checkout there")
    if unfit := re.search(r"[\s\"'%$`\\]", f"{here}{python}"):
        raise ConfigError(f"{here} or {python} has {unfit[0]!r} in its name, which a job script cannot contain; use "
                          f"other directories")
    lines = locate_shipped(SCRIPT).read_text(encoding="utf-8").splitlines()
    printed = f"# meshtrain {shlex.join(['slurm', *own.words])}"
    text = "\n".join([lines[0], printed, "# Submit it with sbatch.", *lines[3:]])
    options = {"job-name": name.replace(" ", "_"), "output": f"{here}/{OUTPUT}/slurm-%j.out", "chdir": str(here),
               **{option: own[option] for option in ("nodes", "gpus-per-node", "cpus-per-task", "time", "partition",
                                                     "account", "qos") if own[option]}}
    for option, value in options.items():
        text = _replace_line(text, rf"#+SBATCH --{option}=.*", f"#SBATCH --{option}={value}")
    if "signal" in own:
        text = _replace_line(text, "#SBATCH --signal=.*", f"#SBATCH --signal={own['signal']}  # to all tasks, seconds "
                                                          "before the limit: more than a step and a checkpoint take;")
    text = _replace_line(text, r"\[ -n \"\$VIRTUAL_ENV.*", f"export PATH={python}:$PATH      # where this was printed")
    given = "[ $# -gt 0 ] || set --"
    text = _replace_line(text, f"{re.escape(given)} .*", f"{given} {shlex.join([*own.names, *own.keys])}")
    if own["container"]:
        text = _replace_line(text, "container=.*", f'container="--container-image={own["container"]} '
                                               f'--container-mounts={here}:{here} --container-workdir={here}"')
    return text + "\n"


def _replace_line(text: str, line: str, by: str) -> str:
    """Return the text with the only line that matches `line` (a pattern) replaced."""
    replaced, count = re.subn(f"^{line}$", lambda _: by, text, flags=re.MULTILINE)
    assert count == 1, f"{SCRIPT} has {count} lines {line}"
    return replaced
