"""Each system call of a save, an export, a start and a rollback, and each fault there: see `disturbed`, which has the
tables."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sampling

from tests import disturbed, syscalls

ROOT = Path(__file__).resolve().parent.parent.parent
CELLS = len(disturbed.PLACES)

PINNED = """
reference, kill: fsync run/reference.npy.tmp 0
resume, gone: open run/.lock 0
resume, io: write run/history.jsonl 0
save, io: unlink run/checkpoints/.2.deleting-*/state/_METADATA 0
rollback, stale: open local/run-*/process-0/6/index.json 0
rollback, gone: open local/run-*/process-0/6/index.json 0
rollback, gone: open local/run-*/process-0/6/shards 1
reference, stale: stat cache/preferences-*/pairs.jsonl-*.ends.npy 1
""".strip().splitlines()    # were wrong once

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux hands system calls over")


def found(tmp_path: Path, *words) -> list[dict]:
    """What `python -m tests.disturbed` found; each cell whose call came has held."""
    report = tmp_path / "found.json"
    free = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC")}
    ran = subprocess.run([sys.executable, "-m", "tests.disturbed", "--json", report, *map(str, words)],
                         cwd=ROOT, text=True,
                         env=free | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    print(ran.stdout)
    assert ran.returncode in (0, 1) and report.exists(), ran.stderr
    cells = json.loads(report.read_text())
    assert [cell for cell in cells if cell["wrong"]] == []
    return cells


def test_system_calls_are_seen_here():
    """Linux 5.5 has what this takes, and so have the usual containers: where it is missing, nothing below is tested."""
    assert syscalls.available() == ""


def test_two_cells_by_the_commits_choice_hold(tmp_path):
    assert len(found(tmp_path, "--cells", 2, "--seed", sampling.commit())) == 2


@pytest.mark.full
def test_a_cell_of_each_place_and_of_each_fault_by_the_commits_choice_and_those_that_were_wrong_once_hold(tmp_path):
    cells = found(tmp_path, "--cells", CELLS, "--seed", sampling.commit(),
                  *(word for cell in PINNED for word in ("--cell", cell)))
    assert len(cells) == CELLS + len(PINNED) and [cell for cell in cells[:len(PINNED)] if not cell["met"]] == []
    drawn = [disturbed.parsed(cell["cell"]) for cell in cells[len(PINNED):]]
    assert {cell.place for cell in drawn} == set(disturbed.PLACES) and {cell.fault for cell in drawn} == set(
        disturbed.FAULTS)


@pytest.mark.long
@pytest.mark.parametrize("fault", disturbed.FAULTS)
@pytest.mark.parametrize("place", disturbed.PLACES)
def test_a_fault_at_any_system_call_loses_nothing_and_ends_with_the_right_code(place, fault, tmp_path):
    cells = found(tmp_path, "--places", place, "--faults", fault)
    met = sum(cell["met"] for cell in cells)
    assert met >= 0.8 * len(cells) > 0, "calls of threads vary, but not by this much"


@pytest.mark.long
@pytest.mark.parametrize("place", [place for place in disturbed.PLACES if place != "rollback"])
def test_the_command_itself_loses_nothing_either(place, tmp_path):
    found(tmp_path, "--real", "--places", place, "--faults", "kill,stop,full,stale",
          "--cells", 4, "--seed", sampling.commit())
