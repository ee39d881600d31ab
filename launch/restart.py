"""Whether a run that has ended is started again, and when: one rule for every launcher.

Exit codes 0, 2 and 75 end a run: done, the user's mistake, stopped on request. Anything else starts it again, from its newest whole
checkpoint, after 5, 10, 20 … 300 s; after so many failures in a row without a newer checkpoint it is given up, with the last words
of each. This module starts and ends nothing, and imports no jax.

python -m launch.restart CODE --max-restarts R -- [RUN.toml] [--section.key value …] is the rule for a shell script, which keeps the
count in run.dir/restarts.json: it prints the seconds to wait and exits with 0 where the run is to be started again, else with 1.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain import config
from meshtrain.config import ConfigError, Run
from meshtrain.run import say, stops

USAGE = "python -m launch.restart CODE --max-restarts R -- [RUN.toml] [--section.key value ...]"
ENDS = (stops.DONE, stops.USER_ERROR, stops.STOPPED)
FIRST_S, LONGEST_S = 5.0, 300.0
KEPT, LINEAGE = "restarts.json", "local.json"     # in run.dir: the count of the command below, and which parts of the fast tier count


def newest(run: Run) -> int:
    """The step of the newest checkpoint of a run, of the fast tier what this host has; 0: none. One that is still being written has
    another name."""
    places = [Path(run.run.dir) / "checkpoints"]
    if run.checkpoint.local_dir:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):     # nothing is kept yet
            kept = json.loads((Path(run.run.dir) / LINEAGE).read_text())["run"]
            places += (Path(run.checkpoint.local_dir) / kept).glob("process-*")
    steps = [0]
    for place in places:
        with contextlib.suppress(OSError):
            steps += (int(name) for name in os.listdir(place) if name.isdecimal())
    return max(steps)


@dataclasses.dataclass
class Failures:
    """Those in a row without a newer checkpoint. said: the last words of each. step: of the newest checkpoint at the last of them."""
    run: Run
    most: int                   # restarts; 0: none, and nothing is said
    step: int = 0
    said: list[str] = dataclasses.field(default_factory=list)

    def wait_s(self, code: int, words: str = "") -> float | None:
        """After a start that ended with this code: seconds until the next one; None: the run has ended, or is given up, which is told.

        words: what it said last, in a line.
        """
        if code in ENDS:
            self.said = []
            return None
        reached = newest(self.run)
        if reached > self.step:
            self.said = []
        self.step = reached
        self.said.append(words or f"exit code {code}")
        count = len(self.said)
        if count > self.most:
            if self.most:
                say.err(f"given up after {count} failures in a row without a newer checkpoint than "
                        f"{f'that of step {reached}' if reached else 'none'}:")
                for number, one in enumerate(self.said, 1):
                    say.err(f"  {number}: {one}")
            return None
        wait_s = min(FIRST_S * 2 ** (count - 1), LONGEST_S)
        say.err(f"starting again from {f'step {reached}' if reached else 'the beginning'} in {wait_s:g} s (failure {count} without a "
                f"newer checkpoint; given up after {self.most + 1})")
        return wait_s


def main(argv: Sequence[str]) -> int:
    at = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="python -m launch.restart", usage=USAGE, allow_abbrev=False, description=(
        "Whether a run that has ended with CODE is started again: prints the seconds to wait and exits with 0, else exits with 1."))
    parser.add_argument("code", type=int, metavar="CODE", help="exit code of the run")
    parser.add_argument("--max-restarts", type=int, default=5, metavar="R", help="in a row without a newer checkpoint (default 5)")
    options = parser.parse_args(argv[:at])
    try:
        run = config.load(argv[at + 1:], USAGE)
        wait_s = _kept(run, options.max_restarts, options.code)
    except ConfigError as error:
        say.err(f"error: {error}")
        return 1
    if wait_s is None:
        return 1
    say.out(f"{wait_s:g}")
    return 0


def _kept(run: Run, most: int, code: int) -> float | None:
    """`Failures.wait_s`, with the count in run.dir. Raises: ConfigError where it cannot be kept: the restarts would have no end."""
    path = Path(run.run.dir) / KEPT
    failures = Failures(run, most)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):     # none yet, or torn by a kill
        kept = json.loads(path.read_text())
        failures.step, failures.said = int(kept["step"]), [str(words) for words in kept["said"]]
    wait_s = failures.wait_s(code)
    try:
        if wait_s is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"step": failures.step, "said": failures.said}))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; it is not started again") from None
    return wait_s


if __name__ == "__main__":
    say.begin()
    sys.exit(main(sys.argv[1:]))
