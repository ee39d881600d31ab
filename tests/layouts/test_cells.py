"""Every cell of the table (tests/cells.toml) computes what its reference does, and its compiled step holds, sends and
multiplies what its rule file and its schedule say. The core has the few cells of the table that have every choice."""
import itertools

import cells
import parity
import pytest
import sampling
import steps

from meshtrain.parallel.pipeline import schedules

MARKS = {"core": (), "full": (pytest.mark.full,), "cell": sampling.GRID}
CELLS = cells.cells()


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=MARKS[cell.tier], id=cell.name) for cell in CELLS])
def test_a_cell_equals_its_reference(cell):
    """And its compiled step holds, sends and multiplies what its rule file and its schedule say."""
    cells.check(cell)
    case = cells.compiled(cell)
    if "gloo" in cell.words:
        assert steps.meeting(case.step.as_text(), case.made.mesh.size) == []
    if "stage" in cell.mesh and cell.reference in ("dense", "gpt2"):
        steps.check_schedule(case)
    if cell.reference == "dense" and "narrow" not in cell.words:       # CPUs add bfloat16 in float32
        check_dense(cell, case)


def check_dense(cell: cells.Cell, case: parity.Compiled) -> None:
    """What of a dense model's step formulas say."""
    assert not case.audit.unknown_loops
    assert any("key and value heads" in note for note in case.made.notes) == (
        cell.mesh.get("tensor", 1) > case.made.run.model.num_kv_heads)
    if "stage" not in cell.mesh and "offload" not in cell.words:
        steps.check_bytes(case)
        steps.check_axes(case)
        steps.check_once_a_step(case)
    if len(cell.mesh) == 1 and "offload" not in cell.words:
        (axis, n), = cell.mesh.items()
        if axis == "fsdp" and cell.rules in steps.PER_PARAM:
            steps.check_bytes_per_parameter(case, cell.rules, n)
        if axis == "context":
            steps.check_context(case)
        if axis == "stage" and case.made.run.model.num_layers % n == 0:     # so does the vocabulary of the head
            steps.check_flops(case)


# ---- what the table holds --------------------------------------------------------------------------------------------

RULES = tuple(sorted(path.stem for path in parity.RULES.glob("*.toml")))
CHOICES = {
    "rules": RULES, "model": tuple(dict.fromkeys(cells.section_of(cell.reference).get("of", cell.reference)
                                                 for cell in CELLS)),
    "schedule": ("none", *schedules.NAMES), "context": ("none", *cells.METHODS), "remat": ("none", *cells.REMATS),
    "microbatches": (1, 2, 3), "data": (False, True), "fsdp": (False, True), "tensor": (False, True)}
# Beside the first choice the second counts only by whether it is made: a rule file splits arrays, however they are
# computed; a model knows no schedule but that there are stages.
BY_WHETHER = {("rules", "schedule"), ("rules", "context"), ("model", "schedule")}
APART = {("rules", "model"), ("rules", "remat"), ("rules", "microbatches")}


def choices_of(cell: cells.Cell) -> dict:
    """The cell's choice of each of CHOICES; 3 microbatches: more than 2."""
    return {"rules": cell.rules, "model": cells.section_of(cell.reference).get("of", cell.reference),
            "schedule": cell.one_of(schedules.NAMES, "auto") if "stage" in cell.mesh else "none",
            "context": cell.one_of(cells.METHODS, "ring") if "context" in cell.mesh else "none",
            "remat": cell.one_of(cells.REMATS, "none"), "microbatches": min(cell.microbatches, 3),
            **{axis: axis in cell.mesh for axis in ("data", "fsdp", "tensor")}}


def impossible(chosen: dict) -> bool:
    """Whether the program refuses these choices."""
    return (chosen.get("schedule", "none") != "none" and chosen.get("remat") == "offload"
            or chosen.get("schedule") in schedules.INTERLEAVED and chosen.get("microbatches") == 1)


def pairs_of(chosen: dict) -> set[tuple]:
    """The pairs of these choices as the table counts them."""
    return {(a, x, b, y != "none" if (a, b) in BY_WHETHER else y)
            for (a, x), (b, y) in itertools.combinations(chosen.items(), 2) if (a, b) not in APART}


def test_the_table_has_every_pair_of_choices():
    wanted = set().union(*(pairs_of({a: x, b: y}) for a, b in itertools.combinations(CHOICES, 2)
                           for x in CHOICES[a] for y in CHOICES[b] if not impossible({a: x, b: y})))
    assert wanted - set().union(*(pairs_of(choices_of(cell)) for cell in CELLS)) == set()


def test_the_core_has_every_choice_in_few_cells():
    core = [choices_of(cell) for cell in CELLS if cell.tier == "core"]
    assert len(core) <= 10
    for name in ("rules", "schedule", "remat", "microbatches", "data", "fsdp", "tensor"):
        assert {chosen[name] for chosen in core} >= set(CHOICES[name]), name
    assert {chosen["context"] for chosen in core} >= {"none", "ring", "ulysses"}


def test_the_table_has_few_models_and_names_each_cell_once():
    assert len({str(cells.section_of(cell.reference)["model"]) for cell in CELLS}) <= 8
    assert len({cell.name for cell in CELLS}) == len(CELLS)
