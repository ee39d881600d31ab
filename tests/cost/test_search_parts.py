"""Parts of the planner's search by what each promises: counts of microbatches, schedules by bubble, the least
recomputation that fits, near misses, and the seconds of a reason."""
import collections
import dataclasses
import functools
import types

import pytest

from meshtrain.commands import plan
from meshtrain.cost.formulas import footprint, price, simulate
from meshtrain.cost.formulas.place import ModelWeights, place
from meshtrain.cost.planner import gap, search
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec


@functools.cache
def question() -> search.Question:
    options = plan.COMMAND.read("llama3-8b --gpus 16 --gpu h100 --global-batch 64".split())
    return plan.question_of(plan.run_of(options), options, *options["gpus"])


def file_of(rules: str):
    (file,) = [one for one in question().rule_files if one.path.endswith(f"/{rules}.toml")]
    return file


def placed_on(rules: str, **sizes: int):
    asked, mesh = question(), MeshSpec(sizes)
    layout, wrong = asked.lay(mesh.sizes, file_of(rules), "ring")
    assert not wrong
    return place(asked.rows, asked.cfg, layout, mesh)


def options_of(placed, remat: str):
    return dataclasses.replace(question().options, microbatches=4, remat=remat, schedule="", chunks=1, method="ring",
                               attended=question().attended(placed.layout, "ring"))


@pytest.mark.parametrize("global_batch, shards, fixed, counts", [
    (48, 4, {}, [12, 6, 3, 1]),         # 1, 2, 4 sequences, or all 12
    (128, 4, {}, [32, 16, 8, 4, 2]),    # no more than 16 sequences in a microbatch
    (48, 5, {}, []), (48, 4, {"microbatches": 6}, [6]), (48, 4, {"microbatches": 5}, [])])
def test_microbatches_leave_a_power_of_two_of_sequences_or_all(global_batch, shards, fixed, counts):
    asked = types.SimpleNamespace(options=types.SimpleNamespace(global_batch=global_batch), fixed=fixed)
    assert search._microbatches(asked, shards) == counts


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 32)])
def test_schedules_come_by_their_simulated_bubble_and_each_once(p, m):
    found = search._schedules(question(), p, m)
    bubbles = [simulate.simulate(schedules.make(name, p, m, v)).makespan_s for name, v in found]
    assert bubbles[0] == min(bubbles) < bubbles[-1] == max(bubbles)
    assert len(set(found)) == len(found) and {name for name, _ in found} <= set(simulate.AUTOMATIC)
    assert all(not schedules.problems(name, p, m, v) and (v > 1) == (name in schedules.INTERLEAVED) for name, v in found)


def test_without_stages_there_is_no_schedule():
    assert search._schedules(question(), 1, 8) == [("", 1)]


def fitting(placed, usable_bytes: int):
    return list(search._fitting(dataclasses.replace(question(), usable_bytes=usable_bytes), placed, 4, "ring"))


def test_the_least_recomputation_that_fits_is_taken_and_the_smallest_where_none_fits():
    placed = placed_on("zero3", fsdp=16)
    needed = {remat: int(footprint.memory(placed, options_of(placed, remat))["total"])
              for remat in (*search.REMAT, search.OFFLOAD)}
    assert needed["none"] > needed["selective"] > needed["full"] > needed["offload"]
    for remat, bytes_ in needed.items():
        assert [(one.remat, n) for one, n in fitting(placed, bytes_)] == [(remat, bytes_)]
    (smallest, n), = fitting(placed, needed["offload"] - 1)
    assert (smallest.remat, n) == ("offload", needed["offload"])


@pytest.mark.parametrize("rules, sizes", [("zero3", dict(fsdp=16)), ("ddp", dict(data=16)), ("zero1", dict(fsdp=4, stage=4)),
                                          ("hsdp", dict(data=2, fsdp=2, stage=2, tensor=2))])
def test_every_option_of_a_layout_needs_its_least_bytes(rules, sizes):
    placed = placed_on(rules, **sizes)
    least = footprint.least_bytes(ModelWeights(placed.rows, placed.cfg, placed.layout), question().options)
    assert 0 < least <= min(n for usable_bytes in (0, 1 << 60) for _, n in fitting(placed, usable_bytes))


