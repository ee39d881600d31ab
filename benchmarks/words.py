"""The arguments of a benchmark. --help shows its docstring. An unknown argument exits with one line and code 2."""
from __future__ import annotations

import argparse


class Parser(argparse.ArgumentParser):
    """doc: the benchmark's docstring, which begins with its usage."""

    def __init__(self, doc: str):
        super().__init__(usage=argparse.SUPPRESS, description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_alone(self, *names: str) -> None:
        """Add the hidden arguments that a benchmark passes only to its own processes."""
        self.add_argument("--alone", nargs=len(names) or "+", metavar=names or "WORD", help=argparse.SUPPRESS)

    def error(self, message: str):
        self.exit(2, f"error: {message}; --help says what it takes\n")
