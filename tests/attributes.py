"""What a script takes from other modules and is not there: attributes and parameters, found without running it.

Reads the script's syntax tree beside the imported modules. The type of a variable is known where it is made by a class,
by a function whose return is annotated, as the target of `with`, or is a parameter with an annotation; what has no
known type is not looked at.
"""
import ast
import importlib
import inspect
import types
import typing
from pathlib import Path

import sources

OURS = ("meshtrain", "benchmarks", "launch")
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)


class Instance(typing.NamedTuple):
    of: type


def faults(path: Path) -> list[str]:
    """One line for each attribute or parameter that is not there."""
    tree = sources.parse(path.read_text(encoding="utf-8"))
    found = []
    known = _imported(tree, found)
    known |= {name: value for node in tree.body if isinstance(node, (ast.Assign, ast.With))
              for name, value in _bound(node, known).items()}
    _read(tree, known, found)
    return [f"{path.name}:{line}: {what}" for line, what in dict.fromkeys(found)]


def _imported(tree: ast.AST, found: list) -> dict[str, object]:
    """Names of our modules and of what is taken from them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0]: importlib.import_module(
                alias.name if alias.asname else alias.name.split(".")[0])
                for alias in node.names if alias.name.split(".")[0] in OURS}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            for alias in node.names:
                try:
                    names[alias.asname or alias.name] = getattr(module, alias.name, None) or importlib.import_module(
                        f"{node.module}.{alias.name}")
                except ImportError:
                    found.append((node.lineno, f"{node.module} has no {alias.name}"))
    return names


def _read(node: ast.AST, known: dict, found: list) -> None:
    """Look at all that is below a node; each function has names of its own beside those around it."""
    for child in ast.iter_child_nodes(node):
        inside = known
        if isinstance(child, SCOPES):
            inside = known | _local(child, known)
        elif isinstance(child, ast.Lambda):
            inside = known | {arg.arg: None for arg in _arguments(child.args)}
        elif isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            inside = known | {name.id: None for part in child.generators for name in ast.walk(part.target)
                              if isinstance(name, ast.Name)}
        elif isinstance(child, ast.Attribute):
            _value(child, known, found)
        elif isinstance(child, ast.Call):
            _check_call(child, known, found)
        _read(child, inside, found)


def _local(function, known: dict) -> dict:
    """Types of a function's own names; None where several are bound to one name, or the type is not known."""
    names = {arg.arg: _annotated(arg.annotation, known) for arg in _arguments(function.args)}
    stores = [name.id for name in ast.walk(function) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    names |= {name: None for name in stores}
    for node in ast.walk(function):
        bound = _bound(node, known | names) if isinstance(node, (ast.Assign, ast.With)) else {}
        names |= {name: value for name, value in bound.items() if stores.count(name) == 1}
    return names


def _arguments(args: ast.arguments) -> list[ast.arg]:
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]


def _annotated(annotation, known: dict):
    cls = _value(annotation, known, []) if annotation is not None else None
    return Instance(cls) if isinstance(cls, type) else None


def _bound(node, known: dict) -> dict:
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets if isinstance(target, ast.Name)]
        for target in node.targets:         # a, b = of_a, of_b
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and not any(
                    isinstance(one, ast.Starred) for one in (*target.elts, *node.value.elts)):
                pairs += [pair for pair in zip(target.elts, node.value.elts) if isinstance(pair[0], ast.Name)]
        return {target.id: _value(value, known, []) for target, value in pairs}
    return {item.optional_vars.id: made for item in node.items if isinstance(item.optional_vars, ast.Name)
            for made in [_value(item.context_expr, known, [])]
            if isinstance(made, Instance) and _hints(getattr(made.of, "__enter__", None)).get("return") in (
                made.of, typing.Self)}


def _value(node, known: dict, found: list):
    """The module, class or function that an expression is, or an Instance; None where it is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Call):
        made = _value(node.func, known, [])
        if isinstance(made, type):
            return Instance(made)
        returned = _hints(made).get("return")
        return Instance(returned) if isinstance(returned, type) and returned is not type(None) else None
    if isinstance(node, ast.Attribute):
        return _attribute(_value(node.value, known, found), node, found)
    return None


def _attribute(value, node: ast.Attribute, found: list):
    if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in OURS:
        if not hasattr(value, node.attr):
            found.append((node.lineno, f"{value.__name__} has no {node.attr}"))
        return getattr(value, node.attr, None)
    cls = value.of if isinstance(value, Instance) else value
    if isinstance(cls, type) and cls.__module__.split(".")[0] in OURS and isinstance(node.ctx, ast.Load):
        if node.attr in (hints := _hints(cls)):
            return Instance(hints[node.attr]) if isinstance(hints[node.attr], type) else None
        if not hasattr(cls, node.attr) and node.attr not in _assigned(cls):
            found.append((node.lineno, f"{cls.__name__} has no {node.attr}"))
        member = inspect.getattr_static(cls, node.attr, None)
        if isinstance(member, property) or hasattr(member, "func"):
            returned = _hints(getattr(member, "fget", None) or member.func).get("return")
            return Instance(returned) if isinstance(returned, type) else None
        return types.MethodType(member, value) if isinstance(value, Instance) and inspect.isfunction(member) else None
    return None


def _assigned(cls: type) -> set[str]:
    """Attributes that a class and those it extends give themselves: `self.x = …`."""
    names = set()
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in OURS:
            names |= set() if base is object or base.__module__ in ("builtins", "typing", "abc") else {"*"}
            continue
        names |= {node.attr for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(base))))
                  if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return names


def _hints(thing) -> dict:
    try:
        return typing.get_type_hints(thing) if thing is not None else {}
    except Exception:       # of a name that is imported for type checkers alone, or of a type within itself
        return {name: None for base in getattr(thing, "__mro__", [thing]) for name in getattr(base, "__annotations__", ())}


def _check_call(node: ast.Call, known: dict, found: list) -> None:
    """Whether a function takes these arguments."""
    called = _value(node.func, known, [])
    module = getattr(called, "__module__", None) or ""
    if (not callable(called) or isinstance(called, Instance) or module.split(".")[0] not in OURS
            or any(isinstance(arg, ast.Starred) for arg in node.args) or any(word.arg is None for word in node.keywords)):
        return
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*node.args, **{word.arg: None for word in node.keywords})
    except TypeError as error:
        found.append((node.lineno, f"{getattr(called, '__qualname__', called)}: {error}"))
