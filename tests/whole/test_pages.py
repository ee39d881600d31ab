"""The pages: whole without script, server or network; every number of the JSON is on them; nobody's name is markup."""
import datetime
import html.parser
import importlib.metadata
import json
import re
import time
from xml.etree import ElementTree

import browser
import numpy as np
import pages_samples
import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401

import meshtrain
from meshtrain import units
from meshtrain.commands import inspect, plan
from meshtrain.cost.formulas import simulate
from meshtrain.inspection import chart
from meshtrain.pages import kernels, layout, pictures, plans, proofs, skin
from meshtrain.parallel.pipeline import schedules

VOID = {"meta", "link", "input", "img", "wbr"}


class Read(html.parser.HTMLParser):
    """A page taken apart; fails where a tag is not closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.text, self.exact, self.ids = [], [], [], set(), []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.exact |= {value for name, value in attrs if name == "data-v"}
        if tag not in VOID:
            self.open.append(tag)
        if tag == "wbr":
            self.text.append("<wbr>")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).replace(" <wbr> ", "").split())


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def standing_alone(page: str) -> Read:
    """The page, once nothing in it asks for anything of anywhere."""
    read = Read(page)
    assert len(read.ids) == len(set(read.ids))
    for tag, attrs in read.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form"), tag
        assert {"src", "srcset", "action", "xlink:href"}.isdisjoint(attrs), (tag, attrs)
        assert attrs.get("href", "#").startswith(("#", "data:")), attrs
        assert not any(name.startswith("on") for name in attrs), attrs
    style = "".join(re.findall(r"<style>(.*?)</style>", page, re.DOTALL))
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style
    assert "@media print" in style
    return read


SAMPLES = {
    "8 GPUs": pages_samples.inspected(),
    "16,384 GPUs and 1,000 parameters": pages_samples.inspected(
        {"data": 64, "fsdp": 2, "tensor": 8, "stage": 16}, 1000),
    "one device": pages_samples.inspected({"data": 1}, gpu=None),
    "hostile names": pages_samples.inspected(name=pages_samples.HOSTILE),
}


@pytest.mark.parametrize("told", SAMPLES.values(), ids=SAMPLES)
def test_a_page_is_one_well_formed_file_that_asks_for_nothing_and_holds_its_json(told):
    page = layout.page(told)
    standing_alone(page)
    assert embedded(page) == json.loads(json.dumps(told))


def numbers(told) -> set:
    """Those of the JSON that have a cell of their own."""
    line = told["roofline"]
    rows = [told["memory_bytes"]["compiled"], told["memory_bytes"]["formula"], *told["collectives"]["compiled"]]
    rows += [{"bytes": row["bytes"]} for row in told["collectives"]["formula"]]
    found = {value for row in rows for value in row.values() if type(value) is int}
    found |= {row[key] for row in told["parameters"] for key in ("size", "stored_bytes", "grads_bytes")}
    found |= {row[key] for row in line["kernels"] for key in ("count", "time_s", "flops", "bytes")}
    return found | {row[key] for row in line["traffic"] for key in ("sent_bytes", "seconds", "exposed_s")}


def test_every_number_of_the_json_is_on_the_page():
    told = pages_samples.inspected()
    read = Read(layout.page(told))
    assert {str(number) for number in numbers(told)} - read.exact == set()
    for part in ("1.2B", "1,234,567,891", "262,144", "2.500 s", "13,107", "43.2%", "matmul 60.0%",
                 "72.8 GiB", "79.1 GiB",
                 "234.5 TFLOP", "123.0 TFLOP by formulas", "matmuls differ: a run", "gathered in a loop: a run",
                 "WRONG NUMBERS", "no zeros, please: a run"):
        assert part in read.words, part


def test_names_of_users_are_text_and_never_markup():
    page = layout.page(pages_samples.inspected(name=pages_samples.HOSTILE))
    read = Read(page)
    assert " ".join(pages_samples.HOSTILE.split()) in read.words
    assert page.count("<script") == 2 == page.count("</script>") and "<img" not in page and "<!--" not in page


@pytest.mark.parametrize("sizes, hosts", [({"fsdp": 8}, 1), ({"data": 8, "tensor": 8}, 8),
                                          ({"data": 2048, "tensor": 8}, 2048)])
def test_a_mesh_of_any_size_is_a_drawing_of_at_most_eight_hosts(sizes, hosts):
    drawn = pictures.mesh(pages_samples.inspected(sizes)["mesh"])
    assert drawn.count(">host ") == min(hosts, 8) and (f"{hosts - 8:,} hosts of 8 more" in drawn) == (hosts > 8)
    assert drawn.count("<rect") <= 8 * 8 * 2


def test_a_rack_is_drawn_by_its_hosts_and_told_by_its_links():
    told = pages_samples.inspected({"data": 2, "tensor": 36}, gpu="gb200", per_host=4)
    told["mesh"] |= {"gpus_per_link_domain": 72,
                     "links": {"data": {"size": 2, "inside": 2}, "tensor": {"size": 36, "inside": 36}}}
    read = Read(layout.page(told))
    assert "10 hosts of 4 more" in read.words and "NVLink reaches 72 GPUs, 18 hosts" in read.words


def test_a_group_over_two_axes_is_told_by_its_hosts_and_cards():
    links = {"data": {"size": 8, "inside": 2}, "tensor": {"size": 4, "inside": 4}}
    mesh = {"links": links, "simulated": False, "gpu": "h100"}
    assert layout.over(mesh, "data") == "network: 4 hosts, 2 cards each"
    assert layout.over(mesh, "data+tensor") == "network: 4 hosts, 8 cards each"
    assert layout.over(mesh, "tensor") == "NVLink" and layout.over(mesh, "fsdp") == ""


@pytest.mark.parametrize("name, p, m, v", [("1f1b", 4, 6, 1), ("interleaved_zero_bubble", 4, 64, 2),
                                           ("1f1b", 64, 128, 1)])
def test_a_schedule_is_drawn_with_every_op_of_its_lines(name, p, m, v):
    schedule = schedules.make(name, p, m, v)
    outcome = simulate.simulate(schedule, simulate.Costs(loss_s=0.25))
    found = chart.as_json(simulate.ChosenSchedule(schedule, outcome, 3 * 2**30, True, "asked for"))
    drawn = pictures.schedule(found)
    backgrounds = p * len(found["lines"])
    assert drawn.count("<rect") == backgrounds + sum(len(part["ops"]) for part in found["lines"])
    assert drawn.count("head and loss") == 0 and f">stage {p - 1}<" in drawn and len(drawn) < 2**20
    read = standing_alone(layout.page(pages_samples.inspected() | {"schedule": found}))
    assert f"{name}: {p} stages" in read.words and f"Bubble {outcome.bubble:.1%}" in read.words
    assert "3.0 GiB" in read.words


def test_the_places_on_a_page_are_those_of_the_mesh():
    from meshtrain.sharding.mesh import MeshSpec
    spec = MeshSpec({"data": 2, "tensor": 4, "stage": 3, "context": 2}, ["data", "stage", "fsdp", "tensor", "context"])
    told = {"sizes": dict(spec.sizes), "placement": list(spec.placement)}
    for place in [(0, 0, 0, 0, 0), (1, 0, 3, 2, 1), (0, 0, 2, 1, 0)]:
        at = dict(zip(spec.sizes, place))
        device = int(np.ravel_multi_index([at[axis] for axis in spec.placement], list(spec.shape.values())))
        assert tuple(pictures.coordinate(told, axis, device) for axis in spec.sizes) == place


def test_a_drawing_alone_is_an_svg_file_with_its_own_colours():
    told = pages_samples.inspected()
    bar = pictures.Bar("<&>", [(0, "one", 1.0), (7, "two", 2.0)], "a note")
    for drawing in (pictures.mesh(told["mesh"]), pictures.bars([bar], "{:.1f}".format, "bars", [(4.0, "most")])):
        root = ElementTree.fromstring(skin.alone(drawing))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "prefers-color-scheme: dark" in root[0].text
        used = {name for element in root.iter() for name in element.get("class", "").split()}
        assert {name for name in used if f".{name} " not in root[0].text} == set()


# ---- what a page says ------------------------------------------------------------------------------------------------


def test_a_page_says_when_where_and_with_which_versions_it_was_made():
    read = Read(layout.page(pages_samples.inspected()))
    found = re.search(r"Written (\d{4}-\d\d-\d\d \d\d:\d\d) UTC by meshtrain (\S+)( \(commit [0-9a-f]{7,}\+?\))?, "
                      r"jax (\S+), Python 3\.\d+\.\d+, on (.+?): \w+ \w+, \d+ CPUs\.", read.words)
    assert found and found[2] == meshtrain.__version__ and found[4] == importlib.metadata.version("jax")
    assert abs(datetime.datetime.strptime(found[1] + "+0000", "%Y-%m-%d %H:%M%z").timestamp() - time.time()) < 120


def test_a_page_outside_of_a_checkout_names_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(skin, "HERE", tmp_path)
    skin._commit.cache_clear()
    assert "commit" not in skin.program_line()
    skin._commit.cache_clear()


@pytest.mark.parametrize("more, said", [
    ({}, "This program would compute wrong numbers"),
    ({"broken_permutes": []}, "It fits: "),
    ({"broken_permutes": [], "memory_bytes": {"usable": 2**30}}, "It does not fit: "),
    ({"broken_permutes": [], "memory_bytes": {"usable": None}, "roofline": None, "mesh": {"hbm_bytes": None}},
     "on each of 8 devices. Its time is unknown")])
def test_the_verdict_of_a_step_is_whether_it_is_right_fits_and_how_fast_it_is(more, said):
    told = pages_samples.inspected()
    for key, value in more.items():
        told[key] = told[key] | value if isinstance(value, dict) else value
    assert said in layout.verdict(told) and Read(layout.page(told)).words.count(layout.verdict(told)) == 1


def test_sections_that_say_nothing_of_a_run_are_left_out():
    told = pages_samples.inspected({"data": 1}, gpu=None) | {"differences": [], "notes": []}
    told["matmul_flops"] = {"formula": 3_265_265_664, "compiled": 4_146_069_504}
    read = Read(layout.page(told))
    assert "4.1 GFLOP of matmuls in a step, 3.3 GFLOP by formulas" in read.words
    assert "Where the time goes" not in read.words and "Communication" not in read.words and "Notes" not in read.words
    told["matmul_flops"] = {"formula": 0, "compiled": 0}
    assert "Matmuls" not in Read(layout.page(told)).words


@pytest.mark.parametrize("count, said", [(0, "0 FLOP"), (12, "12 FLOP"), (123_456, "123.5 kFLOP"), (4.1e9, "4.1 GFLOP"),
                                         (0.099e12, "99.0 GFLOP"), (0.1e12, "100.0 GFLOP"), (1.96e15, "2.0 PFLOP"), (2e18, "2.0 EFLOP")])
def test_operations_are_told_in_a_unit_that_has_digits(count, said):
    assert units.operations(count) == said


WEIGHTS = [("embedding/table", ["vocab", "embed"]), ("head/kernel", ["embed", "vocab"]),
           ("layers/mlp/gate/kernel", ["layers", "embed", "mlp"]), ("layers/mlp/up/kernel", ["layers", "embed", "mlp"]),
           ("layers/mlp/down/kernel", ["layers", "mlp", "embed"]), ("layers/mlp/up/bias", ["layers", "mlp"]),
           ("layers/attention/out/kernel", ["layers", "heads", "head_dim", "embed"]),
           ("layers/attention/key/kernel", ["layers", None, "heads", "head_dim"]),
           ("layers/mlp/experts/up/kernel", ["layers", "expert", "embed", "mlp"])]


@pytest.mark.parametrize("source, line, said", [
    ("jvp(BTD,DF->BTF)/dot_general", "model/layers.py:170", "forward, mlp/gate and mlp/up"),
    ("transpose(jvp(jvp()))/BTD,FD->BTF/dot_general", "model/layers.py:170", "backward, input gradient of mlp/down"),
    ("transpose(jvp(jvp()))/BTF,BTD->FD/dot_general", "", "backward, weight gradient of mlp/down"),
    ("transpose(jvp(jvp()))/remat/BTF,FD->BTD/dot_general", "", "recomputed, mlp/down"),
    ("transpose(jvp(jvp()))/BTD,NHD->BTNH/dot_general", "", "backward, input gradient of attention/out"),
    ("jvp(BTC,CNH->BTNH)/dot_general", "", "forward, attention/key"),
    ("branch_1_fun/nrsD,DV->nrsV/dot_general", "model/loss.py:222", "forward, head"),
    ("branch_1_fun/nrsV,DV->nrsD/dot_general", "model/loss.py:246", "backward, input gradient of head"),
    ("branch_1_fun/nrsD,nrsV->nDV/dot_general", "model/loss.py:249", "backward, weight gradient of head"),
    ("nrsD,VD->nrsV/dot_general", "model/loss.py:222", "forward, embedding/table, as the head"),
    ("jvp(xyz,zw->xyw)/dot_general", "model/mine.py:3", "forward, xyz × zw -> xyw, model"),
    ("dynamic_update_slice", "training/backward.py:327", "write of a slice, pipeline"),
    ("transpose(jvp(jvp()))/remat/mul", "kernels/activations.py:18", "recomputed, product, activation function"),
    ("(jvp()/sharding_constraint:transpose(jvp())/sharding_constraint)", "", "backward, change of sharding"),
    ("copy.506", "", "copy"), ("", "", ""), (pages_samples.HOSTILE, "", None)])
def test_a_kernel_is_named_by_what_it_computes(source, line, said):
    names = kernels.weights([{"name": name, "axes": axes} for name, axes in WEIGHTS])
    found = kernels.describe({"source": source, "line": line, "part": "matmul"}, names)
    assert found == said or said is None


def test_a_figure_has_a_layout_for_phones():
    wide, phone = re.findall(r'viewBox="0 0 (\d+) ', skin.figure(lambda width: pictures.drawing(9, [], "x", width)))
    assert (int(wide), int(phone)) == (skin.WIDTH, skin.PHONE)


def test_the_path_of_a_kernel_is_its_title_and_assumptions_are_folded_with_their_reasons():
    told = pages_samples.inspected()
    told["roofline"]["kernels"][0] |= {"source": "jvp(BTD,DF->BTF)/dot_general"}
    told["roofline"] |= {"assumed": {"matmul.best": 0.8, "new.one": 1.0}, "reasons": {"matmul.best": "because <i>"}}
    page = layout.page(told)
    assert 'title="jvp(BTD,DF-&gt;BTF)/dot_general (gemm)"' in page
    folded = page.split("<details>")[1].split("</details>")[0]
    assert "The 2 assumed numbers" in folded and "because &lt;i&gt;" in folded and "new.one" in folded


def proved(wrong: int = 0, count: int = 3, names: int = 13, findings: int = 0) -> dict:
    """Of `prove --json`."""
    leaves = {"[0].count": 0.0} | {f"layers/part_{k}/kernel": 1e-6 for k in range(names)}
    cells = [{"title": f"zero3 · data {k}", "settings": {}, "loss": 1e-8, "grad_norm": 1e-7,
              "leaves": leaves, "losses": [1e-8], "wrong": ["loss: 1"] if k < wrong else [], "seconds": 1.0,
              "differs": k < wrong} for k in range(count)]
    return {"name": "a run", "devices": 8, "failed": bool(wrong), "tolerance": {"state": 2e-4}, "cells": cells,
            "findings": ["one"] * findings, "notes": [], "seconds": 3.0, "smallest": None}


@pytest.mark.parametrize("told, said", [
    ((0, 3), "Yes: all 3 layouts compute what one device computes."),
    ((0, 1), "Yes: the one layout computes what one device computes."),
    ((1, 3), "No: 1 of 3 layouts does not compute what one device computes."),
    ((2, 3, 13, 1), "No: 2 of 3 layouts do not compute what one device computes, and 1 finding about rule files or "
                    "the GPU program."),
    ((0, 2, 13, 2), "Yes: all 2 layouts compute what one device computes; but 2 findings about rule files or the "
                    "GPU program."),
    ((0, 0), "No layout was compared.")])
def test_the_verdict_of_a_proof_is_yes_or_no(told, said):
    assert proofs.verdict(proved(*told)) == said
    standing_alone(proofs.page(proved(*told)))


@pytest.mark.parametrize("names, count", [(1, 1), (13, 32), (300, 60)])
def test_the_columns_of_the_heat_of_gradients_have_their_names_as_far_as_there_is_room(names, count):
    told = proved(0, count, names)
    wide, phone = proofs.heat_drawing(told), proofs.heat_drawing(told, skin.PHONE)
    assert "count" not in wide and "layers/part_0/kernel" in wide
    assert phone.count("part_") == names and min(names, 50) <= wide.count('class="soft">layers/part_') <= names
    told["cells"][0]["leaves"] = told["cells"][0]["leaves"] | {"[0].count": 1.0}
    assert "[0].count" in proofs.heat_drawing(told), "one that differs is shown"


def test_plans_that_are_equal_within_the_formulas_error_are_one_group(planned):
    told, page = planned[0]
    equal = [one for one in told["plans"] if one["fits"] and
             one["step_time_s"] <= (1 + told["median_error"]) * told["plans"][0]["step_time_s"]]
    assert page.count('<tr class="group">') == 2 and 1 < len(equal) < 20
    assert f"The first {len(equal)} plans are equal within the formulas' error of 4%" in Read(page).words
    assert "to be equal" not in page and "slower" in Read(page).words
    alone = told | {"plans": told["plans"][:1]}
    assert "plans are equal" not in plans.verdict(alone) and 'class="group"' not in plans.page(alone)


def test_a_mesh_of_one_axis_is_told_and_not_drawn():
    one, two = (pages_samples.inspected(sizes) for sizes in ({"fsdp": 64}, {"fsdp": 8, "data": 8}))
    assert ">host 0<" not in layout.mesh(one["mesh"]) and "fsdp 64" in layout.mesh(one["mesh"])
    assert ">host 0<" in layout.mesh(two["mesh"])


@pytest.mark.parametrize("points", [[(1, 1e-300)], [(1, 3e38), (2, 1e-38)], [(0, -5.0), (1, 5.0)], [(1, 0.0), (2, 0.0)],
                                    [(k, k % 7) for k in range(100_000)]])
@pytest.mark.parametrize("width", [skin.WIDTH, skin.PHONE])
def test_a_plot_of_any_numbers_is_finite_and_small(points, width):
    curve = pictures.PlotCurve(0, "x", points)
    axis = pictures.PlotAxis("y", "{:.3g}".format, log=all(y > 0 for _, y in points))
    drawn = pictures.Plot([curve], pictures.PlotAxis("step", "{:g}".format), axis, "y").draw(width)
    assert "nan" not in drawn and "inf" not in drawn and len(drawn) < 60_000
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("low, high", [(1, 10), (6.58, 9.2), (1e-9, 1e9), (2.1, 2.3), (0.5, 60)])
def test_logarithmic_ticks_are_few_and_lie_within(low, high):
    found = pictures.log_ticks(low, high)
    assert 2 <= len(found) <= 12 and all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in found)


@pytest.mark.parametrize("low, high", [(0, 1), (3.2, 3.3), (0, 16384), (-5, 5), (1e-9, 3e-9)])
def test_ticks_are_round_and_lie_within(low, high):
    found = pictures.ticks(low, high)
    assert 2 <= len(found) <= 12 and all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in found)


def test_ticks_of_a_few_steps_stand_at_their_steps():
    axis = pictures.PlotAxis("step", "{:,.0f}".format)
    assert pictures.Plot._ticks(axis, (199, 201), 6) == [199, 200, 201]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_inspect_writes_the_page_of_what_it_prints(tiny, tmp_path):
    ran = call(inspect.main, *tiny, "--json", "--html", "cost.html")
    assert (ran.code, "written: cost.html" in ran.err) == (0, True), ran
    page, told = (tmp_path / "cost.html").read_text(), json.loads(ran.out)
    read = standing_alone(page)
    assert embedded(page) == told and "tiny" in read.words and "data 8" in read.words
    cells = {row["stored_bytes"] for row in told["parameters"]} | {
        row["bytes"] for row in told["collectives"]["compiled"]}
    cells |= {value for held in ("formula", "compiled") for value in told["memory_bytes"][held].values()
              if value is not None}
    assert {str(cell) for cell in cells} - read.exact == set()


@pytest.mark.parametrize("words, parts", [
    (["--html", "there.html"], ["--html=there.html", "there already", "another file"]),
    (["--html", "no/where.html"], ["--html=no/where.html", "no directory no"]),
    (["--html"], ["--html has no value", "cost.html"]),
    (["--html", "new.html", "--schedule"], ["--schedule compiles nothing", "--html"])])
def test_a_page_that_cannot_be_written_costs_no_compiling_and_no_file(words, parts, tiny, tmp_path, monkeypatch):
    (tmp_path / "there.html").write_text("mine")
    monkeypatch.setattr(inspect.assembly, "assemble", lambda *_: pytest.fail("compiled"))
    refused(call(inspect.main, *tiny, *words), *parts)
    assert (tmp_path / "there.html").read_text() == "mine"


def test_a_page_that_appears_meanwhile_is_not_overwritten(tmp_path):
    (tmp_path / "there.html").write_text("mine")
    with pytest.raises(ValueError, match="there already"):
        skin.write("--html", str(tmp_path / "there.html"), "page")


PLAN = ("llama3-8b", "--gpu", "a100-40gb", "--global-batch", 64, "--tokens", "1e12")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(what plan prints as JSON, its page), of 8 GPUs and of several numbers."""
    directory, found = tmp_path_factory.mktemp("plans"), []
    for k, gpus in enumerate(["8", "8,16"]):
        ran = call(plan.main, *PLAN, "--gpus", gpus, "--json", "--html", directory / f"{k}.html")
        assert ran.code == 0 and f"written: {directory}/{k}.html" in ran.err, ran
        found.append((json.loads(ran.out), (directory / f"{k}.html").read_text()))
    return found


