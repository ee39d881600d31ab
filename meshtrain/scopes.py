"""Name scopes that state facts about a program that the compiler does not know.

The model writes them while a program is traced; `cost.program` parses them out of the op_names of the compiled program.
"""
from __future__ import annotations

import dataclasses
import functools
import re


@dataclasses.dataclass(frozen=True)
class Scope:
    """A name scope with whole numbers. form: its text, with {} for each number."""
    form: str

    def write(self, *numbers: int) -> str:
        """Return the scope's text: TAKEN.write(2, 6) -> "taken_2_of_6"."""
        return self.form.format(*numbers)

    def parse(self, op_name: str) -> tuple[int, ...] | None:
        """Return the numbers of the innermost scope of this form in `op_name`; None without one."""
        matches = list(self.pattern.finditer(op_name))
        return tuple(map(int, matches[-1].groups())) if matches else None

    def parse_loop(self, op_name: str) -> tuple[int, ...] | None:
        """Return the numbers of the scope directly before the loop in the loop's path `op_name`; None without such a
        scope."""
        match = re.search(f"{self.pattern.pattern}/while$", op_name)
        return tuple(map(int, match.groups())) if match else None

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(self.form.replace("{}", r"(\d+)"))


TAKEN = Scope("taken_{}_of_{}")             # in how many of how many executions a condition holds
BALANCED_ROWS = Scope("balanced_rows_{}")   # rows of the experts' matmuls on a device if all experts have the same load
FURTHER_ROUNDS = Scope("further_rounds")    # the loop runs only if the loads of experts differ
HOST_MOMENTS = Scope("host_moments")        # copies of the optimizer's moments from and to the host's memory
AT_MOST = Scope("at_most_{}_trips")         # the largest trip count of a loop
SCOPES = (TAKEN, BALANCED_ROWS, FURTHER_ROUNDS, AT_MOST)


def is_scope(name: str) -> bool:
    """Return whether a part of an op_name is one of these scopes."""
    return any(scope.pattern.fullmatch(name) for scope in SCOPES)
