"""Which test kills which fault: `python tests/faults.py --matrix`.

    python tests/faults.py --matrix record FOLDER...      runs the core of these folders (default: tests) and notes for
                                                          each test what it reaches, and its seconds. Python 3.12
    python tests/faults.py --matrix kill [ROOM...]        plants mutants (tests/mutants.py) into the functions of rooms,
                                                          or of all, and runs the tests that reach them, the cheapest
                                                          first

`record` writes REACH, which is no part of the repository. `kill` adds to kills.json, for each function, its mutants
with the test that killed each, or none; it prints those that survived, by room. A function whose mutants stand there
and can still be planted is left out, so `kill` goes on where it ended, and after a change where something has changed.
"""
import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path

import faults
import mutants
import test_house

ROOT = faults.ROOT
KILLS = ROOT / "tests" / "kills.json"
REACH = ROOT / ".pytest_cache" / "reach.json"
MOST_TESTS, MOST_S = 1000, 300.0     # of one mutant: tests, their recorded seconds
PATIENCE_S = 60.0                    # beyond three times their recorded seconds
COUNT = 1                                               # mutants of a function


def record(folders: Sequence[str]) -> int:
    """Run the core's tests of `folders` with the plugin `reach`; write REACH. Returns pytest's exit code."""
    if sys.version_info < (3, 12):
        print("what a test reaches is recorded by sys.monitoring, which Python 3.12 has and this one has not",
              file=sys.stderr)
        return 2
    REACH.parent.mkdir(exist_ok=True)
    reached, report = REACH.with_suffix(".txt"), REACH.with_suffix(".xml")
    reached.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "reach", f"--junitxml={report}", "-o", "junit_family=xunit1",
         *(folders or ["tests"])], cwd=ROOT, env=os.environ | {"REACHED": str(reached), "PYTHONPATH": str(ROOT)})
    seconds = {f"{case.get('file')}::{case.get('name')}": float(case.get("time"))
               for case in xml.etree.ElementTree.parse(report).iter("testcase")}
    functions = collections.defaultdict(set)
    for line in reached.read_text().splitlines():
        test, file, function = line.split("\t")
        if test in seconds:
            functions[f"{file}::{function}"].add(test)
    before = json.loads(REACH.read_text()) if REACH.exists() else {"seconds": {}, "functions": {}}
    for name, tests in before["functions"].items():
        functions[name] |= {test for test in tests if test not in seconds}
    REACH.write_text(json.dumps({
        "seconds": before["seconds"] | seconds,
        "functions": {name: sorted(tests) for name, tests in functions.items()}}))
    print(f"{len(seconds)} tests reach {len(functions)} functions")
    return done.returncode


def choose_tests(reached: dict, function: str) -> list[str]:
    """Those that reach FILE::function, the cheapest of each file first: at most MOST_TESTS of MOST_S in all."""
    seconds, chosen, spent = reached["seconds"], [], 0.0
    tests = sorted(reached["functions"].get(function, ()), key=seconds.__getitem__)
    # One of each file before a second one: what many cells of one test do not see, another may.
    turn = collections.Counter()
    for test in tests:
        turn[test] = sum(other.partition("::")[0] == test.partition("::")[0] for other in turn)
    for test in sorted(tests, key=lambda test: (turn[test], seconds[test])):
        if len(chosen) < MOST_TESTS and spent + seconds[test] <= MOST_S:
            chosen.append(test)
            spent += seconds[test]
    return sorted(chosen, key=seconds.__getitem__)


