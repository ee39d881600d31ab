"""Pipeline schedules: every one of them is sound, costs what the closed forms say, and a broken one is caught."""
import contextlib
import dataclasses
import io
import itertools
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest
import schedule_check
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain import config
from meshtrain.commands import inspect
from meshtrain.cost.formulas import simulate
from meshtrain.cost.formulas.simulate import Costs
from meshtrain.inspection import chart
from meshtrain.names import PIPELINE_SCHEDULES, PipelineSchedule
from meshtrain.parallel.pipeline import schedules
from meshtrain.parallel.pipeline.schedules import B, F, INTERLEAVED, NAMES, W

UNEQUAL = Costs(forward_s=1.0, input_grad_s=1.75, weight_grad_s=0.5)


def cases(p):
    """(name, m, v) of every schedule on p stages with m ≤ 4p and v ≤ 4."""
    for m in range(1, 4 * p + 1):
        for name in NAMES:
            if name not in INTERLEAVED:
                yield name, m, 1
            elif m % p == 0:
                yield from ((name, m, v) for v in (2, 3, 4))


# ---- every schedule --------------------------------------------------------------------------------------------------

def phase_makespan(name, p, m, v, c):
    """Ticks with F and B are mv+p−1 each; W, where it is split off, needs mv."""
    both = (p - 1) / v * (c.forward_s + c.input_grad_s)
    return m * c.ideal_s + both + (0 if name in schedules.SPLIT else (p - 1) / v * c.weight_grad_s)


def phase_peak(name, p, m, v, s):
    """(microbatch, chunk) pairs that stage s holds at m ≥ 2p."""
    if PIPELINE_SCHEDULES[name].forwards_first:
        return m * v
    return (v + 1) * p - (s if name in schedules.SPLIT else 2 * s)


@pytest.mark.parametrize("p", range(1, 9))
def test_every_table_is_sound_and_has_the_makespan_bubble_and_peaks_of_its_closed_form(p):
    for name, m, v in cases(p):
        schedule = schedules.make(name, p, m, v)
        schedule_check.check(schedule)
        assert 0 <= schedule.slots["Q"] - schedule.peak.max() <= 1
        for costs in (Costs(), UNEQUAL):
            outcome = simulate.simulate(schedule, costs)
            assert outcome.makespan_s == pytest.approx(phase_makespan(name, p, m, v, costs), rel=1e-12)
            assert outcome.bubble == pytest.approx(1 - m * costs.ideal_s / outcome.makespan_s, abs=1e-12)
        if m >= 2 * p:
            assert schedule.peak.tolist() == [phase_peak(name, p, m, v, s) for s in range(p)]
            assert outcome.peak_live * v == schedule.peak.max()
            if not PIPELINE_SCHEDULES[name].forwards_first:
                assert schedule.slots["Q"] == schedule.peak[0], "no slot more than what is alive"
                assert schedule.slots["X"] == 1 and schedule.slots["D"] <= 2 and schedule.slots.get("Z", p) <= p


@pytest.mark.parametrize("name, v, makespans", [
    ("gpipe", 1, (33, 117)), ("1f1b", 1, (33, 117)), ("interleaved", 2, (28.5, 106.5)),
    ("interleaved", 4, (26.25, 101.25)),
    ("zero_bubble", 1, (30, 110)), ("interleaved_zero_bubble", 2, (27, 103))])
def test_makespans_are_those_of_independent_simulations(name, v, makespans):
    assert tuple(simulate.simulate(schedules.make(name, p, m, v)).makespan_s for p, m in ((4, 8), (8, 32))) == makespans


