"""The list of planted faults is alive, and every fault in it is caught by the test that it names."""
from pathlib import Path

import faults
import pytest

ROOMS = {path.parent.name for path in (Path(faults.ROOT) / "meshtrain").glob("*/*.py") if path.stat().st_size > 500}


def test_every_planted_fault_has_its_place_and_its_test():
    known = faults.load()
    assert len(known) >= 48
    assert [problem for fault in known for problem in faults.problems(fault)] == []


def test_every_room_has_planted_faults():
    assert ROOMS - {fault.file.parts[1] for fault in faults.load()} == set()


def test_a_fault_is_pinned_by_its_function_and_its_words():
    fault = faults.Fault("", "a.py::A.f", "return  (x+1)", "return 0", "")
    text = "def f(x):\n    return (x + 1)\nclass A:\n    def f(x):\n        return (\n            x + 1)\n"
    assert fault.planted(text) == (text[:text.rindex("return")] + "return 0\n", 1)
    assert fault.planted(text.replace("x +", "xx +"))[1] == 0
    assert fault.planted(text.replace("class A", "class B"))[1] == 0
    assert fault._replace(place="a.py").planted(text)[1] == 2


@pytest.mark.long
@pytest.mark.parametrize("fault", faults.load(), ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_by_its_test(fault):
    caught, what, _ = faults.plant(fault)
    assert caught, f"{fault.name}: {what}"