def test_plan_writes_the_page_of_what_it_prints(planned):
    for told, page in planned:
        read = standing_alone(page)
        assert embedded(page) == told
        fitting = [one for one in told["plans"] if one["fits"]]
        cells = {one["memory_bytes"]["total"] for one in told["plans"]}
        cells |= {one[key] for one in fitting
                  for key in ("step_time_s", "tokens_per_s_per_gpu", "mfu", "days", "gpu_hours")}
        assert {str(cell) for cell in cells} - read.exact == set() and "8.0B parameters" in read.words
    told, page = planned[0]
    read = Read(page)
    for part in [*told["first"]["sentences"], *told["caveats"],
                 *(one["reason"] for one in told["plans"] if not one["fits"])]:
        assert " ".join(part.split()) in read.words, part
    near = [one for one in told["plans"] + told["others"] if one["step_time_s"] <= 4 * told["plans"][0]["step_time_s"]]
    whole, phone = re.findall(r'<div class="(?:wide|phone)">(.*?)</div>', page.split('id="trade"')[1].split("<section")[0])[-2:]
    assert whole.count("<circle") == phone.count("<circle") == len(near) > 20


def test_what_a_step_consists_of_adds_up_to_it(planned):
    told, _ = planned[0]
    assert sum(told["first"]["time_s"].values()) == pytest.approx(told["plans"][0]["step_time_s"])