@pytest.mark.parametrize("what", itertools.starmap(PipelineSchedule, itertools.product((False, True), repeat=3)))
def test_a_row_of_the_table_is_all_that_a_new_schedule_needs(monkeypatch, what):
    name = f"another, {what}"       # its counts are kept by name
    monkeypatch.setitem(PIPELINE_SCHEDULES, name, what)
    for p, rounds, v in itertools.product((1, 2, 3, 5), (1, 2, 4), (2, 3) if what.chunked else (1,)):
        schedule = schedules.make(name, p, rounds * p, v)
        schedule_check.check(schedule)
        assert schedules.counts(name, p, rounds * p, v) == (schedule.executed, dict(schedule.slots))


def test_auto_chooses_among_known_schedules():
    assert set(simulate.AUTOMATIC) <= set(NAMES)


def test_ops_flow_one_stage_a_tick():
    schedule = schedules.make("interleaved_zero_bubble", 2, 4, 2)
    assert [entry.split()[2:] for entry in chart.text(schedule).splitlines()] == [
        "F0a F1a F0b F1b F2a · F3a B0b W0b F2b B1b W1b F3b B0a W0a · B1a W1a B2b W2b B3b W3b B2a W2a B3a W3a".split(),
        "· F0a F1a F0b F1b B0b F2a B1b W0b F3a B0a W1b F2b B1a W0a F3b B2b W1a B3b W2b B2a W3b B3a W2a · W3a".split()]


def test_phases_are_the_scans_of_the_executor():
    phases = lambda schedule: [(phase.start, phase.stop, phase.kinds, phase.loss) for phase in schedule.phases()]
    assert phases(schedules.make("gpipe", 4, 8)) == [
        (0, 3, "F", "never"), (3, 11, "F", "always"), (11, 22, "B", "never")]
    assert phases(schedules.make("1f1b", 4, 8)) == [
        (0, 4, "F", "sometimes"), (4, 11, "FB", "always"), (11, 15, "B", "never")]
    assert phases(schedules.make("zero_bubble", 4, 8)) == [
        (0, 4, "F", "sometimes"), (4, 7, "FB", "always"), (7, 11, "FBW", "always"), (11, 15, "BW", "never")]
    # Four ticks in eight have a loss: phases would be many, so this one stays whole and asks `loss_on`.
    assert phases(schedules.make("interleaved", 4, 8, 2)) == [
        (0, 8, "F", "sometimes"), (8, 19, "FB", "sometimes"), (19, 27, "B", "never")]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4), st.sampled_from(NAMES))
def test_phases_cover_every_tick_once_and_execute_what_some_stage_does(p, rounds, v, name):
    schedule = schedules.make(name, p, rounds * p, v if name in INTERLEAVED else 1)
    ticks = [t for phase in schedule.phases() for t in range(phase.start, phase.stop)]
    assert ticks == list(range(schedule.num_ticks)) and len(schedule.phases()) <= 6
    executed = dict.fromkeys("FBW", 0)
    for phase in schedule.phases():
        for t in range(phase.start, phase.stop):
            assert phase.kinds == "".join(kind for kind in "FBW" if schedule.columns[f"{kind}_on"][t].any())
            assert phase.loss in ("sometimes", "always" if schedule.shared["loss_on"][t] else "never")
        for kind in phase.kinds:
            executed[kind] += phase.stop - phase.start
    n = schedule.num_microbatches * schedule.num_chunks
    assert schedule.executed == executed | {"loss": schedule.num_microbatches}
    assert executed == {"F": n + p - 1, "B": n + p - 1, "W": n if schedule.split else 0}


@pytest.mark.parametrize("name, p, m, v, parts", [
    ("interleaved", 4, 10, 2, ["training.microbatches=10", "mesh.stage=4", "pipeline.chunks=2", "use 8 or 12"]),
    ("interleaved_zero_bubble", 4, 3, 3, ["training.microbatches=3", "use 4,", "pipeline.chunks=1"]),
    ("1f1b", 4, 8, 2, ["1f1b", "pipeline.chunks=2", 'pipeline.schedule="interleaved"']),
    ("zero_bubble", 4, 8, 2, ["zero_bubble", "pipeline.chunks=1", "interleaved_zero_bubble"]),
    ("gpipe", 4, 0, 1, ["training.microbatches=0", "at least 1"]),
    ("1f1b", 4, 10**18, 1, [f"training.microbatches={10**18}", "mesh.stage=4", "ops", "at most 50000"]),
    ("interleaved", 2, 4, 10**30, ["pipeline.chunks=1000", "ops"]),     # a table of 10^30 ops would never be made
    ("2f2b", 4, 8, 1, ["2f2b", "1f1b"])])