@pytest.mark.parametrize("gib", [pytest.param(20, marks=pytest.mark.full), 1])
def test_layouts_that_need_far_too_much_are_not_priced_unless_nothing_fits(gib, monkeypatch):
    asked = dataclasses.replace(question(), usable_bytes=gib << 30, fixed={"stage": 1, "tensor": 2})

    def answer():
        found, priced = search.search(asked), len(divided)
        divided.clear()
        plans = [plan.as_json() for plan in (*found.plans, *found.misses)]
        return priced, (len(found.plans), plans, found.tried, found.faults)
    divided, divide = [], search._divide
    monkeypatch.setattr(search, "_divide", lambda *layout: divided.append(layout) or divide(*layout))
    priced, given = answer()
    monkeypatch.setattr(footprint, "least_bytes", lambda placed, options: 0)
    all_priced, same = answer()
    assert given == same and given[1] and (given[0] > 0) == (gib > 1)
    assert priced < all_priced if gib > 1 else priced == all_priced


def test_a_pipeline_is_tried_with_and_without_recomputation_and_a_separate_weight_gradient():
    found = fitting(placed_on("zero1", fsdp=4, stage=4), 1 << 60)
    assert {one.remat for one, _ in found} == {"none", "selective"}
    assert {one.schedule in schedules.SPLIT for one, _ in found} == {True, False}


def test_a_pipeline_takes_the_first_schedule_that_fits():
    placed = placed_on("zero1", fsdp=4, stage=4)
    least = min(n for _, n in fitting(placed, 1 << 60))
    found = fitting(placed, least)
    assert found and all(n <= least for _, n in found)


def test_most_options_of_a_layout_are_dismissed_before_their_collectives_are_listed(monkeypatch):
    asked, placed, rules, listed = question(), placed_on("zero3", fsdp=4, stage=4), file_of("zero3"), []
    fits = [one for m in (1, 2, 4, 8, 16) for one, _ in search._fitting(asked, placed, m, "ring")]
    pricings = [price.Pricing(placed, asked.rated, one) for one in fits]
    seconds = [one.step_s() for one in pricings]
    assert all(one.least_s() < step_s == one.price().step_s for one, step_s in zip(pricings, seconds))
    list_collectives = price.Pricing.list_collectives
    monkeypatch.setattr(price.Pricing, "list_collectives", lambda one: listed.append(one) or list_collectives(one))
    assert search._find_fastest(asked, placed, rules, fits).options == fits[seconds.index(min(seconds))]
    assert 0 < len(listed) < len(fits) / 2


def test_near_misses_are_the_smallest_that_training_takes_fastest_first():
    misses = []
    for rules, sizes in (("zero3", dict(fsdp=16)), ("zero2", dict(fsdp=16)), ("zero1", dict(fsdp=8, tensor=2)),
                         ("zero3", dict(fsdp=8, tensor=2)), ("hsdp", dict(data=2, fsdp=8)), ("ddp", dict(data=16)),
                         ("zero1", dict(fsdp=16))):
        placed = placed_on(rules, **sizes)
        options = options_of(placed, "none")
        misses.append((int(footprint.memory(placed, options)["total"]), placed, file_of(rules), options))
    asked = dataclasses.replace(question(), usable_bytes=20 << 30, refused=lambda one: (
        ["no ddp"] if one.rules.path.endswith("/ddp.toml") else []))
    faults = collections.Counter()
    found = search._near(asked, misses, faults)
    assert len(found) == search.MOST_MISSES and faults == {"no ddp": 1}
    times = [one.price.step_s for one in found]
    assert times == sorted(times) and not any(one.fits for one in found)
    held = {name: found[0].price.memory_bytes.get(name, 0) for name in search.KIND_NAMES}
    largest = max(held, key=held.get)
    assert (f"20.00 GiB can be used: {search.KIND_NAMES[largest]} take {simulate.gib(held[largest])}" in found[0].reason)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_a_layers_weights_are_gathered_in_its_dtype_and_its_gradients_reduced_in_float32(dtype, size):
    placed = placed_on("zero3", data=2, fsdp=8)
    asked = dataclasses.replace(question(), cfg=question().cfg.model_copy(update={"compute_dtype": dtype}))
    links = price.Links(asked.rated, placed.mesh)
    for kind, itemsize in (("all-gather", size), ("reduce-scatter", 4)):
        parts = [asked.rated.collective_s(kind, n * itemsize, links.group(axes))
                 for axes, n in ((("fsdp",), 3e8), (("data", "fsdp"), 1e8))]
        both = gap._each_s(asked, types.SimpleNamespace(placed=placed), {("fsdp",): 3e8, ("data", "fsdp"): 1e8}, kind)
        assert both == pytest.approx(sum(parts), rel=1e-12) and min(parts) > 0
