"""The options of a command, without the import of what the command works with: jax takes a second.

A command's module declares its options beside its work. `read` executes only what the declaration needs.
"""
from __future__ import annotations

import __future__
import ast
import importlib.util
from pathlib import Path

from meshtrain.config import Command

TABLE = "COMMAND"


def read(module: str) -> tuple[Command | None, str]:
    """Return (the options of a command, the docstring of its module). The options are None if it has only keys.

    module: its full name. Only statements at the top of the module run that the options need, by the names in them:
    imports, constants and functions.
    """
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin, module
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    statements = [part for statement in tree.body for part in _split(statement)]
    binding = {name: statement for statement in statements for name in _names_bound_by(statement)}
    wanted, needed = [TABLE], set()
    while wanted:
        if (statement := binding.get(wanted.pop())) and statement not in needed:
            needed.add(statement)
            wanted += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    space: dict = {"__name__": module}
    body = [statement for statement in statements if statement in needed]
    exec(compile(ast.Module(body, []), spec.origin, "exec", flags=__future__.annotations.compiler_flag), space)
    return space.get(TABLE), ast.get_docstring(tree, clean=False) or ""


def text(module: str) -> str:
    """Return the text of --help of a command that has options. module: as in `read`."""
    command, about = read(module)
    assert command, module
    return command.help(about)


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """Return an import as one statement for each name, and any other statement as it is."""
    if isinstance(statement, ast.Import):
        parts: list[ast.stmt] = [ast.Import([alias]) for alias in statement.names]
    elif isinstance(statement, ast.ImportFrom):
        parts = [ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names]
    else:
        return [statement]
    return [ast.copy_location(part, statement) for part in parts]


def _names_bound_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = (statement.targets if isinstance(statement, ast.Assign) else
               [statement.target] if isinstance(statement, ast.AnnAssign) else [])
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
