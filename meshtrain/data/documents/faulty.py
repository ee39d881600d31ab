"""Lines of conversations that are left out because they are faulty: data.faulty = "leave out".

Whether a line is left out depends on its file, the chat template and the tokenizer alone, so every host leaves out the
same lines. A file that cannot be read, or a template that fails for many lines, is an error all the same.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

FIRST = 8               # faulty lines that are reported
MOST_BY_TEMPLATE = 100  # at most one line of this many may fail in the template
EARLY = 1000            # lines after which a template that fails for half of them is an error at once


@dataclasses.dataclass(eq=False)
class LeftOut:
    """The faulty lines of a file. kept: number of lines that are not faulty. count: number of faulty lines.
    by_template: number of faulty lines for which the chat template fails. first: (place, reason) of the first faulty
    lines, in file order."""
    path: str
    kept: int = 0
    count: int = 0
    by_template: int = 0
    first: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def lines(self) -> int:
        return self.kept + self.count

    def add(self, place: str, fault: str, by_template: bool = False) -> None:
        """Leave out a line. place: "line 3" or "row 3 (from 0)". fault: the message of the fault."""
        self.count += 1
        self.by_template += by_template
        self.first = sorted([*self.first, (place, fault.removeprefix(f"{self.path}, {place}: "))],
                            key=lambda line: int(re.findall(r"\d+", line[0])[0]))[:FIRST]

    def check(self, template: str, ended: bool) -> None:
        """Check that the faults come from the lines, not from the template. template: the template's file. ended:
        whether all lines of the file have been read. Raises: ValueError if the template fails for too many lines, or if
        no line is left."""
        too_many = self.by_template * MOST_BY_TEMPLATE > self.lines if ended else \
            self.lines >= EARLY and self.by_template * 2 > self.lines
        if too_many:
            raise ValueError(f'{self.path}: the chat template {template} fails for {self.by_template:,} of '
                             f'{self.lines:,} lines, but data.faulty="leave out" is for single lines, at most 1 % of '
                             f'a file; fix the template, or name another as data.chat_template ({self.describe()[0]})')
        if ended and self.count and not self.kept:
            raise ValueError(f'{self.path}: all {self.count:,} lines are faulty, so data.faulty="leave out" leaves '
                             f'none; give a file with conversations ({self.describe()[0]})')

    def describe(self) -> list[str]:
        """Return the first faulty lines with their reasons, as messages."""
        return [f"{self.path}, {place}: {reason}" for place, reason in self.first]

    def as_saved(self) -> dict:
        """Return the entry for the note of the token cache, which may be moved with the file."""
        return {name: value for name, value in vars(self).items() if name != "path"}


def describe(where: str, files: Sequence[LeftOut]) -> list[str]:
    """Return messages about the faulty lines of a source's files; no message if no line is faulty. where: the source's
    section."""
    count, lines = sum(file.count for file in files), sum(file.lines for file in files)
    first = [line for file in files for line in file.describe()][:FIRST]
    head = f'{where}.paths: {count:,} of {lines:,} lines are faulty and left out (data.faulty="leave out")'
    return [f"{head}; the first {len(first)}:" if count > len(first) else f"{head}:", *first] if count else []