def test_what_has_no_table_is_refused_with_the_nearest(name, p, m, v, parts):
    with pytest.raises(ValueError) as refused:
        schedules.make(name, p, m, v)
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


# ---- schedules broken on purpose -------------------------------------------------------------------------------------

def changed(schedule, name, index, value):
    columns = dict(schedule.columns)
    columns[name] = columns[name].copy()
    columns[name][index] = value
    return dataclasses.replace(schedule, columns=columns)


def an_op(schedule, draw, kinds=(F, B, W)):
    on = np.argwhere(schedule.ops[..., 0] >= 0)
    on = on[np.isin(on[:, 2], kinds)]
    return tuple(on[draw(st.integers(0, len(on) - 1))].tolist())


def lose_an_op(schedule, draw):
    t, s, kind = an_op(schedule, draw)
    ops = schedule.ops.copy()
    ops[t, s, kind] = -1
    return dataclasses.replace(schedule, ops=ops), "complete"


def do_an_op_twice(schedule, draw):
    t, s, kind = an_op(schedule, draw)
    ops = np.concatenate([schedule.ops, np.full_like(schedule.ops[:1], -1)])
    ops[-1, s, kind] = ops[t, s, kind]
    longer = lambda arrays: {name: np.concatenate([a, a[-1:]]) for name, a in arrays.items()}
    return dataclasses.replace(schedule, ops=ops, columns=longer(schedule.columns),
                               shared=longer(schedule.shared)), "complete"


def tell_the_executor_something_else(schedule, draw):
    t, s, kind = an_op(schedule, draw)
    name = f"{'FBW'[kind]}_{draw(st.sampled_from(['on', 'mb', 'chunk']))}"
    return changed(schedule, name, (t, s), 1 - schedule.columns[name][t, s]), "complete"


def flip_a_flag(schedule, draw):
    name = draw(st.sampled_from(["F_first", "B_first", "loss_here"]))
    t, s = draw(st.integers(0, schedule.num_ticks - 1)), draw(st.integers(0, schedule.num_stages - 1))
    return changed(schedule, name, (t, s), 1 - schedule.columns[name][t, s]), "complete"


def share_the_wrong_microbatch(schedule, draw):
    name = draw(st.sampled_from(["embed", "loss", "embed_grad"]))
    t = draw(st.sampled_from(np.flatnonzero(schedule.shared[f"{name}_on"]).tolist()))
    shared = dict(schedule.shared)
    shared[f"{name}_mb"] = shared[f"{name}_mb"].copy()
    shared[f"{name}_mb"][t] += 1
    return dataclasses.replace(schedule, shared=shared), "complete"


def do_an_op_in_the_tick_of_what_it_waits_for(schedule, draw):
    """Another stage's result arrives after its tick, so the op comes too early."""
    p, num_virtual = schedule.num_stages, schedule.num_stages * schedule.num_chunks
    ticks = {(k, schedule.ops[t, s, k, 1] * p + s, schedule.ops[t, s, k, 0]): (t, s)
             for t, s, k in np.argwhere(schedule.ops[..., 0] >= 0).tolist()}
    waits = sorted((kind, g, i) for kind, g, i in ticks if kind != W and not (kind == F and g == 0)
                   and not (kind == B and g == num_virtual - 1))
    kind, g, i = draw(st.sampled_from(waits))
    (t, s), (early, _) = ticks[kind, g, i], ticks[kind, g - 1 if kind == F else g + 1, i]
    ops = schedule.ops.copy()
    cells = [(t, s, kind), (early, s, kind)]
    ops[cells[0]], ops[cells[1]] = schedule.ops[cells[1]], schedule.ops[cells[0]]
    return rebuilt_columns(schedule, ops), "order"


