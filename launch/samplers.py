"""Run N samplers of a run on this machine: meshtrain launch samplers --samplers 2 -- RUN.toml.

For runs whose answers are drawn apart (rl.lag): each is `python -m meshtrain.sample`, with GPUs of its own. One that
fails is started again after 5, 10, 20 … 300 s; the others meanwhile draw what it had begun. launch.local starts this
beside the trainer. Exit codes: 0 the run is finished · 2 the user's mistake · 75 stopped on request.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from meshtrain.launch import restart, supervise
from meshtrain import config
from meshtrain.cluster import gpus
from meshtrain.config import ConfigError, Run
from meshtrain.run import command, say, stops

OPTIONS = {
    "samplers": config.Option("separate processes that generate answers (rl.lag)", "N", "2", config.whole(), 0),
    "sampler-gpus": config.Option("GPUs per sampler (default 1; 0 with mesh.simulated_devices)", "G", "1",
                                  config.whole()),
}
COMMAND = config.Command("meshtrain.launch.samplers", {**OPTIONS, "first": config.Option(
    "number of the first sampler, in messages", "I", "4", config.whole(), 0)}, launcher=True)
LOOK_S, ENDS_S, LASTED_S = 0.2, 10.0, 600.0


def asked(run: Run, given: config.Arguments) -> tuple[int, int]:
    """(number of samplers, GPUs of each). Raises: ConfigError where they do not fit the run."""
    count, simulated = given["samplers"], run.mesh.simulated_devices
    each = given["sampler-gpus"] if "sampler-gpus" in given else 0 if simulated else 1
    if count and not run.rl.lag:
        raise ConfigError(f"--samplers {count}: with rl.lag=0 the trainer generates the answers itself; use rl.lag=1, "
                          f"or leave it out")
    if run.rl.lag and simulated and each:
        raise ConfigError(f"--sampler-gpus {each}: samplers on simulated devices use no GPU; leave out "
                          f"--sampler-gpus")
    if count and not simulated and not each:
        raise ConfigError("--sampler-gpus 0 leaves the samplers without devices; use 1 or more")
    return count, each


def words(count: int, each: int, rest: Sequence[str], first: int = 0) -> list[str]:
    """The command line of this launcher, behind python."""
    return ["-m", "meshtrain.launch.samplers", f"--samplers={count}", f"--sampler-gpus={each}", f"--first={first}",
            "--", *rest]


def divided(run: Run, count: int, each: int, environ: Mapping[str, str]) -> tuple[dict, dict]:
    """(environment of the trainer, of the samplers): the last GPUs are theirs. Raises: ConfigError."""
    if not count or not each:
        return dict(environ), dict(environ)
    found = gpus.visible(environ)
    if count * each >= len(found):
        raise ConfigError(f"--samplers {count} of --sampler-gpus {each} leave none of {len(found)} GPUs to the "
                          f"trainer; use fewer")
    cut = len(found) - count * each
    of = lambda own: {**environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}
    return of(found[:cut]), of(found[cut:])


@command.entry(COMMAND, __doc__)
def main(given: config.Arguments) -> int:
    run = config.load(given.run)
    count, each = asked(run, given)
    if not count:
        raise ConfigError("--samplers is missing: nothing says how many; add e.g. --samplers 2")
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"} | ({} if each else {"CUDA_VISIBLE_DEVICES": ""})
    found = gpus.visible(environ) if each else []
    if count * each > len(found):
        raise ConfigError(f"--samplers {count} of --sampler-gpus {each} need {count * each} GPUs, and {len(found)} are "
                          f"there; use fewer")
    own = [environ | ({"CUDA_VISIBLE_DEVICES": ",".join(found[i * each:(i + 1) * each])} if each else {})
           for i in range(count)]
    simulated = ["--mesh.simulated_devices=1"] * bool(run.mesh.simulated_devices)
    return _run([sys.executable, "-m", "meshtrain.sample", run.run.dir,
                 f"--run.compilation_cache={run.run.compilation_cache}", *simulated], own, given["first"])


def _run(argv: Sequence[str], environs: Sequence[Mapping[str, str]], first: int) -> int:
    """Runs them until all have ended for good. Single-threaded: it forks all the time."""
    asked_by: list[int] = []
    for number in stops.heeded():
        signal.signal(number, lambda number, frame: asked_by.append(number))
    running: dict[int, subprocess.Popen] = {}
    starts, began, failures, codes = [-1] * len(environs), [0.0] * len(environs), [0] * len(environs), {}
    begins = dict.fromkeys(range(len(environs)), 0.0)
    while (running or begins) and not asked_by:
        for index in [index for index, at in begins.items() if time.monotonic() >= at]:
            del begins[index]
            began[index], starts[index] = time.monotonic(), starts[index] + 1
            running[index] = supervise.begin(argv, {**environs[index], "MESHTRAIN_START": str(starts[index])},
                                             stdout=subprocess.DEVNULL)
        for index in [index for index, one in running.items() if one.poll() is not None]:
            pid, code = running[index].pid, running.pop(index).returncode
            if code in restart.ENDS:
                codes[index] = code
                continue
            failures[index] = 1 if time.monotonic() - began[index] > LASTED_S else failures[index] + 1
            wait_s = restart.pause_s(failures[index])
            begins[index] = time.monotonic() + wait_s
            say.err(f"sampler {first + index} (pid {pid}) {_ending(code)}; it is started again in {wait_s:g} s, and "
                    f"others draw what it had begun")
        time.sleep(LOOK_S)
    end(running.values(), ENDS_S)
    return stops.STOPPED if asked_by else max(codes.values(), default=stops.DONE)


def end(processes: Collection[subprocess.Popen], limit_s: float) -> None:
    """SIGTERM, and after limit_s SIGKILL."""
    for one in processes:
        one.terminate()
    until = time.monotonic() + limit_s
    for one in processes:
        try:
            one.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