def test_a_rule_file_of_any_name_is_text_on_the_page(planned):
    for told, _ in planned:
        renamed = [one | {"rules": pages_samples.HOSTILE, "reason": pages_samples.HOSTILE} for one in told["plans"]]
        page = plans.page(told | {"plans": renamed, "name": pages_samples.HOSTILE})
        assert "<img" not in page and page.count("<script") == 2
        assert " ".join(pages_samples.HOSTILE.split()) in standing_alone(page).words


def test_what_was_compiled_stands_beside_the_formulas(planned):
    told, _ = planned[0]
    best = told["plans"][0] | {"compiled": {"memory_bytes": {"total": 12345678901}, "step_time_s": 7.125,
                                            "traffic_bytes": {"fsdp": 1234567890, "": 1}}}
    read = standing_alone(plans.page(told | {"plans": [best, *told["plans"][1:]]}))
    assert {"12345678901", "1234567891", "7.125"} <= read.exact and "Formula beside compiled" in read.words


def test_where_nothing_fits_the_page_says_so_and_why(tmp_path):
    ran = call(plan.main, "llama3-70b", "--gpus", 8, "--gpu", "a100-40gb", "--global-batch", 64, "--html", "none.html")
    read = standing_alone((tmp_path / "none.html").read_text())
    assert ran.code == 3 and "No layout fits" in read.words and "What does not fit" in read.words
    assert "needs" in read.words


