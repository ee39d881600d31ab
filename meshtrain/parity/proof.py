"""Compares a run on many layouts with one device. The layouts cover every pair of choices that the run allows.

The run's model is made small first. For each layout, the loss, the gradient norm, every gradient leaf and the losses of
three steps must equal those on one device, in float32. An error that also occurs on one device is not found.
"""
from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax

from meshtrain import config
from meshtrain.config import Run
from meshtrain.parity import cells as cells_of, compare, program, rule_files, shrink
from meshtrain.shipped import find_file
from meshtrain.units import amount

TOLERANCE = compare.FLOAT32


@dataclasses.dataclass(frozen=True)
class CellResult:
    """Relative differences between one layout and one device.

    settings: the keys of a run file that choose the layout. leaves: the difference of each parameter's gradient, as
    seen in the optimizer state after one step. losses: the difference of each step's loss. wrong: numbers beyond the
    tolerance and other faults; empty if there are none. run: the run with this layout.
    """
    title: str
    settings: dict[str, object]
    loss: float | None
    grad_norm: float | None
    leaves: dict[str, float]
    losses: tuple[float, ...]
    wrong: tuple[str, ...]
    seconds: float
    run: Run | None = dataclasses.field(repr=False)     # None for a layer

    @property
    def differs(self) -> bool:
        return bool(self.wrong)

    @property
    def worst(self) -> tuple[str, float]:
        """(name, difference) of the parameter whose gradient differs most."""
        return max(self.leaves.items(), key=lambda item: item[1], default=("", 0.0))

    def as_json(self) -> dict:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "run"}
        return _finite(fields | {"losses": list(self.losses), "wrong": list(self.wrong), "differs": self.differs})


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of `prove`. cells: the run's own layout first, then by the number of pairs that they cover. findings:
    faults of rule files and of the GPU program. notes: what was not tested, and why."""
    name: str
    run: Run | None = dataclasses.field(repr=False)     # the shrunk run; None for a layer
    devices: int
    cells: tuple[CellResult, ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def failed(self) -> bool:
        return bool(self.findings) or any(cell.differs for cell in self.cells)

    def as_json(self) -> dict:
        return {"name": self.name, "devices": self.devices, "failed": self.failed,
                "tolerance": TOLERANCE._asdict(), "cells": [cell.as_json() for cell in self.cells],
                "findings": list(self.findings), "notes": list(self.notes), "seconds": self.seconds}


def _finite(found):
    """Return a JSON value with None for numbers that are not finite."""
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def prove(run: Run, rules: Sequence[str] = (), devices: Sequence[jax.Device] | None = None, cells: int | None = None,
          tell: Callable[[str], None] = lambda line: None, begun: Callable[[str], None] = lambda line: None) -> Proof:
    """Compare a run on many layouts with the run on one device.

    rules: rule files to use instead of the run's and the shipped ones. devices: simulated or real; None: all. cells:
    largest number of layouts. tell: a function that gets a line after each layout. begun: a function that gets a line
    before each layout, so that a crash of XLA shows which layout caused it. Raises: ConfigError if the run or a rule
    file has faults.
    """
    began = time.monotonic()
    devices = devices if devices is not None else jax.devices()
    small, notes = shrink.shrunk(run, len(devices))
    rules = [str(find_file(path)) for path in rules]
    findings: list[str] = []
    own = [path for path in dict.fromkeys(rules or [run.sharding.rules]) if not cells_of.is_shipped(path)]
    for path in own:        # meshtrain's tests check the shipped rule files
        forgotten, more = rule_files.check(small, path)
        findings, notes = findings + forgotten, notes + more
    for finding in findings:
        tell(f"FOUND: {finding}")
    runs = layouts(small, rules, len(devices))
    chosen = runs[:cells] if cells else runs
    if len(chosen) < len(runs):
        notes.append(f"{len(chosen)} of {len(runs)} layouts were tested; --cells {len(runs)} covers every pair of "
                     f"choices")
    results = []
    for number, cell in enumerate(chosen, 1):
        begun(f"{number:>3}/{len(chosen)}  {cells_of.title(cell)} …")
        try:
            results.append(compare_cell(cell, devices))
            tell(line(results[-1], number, len(chosen)))
        except config.ConfigError as error:
            notes.append(f"{cells_of.title(cell)} was not tested: {error}")
    of_program, more = program.of_run(run)
    for finding in of_program:
        tell(f"FOUND: {finding}")
    return Proof(run.run.name, small, len(devices), tuple(results), (*findings, *of_program), (*notes, *more),
                 time.monotonic() - began)


def layouts(small: Run, rules: Sequence[str], num_devices: int) -> list[Run]:
    """Return the runs to compare, the run's own layout first. Raises: ConfigError if no layout is allowed."""
    files = list(dict.fromkeys(rules)) or cells_of.differing_rules(small)
    own, first, refused = small.replace(sharding={"rules": files[0]}), [], None
    try:
        compare.check_accepted(own)
        first = [own] * (compare.num_devices(own) > 1)
    except config.ConfigError as error:
        refused = error
    others = cells_of.cover(small, cells_of.factors(small, files, num_devices), num_devices)
    runs = [*first, *(cell for cell in others if cell not in first)]
    if not runs:
        raise refused or config.ConfigError(f"this run has no possible layout on {num_devices} devices; use "
                                            f"--devices 8")
    return runs


