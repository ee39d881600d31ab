"""The table of cells (cells.toml): runs on simulated devices, and what they must compute.

A cell's name is its reference and its line: "dense: zero1 fsdp8". `compiled` keeps a cell's step, so that tests of what
a compiled step holds and sends ask those of the table.
"""
import contextlib
import dataclasses
import functools
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import parity
import pytest

from meshtrain import config, scratch, trained
from meshtrain.choices import engines
from meshtrain.kernels import rotation
from meshtrain.model import parts
from meshtrain.model.execution import Engines
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.training import accumulate

TABLE = Path(__file__).with_suffix(".toml")
TIERS = ("core", "full", "cell")
METHODS, REMATS = ("ring", "gather", "ulysses"), ("selective", "full", "offload")
# Ways to compile a step, not settings of a run: each is a patch of `compiling`.
WAYS = ("gloo", "halves", "kernels")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A line of the table. words: without its rule file and mesh."""
    reference: str
    line: str
    tier: str
    rules: str
    mesh: dict[str, int] = dataclasses.field(compare=False)
    words: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.reference}: {self.line}"

    @property
    def microbatches(self) -> int:
        return int(next((word[1:] for word in self.words if re.fullmatch(r"m\d+", word)), 2))

    def one_of(self, names, otherwise: str) -> str:
        """The word of the cell that is one of these names."""
        return next((word for word in names if word in self.words), otherwise)


@functools.cache
def table() -> dict:
    return tomllib.loads(TABLE.read_text())


def read_line(reference: str, tier: str, line: str) -> Cell:
    """Raises: AssertionError for a word that is none."""
    rule, *words = line.split()
    mesh = {found[1]: int(found[2]) for word in words if (found := re.fullmatch(rf"({'|'.join(AXES)})(\d+)", word))}
    rest = frozenset(word for word in words if re.sub(r"\d+$", "", word) not in AXES)
    known = {*schedules.NAMES, *METHODS, *REMATS, *WAYS, "sent", "narrow"}
    assert all(word in known or re.fullmatch(r"m\d+", word) for word in rest), f"{line}: {rest - known}"
    return Cell(reference, line, tier, rule, mesh, rest)


def cells() -> list[Cell]:
    """All of the table, the cells of a reference together."""
    return [read_line(reference, tier, line) for reference, section in table().items()
            for tier in TIERS for line in section.get(tier, ())]


def cell(name: str) -> Cell:
    return next(one for one in cells() if one.name == name)


@functools.cache
def section_of(reference: str) -> dict:
    """A reference's section, with what it takes from that which it is `of`."""
    section = table()[reference]
    base = section_of(section["of"]) if "of" in section else {}
    merged = {key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
              for key, value in section.items()}
    return {key: value for key, value in {**base, **merged}.items() if key not in TIERS}


def run_of(cell: Cell) -> config.Run:
    section, schedule = section_of(cell.reference), cell.one_of(schedules.NAMES, "auto")
    staged, context = "stage" in cell.mesh, "context" in cell.mesh
    rules = str(parity.RULES / f"{cell.rules}.toml")
    if "narrow" in cell.words:
        rules = scratch.rule_file({"extends": cell.rules, "grads": {"reduce": "bfloat16"}})
    return config.Run(
        mesh=cell.mesh, sharding=dict(rules=rules),
        model=dict(compute_dtype="float32") | section["model"], lora=section.get("lora", {}),
        data=dict(seq_len=16, global_batch=16) | section.get("data", {}),
        training=dict(steps=20, loss_chunk=24) | section.get("training", {}) | dict(
            microbatches=cell.microbatches, remat=cell.one_of(REMATS, "none")),
        optimizer=dict(learning_rate=1e-3, schedule="constant", warmup_steps=0) | section.get("optimizer", {}),
        distill=section.get("distill", {}),
        experts=section.get("experts", {}) | (dict(dispatch="all_to_all") if "sent" in cell.words else {}),
        pipeline=dict(schedule=schedule, chunks=1 + (schedule in schedules.INTERLEAVED)) if staged else {},
        context=dict(method=cell.one_of(METHODS, "ring")) if context else {},
    )  # fmt: skip


@contextlib.contextmanager
def compiling(cell: Cell) -> Iterator[None]:
    """The cell's ways to compile; on leaving, checks that they were taken."""
    used = set()
    with pytest.MonkeyPatch.context() as patch:
        if "gloo" in cell.words:
            for module in (accumulate, trained):
                patch.setattr(module, "by_gloo", lambda mesh: True)
        if "halves" in cell.words:
            run, cut = run_of(cell), parts.cut
            rows = run.data.global_batch // cell.microbatches // math.prod(
                cell.mesh.get(axis, 1) for axis in ("data", "fsdp"))
            patch.setattr(parts, "MIN_TOKENS", rows * run.data.seq_len // 2)
            patch.setattr(parts, "cut", lambda a, shards, count: used.add(count) or cut(a, shards, count))
        if "kernels" in cell.words:
            for name in ("forward", "backward"):
                patch.setattr(rotation, name, lambda *args, of=getattr(rotation, name), **more: (
                    used.add(of), of(*args, **more, interpret=True))[1])
            patch.setattr(engines, "Engines",
                          lambda *args, **given: Engines(*args, **given | {"by_kernels": True}))
        yield
    assert "halves" not in cell.words or used == {2}
    assert "kernels" not in cell.words or len(used) == 2


@functools.lru_cache(4)
def compiled(cell: Cell) -> parity.Compiled:
    """The cell's step."""
    with compiling(cell):
        return parity.compile_run(run_of(cell))


def one_device(cell: Cell):
    """(parameters, and what `parity.train` returns) of the cell's reference on one device."""
    return parity.one_device(parity.on_one_device(run_of(cell)).model_dump_json(), 0)


def tolerance_of(cell: Cell) -> parity.Tolerance:
    given = section_of(cell.reference).get("tolerance", {})
    return parity.BFLOAT16 if given == "bfloat16" else parity.FLOAT32._replace(**given)


def check(cell: Cell) -> None:
    """Compare losses, metrics and every leaf of the optimizer's state with the reference's (`meshtrain.parity`)."""
    one_device(cell)        # kept: not compiled in the way of the cell
    parity.check_equal(compiled(cell), 0, tolerance_of(cell))
