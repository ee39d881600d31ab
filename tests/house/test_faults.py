"""The list of planted faults is alive, and every fault in it is caught by the test that it names."""
import ast
import os
import subprocess
import sys
from pathlib import Path

import faults
import matrix
import mutants
import pytest
import test_house

LEAST_LINES = 60        # of code: what makes a module beside the rooms one of them
CORES_SHARE = 0.85      # of the faults, which the core catches whatever else is moved to tier full


def test_every_planted_fault_has_its_place_and_its_test():
    known = faults.load()
    assert len(known) >= 425
    assert [problem for fault in known for problem in faults.problems(fault)] == []


def rooms_without_faults(known: list[faults.Fault]) -> set[str]:
    large = {path.stem for path in (faults.ROOT / "meshtrain").glob("*.py") if lines_of_code(path) > LEAST_LINES}
    planted = {test_house.room(".".join(fault.file.with_suffix("").parts)) if fault.file.parts[0] == "meshtrain"
               else fault.file.parts[0] for fault in known}       # launch/ is meshtrain.launch
    return {*test_house.OPEN_TO, *test_house.UNBOUND, *large} - planted


def lines_of_code(path: Path) -> int:
    """Lines of a file without empty ones, comments and docstrings: ast leaves the last two out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return len(ast.unparse(tree).splitlines())


def test_every_room_has_planted_faults():
    known = faults.load()
    assert rooms_without_faults(known) == set()
    for room, place in (("data/files", "meshtrain/data/files/"), ("commands", "meshtrain/commands/")):
        assert rooms_without_faults([one for one in known if not one.place.startswith(place)]) == {room}


def test_a_fault_is_pinned_by_its_function_and_its_words():
    fault = faults.Fault("", "a.py::A.f", "return  (x+1)", "return 0", "")
    text = "def f(x):\n    return (x + 1)\nclass A:\n    def f(x):\n        return (\n            x + 1)\n"
    assert fault.planted(text) == (text[:text.rindex("return")] + "return 0\n", 1)
    assert fault.planted(text.replace("x +", "xx +"))[1] == 0
    assert fault.planted(text.replace("class A", "class B"))[1] == 0
    assert fault._replace(place="a.py").planted(text)[1] == 2


@pytest.mark.full
def test_the_core_has_the_tests_of_most_faults():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=-q", "-p", "no:cacheprovider"], cwd=faults.ROOT,
        env=os.environ | {"PYTHONPATH": str(faults.ROOT)}, capture_output=True, text=True, check=True)
    cells = {line for line in done.stdout.splitlines() if "::" in line}
    core, known = cells | {cell.partition("[")[0] for cell in cells}, faults.load()
    missed = [fault.name for fault in known if fault.test not in core]
    print(f"{len(known) - len(missed)} of {len(known)} faults have a test among the core's {len(cells)}")
    assert len(missed) <= (1 - CORES_SHARE) * len(known), missed


@pytest.mark.long
@pytest.mark.parametrize("fault", faults.load(), ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_by_its_test(fault):
    caught, what, _ = faults.plant(fault)
    assert caught, f"{fault.name}: {what}"


TEXT = '''def f(a, b):
    """A docstring of 1 line."""
    total = 0
    for one in a:
        if one < b and one not in (1, 2):
            total += min(one, b)
        if one < b:
            say(f"{one + 1} is below")
        log.append(one)
        total = total - 1
    return total
'''


def test_mutants_are_programs_that_differ_in_one_place_and_can_be_planted(tmp_path):
    (tmp_path / "a.py").write_text(TEXT)
    made = mutants.draw_mutants(tmp_path, "a.py", 100)["f"]
    changes = {f"{one.old} -> {one.new}" for one in made}
    assert changes >= {"< -> <=", "and -> or", "not in -> in", "min -> max", "log.append(one) -> pass", "- -> +",
                       "0 -> 1", "one < b -> not (one < b)"}
    assert not any("+ 1" in one.old or "docstring" in one.old for one in made)      # messages and docstrings stay
    assert mutants.draw_mutants(tmp_path, "a.py", 3)["f"] == made[:3]
    for one in made:
        fault = matrix.fault_of(one, "a test", TEXT)
        assert fault.planted(TEXT) == (one.planted(TEXT), 1)
        with pytest.raises(ValueError, match="no longer"):
            one.planted("\n" + TEXT[:one.start] + "#" + TEXT[one.start:])


@pytest.mark.long
@pytest.mark.parametrize("fault", matrix.killed_faults(), ids=lambda fault: fault.name)
def test_a_mutant_is_killed_by_its_test(fault):
    caught, what, _ = faults.plant(fault)
    assert caught or what.startswith("failed"), f"{fault.name}: {what}"
