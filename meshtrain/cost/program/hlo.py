"""Parses optimized HLO text: computations, their instructions, and how often a step executes each.

XLA prints a program as named computations that call each other (loop bodies, fusions, async wrappers). `walk` follows
the calls from the entry and multiplies loop trip counts. This module knows neither meshes nor collectives; its caller
selects instructions (`audit`).

Source: the grammar of `HloInstruction::ToString` (openxla/xla); text of jax 0.10.2 and 0.12 on CPU and GPU.
"""
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from meshtrain import scopes

Shape = tuple[str, tuple[int, ...]]  # (dtype as HLO spells it, dimensions)

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([0-9,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")


def dtype_bits(dtype: str) -> int:
    """Return the bits of one element: f8e4m3fn → 8, s4 → 4, pred → 8 (stored as a byte). Raises: ValueError for an
    unknown dtype."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width:
        raise ValueError(f"HLO dtype {dtype!r} has no known width; add it to _BITS")
    return int(width.group(1))


def shape_bytes(shape: Shape) -> int:
    """Return the bytes of one array. Elements smaller than a byte are packed."""
    dtype, dims = shape
    return math.ceil(math.prod(dims) * dtype_bits(dtype) / 8)


def shapes(type_text: str) -> list[Shape]:
    """Return all arrays of an HLO type, with tuples flattened: '(f32[2,3]{1,0}, s32[])' → [('f32', (2, 3)), ('s32',
    ())]."""
    return [(d, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n)) for d, dims in _ARRAY.findall(type_text)]


@dataclass(frozen=True)
class Instruction:
    name: str
    type_text: str
    op: str
    args: str
    attrs: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the operands, in order."""
        parts = re.sub(r"/\*.*?\*/", "", self.args)  # /*index=5*/ marks every fifth operand
        return tuple(re.findall(r"%([\w.\-]+)", parts))

    @cached_property
    def op_name(self) -> str:
        """Return the JAX path of this instruction, for example 'jit(step)/while/body/…/dot_general', or '' if it has
        none."""
        match = re.search(r'op_name="([^"]*)"', self.attrs)
        return match.group(1) if match else ""

    @cached_property
    def branch_share(self) -> Fraction:
        """Return the fraction of executions in which a conditional runs its non-trivial branch, from the annotation
        `scopes.TAKEN` in op_name. Without annotation it is 1, an upper bound."""
        numbers = scopes.TAKEN.parse(self.op_name) if self.op == "conditional" else None
        return Fraction(*numbers) if numbers else Fraction(1)

    @property
    def further_rounds(self) -> bool:
        """Whether this instruction is a loop that runs only if experts are unbalanced."""
        return self.op == "while" and scopes.FURTHER_ROUNDS.parse_loop(self.op_name) is not None

    @cached_property
    def target(self) -> str:
        """Return the target of a custom call, for example '__cublas$gemm'; '' for other instructions."""
        match = re.search(r'custom_call_target="([^"]*)"', self.attrs) if self.op.startswith("custom-call") else None
        return match.group(1) if match else ""

    @cached_property
    def callees(self) -> tuple[str, ...]:
        """Return the names of the computations that one execution of this instruction runs. A conditional lists all
        branches."""
        if self.op.endswith(("-done", "-update")):  # names the computation that its -start has run already
            return ()
        attrs = self.attrs.split("metadata={")[0]
        names = re.findall(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
                           attrs)
        for several in re.findall(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}", attrs):
            names += [n.strip().lstrip("%") for n in several.split(",") if n.strip()]
        return tuple(names)

    def attr(self, key: str) -> str | None:
        """Return the value of the attribute key=%value, a computation or a word. Return None if absent."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attrs.split("metadata={")[0])
        return match.group(1) if match else None

    def required(self, key: str) -> str:
        """Return the value of an attribute that this instruction always has."""
        value = self.attr(key)
        assert value is not None, f"{self.name} has no {key}"
        return value

    def ints(self, key: str) -> tuple[int, ...]:
        """Return the integers of the attribute key={1,2}; () if absent."""
        match = re.search(rf"\b{key}=\{{([\d,]*)\}}", self.attrs)
        return tuple(int(n) for n in match.group(1).split(",") if n) if match else ()


Computation = dict[str, Instruction]


def root(scope: Computation) -> Instruction:
    return next(ins for ins in scope.values() if ins.is_root)


@dataclass(frozen=True)
class HloModule:
    computations: dict[str, Computation]
    entry: str

    def operand_shapes(self, computation: str, instruction: Instruction) -> list[Shape]:
        """Return the shapes of the arrays that an instruction reads, in operand order, with tuples flattened."""
        scope = self.computations[computation]
        return [s for name in instruction.operands for s in shapes(scope[name].type_text)]


@functools.lru_cache(maxsize=1)      # one program is read for several answers
def parse(text: str) -> HloModule:
    """Parse `compiled.as_text()`. Raises: ValueError if the text has no entry computation."""
    computations: dict[str, Computation] = {}
    scope, entry = None, None
    for line in text.splitlines():
        if not line.startswith((" ", "}", "HloModule")) and (head := _COMPUTATION.match(line)):
            scope = computations.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            scope = None
        elif scope is not None and (match := _INSTRUCTION.match(line)):
            is_root, name, rest = match.groups()
            scope[name] = Instruction(name, *_split(rest), is_root=bool(is_root))
    if entry is None:
        raise ValueError("no ENTRY computation: pass the text of a compiled program, compiled.as_text()")
    return HloModule(computations, entry)


def _split(rest: str) -> tuple[str, str, str, str]:
    """Split '(f32[2]{0}, s32[]) op(%a, %b), attrs' into (type, op, args, attrs). Types and args may nest
    parentheses."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_text, rest = rest[:end], rest[end:].lstrip()
    op = rest[: rest.index("(")]
    close = _closing(rest, len(op))
    return type_text, op, rest[len(op) + 1 : close], rest[close + 1 :]


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO: {text[:120]!r}")


# ---- execution counts: the walk down the calls -----------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """One instruction on one call path."""

    computation: str
    instruction: Instruction
    trips: int  # executions per step
    in_branch: bool  # inside a conditional, each of whose branches counts with the fraction `Instruction.branch_share`


def walk(module: HloModule, wanted: Callable[[Instruction], bool]) -> tuple[list[Visit], list[str]]:
    """Return (a Visit for every wanted instruction with its executions per step, the loops of unknown trip count).

    Loops of further rounds count 0 trips. Loops of unknown trip count count 1 (`find_trips`). Skips loops without a
    wanted instruction.
    """
    holds = _holders(module, wanted)
    visits, unknown = [], []

    def visit(name, trips, in_branch):
        for ins in module.computations[name].values():
            if wanted(ins):
                visits.append(Visit(name, ins, trips, in_branch))
            called = [c for c in ins.callees if c in holds]
            if called and ins.op == "while":
                n = 0 if ins.further_rounds else find_trips(ins)
                if n is None:
                    n = 1
                    unknown.append(f"{ins.name} in {name}" + (f" ({ins.op_name})" if ins.op_name else ""))
                for part, runs in ((ins.attr("body"), n), (ins.attr("condition"), n + 1)):
                    if part in called and (runs or ins.further_rounds):
                        visit(part, trips * runs, in_branch)
            else:
                branch = ins.op == "conditional"
                for part in called:
                    visit(part, round(trips * ins.branch_share), in_branch or branch)

    visit(module.entry, 1, False)
    return visits, sorted(set(unknown))


def _holders(module: HloModule, wanted) -> set[str]:
    """Return the names of computations that contain a wanted instruction or call a computation that does."""
    @functools.cache
    def holds(name):    # HLO calls do not recurse
        instructions = module.computations.get(name, {}).values()
        return any(wanted(i) for i in instructions) or any(holds(c) for i in instructions for c in i.callees)

    return set(filter(holds, module.computations))


# ---- loops -----------------------------------------------------------------------------------------------------------

_SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier",
               "optimization-barrier")


def find_trips(ins: Instruction) -> int | None:
    """Return a loop's number of iterations from XLA's known_trip_count, else the maximum from the annotation
    `scopes.AT_MOST`, else None.

    XLA notes the count of every lax.scan, of every fori_loop with constant bounds, and of most while_loops that count
    up to a constant.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', ins.attrs)
    numbers = known.groups() if known else scopes.AT_MOST.parse_loop(ins.op_name)
    return int(numbers[0]) if numbers else None


def find_changed(module: HloModule, body: str) -> list[Shape]:
    """Return the shapes of the arrays in a loop's carried tuple that its body changes."""
    scope = module.computations[body]
    out = []
    for i, name in enumerate(root(scope).operands):
        source = scope[name]
        while source.op in _SAME_VALUE:
            source = scope[source.operands[0]]
        passed = (source.op == "get-tuple-element" and int(source.required("index")) == i
                  and scope[source.operands[0]].op == "parameter")      # not of a loop or a call inside
        if not passed:
            out += shapes(scope[name].type_text)
    return out
