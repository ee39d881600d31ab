"""Result types of the Python interface: the JSON of a command, which prints the command's text and shows a picture in a
notebook."""
from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshtrain import config, parity
from meshtrain.commands import plan
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import simulate
from meshtrain.inspection import chart, function_report, report
from meshtrain.inspection.functions import InspectedFunction
from meshtrain.inspection.inspected import Inspected
from meshtrain.pages import functions as functions_page, layout, pictures, plans, proofs, skin
from meshtrain.pages.pictures import Bar, PlotAxis, PlotCurve
from meshtrain.parallel.pipeline import schedules
from meshtrain.units import amount, seconds, size


class Shown:
    """A result with a text and a picture. text: what `print` shows. picture: an SVG drawing of `pictures`, which a
    notebook shows; "" for none."""
    text = picture = ""

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str | None:
        return skin.alone(self.picture) if self.picture else None


class JsonTable(Shown, dict):
    """A JSON object with a text and a picture.

    >>> JsonTable({"total": 3}, "total 3")["total"], JsonTable({"total": 3}, "total 3").json
    (3, '{"total": 3}')
    """

    def __init__(self, data: dict, text: str, picture: str = ""):
        super().__init__(data)
        self.text, self.picture = text, picture

    __str__ = Shown.__repr__

    @property
    def json(self) -> str:
        """The object as JSON text."""
        return json.dumps(self)


class Rows(Shown, list):
    """A JSON array with a text and a picture.

    >>> Rows([{"step": 1}], "step 1")
    step 1
    """

    def __init__(self, rows, text: str, picture: str = ""):
        super().__init__(rows)
        self.text, self.picture = text, picture

    __str__ = Shown.__repr__


