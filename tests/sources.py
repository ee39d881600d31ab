"""The syntax of the repository's files, which dozens of tests read: parsed once for all tests of a folder."""
import ast
import functools


@functools.cache
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(parse(text)))


def forget() -> None:
    parse.cache_clear()
    nodes_of.cache_clear()
