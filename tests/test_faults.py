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
    assert ROOMS - {fault.file.split("/")[1] for fault in faults.load()} == set()


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.load(), ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_by_its_test(fault):
    caught, what, _ = faults.plant(fault)
    assert caught, f"{fault.name}: {what}"
