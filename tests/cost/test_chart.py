"""The chart of a schedule: every op is in it, a long one is cut where it repeats, and no line outgrows a screen."""
import re
from pathlib import Path

import pytest

from meshtrain.cost.formulas import simulate
from meshtrain.cost.formulas.simulate import Costs
from meshtrain.inspection import chart
from meshtrain.pages import pictures, skin
from meshtrain.parallel.pipeline import schedules

GIB = 2**30
COSTS = Costs(forward_s=1.0, input_grad_s=1.75, weight_grad_s=0.5, loss_s=0.25)
LONG = [("interleaved", 4, 64, 4), ("1f1b", 4, 64, 1), ("gpipe", 4, 64, 1), ("zero_bubble", 8, 64, 1),
        ("interleaved_zero_bubble", 16, 64, 2)]


def drawn(schedule, costs=COSTS, memory_bytes=3 * GIB) -> str:
    """As `inspect --schedule` writes it."""
    outcome = simulate.simulate(schedule, costs)
    told = chart.as_json(simulate.ChosenSchedule(schedule, outcome, memory_bytes, True, "asked for"))
    return skin.alone(pictures.schedule(told, chart.title(schedule, outcome, memory_bytes))) + "\n"


def numbers(svg: str) -> list[int]:
    return [int(text) for text in re.findall(r">(\d+)</text>", svg)]


def labels(text: str) -> list[str]:
    return re.findall(r"\b[FBW]\d+[a-d]?\b", text)


@pytest.mark.parametrize("name, v", [("zero_bubble", 1), ("interleaved_zero_bubble", 2)])
def test_a_picture_shows_every_op_with_its_microbatch(name, v):
    svg = drawn(schedules.make(name, 2, 4, v))
    assert sorted(numbers(svg)) == sorted([*range(4)] * 3 * 2 * v)
    assert "3.00 GiB" in svg and "head and loss" in svg


def test_the_boxes_of_a_picture_are_as_many_as_ops_and_losses():
    svg = drawn(schedules.make("zero_bubble", 2, 4, 1))
    assert [svg.count(f'class="c{color} gap"') for color, _ in map(pictures.KINDS.get, ("F", "B", "W", "loss"))] == [
        8, 8, 8, 2 * 4]
    assert all(f">{name}<" in svg for name in ("forward", "input gradient", "weight gradient"))


@pytest.mark.parametrize("name, p, m, v", [("zero_bubble", 2, 4, 1), ("interleaved", 2, 4, 2), *LONG])
def test_a_schedule_as_json_has_every_op_of_its_lines_once_and_names_what_repeats(name, p, m, v):
    schedule = schedules.make(name, p, m, v)
    told = chart.as_json(simulate.ChosenSchedule(schedule, simulate.simulate(schedule, COSTS), GIB, True, "asked for"))
    ops = [tuple(op) for line in told["lines"] for op in line["ops"]
           if op[1] != "loss" and line["begin"] <= op[4] and op[5] <= line["end"]]
    assert len(set(ops)) == len(ops) <= chart.MOST_OPS and (len(told["lines"]) == 1) == (m == 4)
    if m == 4:
        assert sorted(op[2] for op in ops) == sorted([*range(4)] * (3 if schedule.split else 2) * 2 * v)
    else:
        assert any("repeated every" in line["heading"] for line in told["lines"])
    assert {op[0] for op in ops} == set(range(p)) and told["bubble"] > 0


@pytest.mark.parametrize("name, p, m, v", LONG)
def test_a_long_schedule_is_its_warm_up_one_steady_period_and_its_cool_down(name, p, m, v):
    schedule = schedules.make(name, p, m, v)
    start, stop, period = chart.steady(schedule)
    assert period == (p * v if v > 1 else 1)
    ops = schedule.ops[..., 0]
    for t in range(start, stop - period):
        later = schedule.ops[t + period, ..., 0]
        on = ops[t] >= 0
        assert (on == (later >= 0)).all() and len(set((later - ops[t])[on].tolist())) == 1
    warm_up, steady, cool_down = chart.panels(schedule)
    assert (warm_up.start, warm_up.stop, steady.start, cool_down.start, cool_down.stop) == (
        0, start, start, stop, schedule.num_ticks)
    assert steady.stop - steady.start >= p


@pytest.mark.parametrize("name, p, m, v", [*LONG, ("interleaved_zero_bubble", 4, 8, 2), ("interleaved", 16, 32, 2)])
def test_no_line_of_the_text_is_longer_than_a_screen_and_what_is_cut_is_marked(name, p, m, v):
    schedule = schedules.make(name, p, m, v)
    lines = chart.text(schedule).splitlines()
    assert max(map(len, lines)) <= chart.TEXT_COLUMNS
    shown = chart.panels(schedule)
    assert [line for line in lines if line.endswith(":")] == [f"{panel.heading}:" for panel in shown]
    for i, panel in enumerate(shown):
        block = lines[i * (p + 1) + 1:(i + 1) * (p + 1)]
        ops = int((schedule.ops[panel.start:panel.stop, ..., 0] >= 0).sum())
        found = len(labels("\n".join(block)))
        assert found == ops or found < ops and all("…" in line for line in block)


def test_a_schedule_that_fits_on_a_line_is_not_cut():
    schedule = schedules.make("interleaved", 2, 4, 2)
    text = chart.text(schedule)
    assert len(text.splitlines()) == 2 and len(labels(text)) == 2 * 2 * 4 * 2


def test_the_picture_of_64_microbatches_and_4_chunks_has_numbers_of_one_size_and_the_heading_of_each_part():
    schedule = schedules.make("interleaved", 4, 64, 4)
    svg = drawn(schedule)
    assert len(re.findall(r'<text [^>]*font-size="10.5"[^>]*>\d+</text>', svg)) == len(numbers(svg)) > 200
    assert all(panel.heading in svg for panel in chart.panels(schedule)) and "both gradients" in svg
    assert len(svg) < 160_000


def test_the_picture_of_the_first_page_is_that_of_today():
    """benchmarks/schedule.svg is drawn from unit costs."""
    svg = drawn(schedules.make("interleaved_zero_bubble", 4, 8, 2), simulate.Costs(), None)
    assert (Path(__file__).resolve().parent.parent.parent / "benchmarks" / "schedule.svg").read_text() == svg