class ProgramCosts(JsonTable):
    """The costs of a compiled program. memory_bytes, collectives and roofline have pictures; roofline is None without a
    GPU of known speed.

    >>> mt.Experiment(mesh={"data": 2}).inspect().collectives["compiled"][0]["axes"]
    ['data']
    """
    memory_bytes: JsonTable
    collectives: JsonTable
    roofline: JsonTable | None

    def __init__(self, data: dict, text: str, make_page: Callable[[dict], str]):
        super().__init__(data, text, layout.memory_drawing(data, legend=True))
        self._make_page = make_page

    def _add_tables(self, memory: str, collectives: str, roofline: str | None) -> None:
        sent = layout.traffic_drawing(self, legend=True) if self["collectives"]["compiled"] else ""
        self.memory_bytes = JsonTable(self["memory_bytes"], memory, self.picture)
        self.collectives = JsonTable(self["collectives"], collectives, sent)
        self.roofline = None if roofline is None else JsonTable(
            self["roofline"], roofline, layout.time_drawing(self["roofline"], legend=True))

    def write_page(self, file: str | Path) -> None:
        """Write the costs as an HTML page: one new file without external resources. Raises: ConfigError if it exists or
        cannot be written."""
        with config.user_errors():
            skin.write("file", str(file), self._make_page(self))

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Kind of collective -> bytes that a device sends in a step."""
        by_kind: dict[str, int] = {}
        for row in self.collectives["compiled"]:
            by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row["bytes"]
        return by_kind


class StepCosts(ProgramCosts):
    """The costs of a compiled step: the JSON of `python -m meshtrain.inspect --json`, with that command's text.

    >>> mt.Experiment(mesh={"data": 2}).inspect().memory_bytes["compiled"]["params"] > 0
    True
    """

    def __init__(self, step: Inspected):
        super().__init__(report.as_json(step), report.text(step), layout.page)
        program, choice = step.program, step.made.choice
        self._add_tables(report.memory_table(step), report.collectives_table(program.audit, step.formulas),
                         report.roofline_table(program.roofline, program.mesh) if program.roofline else None)
        # None without a pipeline
        self.schedule = choice and DrawnSchedule(choice.schedule, choice.outcome)


class FunctionCosts(ProgramCosts):
    """The costs of a function of another project. Result of mt.inspect(jitted, *args).

    >>> mt.inspect(jax.jit(lambda x: x @ x), jax.numpy.ones((64, 64)))["matmul_flops"]["traced"] == 2 * 64**3
    True
    """

    def __init__(self, function: InspectedFunction):
        super().__init__(function_report.as_json(function), function_report.text(function), functions_page.page)
        program = function.program
        self._add_tables(function_report.memory_table(function), report.collectives_table(program.audit),
                         report.roofline_table(program.roofline, program.mesh) if program.roofline else None)


class DrawnSchedule(JsonTable):
    """A pipeline schedule: the JSON of its picture, which a notebook shows.

    >>> round(mt.schedule("zero_bubble", stages=4, microbatches=8).bubble, 3)
    0.2
    """

    def __init__(self, of: schedules.Schedule, outcome: simulate.Outcome):
        heading, self.of, self.bubble, self.peak = chart.title(of, outcome), of, outcome.bubble, outcome.peak_live
        data = chart.as_json(simulate.ChosenSchedule(of, outcome, None, None, ""))
        super().__init__(data, f"{heading}\n{chart.text(of)}", pictures.schedule(data, heading))

    def draw(self) -> DrawnSchedule:
        """Return the schedule itself, whose picture a notebook shows.

        >>> mt.schedule("gpipe", stages=2, microbatches=2).draw()
        gpipe: 2 stages, 2 microbatches · bubble 33.3% · peak memory: activations of 2 microbatches on stage 0
        stage 0 F0 F1 ·  ·  B0 B1
        stage 1 ·  F0 F1 B0 B1 ·
        """
        return self

    def simulate(self, **costs: float) -> DrawnSchedule:
        """Return the schedule with other times of its ops: forward_s, input_grad_s, weight_grad_s, loss_s, link_s, in
        any unit (`cost.formulas.simulate.Costs`). Raises: ConfigError for negative times.

        >>> slow_links = mt.schedule("1f1b", stages=4, microbatches=8).simulate(link_s=0.5)
        """
        if wrong := [f"{name}={value}" for name, value in costs.items() if value < 0]:
            raise ConfigError(f"{wrong[0]} is not a time of a schedule's op; use 0 or more")
        return DrawnSchedule(self.of, simulate.simulate(self.of, simulate.Costs(**costs)))


def history(rows: Sequence[Mapping[str, float]]) -> Rows:
    """Return metrics of steps with the curve of their loss as picture."""
    points = [(row["step"], row["loss"]) for row in rows if math.isfinite(row["loss"])]
    curve = pictures.Plot([PlotCurve(0, "loss", points)], PlotAxis("step", "{:g}".format),
                          PlotAxis("loss", "{:g}".format), "loss by step", height=240).draw() if points else ""
    last = "; ".join(f"{name} {value:.6g}" for name, value in rows[-1].items()) if rows else "no step was taken"
    return Rows(rows, f"{amount(len(rows), 'step')}, the last: {last}" if rows else last, curve)


def name_all(experiments: Sequence | Mapping) -> dict:
    """Return name -> experiment. Experiments without names are named by their layouts. Raises: ConfigError if two have
    the same layout."""
    if isinstance(experiments, Mapping):
        return dict(experiments)
    by_layout = {one.layout: one for one in experiments}
    if len(by_layout) < len(experiments):
        raise ConfigError(f"the {len(experiments)} experiments to compare have only {len(by_layout)} different "
                          f'layouts; give them names, mt.compare({{"a": …}})')
    return by_layout


def comparison_row(name: str, layout: str, costs: StepCosts, steps: Sequence[Mapping[str, float]]) -> dict:
    """Return a row of `comparison`. steps: metrics of the steps from the start."""
    step_s = costs.roofline["step_time_s"] if costs.roofline else min(row["step_s"] for row in steps)
    return {"name": name, "layout": layout, "memory_bytes": costs.memory_bytes["compiled"]["total"],
            "sent_bytes": sum(costs.sent_bytes.values()), "step_time_s": step_s, "loss": steps[-1]["loss"]}


def comparison(rows: Sequence[Mapping], costs: Mapping[str, StepCosts], steps: int) -> Rows:
    """Return a table of experiments. Its picture shows their memory and, below, the bytes that they send. rows: from
    `comparison_row`. steps: number of steps before the loss."""
    lines = [("", "layout", "memory", "sent", "step", f"loss after {amount(steps, 'step')}")]
    lines += [(row["name"], row["layout"], size(row["memory_bytes"]), size(row["sent_bytes"]),
               seconds(row["step_time_s"]), f"{row['loss']:.6f}") for row in rows]
    kinds = list(dict.fromkeys(kind for one in costs.values() for kind in one.sent_bytes))
    held = [Bar(row["name"], layout.stack(costs[row["name"]].memory_bytes["compiled"])) for row in rows]
    sent = [Bar(row["name"], [(kinds.index(kind) % pictures.COLORS, kind, count)
                              for kind, count in costs[row["name"]].sent_bytes.items()], f"loss {row['loss']:.6f}")
            for row in rows]
    return Rows(rows, report.columns(lines), pictures.below([
        pictures.bars(held, size, "memory of a device", legend=True),
        pictures.bars(sent, size, "bytes that a device sends in a step", legend=True)]))


def show_plans(found: plan.Planned) -> Rows:
    """Return plans. If they are for one number of GPUs, their picture shows memory against step time."""
    data, one = found.as_json(), len(found.answers) == 1
    return Rows(data["plans"], found.text(), plans.trade_drawing(data, legend=True) if found.best and one else "")


def show_proof(proof: parity.Proof) -> JsonTable:
    """Return a proof with a line of text for each layout."""
    data, total = proof.as_json(), len(proof.cells)
    lines = [parity.line(cell, number, total) for number, cell in enumerate(proof.cells, 1)]
    lines += [f"FOUND: {finding}" for finding in proof.findings] + [f"note: {note}" for note in proof.notes]
    return JsonTable(data, "\n".join([*lines, parity.summarize(proof)]), proofs.heat_drawing(data))


def display(shown):
    """Show a result in a notebook, and return the handle by which it can be updated; None outside a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import display, get_ipython
    return display.display(shown, display_id=True) if get_ipython() else None