class Copy:
    """A copy of the tree in which one mutant at a time stands, and forks of this process that test it."""

    def __init__(self, place: Path):
        self.place, self._clock = place, int(time.time()) - (1 << 20)
        for name in faults.COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, place / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(source, place / name)

    def collect(self, files: Iterable[str]) -> set[str]:
        """The ids of the tests that these files have today; a recorded one may have another name."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider",
             *(file for file in sorted(files) if (self.place / file).is_file())],
            cwd=self.place, env=os.environ | {"PYTHONPATH": str(self.place)}, capture_output=True, text=True, check=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    def test(self, mutant: mutants.Mutant, tests: Sequence[str], patience_s: float) -> tuple[str | None, str]:
        """(the test that killed the mutant or None, how: "assertion", "error", "time" or "survived")."""
        target = self.place / mutant.file
        original = target.read_text()
        self._write(target, mutant.planted(original))
        try:
            return self._run(tests, patience_s)
        finally:
            self._write(target, original)

    def _write(self, target: Path, text: str) -> None:
        """A time of its own: Python knows compiled files by size and seconds."""
        target.write_text(text)
        self._clock += 1
        os.utime(target, (self._clock, self._clock))

    def _run(self, tests: Sequence[str], patience_s: float) -> tuple[str | None, str]:
        report = self.place / "report.xml"
        report.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _test_in_child(self.place, report, tests)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if ended == (0, 0):
            os.waitpid(child, 0)
            return tests[0], "time"
        if not report.is_file() or os.waitstatus_to_exitcode(ended[1]) not in (0, 1):
            return tests[0], "error"
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('file')}::{case.get('name')}"
            for failure in case.iter("failure"):
                by_assertion = failure.get("message", "").startswith(faults.BY_ASSERTION)
                return name, "assertion" if by_assertion else "error"
            for _ in case.iter("error"):
                return name, "error"
        return None, "survived"


def _test_in_child(place: Path, report: Path, tests: Sequence[str]) -> None:
    os.setsid()
    os.chdir(place)
    log = os.open(place / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["PYTHONPATH"] = str(place)
    for name in [name for name, module in sys.modules.items()
                 if str(ROOT) in (getattr(module, "__file__", None) or "") and name != "__main__"]:
        del sys.modules[name]
    sys.path[:] = [str(place), *(path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT))]
    sys.dont_write_bytecode = False
    code = 1
    try:
        import pytest
        code = pytest.main(["-x", "-q", "-o", "addopts=", "-o", "junit_family=xunit1", "-p", "no:cacheprovider",
                            f"--junitxml={report}", *tests])
    finally:
        os._exit(int(code))


def kill(rooms: Sequence[str], place: Path) -> int:
    """Plant the mutants of the functions that kills.json lacks. Returns 1 if one survived."""
    import jax  # noqa: F401  once, for every fork
    reached, copy, kept = json.loads(REACH.read_text()), Copy(place), read_kills()
    there = copy.collect({test.partition("::")[0] for tests in reached["functions"].values() for test in tests})
    reached["functions"] = {name: [test for test in tests if test in there]
                            for name, tests in reached["functions"].items()}
    survivors: dict[str, list[str]] = collections.defaultdict(list)
    for room, function, made in draw(rooms):
        killed = [faults.Fault(function, *one) for one in kept.get(function, ()) if one[-1]]
        if function in kept and not any(map(faults.problems, killed)):
            continue
        kept[function] = []
        for mutant in made:
            tests = choose_tests(reached, function)
            patience_s = PATIENCE_S + 3 * sum(map(reached["seconds"].__getitem__, tests))
            test, how = copy.test(mutant, tests, patience_s) if tests else (None, "reached by none")
            kept[function].append(fault_of(mutant, test, (ROOT / mutant.file).read_text())[1:])
            print(f"{how:<15} {mutant}  {test or ''}", flush=True)
            if test is None:
                survivors[room].append(f"{how}: {mutant}")
        write_kills(kept)
    for room, lines in sorted(survivors.items()):
        print(f"\n{room}: {len(lines)} survived", *lines, sep="\n  ")
    return 1 if survivors else 0


def draw(rooms: Sequence[str]) -> Iterable[tuple[str, str, list[mutants.Mutant]]]:
    """(room, FILE::function, its mutants) of the rooms, or of all."""
    for path in sorted((ROOT / "meshtrain").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        room = test_house.room(".".join(Path(file).with_suffix("").parts))
        if not rooms or room in rooms or room.partition("/")[0] in rooms:
            for function, made in mutants.draw_mutants(ROOT, file, COUNT).items():
                yield room, f"{file}::{function}", made


def killed_faults() -> list[faults.Fault]:
    """The mutants of kills.json that a test killed."""
    return [faults.Fault(function, *fault) for function, known in read_kills().items()
            for fault in known if fault[-1]]


def fault_of(mutant: mutants.Mutant, test: str | None, text: str) -> faults.Fault:
    """The mutant as an entry of faults.toml: as many whole lines around it as make it one of its kind in the file."""
    changed = mutant.planted(text)
    start, end = text.rfind("\n", 0, mutant.start) + 1, text.find("\n", mutant.end)
    while text.count(text[start:end]) > 1:
        start = text.rfind("\n", 0, start - 1) + 1
    new = changed[start:end + len(changed) - len(text)]
    return faults.Fault(f"{mutant.file}::{mutant.function}", mutant.file, text[start:end], new, test)


def read_kills() -> dict[str, list[list[str | None]]]:
    """FILE::function -> its mutants: the file, the text, the text instead, the test that kills it or None."""
    return json.loads(KILLS.read_text()) if KILLS.exists() else {}


def write_kills(kept: dict[str, list[list[str | None]]]) -> None:
    KILLS.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")


def main(words: Sequence[str]) -> int:
    match words:
        case ["record", *folders]:
            return record(folders)
        case ["kill", *rooms]:
            with tempfile.TemporaryDirectory(prefix="meshtrain-mutants-") as place:
                return kill(rooms, Path(place))
    print(f"--matrix {words[0]}: it is record or kill", file=sys.stderr)
    return 2
