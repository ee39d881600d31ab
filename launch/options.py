"""The words before --: what every launcher of several processes is told, and the mistakes in it."""
from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence


def parser(name: str, usage: str, description: str, fewer: str) -> argparse.ArgumentParser:
    """fewer: when the launcher goes on with fewer processes."""
    made = argparse.ArgumentParser(prog=f"python -m launch.{name}", usage=usage, description=description,
                                   allow_abbrev=False)
    made.add_argument("--processes", type=int, required=True, metavar="N", help="how many processes, at least 1")
    made.add_argument("--max-restarts", type=int, default=0, metavar="R",
                      help="a run that fails is started again from its newest "
                      "checkpoint, so many times in a row without a newer one (default 0)")
    made.add_argument("--min-processes", type=int, default=0, metavar="K",
                      help=f"goes on with fewer, down to K, {fewer}; the axis of -1 "
                      "shrinks, and the batch stays (default N)")
    return made


def parse(of: argparse.ArgumentParser, own: Sequence[str], least: Mapping[str, int] = {}) -> argparse.Namespace:
    """What was given; a mistake is told, and ends the command with 2. least: option -> its smallest number."""
    parsed = known(of, own, least)
    if parsed.processes < 1:
        of.error(f"--processes {parsed.processes} starts nothing; use at least 1")
    if parsed.max_restarts < 0:
        of.error(f"--max-restarts {parsed.max_restarts} is no number of starts; use 0 for none, or e.g. 5")
    if parsed.min_processes and not 1 <= parsed.min_processes <= parsed.processes:
        of.error(f"--min-processes {parsed.min_processes} must be from 1 to --processes {parsed.processes}")
    return parsed


def known(of: argparse.ArgumentParser, own: Sequence[str], least: Mapping[str, int] = {}) -> argparse.Namespace:
    """The same of a parser of one's own."""
    parsed, unknown = of.parse_known_args(own)
    if unknown:
        first, value = next(iter(vars(parsed).items()))
        of.error(f"{unknown[0]} is no option of the launcher; the run file and its options stand behind --, e.g. "
                 f"--{first} {value} -- {' '.join(unknown)}")
    for option, smallest in least.items():
        value = getattr(parsed, option)
        if value is not None and value < smallest:
            of.error(f"--{option.replace('_', '-')} {value} is too few; use at least {smallest}")
    return parsed