def test_a_layout_that_is_fixed_stands_on_the_page_with_its_distance_to_the_best(tmp_path):
    ran = call(plan.main, *PLAN, "--gpus", 8, "--tensor", 8, "--json", "--html", "fixed.html")
    told, words = json.loads(ran.out), standing_alone((tmp_path / "fixed.html").read_text()).words
    assert told["behind"]["reasons"] and "With tensor 8 fixed the first plan is number" in words
    assert [reason for reason in told["behind"]["reasons"] if " ".join(reason.split()) not in words] == []


def test_plan_overwrites_no_page(tmp_path, monkeypatch):
    (tmp_path / "there.html").write_text("mine")
    monkeypatch.setattr(plan, "answer_for", lambda *_: pytest.fail("searched"))
    refused(call(plan.main, *PLAN, "--gpus", 8, "--html", "there.html"), "--html=there.html", "there already")
    assert (tmp_path / "there.html").read_text() == "mine"


# ---- in a browser ----------------------------------------------------------------------------------------------------

LOOK = """
const field = document.querySelector('input[data-table="parameter-table"]'), table = document.getElementById("parameter-table");
const shown = () => [...table.tBodies[0].rows].filter(row => row.offsetParent !== null).map(row => row.cells[0].textContent);
const click = name => [...table.querySelectorAll("th")].find(head => head.textContent === name).click();
const seen = {all: shown().length};
field.value = "LAYERS/7"; field.dispatchEvent(new Event("input")); seen.searched = shown();
field.value = ""; field.dispatchEvent(new Event("input"));
click("size"); seen.descending = shown()[0]; click("size"); seen.ascending = shown()[0];
const style = getComputedStyle(document.body);
Object.assign(seen, {paper: style.backgroundColor, ink: style.color, title: document.title,
  width: document.documentElement.scrollWidth <= innerWidth, drawings: [...document.querySelectorAll(".wide svg")].map(
    svg => svg.getBoundingClientRect().height > 20 && svg.getBBox().width <= 961 && svg.getBBox().x >= -1)});
document.body.replaceChildren(JSON.stringify(seen));
"""


