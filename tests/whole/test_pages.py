"""The pages: whole without script, server or network; every number of the JSON is on them; nobody's name is markup."""
import html.parser
import json
import re
from xml.etree import ElementTree

import browser
import numpy as np
import pages_samples
import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401

from meshtrain.commands import inspect, plan
from meshtrain.cost.formulas import simulate
from meshtrain.inspection import chart
from meshtrain.pages import layout, pictures, plans, skin
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
                 "234.5 TFLOP", "123.0 by formulas", "matmuls differ: a run", "gathered in a loop: a run",
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
    found = chart.as_json(simulate.Choice(schedule, outcome, 3 * 2**30, True, "asked for"))
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
        device = int(np.ravel_multi_index([at[axis] for axis in spec.placement], list(spec.by_placement.values())))
        assert tuple(pictures.coordinate(told, axis, device) for axis in spec.sizes) == place


def test_a_drawing_alone_is_an_svg_file_with_its_own_colours():
    told = pages_samples.inspected()
    bar = pictures.Bar("<&>", [(0, "one", 1.0), (7, "two", 2.0)], "a note")
    for drawing in (pictures.mesh(told["mesh"]), pictures.bars([bar], "{:.1f}".format, "bars", [(4.0, "most")])):
        root = ElementTree.fromstring(skin.alone(drawing))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "prefers-color-scheme: dark" in root[0].text
        used = {name for element in root.iter() for name in element.get("class", "").split()}
        assert {name for name in used if f".{name} " not in root[0].text} == set()


@pytest.mark.parametrize("low, high", [(0, 1), (3.2, 3.3), (0, 16384), (-5, 5), (1e-9, 3e-9)])
def test_ticks_are_round_and_lie_within(low, high):
    found = pictures.ticks(low, high)
    assert 2 <= len(found) <= 12 and all(low - 1e-12 <= tick <= high * (1 + 1e-9) for tick in found)


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
    assert page.count("<circle") == len(near) > 20


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
    assert ran.code == 0 and "No layout fits" in read.words and "What does not fit" in read.words
    assert "needs" in read.words


def test_a_layout_that_is_fixed_stands_on_the_page_with_its_distance_to_the_best(tmp_path):
    ran = call(plan.main, *PLAN, "--gpus", 8, "--tensor", 8, "--json", "--html", "fixed.html")
    told, words = json.loads(ran.out), standing_alone((tmp_path / "fixed.html").read_text()).words
    assert told["behind"]["reasons"] and "With tensor 8 fixed the first plan is number" in words
    assert [reason for reason in told["behind"]["reasons"] if " ".join(reason.split()) not in words] == []


def test_plan_overwrites_no_page(tmp_path, monkeypatch):
    (tmp_path / "there.html").write_text("mine")
    monkeypatch.setattr(plan, "answered", lambda *_: pytest.fail("searched"))
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
