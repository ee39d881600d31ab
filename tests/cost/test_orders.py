"""The planner's order and memory beside those of compiled steps, which benchmarks/layouts.py has recorded."""
import itertools
import tomllib

import pytest

from benchmarks import layouts

RECORDED = tomllib.loads(layouts.GOLDEN.read_text())
CASES = {case.name: case for case in layouts.CASES}


@pytest.fixture(scope="module")
def prices():
    return {name: layouts.priced(case) for name, case in CASES.items()}


def test_the_record_has_every_layout_of_the_benchmark():
    assert list(RECORDED) == list(CASES) and len(CASES) >= 12


def test_layouts_come_in_the_order_of_the_roofline_wherever_that_tells_them_apart(prices):
    """Of one model and batch, more than 5% apart. Tensor parallelism is the furthest off, 6.0%."""
    wrong = []
    for (a, one), (b, other) in itertools.combinations(CASES.items(), 2):
        ratio = RECORDED[b]["step_s"] / RECORDED[a]["step_s"]
        if (one.model, one.batch, one.gpus) == (other.model, other.batch, other.gpus) and not 1 / 1.05 < ratio < 1.05:
            wrong += [(a, b)] * ((prices[b].step_s > prices[a].step_s) != (ratio > 1))
    assert wrong == []
    assert {name: one.step_s for name, one in prices.items()} == pytest.approx(
        {name: row["step_s"] for name, row in RECORDED.items()}, rel=.08)


def test_no_formula_holds_more_than_a_twentieth_less_than_the_program(prices):
    few = {name: one.memory_bytes["total"] for name, one in prices.items()
           if one.memory_bytes["total"] < .95 * RECORDED[name]["bytes"]}
    assert few == {}
