"""python .ci/check_types.py [--write]: the number of mypy errors in a file may fall but not rise.

.ci/types.json has the numbers of the last time that the table was written. Functions of tests and benchmarks have few
types, so only errors of names count there: an attribute, a parameter or a name that does not exist. Packages count as
untyped, so that the number is the same in every environment.
"""
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / ".ci" / "types.json"
NAMES = ("attr-defined", "call-arg", "name-defined")


def run_mypy(*args: str, path: str = "") -> list[str]:
    """Return mypy's error lines. path: folders whose files are modules by their own names, separated by colons."""
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-site-packages", "--ignore-missing-imports",
                           "--python-version", "3.11", *args], cwd=ROOT, env=os.environ | {"MYPYPATH": path},
                          capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(f"mypy ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if re.match(r"[^:]+:\d+: error: ", line)]


def find_names_not_there() -> list[str]:
    """Return the errors of names in tests and benchmarks. Tests import each other by `import steps`; benchmarks import
    them by `from tests import steps`. mypy knows a file by one name only, so it runs twice."""
    folders = sorted({path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")})
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))
    options = ("--check-untyped-defs", "--cache-dir=.mypy_cache/names")
    lines = {*run_mypy(*options, "--no-namespace-packages", *files, path=":".join(folders)),
             *run_mypy(*options, "--explicit-package-bases", "benchmarks")}
    return sorted(line for line in lines if line.startswith(("tests/", "benchmarks/"))
                  and line.endswith(tuple(f"[{name}]" for name in NAMES)))


def count_errors() -> tuple[dict[str, int], list[str]]:
    """Return (errors by file, mypy's lines)."""
    lines = run_mypy("meshtrain", "launch") + find_names_not_there()
    return dict(sorted(collections.Counter(line.partition(":")[0] for line in lines).items())), lines


def main() -> int:
    found, lines = count_errors()
    if "--write" in sys.argv[1:]:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(TABLE.read_text())
    worse = [name for name, count in found.items() if count > known.get(name, 0)]
    for name in worse:
        print(f"{name}: {found[name]} errors of types, {known.get(name, 0)} in .ci/types.json:")
        print("\n".join(line for line in lines if line.startswith(f"{name}:")))
    print(f"types: {sum(found.values())} errors, {sum(known.values())} in .ci/types.json")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