def rebuilt_columns(schedule, ops):
    """New ops under the old slots: what is done is told right, only the order is wrong."""
    columns, shared = schedules._work(ops, schedule.num_stages, schedule.num_chunks)
    return dataclasses.replace(schedule, ops=ops, columns=dict(schedule.columns) | columns, shared=shared)


def send_what_was_not_made(schedule, draw):
    name, kind = draw(st.sampled_from([("y_out", F), ("dx_out", B)]))
    idle = np.argwhere(schedule.ops[:, :, kind, 0] < 0).tolist()
    return changed(schedule, name, tuple(draw(st.sampled_from(idle))), 1), "sends"


def keep_what_is_awaited(schedule, draw):
    name = draw(st.sampled_from(["y_out", "dx_out"]))
    return changed(schedule, name,
                   tuple(draw(st.sampled_from(np.argwhere(schedule.columns[name]).tolist()))), 0), "sends"


def receive_nothing_or_noise(schedule, draw):
    name = draw(st.sampled_from(["y_in_on", "dx_in_on"]))
    t, s = draw(st.integers(0, schedule.num_ticks - 1)), draw(st.integers(0, schedule.num_stages - 1))
    return changed(schedule, name, (t, s), 1 - schedule.columns[name][t, s]), "slots"


def take_another_slot(schedule, draw):
    """A value goes to, or is looked for in, a slot that is not its own; where there is only one, in one that is
    none."""
    t, s, kind = an_op(schedule, draw)
    letter = "FBW"[kind]
    first = schedule.columns["F_first"][t, s]
    names = [name for name in schedule.columns if name.startswith(f"{letter}_") and name[2:] in "rqdz"]
    name = draw(st.sampled_from(names + (["F_x"] if kind == F and not first else [])))
    number = schedule.slots[name[2:].upper()]
    shift = draw(st.integers(1, number - 1)) if number > 1 else 1
    value = (schedule.columns[name][t, s] + shift) % number if number > 1 else number
    return changed(schedule, name, (t, s), value), "slots"


def let_noise_overwrite_what_is_alive(schedule, draw):
    """A masked F of an idle stage writes its residuals where B will look for another microbatch's."""
    c, found = schedule.columns, []
    for t, s in np.argwhere(c["F_on"] == 0).tolist():
        for later in range(t, schedule.num_ticks):
            if c["B_on"][later, s]:
                born = np.flatnonzero((schedule.ops[:, s, F] == schedule.ops[later, s, B]).all(1))[0]
                if born < t:
                    found.append((t, s, int(c["B_r"][later, s])))
    t, s, slot = draw(st.sampled_from(found))
    return changed(schedule, "F_r", (t, s), slot), "slots"


def have_a_slot_too_few(schedule, draw):
    buffer = draw(st.sampled_from(sorted(schedule.slots)))
    return dataclasses.replace(schedule, slots=dict(schedule.slots) | {buffer: schedule.slots[buffer] - 1}), "slots"


def declare_a_smaller_peak(schedule, draw):
    s = draw(st.integers(0, schedule.num_stages - 1))
    peak = schedule.peak.copy()
    peak[s] -= 1
    return dataclasses.replace(schedule, peak=peak), "live"


