"""Maps an instruction of a compiled program to lines of Python, and to the part of the step that computes it.

XLA prints a table of stack frames above the program, and an instruction names its innermost frame. Attention is found
by the scope "attention" in its JAX path, because jax loses the frames inside it. Recurrences are found by their scope
and files, the optimizer by its files and those of optax. Programs of other projects have the same scopes if their code
uses `jax.named_scope`.
"""
from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshtrain.cost.program import hlo

ATTENTION, RECURRENCE, OPTIMIZER = "attention", "recurrence", "optimizer"
_SCOPES = re.compile(rf"(?:^|[/(])({ATTENTION}|{RECURRENCE})(?:[/)]|$)")
_RECURRENCE_FILES = re.compile(r"meshtrain/(kernels/(recurrence\w*|convolution)|parallel/context/recurrence)\.py$")
_OPTIMIZER_FILES = re.compile(r"meshtrain/training/(optimizer|adafactor|muon|offload)\.py$")
_STEP_FILE = re.compile(r"meshtrain/training/step\.py$")
_TRACING_FILE = re.compile(r"(^|/)meshtrain/inspection/functions\.py$")
_OURS = re.compile(r"(^|/)(meshtrain/.*)$")
_OPTAX_FILES = re.compile(r"/optax/(?!losses/|_src/loss)")
# Files of Python, of installed packages and of notebooks' kernels.
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
_JAX_FILES = re.compile(r"-packages/jax(lib)?/")


@dataclass(frozen=True)
class SourceFrame:
    file: str
    line: int

    @property
    def ours(self) -> str | None:
        """Return the file's path inside this project; None for a file of another package."""
        match = _OURS.search(self.file) if not _JAX_FILES.search(self.file) else None
        return match.group(2) if match else None

    @property
    def name(self) -> str:
        """Return 'model/layers.py:55' for a file of this project, else the last two parts of the path and the line."""
        ours = self.ours
        path = ours.removeprefix("meshtrain/") if ours else "/".join(self.file.split("/")[-2:])
        return f"{path}:{self.line}"


def line_of(frames: Iterable[SourceFrame]) -> str:
    """Return the line of the innermost frame in this project or outside installed packages, for example
    'model/layers.py:55'; else the line of the innermost frame outside jax; "" without such a frame. frames: innermost
    first. If `inspection.functions` traces a function, only the function's own frames count; otherwise every line of an
    installed library would be the line that calls `mt.inspect`."""
    frames = list(itertools.takewhile(lambda frame: not _TRACING_FILE.search(frame.file), frames))
    own = [frame for frame in frames if frame.ours or not _INSTALLED.search(frame.file)]
    installed = [frame for frame in frames if not _JAX_FILES.search(frame.file)]
    return next((frame.name for frame in (*own, *installed)), "")


@dataclass(frozen=True)
class Sources:
    """The stack frames of a program. frames: frame number → (SourceFrame, the number of the caller's frame)."""
    frames: Mapping[int, tuple[SourceFrame, int]]

    @classmethod
    @functools.lru_cache(maxsize=1)      # one program is read for several answers
    def of(cls, text: str) -> Sources:
        """Parse the header of `compiled.as_text()`. In programs without these tables, instructions have source_file and
        source_line instead."""
        files = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.MULTILINE)}

        def pick(table: str, first: str, second: str) -> dict[int, tuple[int, int]]:
            row = rf"^(\d+) \{{.*?\b{first}=(\d+).*?\b{second}=(\d+)"
            return {int(n): (int(a), int(b)) for n, a, b in re.findall(row, _table(text, table), re.MULTILINE)}
        places = pick("FileLocations", "file_name_id", "line")
        stack = pick("StackFrames", "file_location_id", "parent_frame_id")
        # XLA prints the caller's number plus one.
        return cls({n: (SourceFrame(files.get(places[at][0], ""), places[at][1]), caller - 1)
                    for n, (at, caller) in stack.items() if at in places})

    def stack(self, ins: hlo.Instruction) -> list[SourceFrame]:
        """Return the frames of an instruction, innermost first; [] if XLA dropped them."""
        if match := re.search(r"\bstack_frame_id=(\d+)", ins.attrs):
            number, out = int(match.group(1)), []
            while number in self.frames:
                frame, number = self.frames[number]
                out.append(frame)
            return out
        file, line = re.search(r'source_file="([^"]*)"', ins.attrs), re.search(r"source_line=(\d+)", ins.attrs)
        return [SourceFrame(file.group(1), int(line.group(1)))] if file and line else []

    def part(self, ins: hlo.Instruction) -> str | None:
        """Return the part of the step: attention, recurrence (with its convolution), optimizer, or "" for all else.
        Return None for an instruction without metadata."""
        frames = self.stack(ins)
        ours = [frame.ours for frame in frames if frame.ours]
        if scope := scope_of(ins.op_name):
            return scope
        if ours and _RECURRENCE_FILES.search(ours[0]):
            return RECURRENCE
        if any(_OPTIMIZER_FILES.search(file) for file in ours) or (ours and _STEP_FILE.search(ours[0])):
            return OPTIMIZER        # step.py calls the gradients; what it computes itself is the update
        if any(_OPTAX_FILES.search(frame.file) for frame in frames):
            return OPTIMIZER
        return "" if frames or ins.op_name.startswith("jit(") else None

    def line(self, ins: hlo.Instruction) -> str:
        """Return `line_of` the instruction's frames."""
        return line_of(self.stack(ins))


def scope_of(op_name: str) -> str:
    """Return the scope that a JAX path, shortened or not, is in: attention, recurrence or ""."""
    match = _SCOPES.search(op_name)
    return match[1] if match else ""


def _table(text: str, name: str) -> str:
    """Return the lines below a heading, up to the next empty line."""
    match = re.search(rf"^{name}\n(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    return match.group(1) if match else ""
