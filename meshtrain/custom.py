"""A run's own code, given by path: "file.py:name". This module knows no key, no jax and no model.

A file is checked by its syntax tree, without being executed, and executed once for each content. A digest of the file,
and of what it imports from its own folder, identifies the content. Copies in run.dir serve later commands.
"""
from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import itertools
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshtrain import files


MODULE = "meshtrain_custom_"     # begins the name of each executed file as a module
_DIGEST = re.compile("[0-9a-f]{16}")
ERRORS = (Exception, SystemExit)        # that code of a run's own may raise; exit codes are those of the commands


def is_path(value: object) -> bool:
    """Return whether a value names code of the run's own."""
    return isinstance(value, str) and ".py:" in value and value.rpartition(":")[2].isidentifier()


def split(value: str) -> tuple[Path, str]:
    """Return (file, name in the file)."""
    path, _, name = value.rpartition(":")
    return Path(path).expanduser(), name


# ---- checks by the syntax tree ---------------------------------------------------------------------------------------


def find_faults(key: str, value: str) -> Iterator[str]:
    """Yield the reasons why the file cannot be read or does not define the name, without executing the file."""
    (path, name), said = split(value), f'{key}="{value}"'
    try:
        there = _names(path)
        digest(path)
    except (OSError, SyntaxError, ValueError) as error:
        why = f"{error.msg} in line {error.lineno}" if isinstance(error, SyntaxError) else (
            getattr(error, "strerror", None) or error)
        yield (f"{said}: {path} cannot be read: {why}"
               f"{_find_remedy(path) or f'; give a Python file, relative to the current directory, {Path.cwd()}'}")
        return
    if name not in there:
        near = difflib.get_close_matches(name, there, 1)
        yield f"{said}: {path} has no {name}; " + (
            f"did you mean {near[0]}?" if near else f"it has {', '.join(there) or 'no names'}")


def count_arguments(value: str) -> int:
    """Return the number of a function's arguments, without executing its file. An argument with a default does not
    count, unless it is the first. Raises: OSError, SyntaxError."""
    path, name = split(value)
    statement = _names(path).get(name)
    node = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else statement
    if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
        return 1
    given = len(node.args.posonlyargs + node.args.args)
    return max(given - len(node.args.defaults), min(given, 1))