def looked(page: str, tmp_path, dark: bool = False) -> dict:
    dom, console = browser.visit(page, tmp_path, LOOK, dark)
    assert console == []
    return json.loads(html.unescape(re.search(r"<body>(.*?)</body>", dom, re.DOTALL)[1]))


def luminance(color: str) -> float:
    return sum(w * int(n) for w, n in zip((0.2126, 0.7152, 0.0722), re.findall(r"\d+", color))) / 255


@browser.needed
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser_a_page_is_quiet_searches_sorts_and_follows_the_colour_scheme(dark, tmp_path):
    seen = looked(layout.page(pages_samples.inspected()), tmp_path, dark)
    assert seen["all"] == 12 and seen["searched"] == ["layers/7/a run"]
    assert (seen["descending"], seen["ascending"]) == ("layers/11/a run", "layers/0/a run")
    assert all(seen["drawings"]) and len(seen["drawings"]) == 4 and seen["width"]
    paper, ink = luminance(seen["paper"]), luminance(seen["ink"])
    assert (paper < 0.2 and ink > 0.8) if dark else (paper > 0.9 and ink < 0.2)


ON_PHONE = """
const visible = [...document.querySelectorAll("figure svg")].filter(svg => svg.getBoundingClientRect().width > 30);
const smallest = svg => Math.min(...[...svg.querySelectorAll("text")].map(text => Number(text.getAttribute("font-size"))))
  * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
const inside = svg => { const box = svg.getBBox(), all = svg.viewBox.baseVal;
  return box.x >= -1 && box.x + box.width <= all.width + 1; };
document.body.replaceChildren(JSON.stringify({width: document.documentElement.scrollWidth <= innerWidth,
  phone: visible.every(svg => svg.parentElement.className === "phone"), drawings: visible.length,
  cut: visible.filter(svg => !inside(svg)).map(svg => svg.getAttribute("aria-label")),
  smallest: Math.min(...visible.map(smallest)),
  tallest: Math.max(...[...document.querySelectorAll("tbody tr")].map(row => row.getBoundingClientRect().height))}));
"""


