"""Faults planted on purpose: does the suite see a wrong sign, a lost factor, an axis too few?

Each entry of faults.toml is one small change to a copy of the tree and the one test that must fail because of it. A
test that stays green there claims what it does not check; a fault that no test names is a hole in the suite.

    python tests/faults.py [--only NAME] [--jobs N]      plants them one after another and prints a table
    python tests/faults.py --matrix record|kill …        mutants of every function, and which test kills each (matrix.py)
"""
import argparse
import ast
import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

import sources

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("meshtrain", "tests", "benchmarks", "chat_templates", "configs", "sharding_rules", "launch", "docs", "pyproject.toml", "README.md")
TIMEOUT_S = 600
BY_ASSERTION = ("AssertionError", "assert ", "Failed: ", "subprocess.TimeoutExpired")       # how such a failure begins


class Fault(NamedTuple):
    """`old`, which stands once at `place`, becomes `new`; `test` (a pytest id, not of tier long) must then fail by assertion.

    place: FILE::Class.function, or FILE alone for what is in none. Spaces and line ends within `old` stand for any.
    """
    name: str
    place: str
    old: str
    new: str
    test: str

    @property
    def file(self) -> Path:
        return Path(self.place.partition("::")[0])

    def planted(self, text: str) -> tuple[str, int]:
        """(the text of the file with the fault, how often `old` stands at its place: once, or it cannot be planted)."""
        start, end = 0, len(text)
        if function := self.place.partition("::")[2]:
            if function not in (found := functions(text)):
                return text, 0
            start, end = found[function]
        changed, count = pattern(self.old).subn(lambda match: self.new, text[start:end])
        return text[:start] + changed + text[end:], count


@functools.lru_cache(maxsize=None)
def functions(text: str) -> dict[str, tuple[int, int]]:
    """Class.function -> (start, end) of its characters in a file's text, with functions within functions."""
    starts, found = [0], {}
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node, names):
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*names, child.name)
                first = min([child.lineno, *(mark.lineno for mark in child.decorator_list)])
                found[".".join(inner)] = starts[first - 1], starts[child.end_lineno]
            visit(child, inner)
    visit(sources.parse(text), ())
    return found


def pattern(old: str) -> re.Pattern:
    """The words of `old` with any spaces between them, or none where none are needed; those at its ends as they are."""
    inside = old.strip()
    head, tail = old[:old.find(inside)], old[old.find(inside) + len(inside):]
    words = re.findall(r"\w+|[^\w\s]", inside)
    both = lambda a, b: a[-1].isidentifier() and b[0].isidentifier()
    gaps = [r"\s+" if both(a, b) else r"\s*" for a, b in zip(words, words[1:])]
    body = "".join(re.escape(word) + gap for word, gap in zip(words, [*gaps, ""]))
    return re.compile(re.escape(head) + body + re.escape(tail))


def load() -> list[Fault]:
    """The entries of faults.toml; the table's name is the fault's."""
    entries = tomllib.loads((ROOT / "tests" / "faults.toml").read_text())
    return [Fault(name, **entry) for name, entry in entries.items()]


def problems(fault: Fault) -> list[str]:
    """Why this entry cannot be planted in the tree as it stands; empty if it can."""
    found, path = [], ROOT / fault.file
    count = fault.planted(path.read_text())[1] if path.is_file() else -1
    if count != 1:
        what = "the file is gone" if count < 0 else f"the old text stands {count} times, not once: {fault.old!r}"
        found.append(f"{fault.name}: {fault.place}: {what}; give the entry the text that does this work now")
    if fault.old == fault.new:
        found.append(f"{fault.name}: old and new are the same")
    file, _, name = fault.test.partition("::")
    tests = _tests(ROOT / file)
    if name.partition("[")[0] not in tests:
        found.append(f"{fault.name}: there is no test {fault.test}; name the one that must see this fault")
    return found


@functools.lru_cache(maxsize=None)
def _tests(path: Path) -> set[str]:
    """The tests of a file that are not of tier long as a whole."""
    if not path.is_file():
        return set()

    def long(node) -> bool:
        return any("mark.long" in ast.unparse(mark) and "param" not in ast.unparse(mark) for mark in node.decorator_list)

    tree = sources.parse(path.read_text()).body
    named = {target.id for node in tree if isinstance(node, ast.Assign)
             for target in node.targets if isinstance(target, ast.Name)}
    return named | {node.name for node in tree if isinstance(node, ast.FunctionDef) and not long(node)}


NOT_LONG = "-m 'not long'"       # of a whole test; a cell that is named runs in any case


def plant(fault: Fault) -> tuple[bool, str, float]:
    """(caught, what happened, seconds): the fault's test, in a copy of the tree that has the fault."""
    if faults := problems(fault):
        return False, "; ".join(faults), 0.0
    with tempfile.TemporaryDirectory(prefix="meshtrain-fault-") as place:
        copy = Path(place)
        for name in COPIED:
            ignore = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, copy / name, ignore=ignore) if (ROOT / name).is_dir() else shutil.copy(
                ROOT / name, copy)
        target = copy / fault.file
        target.write_text(fault.planted(target.read_text())[0])
        report, start = copy / "report.xml", time.monotonic()
        # In this process's child alone, without the suite's workers: one test is all there is.
        options = f"addopts=-q {'' if '[' in fault.test else NOT_LONG}"
        command = [sys.executable, "-m", "pytest", "-o", options, "-x", "-p", "no:cacheprovider",
                   f"--junitxml={report}", fault.test]
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False, f"still running after {TIMEOUT_S} s", TIMEOUT_S
        caught, what = _outcome(done, report)
        return caught, what, time.monotonic() - start


def _outcome(done, report: Path) -> tuple[bool, str]:
    """A test that failed by an assertion, or waited in vain for a process, has caught the fault; an import that breaks
    proves nothing."""
    if done.returncode == 0:
        return False, "NOT CAUGHT: the test passes"
    if done.returncode != 1 or not report.is_file():
        return False, f"pytest exited with {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    messages = [failure.get("message", "") for case in cases for failure in case.iter("failure")]
    # An assert of ours or of numpy, chex or pytest.raises.
    if any(message.startswith(BY_ASSERTION) for message in messages):
        return True, "caught"
    said = messages or [error.get("message", "") for case in cases for error in case.iter("error")] or [
        done.stdout[-400:]]
    return False, f"failed, but not by an assertion: {said[0][:300]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="name of an entry; may be given again")
    parser.add_argument("--jobs", type=int, default=1, help="planted at once")
    parser.add_argument("--matrix", nargs="+", metavar="WORD", help="`record FOLDER…` or `kill ROOM…` of matrix.py")
    args = parser.parse_args()
    if args.matrix:
        sys.path.insert(0, str(Path(__file__).with_name("house")))
        import matrix
        return matrix.main(args.matrix)
    known = {fault.name: fault for fault in load()}
    if unknown := [name for name in args.only or () if name not in known]:
        print(f"no such fault: {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    faults = [known[name] for name in args.only or known]
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for fault, (caught, what, seconds) in zip(faults, pool.map(plant, faults)):
            missed += not caught
            print(f"{fault.name:<44} {seconds:5.0f} s  {what if caught else what.upper()[:10] + what[10:]}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