def _names(path: Path) -> dict[str, ast.stmt]:
    """Return the names that a file's statements define, also those of an `if`, `try` or `with`, with their
    statements."""
    there: dict[str, ast.stmt] = {}
    blocks = [ast.parse(path.read_bytes()).body]
    for node in itertools.chain.from_iterable(blocks):
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            blocks += [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(node, "handlers", [])]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            there[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            there |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target)]
            there |= {name.id: node for name in names if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return there


# ---- contents --------------------------------------------------------------------------------------------------------


def read_sources(path: Path) -> dict[str, bytes]:
    """Return name -> content of the file and of the files that it imports from its own folder. Names are relative to
    the folder; the file's own name is first. Raises: OSError, SyntaxError."""
    contents: dict[str, bytes] = {}

    def visit(name: str) -> None:
        contents[name] = (path.parent / name).read_bytes()
        for node in ast.walk(ast.parse(contents[name])):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
                words = f"{before}{alias.name}".split(".")
                places = ["/".join(words[:n]) for n in range(1, len(words) + 1)]
                for other in (f"{place}{end}" for place in places for end in (".py", "/__init__.py")):
                    if other not in contents and (path.parent / other).is_file():
                        visit(other)
    visit(path.name)
    return contents


def digest(path: Path) -> str:
    """Return a hash of `read_sources`, 16 hexadecimal digits. The file's own name does not count. Raises: as
    `read_sources`."""
    (_, own), *beside = read_sources(path).items()
    contents = [("", own), *sorted(beside)]
    return hashlib.sha256(b"".join(f"{name} {len(text)} ".encode() + text for name, text in contents)).hexdigest()[:16]


class Misuse(ValueError):
    """Code of the run's own is not what its key requires, or raised an error."""


def load(value: str) -> Any:
    """Return what the value names. The file is executed once for each content. Raises: Misuse, also for a copy of
    `keep` with another content than the run had."""
    path, name = split(value)
    try:
        content = digest(path)
        if _name_copy(path) not in ("", content):
            raise ValueError("the run's copy has changed")
        return getattr(_execute(str(path), content), name)
    except Misuse:
        raise
    except (OSError, SyntaxError, ValueError, AttributeError) as error:
        raise Misuse(f"{value} cannot be loaded: {getattr(error, 'strerror', None) or error}"
                     f"{_find_remedy(path)}") from error


def _name_copy(path: Path) -> str:
    """Return the digest of the file that `keep` has copied to this path; "" for any other path."""
    return path.parent.name if _DIGEST.fullmatch(path.parent.name) else ""


def _find_remedy(path: Path) -> str:
    """Return what to do about a copy that cannot be used; "" for any other path."""
    content = _name_copy(path)
    return f"; put back the file with which the run was trained, of digest {content} in run.code" * bool(content)


def call(key: str, value: str, contract: str, *arguments: object) -> Any:
    """Load what the value names, and call it. key: the key of the run file; contract: what the key requires; both for
    messages. Raises: ValueError, also for the errors of the called code."""
    called = load(value)
    try:
        return called(*arguments)
    except ERRORS as error:
        given = ", ".join(type(argument).__name__ for argument in arguments)
        raise refuse(key, value, contract, f"was called with ({given}) and raised {tell(error)}") from error


def refuse(key: str, value: str, contract: str, what: str) -> Misuse:
    """Return the error for code of the run's own that is not what its key requires. what: a verb and its object."""
    return Misuse(f'{key}="{value}" {what}; give {contract}')


@contextlib.contextmanager
def blame(parts: Iterable[tuple[str, str, str]]) -> Iterator[None]:
    """Turn an error that passed code of the run's own into a Misuse with its key. parts: (key, value, contract) of the
    run. Any other error is raised unchanged."""
    try:
        yield
    except ERRORS as error:
        if not (frames := _find_frames(error)):
            raise
        code = frames[0][0].f_code
        known = [part for part in parts if split(part[1])[0] == Path(code.co_filename)]
        part = next((part for part in known if split(part[1])[1] == code.co_qualname.split(".")[0]), *known[:1])
        raise refuse(*part, f"raised {tell(error)}") from error


def find_misuse(error: BaseException) -> str:
    """Return the message of an error that is a Misuse, or that code of the run's own raised; "" for any other error."""
    return str(error) if isinstance(error, Misuse) else tell(error) if _find_frames(error) else ""


def tell(error: BaseException) -> str:
    """Return one line about an error in code of the run's own: its type, the last line of such code that was executed,
    and the first sentence of its message."""
    frames = _find_frames(error)
    place = f" in line {frames[-1][1]} of {frames[-1][0].f_code.co_filename}" if frames else ""
    sentence = (str(error).splitlines() or [""])[0].split(". ")[0].rstrip(".")
    return f"{type(error).__name__}{place}{sentence and ': '}{textwrap.shorten(sentence, 160, placeholder=' …')}"


def _find_frames(error: BaseException) -> list[tuple[types.FrameType, int]]:
    """Return (frame, line) of code of the run's own that an error passed, the outermost first."""
    return [found for found in traceback.walk_tb(error.__traceback__)
            if str(found[0].f_globals.get("__name__")).startswith(MODULE)]


@functools.cache
def _execute(path: str, content: str) -> types.ModuleType:
    """Return the executed file. content: the digest of the file. Modules in the file's folder hide other modules of the
    same name, and are hidden from all other code."""
    own, *beside = read_sources(Path(path)).items()
    module = types.ModuleType(f"{MODULE}{content}")
    module.__file__ = path
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in beside}
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.modules[module.__name__] = module       # dataclasses look their module up
    sys.path.insert(0, str(Path(path).parent.resolve()))
    importlib.invalidate_caches()
    try:
        exec(compile(own[1], path, "exec"), module.__dict__)
    except ERRORS as error:
        raise Misuse(f"{path} raised {tell(error)}; it is executed before a run starts") from error
    finally:
        sys.path.pop(0)
        sys.dont_write_bytecode = writes
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
    return module


# ---- copies in run.dir -----------------------------------------------------------------------------------------------


def describe(values: Iterable[str]) -> tuple[str, ...]:
    """Return a line "FILE DIGEST" for each file that the values name. A file that cannot be read has no line."""
    lines = []
    for path in sorted({split(value)[0] for value in values}):
        try:
            lines.append(f"{path} {digest(path)}")
        except (OSError, SyntaxError, ValueError):      # `find_faults` tells it
            continue
    return tuple(lines)


def keep(values: Iterable[str], directory: Path) -> None:
    """Copy the files that the values name to directory/DIGEST/. Files that already exist there are not written
    again."""
    for path in {split(value)[0] for value in values}:
        for name, content in read_sources(path).items():
            place = directory / digest(path) / name
            if not place.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                files.replace(place, content)


def identify(value: object, lines: Sequence[str]) -> object:
    """Return the value of a key with the digests of files in place of their names, so that content is compared. lines:
    the result of `describe`."""
    digests = dict(line.rpartition(" ")[::2] for line in lines)
    if isinstance(value, dict):
        return {key: identify(part, lines) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and set(value) == set(lines):
        return set(digests.values())
    if not is_path(value):
        return value
    path, name = split(str(value))
    return digests.get(str(path), path), name


def in_copy(value: Any, lines: Sequence[str], directory: Path) -> Any:
    """Return a value, or a section with all of its values, with files replaced by the copies that `keep` made. lines:
    the result of `describe` at that time."""
    if isinstance(value, dict):
        return {key: in_copy(part, lines, directory) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_copy(part, lines, directory) for part in value]
    if not is_path(value):
        return value
    path, name = split(value)
    digests = dict(line.rpartition(" ")[::2] for line in lines)
    return f"{directory / digests[str(path)] / path.name}:{name}" if str(path) in digests else value
