"""What schedules cost in time and memory: the closed forms, and what "auto" takes."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain.cost.formulas import simulate
from meshtrain.cost.formulas.simulate import Costs
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import INTERLEAVED, NAMES
from schedule_check import needs
from test_schedules import UNEQUAL

# ---- the simulator ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, v, equal, recomputing", [
    ("gpipe", 1, .273, .273), ("1f1b", 1, .273, .273), ("interleaved", 2, .158, .158), ("zero_bubble", 1, .200, .220),
    ("interleaved_zero_bubble", 2, .111, .123)])
def test_bubbles_at_4_stages_and_8_microbatches_are_the_references(name, v, equal, recomputing):
    for costs, bubble in ((Costs(), equal), (Costs(input_grad_s=2.0), recomputing)):
        assert simulate.simulate(schedules.make(name, 4, 8, v), costs).bubble == pytest.approx(bubble, abs=6e-4)


def test_a_phase_table_pays_both_links_in_every_tick_but_for_what_the_loss_hides():
    base, p, link_s = simulate.simulate(schedules.make("1f1b", 4, 8), UNEQUAL).makespan_s, 4, 0.5
    slow = dataclasses.replace(UNEQUAL, link_s=link_s)
    # Ten ticks in which some stage sends y on, and ten with a dx: the last F goes to no stage, nor does the last B.
    assert simulate.simulate(schedules.make("1f1b", p, 8), slow).makespan_s == pytest.approx(base + 2 * 10 * link_s)
    # eight ticks: the first sends y alone, six both, the last dx alone
    losing = dataclasses.replace(slow, loss_s=0.75)
    assert simulate.simulate(schedules.make("1f1b", p, 8), losing).makespan_s == pytest.approx(
        base + 2 * 10 * link_s + 2 * 0.25)


def test_the_loss_costs_its_time_once_for_every_microbatch():
    costs = dataclasses.replace(UNEQUAL, loss_s=0.25)
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        schedule = schedules.make(name, 4, 8, v)
        without_s = simulate.simulate(schedule, UNEQUAL).makespan_s
        assert simulate.simulate(schedule, costs).makespan_s == pytest.approx(without_s + 8 * 0.25)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.sampled_from(NAMES), st.floats(.25, 4),
       st.floats(.25, 4), st.floats(0, 1))
def test_times_of_a_table_respect_what_each_op_waits_for(p, rounds, name, back, weight, link):
    schedule = schedules.make(name, p, rounds * p, 2 if name in INTERLEAVED else 1)
    costs = Costs(1.0, back, weight, 0.125, link)
    outcome = simulate.simulate(schedule, costs)
    ended = {}
    for t, s, kind in np.argwhere(schedule.ops[..., 0] >= 0).tolist():
        i, chunk = schedule.ops[t, s, kind].tolist()
        g = chunk * p + s
        for need in needs(kind, g, i, p * schedule.num_chunks):
            travel_s = link if need[1] != g else 0
            assert outcome.begin_s[t, s, kind] >= ended[need] + travel_s - 1e-9
        ended[kind, g, i] = outcome.end_s[t, s, kind]
    assert outcome.makespan_s >= np.nanmax(outcome.end_s) - 1e-9 and 0 <= outcome.bubble < 1


# ---- auto ------------------------------------------------------------------------------------------------------------

GIB = 2**30

def slots(schedule) -> int:
    """Of a microbatch 1 GiB for B and 1 for W, half of one from B to W, and a tenth between stages."""
    kept = GIB * (schedule.slots["R"] + schedule.slots["Q"]) + GIB // 2 * schedule.slots.get("Z", 0)
    return GIB // 10 * (schedule.slots["X"] + schedule.slots["D"]) + -(-kept // schedule.num_chunks)


def memory(schedule) -> simulate.StepBytes:
    """All but the slots is another GiB."""
    return simulate.StepBytes(slots(schedule), slots(schedule) + GIB)


def test_auto_takes_the_cheapest_table_that_fits_and_says_why():
    free = simulate.choose(4, 8, chunks=(1, 2, 4))
    assert (free.schedule.name, free.schedule.num_chunks, free.fits) == ("interleaved_zero_bubble", 4, None)
    assert "5.9%" in free.why and "next interleaved of 4 chunks (8.6%)" in free.why
    held = {v: slots(schedules.make("interleaved_zero_bubble", 4, 8, v)) for v in (1, 2)}
    tight = simulate.choose(4, 8, Costs(), memory, held[2] + GIB, chunks=(1, 2))
    assert tight.schedule.name == "interleaved_zero_bubble" and tight.fits and tight.memory_bytes == held[2]
    tighter = simulate.choose(4, 8, Costs(), memory, held[2] + GIB - 1, chunks=(1, 2))
    assert (tighter.schedule.name, tighter.fits) == ("interleaved", True)
    assert "interleaved_zero_bubble of 2 chunks (11.1%) is faster but needs" in tighter.why
    nothing = simulate.choose(4, 8, Costs(), memory, GIB, chunks=(1, 2))
    assert nothing.fits is False and "none of 5 schedules fits" in nothing.why
    assert nothing.memory_bytes == min(slots(schedules.make(n, 4, 8, 2 if n in INTERLEAVED else 1)) for n in NAMES)


def test_auto_prefers_the_plain_table_where_nothing_is_gained():
    assert simulate.choose(4, 6, Costs(weight_grad_s=0.0)).schedule.name == "1f1b"
    assert simulate.choose(4, 6).schedule.name == "zero_bubble", "6 microbatches on 4 stages have no chunks"
    # A link that no op hides costs more with chunks, which cross it more often.
    assert simulate.choose(4, 8, Costs(link_s=5.0), chunks=(1, 2)).schedule.num_chunks == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(1, 24), st.floats(.5, 3), st.floats(.1, 2), st.integers(0, 40))
def test_auto_never_takes_a_table_that_another_fitting_one_beats(p, m, back, weight, budget):
    costs = Costs(1.0, back, weight)
    choice = simulate.choose(p, m, costs, memory, budget * GIB, chunks=(1, 2))
    for name in simulate.AUTOMATIC:
        v = 2 if name in INTERLEAVED else 1
        if not schedules.problems(name, p, m, v):
            schedule = schedules.make(name, p, m, v)
            if memory(schedule).total <= budget * GIB:
                assert choice.fits and choice.outcome.makespan_s <= simulate.simulate(schedule, costs).makespan_s * (
                    1 + 1e-8)


def test_auto_refuses_chunks_that_the_microbatches_do_not_allow():
    with pytest.raises(ValueError, match="training.microbatches=6 is not a multiple of mesh.stage=4.*use 4 or 8"):
        simulate.choose(4, 6, chunks=(2,))


def test_chunks_are_those_that_need_no_padding():
    assert simulate.chunk_counts(32, 4) == (1, 2, 4)
    assert simulate.chunk_counts(24, 4) == (1, 2), "three chunks and four stages: weights would travel many times"
    assert simulate.chunk_counts(30, 4) == (1, 2, 4), "30 layers are padded to 32 anyway"
    assert simulate.chunk_counts(4, 4) == (1,)