def compare_cell(cell: Run, devices: Sequence[jax.Device]) -> CellResult:
    """Compare one layout with one device. Raises: ConfigError if the program refuses the layout."""
    began = time.monotonic()
    loss = norm = None
    leaves: dict[str, float] = {}
    losses: tuple[float, ...] = ()
    try:
        case = compare.compile_run(cell, devices)
        off = compare.differences(case)
        names = {info.name for info in case.made.model.parameters()}
        loss, norm, losses, leaves = off.loss, off.norm, off.losses, off.by_parameter(names)
        tolerance = compare.allow_reduction(TOLERANCE, case.made.layout)
        wrong = off.beyond(tolerance, leaves)
        if wrong and cell.model.num_experts:
            # A tie of two experts, which rounding decides, occurs with one seed; a fault shows with every seed.
            wrong = compare.differences(case, seed=1).beyond(tolerance) and wrong
        wrong += [f"a permute leaves devices with zeros: {text}" for text in case.audit.broken_permutes]
    except compare.NotFiniteError as error:
        wrong = [f"not finite in {error}"]
    except config.ConfigError:
        raise
    except Exception as error:      # any error of the compiler or of a user's code counts as a difference
        wrong = [f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"]
    return CellResult(cells_of.title(cell), cells_of.settings(cell), loss, norm, leaves, losses, tuple(wrong),
                      time.monotonic() - began, cell)


def line(cell: CellResult, number: int, total: int) -> str:
    """Return the line that is printed for a compared layout."""
    name, off = cell.worst
    said = f"equal; {'loss' if cell.losses else 'output'} {cell.loss or 0:.0e}, gradients {off:.0e} ({name})"
    if cell.differs:
        said = f"DIFFERS: {cell.wrong[0]}" + f" and {len(cell.wrong) - 1} more" * (len(cell.wrong) > 1)
    return f"{number:>3}/{total}  {cell.title}: {said}  {cell.seconds:.1f} s"


def summarize(proof: Proof) -> str:
    """Return the text that is printed at the end of a proof."""
    equal, total = sum(not cell.differs for cell in proof.cells), len(proof.cells)
    return (f"{proof.name}: {equal} of {amount(total, 'layout')} {'computes' if equal == 1 else 'compute'} what one "
            f"device computes, findings: {len(proof.findings)}; {proof.seconds:.0f} s, "
            f"{proof.seconds / max(1, total):.1f} s a layout")
