"""Faults by operators: small changes of one function each, made from its syntax tree.

The faults of faults.toml were thought of; these were not. Every function of LEAST_LINES lines has some. A mutant that
no test kills is a hole in the suite, or code that does nothing.
"""
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LEAST_LINES = 10
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
            ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.BitOr: "&", ast.BitAnd: "|"}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
# Words and places of messages: the tests compare what a reader needs of them.
SILENT = {"say", "warn", "print", "tell", "log", "add_argument", "write_line"}
TEXTS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


class Mutant(NamedTuple):
    """Characters [start, end) of `file`, which are `old` in line `line`, the `within`-th of a function, become `new`.
    """
    file: str
    function: str
    line: int
    within: int
    start: int
    end: int
    old: str
    new: str

    def planted(self, text: str) -> str:
        """The text of the file with the mutant. ValueError: the text has changed since the mutant was made."""
        if text[self.start:self.end] != self.old:
            raise ValueError(f"{self.file} no longer has {self.old!r} at character {self.start}")
        return text[:self.start] + self.new + text[self.end:]

    @property
    def change(self) -> str:
        """What it is within its function."""
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.within}: {old} -> {new}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function} {self.change.partition(': ')[2]}"


def draw_mutants(root: Path, file: str, count: int) -> dict[str, list[Mutant]]:
    """Function -> up to `count` of its mutants, drawn by its name, for the functions of LEAST_LINES lines."""
    text = (root / file).read_text()
    offsets, tree = _offsets(text), ast.parse(text)
    found: dict[str, list[Mutant]] = {}
    for name, node in _functions(tree, ()):
        edits = sorted({edit for edit in _edits(node, text, offsets) if edit})
        random.Random(f"{file}::{name}").shuffle(edits)
        for start, end, new in edits:
            line = text.count("\n", 0, start) + 1
            mutant = Mutant(file, name, line, line - node.lineno, start, end, text[start:end], new)
            if len(found.get(name, ())) < count and _differs(mutant, text, offsets(node.lineno, 0)):
                found.setdefault(name, []).append(mutant)
    return found


def _functions(tree: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(tree):
        inner = names
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = (*names, child.name)
            if not isinstance(child, ast.ClassDef) and child.end_lineno - child.lineno + 1 >= LEAST_LINES:
                yield ".".join(inner), child
        yield from _functions(child, inner)


def _differs(mutant: Mutant, text: str, begin: int) -> bool:
    """Whether a mutant is Python and another program: `not in` within words may be neither.

    begin: where its function begins, the end of whose text stands behind the mutant.
    """
    end = text.find("\n", mutant.end)
    try:
        before, after = (ast.dump(ast.parse("if True:\n " + part.replace("\n", "\n "))) for part in (
            text[begin:end], mutant.planted(text)[begin:end + len(mutant.new) - len(mutant.old)]))
    except SyntaxError:
        return True         # the lines do not end a statement: Python tells when the mutant is planted
    return before != after


def _offsets(text: str):
    """(line, byte column) of the syntax tree -> position in the text."""
    lines, starts, at = text.splitlines(keepends=True), [], 0
    for line in lines:
        starts.append(at)
        at += len(line)
    return lambda line, column: starts[line - 1] + len(lines[line - 1].encode()[:column].decode())


def _edits(function: ast.FunctionDef, text: str, offsets) -> Iterator[tuple[int, int, str] | None]:
    """(start, end, what stands there instead)."""
    def span(node) -> tuple[int, int]:
        return offsets(node.lineno, node.col_offset), offsets(node.end_lineno, node.end_col_offset)

    def between(left, right, old: str, new: str) -> tuple[int, int, str] | None:
        start, end = span(left)[1], span(right)[0]
        if match := re.search(old, text[start:end]):
            return start + match.start(), start + match.end(), new
        return None

    for node in _walk(function):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
                yield between(left, right, r"not\s+in|is\s+not|[<>=!]=?|\bin\b|\bis\b", COMPARED[type(op)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
                if not isinstance(left, TEXTS[1:]) and not isinstance(right, TEXTS[1:]) and not (_is_text(left)
                                                                                               or _is_text(right)):
                    yield between(left, right, r"//|[-+*/|&]", COMPUTED[type(op)])
            case ast.BoolOp(op=op, values=[left, right, *_]):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield between(left, right, rf"\b{old}\b", new)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                start, end = span(test)
                yield start, end, f"not ({text[start:end]})"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SWAPPED:
                end = span(node.func)[1]
                yield end - len(name), end, SWAPPED[name]
            case ast.Expr(value=ast.Call() as call) if _called(call) not in SILENT:
                yield *span(node), "pass"
            case ast.Constant(value=bool() as value):
                yield *span(node), str(not value)
            case ast.Constant(value=int() as value) if value < 10:
                yield *span(node), str(value + 1)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield *span(node), f"({text[slice(*span(operand))]})"


def _walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a body without annotations, messages, docstrings and the tests of an assertion."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Assert)) or (
                isinstance(node, ast.Call) and _called(node) in SILENT):
            continue
        yield node
        todo += [child for name, value in ast.iter_fields(node)
                 if name not in ("annotation", "returns", "decorator_list")
                 for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