@browser.needed
@pytest.mark.parametrize("page", [
    lambda planned: layout.page(pages_samples.inspected({"data": 64, "fsdp": 2, "tensor": 8, "stage": 16}, 100)),
    lambda planned: planned[0][1], lambda planned: planned[1][1], lambda planned: proofs.page(proved())],
    ids=["inspect", "plan", "plans of several numbers", "prove"])
def test_on_a_phone_figures_fit_their_words_are_readable_and_no_row_is_a_column_of_letters(page, planned, tmp_path):
    dom, console = browser.visit(page(planned), tmp_path, ON_PHONE, width=500)
    seen = json.loads(html.unescape(re.search(r"<body>(.*?)</body>", dom, re.DOTALL)[1]))
    assert console == [] and seen["width"] and seen["phone"] and seen["drawings"] >= 1, seen
    assert seen["cut"] == [] and seen["smallest"] >= 7 and seen["tallest"] < 160, seen


HOVERED = """
const svg = document.querySelector("svg[data-x]"), frame = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: frame.left + frame.width / 2, clientY: frame.top + 20}));
document.body.replaceChildren(JSON.stringify(svg.parentElement.querySelector(".value").textContent));
"""


@browser.needed
def test_in_a_browser_the_value_below_the_pointer_is_told(tmp_path):
    curve = pictures.PlotCurve(0, "<b>loss</b>", [(step, 10.0 / step) for step in range(1, 102)])
    plot = pictures.Plot([curve], pictures.PlotAxis("step", "{:,.0f}".format), pictures.PlotAxis("loss", "{:g}".format), "loss")
    page = skin.document(skin.Head("a", "b", "c", "d", ""), [skin.PageSection("e", "f", skin.figure(plot.draw))], {})
    dom, console = browser.visit(page, tmp_path, HOVERED)
    step, told = re.search(r"step ([0-9]+)<b>loss</b> ([0-9.]+)", json.loads(
        html.unescape(re.search(r"<body>(.*?)</body>", dom, re.DOTALL)[1]))).groups()
    assert console == [] and 40 < int(step) < 60 and float(told) == pytest.approx(10 / int(step), rel=0.02)


