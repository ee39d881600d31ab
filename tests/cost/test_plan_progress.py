"""What plan says while it searches; and that a search asks for each layout what layouts change."""
import contextlib
import io
import json
import types

import pytest
from test_plan import call, in_a_directory_of_its_own, question  # noqa: F401

from meshtrain import config
from meshtrain.commands import plan
from meshtrain.config import checks, conflicts
from meshtrain.cost.formulas import place, price
from meshtrain.cost.planner import search
from meshtrain.run import say
from meshtrain.sharding.mesh import MeshSpec

SMALL = ("llama3-8b", "--gpus", 8, "--gpu", "h100", "--tensor", 8, "--microbatches", 8)


def test_a_search_says_how_far_it_is_on_stderr_and_nothing_in_the_json(monkeypatch):
    monkeypatch.setattr(plan, "FIRST_S", 0.0)
    monkeypatch.setattr(plan, "EVERY_S", 0.0)
    code, out, err = call(*SMALL, "--json")
    assert code == 0 and "pricing" not in out and json.loads(out)["plans"]
    lines = [line for line in err.splitlines() if line.startswith("pricing layouts of 8 GPUs: ")]
    assert lines[0].startswith("pricing layouts of 8 GPUs: 0 of ") and len(lines) > 2 and lines == err.splitlines()


def test_progress_is_a_line_after_a_second_and_then_every_ten_and_on_a_terminal_one_live_line(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(plan.time, "monotonic", lambda: now[0])
    progress, times = plan.SearchProgress(), []
    for step in range(250):
        now[0] = step / 10
        with contextlib.redirect_stderr(io.StringIO()) as err:
            progress.tell(16384, step, 250)
        if err.getvalue():
            assert err.getvalue() == f"pricing layouts of 16,384 GPUs: {step} of 250 meshes with a rule file\n"
            times.append(now[0])
    assert times == pytest.approx([1, 11, 21])
    shown = []
    monkeypatch.setattr(say, "is_live", lambda: True)
    monkeypatch.setattr(say, "live", lambda text, passing: shown.append((text, passing)))
    progress = plan.SearchProgress()
    progress.tell(8, 0, 3)
    progress.tell(8, 1, 3)
    assert [text.split(": ")[1][:6] for text, _ in shown] == ["0 of 3"] and shown[0][1], "at once, and erased at the end"


def test_checks_apart_from_layouts_say_the_same_of_every_layout():
    wrong = config.Run(run=dict(dir="ftp://place/run"), model=dict(mixers="WWWF"),
                       optimizer=dict(name="mine.py:none", qk_clip=100.0))
    found = config.problems(wrong, config.APART_FROM_LAYOUT)
    assert [word in " ".join(found) for word in ("ftp://place/run", "model.mixers", "mine.py")] == [True] * 3
    laid = wrong.replace(mesh={"tensor": 8, "stage": 4}, context={"method": "gather"}, pipeline={"schedule": "1f1b"},
                         training={"remat": "full", "microbatches": 7})
    assert config.problems(laid, config.APART_FROM_LAYOUT) == found
    of_layout = " ".join(config.problems(laid, config.OF_LAYOUT))
    assert "optimizer.qk_clip" in of_layout and "training.microbatches=7" in of_layout
    assert sorted(config.problems(laid)) == sorted(found + config.problems(laid, config.OF_LAYOUT))
    assert set(checks.CHECKS) == {*config.OF_LAYOUT, *config.APART_FROM_LAYOUT}


def read_names(check) -> set[str]:
    """Return the names of attributes that a check reads, with those of the functions and tables that it uses."""
    names, seen, waiting = set(), {checks.problems}, [check]        # by default `problems` makes all checks
    while waiting:
        part = waiting.pop()
        if isinstance(part, conflicts.Conflict):
            names |= {name for text in (part.because, part.remedy) if isinstance(text, str)
                      for found in conflicts.PLACEHOLDER.findall(text) for name in found}
            waiting += [part.when, part.remedy]
        elif isinstance(part, tuple):
            waiting += part
        elif isinstance(part, types.FunctionType) and part not in seen and part.__module__.startswith("meshtrain.con"):
            seen.add(part)
            codes = [part.__code__]
            for code in codes:
                names |= {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
                codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
                waiting += [value for name in code.co_names for module in (vars(conflicts), part.__globals__)
                            if isinstance(value := module.get(name), (tuple, types.FunctionType))]
    return names


def test_every_check_that_reads_what_a_layout_sets_is_made_for_each_layout():
    of_layout = {"mesh", "context", "pipeline", "microbatches", "remat"}
    reading = [check for check in checks.CHECKS if read_names(check) & of_layout]
    assert reading == [*config.OF_LAYOUT]
    assert not any("sharding" in read_names(check) for check in reading), "the rule file is not set for these"


def test_a_step_on_another_placement_is_priced_as_from_the_beginning():
    _, asked = question("llama3-8b --gpus 16 --gpu h100 --tensor 2 --stage 2 --microbatches 8 --global-batch 64")
    found = search.search(asked).plans[0]
    pricing, prices = price.Pricing(found.placed, asked.rated, found.options), set()
    for placement in search.PLACEMENTS:
        mesh = MeshSpec(found.sizes, placement)
        placed = place.place(asked.rows, asked.cfg, found.placed.layout, mesh)      # nothing is kept in it
        fresh = price.Pricing(placed, asked.rated, found.options).price()
        assert pricing.on(mesh).price() == fresh
        prices.add(fresh.step_s)
    assert len(prices) > 1
