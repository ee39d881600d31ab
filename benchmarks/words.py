"""The words of a benchmark: --help shows its docstring; what it does not know ends it with one line and exit code 2."""
from __future__ import annotations

import argparse


class Parser(argparse.ArgumentParser):
    """doc: the benchmark's docstring, which begins with its usage."""

    def __init__(self, doc: str):
        super().__init__(usage=argparse.SUPPRESS, description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_alone(self, *names: str) -> None:
        """What a benchmark says to a process of its own, and no one else."""
        self.add_argument("--alone", nargs=len(names) or "+", metavar=names or "WORD", help=argparse.SUPPRESS)

    def error(self, message: str):
        self.exit(2, f"error: {message}; --help says what it takes\n")