SORTED = """
const table = document.getElementById("ranked"), heads = [...table.querySelectorAll("th")];
const column = heads.findIndex(head => head.textContent === "memory"), shown = () => [...table.tBodies[0].rows].map(
  row => Number(row.cells[column].dataset.v));
heads[column].click(); const down = shown();
heads[column].dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
document.body.replaceChildren(JSON.stringify({down, up: shown()}));
"""


@browser.needed
def test_in_a_browser_plans_sort_by_memory(planned, tmp_path):
    told, page = planned[0]
    dom, console = browser.visit(page, tmp_path, SORTED)
    seen = json.loads(re.search(r"<body>(.*?)</body>", dom, re.DOTALL)[1])
    held = sorted(one["memory_bytes"]["total"] for one in told["plans"] if one["fits"])
    assert console == [] and seen["up"] == seen["down"][::-1] == held


@browser.needed
def test_in_a_browser_a_hostile_name_runs_nothing(tmp_path):
    seen = looked(layout.page(pages_samples.inspected(name=pages_samples.HOSTILE)), tmp_path)
    assert seen["all"] == 12 and seen["title"].startswith("</script>")


@browser.needed
def test_the_browser_test_hears_the_console(tmp_path):
    page = layout.page(pages_samples.inspected()).replace("</main>", '<img src="https://example.invalid/a.png"></main>')
    _, console = browser.visit(page, tmp_path, "console.error('heard')")
    assert any("heard" in line for line in console) and any("Content Security Policy" in line for line in console)
