"""python -m tests.touched [COMMIT]: the tests to run for what has changed since a commit (default: main).

Prints the pytest command: the test files that changed; those that import a changed module, or a helper of tests/ that
changed, directly; those that a planted fault of a changed module names; those that read every file. For a module that
no test imports: the tests of the modules that import it, or that import anything of its room.
"""
import functools
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / folder) for folder in (".", "house")]
import faults  # noqa: E402
import test_house  # noqa: E402

ROOT = Path(faults.ROOT)
TESTS = ROOT / "tests"
ALWAYS = ("test_house.py", "test_docs.py", "test_faults.py", "test_mistakes.py")      # they read all, or ask every command


def changed(commit: str) -> set[str]:
    """Paths that differ from a commit, with those that git does not know yet."""
    def ask(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {*ask("diff", "--name-only", commit), *ask("ls-files", "--others", "--exclude-standard")}


def module_of(path: str) -> str:
    """`meshtrain/run/say.py` -> meshtrain.run.say, `tests/run/test_say.py` -> test_say."""
    parts = Path(path).with_suffix("").parts
    return parts[-1] if parts[0] == "tests" else ".".join(parts)


def tests_of(paths: set[str]) -> set[str]:
    """The test files for changed paths."""
    imports = read_imports()
    found = {name for path in paths if (name := Path(path).name) in imports and name.startswith("test_")}
    found |= {Path(fault.test.partition("::")[0]).name for fault in faults.load() if str(fault.file) in paths}
    wanted = {module_of(path) for path in paths if path.endswith(".py")}
    helpers = {name for name in imports if not name.startswith("test_")}
    while more := {module_of(f"tests/{name}") for name in helpers if reaches(imports[name], wanted)} - wanted:
        wanted |= more
    for module in wanted:
        direct = {name for name, names in imports.items() if reaches(names, {module}) and name.startswith("test_")}
        if not direct and module.startswith("meshtrain."):
            users, room = modules_that_import(module), test_house.room(module)
            direct = {name for name, names in imports.items() if name.startswith("test_") and (
                reaches(names, users) or room in {test_house.room(one) for one in names if "meshtrain." in one})}
        found |= direct
    return found | set(ALWAYS)


@functools.cache
def read_imports() -> dict[str, set[str]]:
    """File of tests/ -> the names that it imports."""
    return {path.name: {name.removeprefix("tests.") for name in test_house.imported_modules(path)}
            for path in TESTS.rglob("*.py")}


@functools.cache
def modules_that_import(module: str) -> frozenset[str]:
    """The modules of the program that import a module directly."""
    return frozenset(name for name, names in _program().items() if reaches(names, {module}))


@functools.cache
def _program() -> dict[str, set[str]]:
    return {module_of(str(path.relative_to(ROOT))): test_house.imported_modules(path)
            for path in (ROOT / "meshtrain").rglob("*.py")}


def reaches(names: set[str], modules: Collection[str]) -> bool:
    """Whether an import is of one of the modules, or of a name in it."""
    return any(name == module or name.startswith(f"{module}.") for name in names for module in modules)


def main() -> int:
    found = tests_of(changed(sys.argv[1] if len(sys.argv) > 1 else "main"))
    paths = sorted(str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py") if path.name in found)
    print("python -m pytest " + " ".join(paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
