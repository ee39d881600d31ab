"""Each system call of a save, an export, a start and a rollback, and each fault there: see `disturbed`, which has the tables."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sampling

from tests import disturbed, syscalls

ROOT = Path(__file__).resolve().parent.parent
CELLS = 12      # in every run of the suite

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux hands system calls over")


def found(tmp_path: Path, *words) -> list[dict]:
    """What `python -m tests.disturbed` found; each cell whose call came has held."""
    report = tmp_path / "found.json"
    free = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC")}
    ran = subprocess.run([sys.executable, "-m", "tests.disturbed", "--json", report, *map(str, words)], cwd=ROOT, text=True,
                         env=free | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    print(ran.stdout)
    assert ran.returncode in (0, 1) and report.exists(), ran.stderr
    cells = json.loads(report.read_text())
    assert [cell for cell in cells if cell["wrong"]] == []
    return cells


def test_system_calls_are_seen_here():
    """Linux 5.5 has what this takes, and so have the usual containers: where it is missing, nothing below is tested."""
    assert syscalls.available() == ""


def test_some_cells_of_the_commits_choice_hold(tmp_path):
    cells = found(tmp_path, "--places", "save,local,export,export last", "--faults", "kill,stop", "--cells", CELLS, "--seed", sampling.commit())
    assert len(cells) == CELLS and any(cell["met"] for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("fault", disturbed.FAULTS)
@pytest.mark.parametrize("place", disturbed.PLACES)
def test_a_fault_at_any_system_call_loses_nothing_and_ends_with_the_right_code(place, fault, tmp_path):
    cells = found(tmp_path, "--places", place, "--faults", fault)
    met = sum(cell["met"] for cell in cells)
    assert met >= 0.8 * len(cells) > 0, "calls of threads vary, but not by this much"


@pytest.mark.slow
@pytest.mark.parametrize("place", [place for place in disturbed.PLACES if place != "rollback"])
def test_the_command_itself_loses_nothing_either(place, tmp_path):
    found(tmp_path, "--real", "--places", place, "--faults", "kill,stop,full,stale", "--cells", 4, "--seed", sampling.commit())
