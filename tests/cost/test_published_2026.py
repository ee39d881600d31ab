"""Published runs of 2026 (goldens/published_2026.csv) against the closed formulas."""
import dataclasses
import statistics

import pytest

from benchmarks import other_frameworks, published_2026
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import assumptions


@pytest.fixture(scope="module")
def compared():
    return published_2026.errors()


def test_the_runs_of_2026_are_met(compared):
    """The bounds are what was asked for; met are 4.1% and 10.7%, on Hopper 13.6% of experts' rows."""
    kinds = published_2026.by_kind(compared[0])
    for name, most in (("all dense", .08), ("dense Hopper", .10), ("dense Blackwell", .08), ("all MoE", .13),
                       ("MoE Hopper", .15), ("MoE Blackwell", .12)):
        assert statistics.median(kinds[name]) <= most, name
    assert len(kinds["all dense"]) == 64 and len(kinds["all MoE"]) == 102


def test_their_layouts_come_in_the_published_order(compared):
    count, right, _ = published_2026.pairs(compared[0])
    assert count == 134 and right >= .85 * count


def test_models_that_no_constant_has_seen_are_met_too(compared):
    kinds = published_2026.by_kind(published_2026.held_out(compared[0], lambda row: row.shape))
    assert statistics.median(kinds["all dense"]) <= .09 and statistics.median(kinds["all MoE"]) <= .14


def test_the_bounds_see_a_wrong_constant(monkeypatch):
    monkeypatch.setitem(published_2026.TABLE["matmul.sustained"].values, "b300", .45)
    monkeypatch.setitem(published_2026.TABLE["matmul.sustained"].values, "gb", .45)
    kinds = published_2026.by_kind(published_2026.errors()[0])
    assert statistics.median(kinds["dense Blackwell"]) > .10


def test_a_row_has_a_price_or_a_reason(compared):
    found, left = compared
    assert len(found) + len(left) == 203
    reasons = {(row.columns["model"], why) for row, why in left}
    assert ("Nemotron_3_Super", "products in nvfp4") in reasons
    assert all(why for _, why in reasons)


def test_a_run_file_cannot_ask_for_what_is_priced_for_comparison_alone():
    with pytest.raises(ValueError, match="matmul_dtype"):
        Model(matmul_dtype="mxfp8")
    assert other_frameworks.OTHERS.keys() & assumptions.TABLE.keys() == {"overlap.reduced"}


def test_experts_are_sharded_over_tensor_and_data_unless_their_width_is():
    by = {(row.shape, row.gpu, row.count("ep")): row for row in published_2026.rows() if row.columns["ep"]}
    whole = published_2026.ways(by["qwen3-235b-a22b", "h100", 32])
    assert whole.experts == ("fsdp", "tensor") and dict(whole.mesh)["fsdp"] == 16 and not whole.inner
    split = published_2026.ways(by["grok1", "gb200", 8])
    assert split.experts == ("fsdp",) and split.inner
    assert published_2026.copies(by["qwen3-235b-a22b", "h100", 32], whole) == pytest.approx(4 * (1 - .75**8))


def test_a_row_without_a_layout_says_so():
    row = published_2026.rows()[0]
    without = dataclasses.replace(row, columns=row.columns | {"tp": ""})
    with pytest.raises(published_2026.NotPriced, match="layout is not published"):
        published_2026.priced(without)