@pytest.mark.parametrize("break_it", [
    lose_an_op, do_an_op_twice, tell_the_executor_something_else, flip_a_flag, share_the_wrong_microbatch,
    do_an_op_in_the_tick_of_what_it_waits_for, send_what_was_not_made, keep_what_is_awaited, receive_nothing_or_noise,
    take_another_slot, let_noise_overwrite_what_is_alive, have_a_slot_too_few, declare_a_smaller_peak,
], ids=lambda f: f.__name__)  # fmt: skip
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_table_broken_on_purpose_is_caught_by_the_invariant_it_breaks(break_it, data):
    p, rounds = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    name = data.draw(st.sampled_from(NAMES))
    schedule = schedules.make(name, p, rounds * p, data.draw(st.integers(2, 3)) if name in INTERLEAVED else 1)
    schedule_check.check(schedule)
    broken, invariant = break_it(schedule, data.draw)
    first, _ = next(schedule_check.violations(broken), (None, ""))
    assert first == invariant
    with pytest.raises(ValueError, match=f"{name} .*cannot be executed:\n{invariant}: "):
        schedule_check.check(broken)


def test_values_that_die_before_their_last_read_are_seen_as_such():
    """The replay is not the planner: slots shared by two values that are alive at once are found by reading them."""
    schedule = schedules.make("zero_bubble", 4, 8)
    for name in ("F_q", "B_q", "W_q"):        # all in one slot: each write falls on a value that W still awaits
        schedule = changed(schedule, name, slice(None), 0)
    assert {invariant for invariant, _ in schedule_check.violations(schedule)} == {"slots"}


# ---- as people see it ------------------------------------------------------------------------------------------------

def call(*args):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = inspect.main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def pipeline(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "NOT_YET", ("context",), raising=False)
    monkeypatch.chdir(tmp_path)
    rules = Path(__file__).resolve().parent.parent.parent / "sharding_rules" / "zero1.toml"
    return ("--mesh.simulated_devices", 0, "--mesh.fsdp", 1, "--mesh.stage", 4, "--sharding.rules",
            rules, "--data.global_batch", 32,
            "--training.microbatches", 8, "--run.name", "mine", "--schedule")


def test_inspect_draws_the_schedule_and_prints_it(pipeline, tmp_path):
    code, out, err = call(*pipeline, "--pipeline.schedule", "1f1b")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("1f1b: 4 stages, 8 microbatches · bubble 2")
    assert "activations of 8 microbatches" in lines[0]
    assert lines[2] == "stage 0 F0 F1 F2 F3 F4 ·  F5 ·  F6 ·  F7 B0 ·  B1 ·  B2 ·  B3 B4 B5 B6 B7"
    assert lines[5] == "stage 3 ·  ·  ·  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7 ·  ·  ·"
    assert lines[6] == "written: mine-schedule.svg"
    assert [path.name for path in tmp_path.iterdir()] == ["mine-schedule.svg"]
    assert xml.dom.minidom.parse(str(tmp_path / "mine-schedule.svg")).documentElement.tagName == "svg"


def test_a_mesh_that_does_not_fit_a_topology_is_told_the_topology_that_fits(pipeline):
    code, _, err = call(*pipeline, "--topology", "h100:8")
    assert code == 2 and err.count("\n") == 1
    assert "takes 16 devices, and there are 8" in err and "--topology h100:16" in err and "simulated" not in err


def test_inspect_says_what_auto_takes(pipeline):
    code, out, _ = call(*pipeline, "--model.num_layers", 8)
    assert code == 0 and out.splitlines()[1].startswith("interleaved_zero_bubble of 2 chunks: modelled bubble 1")


@pytest.mark.parametrize("args, parts", [
    (("--pipeline.schedule", "gpipe", "--pipeline.chunks", 2), ["gpipe", "pipeline.chunks=2", "interleaved"]),
    (("--training.microbatches", 16, "--mesh.stage", 3, "--pipeline.chunks", 2),
     ["training.microbatches=16", "use 15 or 18"]),
    (("--topology", "h1000:64"), ["h1000", "h100"]),
    (("--topology", "h100:8"), ["mesh.stage=4", "8"])])
def test_what_cannot_be_drawn_is_told_in_one_message(pipeline, tmp_path, args, parts):
    code, out, err = call(*pipeline, *args)
    assert (code, out) == (2, "") and all(part in err for part in parts) and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
