"""What report tells of a run: at work, stopped, killed, without a step; and that it disturbs nothing."""
import json
import math
import os
import re
import shutil
import socket
import time
from pathlib import Path

import browser
import jax
import numpy as np
import pages_samples
import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401
from test_pages import Read, embedded, standing_alone

from meshtrain.commands import report, train
from meshtrain.inspection import compared, measured
from meshtrain.journal import goodput, history, metrics, rows
from meshtrain.pages import compared as compared_pages
from meshtrain.pages import measured as pages
from meshtrain.run import rundir, say
from meshtrain.units import duration


@pytest.fixture(scope="module")
def trained(tiny, home):  # noqa: F811
    """The run.dir of a run that was trained for 4 steps, then for 6."""
    directory = home / "trained"
    for steps in (4, 6):
        ran = call(train.main, *tiny, "--run.dir", directory, "--training.steps", steps, "--validation.every", 2)
        assert ran.code == 0, ran
    return directory


@pytest.fixture
def run_dir(trained, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(trained, tmp_path / "run")


def files(directory) -> dict:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob("*") if path.is_file()}


def test_a_run_that_is_finished_is_told_with_all_its_starts_and_nothing_is_touched(trained):
    before = files(trained)
    ran, told = call(report.main, trained), measured.of(trained)
    assert ran.code == 0 and "step 6 of 6" in ran.out and "finished" in ran.out
    assert "2 starts; 0 steps taken again" in ran.out, ran
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert told["loss"]["last"] == rows[-1]["loss"] and told["rows"]["loss"] == [row["loss"] for row in rows]
    assert [(one["from_step"], one["to_step"], one["how"]) for one in told["starts"]] == [
        (0, 4, "finished"), (4, 6, "finished")]
    assert told["checkpoints"] and told["loss"]["validation_step"] == 6
    spent, starts = told["time_s"], told["starts"]
    assert sum(spent.values()) == pytest.approx(starts[-1]["ended"] - starts[0]["began"], rel=0.02)
    steps_s = sum(row["step_time_s"] - row["data_wait_s"] for row in rows)
    assert rows[-1]["goodput"] * rows[-1]["elapsed_s"] == pytest.approx(spent["steps"])
    # A row counts from where the step before may have ended, so two rows may share the time in which the host was busy.
    assert spent["steps"] <= steps_s * (1 + 1e-6)
    assert min(spent[part] for part in ("start", "compile", "restore", "data", "checkpoints", "validation")) > 0
    assert 0 < told["goodput"] < 1 and f"{duration(spent['steps'])} were steps; " in ran.out
    assert files(trained) == before


def test_the_load_of_experts_is_drawn_over_layers_and_steps(tmp_path):
    steps = range(1, 131)
    assert written(tmp_path / "dense", [2.5] * 130)["experts"] is None
    assert "experts" not in call(report.main, tmp_path / "dense").out
    run_dir = tmp_path / "run"
    found = written(run_dir, [2.5] * 130, expert_load_max_by_layer=[[None, 1.5, 4.0 if k == 7 else 1.25] for k in steps],
                    expert_load_min_by_layer=[[None, 0.5, 0.0 if k == 130 else 0.75] for k in steps],
                    expert_load_entropy_by_layer=[[None, 0.9, 0.95]] * 130)["experts"]
    assert found["layers"] == [1, 2] and found["steps"][-1] == 130 and len(found["steps"]) <= measured.MOST_STRETCHES
    # the worst of a stretch is not lost
    assert max(map(max, found["max"])) == 4.0 and found["max"][-1] == [1.5, 1.25]
    told = call(report.main, run_dir, "--html", "page.html").out
    assert "experts: the busiest has 1.50 × the mean (layer 1), the idlest 0.00 × (layer 2), entropy 0.900 or more" in told
    page = Path("page.html").read_text()
    assert "layer 2, step" in page and "layer 0, step" not in page and page.count(": 4.00</title>") == 1
    standing_alone(page)


def test_train_writes_down_what_inspect_says_of_its_step(trained, tiny):  # noqa: F811
    from meshtrain.commands import inspect
    told = json.loads(call(inspect.main, *tiny, "--training.steps", 6, "--validation.every",
                           2, "--run.dir", trained, "--json").out)
    written = json.loads((trained / "cost.json").read_text())
    assert set(written.pop("warnings")) <= set(told.pop("warnings"))
    assert "data.paths are not opened" in told["notes"].pop(), "which train has opened"
    assert written == told


def test_the_page_has_what_was_measured_and_what_was_priced(trained, tmp_path):
    ran = call(report.main, trained, "--html", "report.html")
    assert (ran.code, "written: report.html" in ran.err) == (0, True), ran
    page, told = (tmp_path / "report.html").read_text(), measured.of(trained)
    read = standing_alone(page)
    assert embedded(page) == told and "Priced before the run" in read.words
    assert "step 6 of 6; finished" in read.words
    cells = [told["speed"]["tokens_per_s"], *told["time_s"].values(),
             *(value for value in told["rows"]["val_loss"] if value)]
    cells += [row["stored_bytes"] for row in told["priced"]["parameters"]]
    assert {str(cell) for cell in cells if cell} - read.exact == set()
    refused(call(report.main, trained, "--html", "report.html"), "--html=report.html", "there already")


def test_a_killed_run_is_told_and_what_it_lost_is_kept_when_it_goes_on(run_dir):
    lines = (run_dir / "history.jsonl").read_text().splitlines()
    beat = json.loads(lines[-2])
    beat |= {"step": 5, "counted_s": beat["counted_s"] + 1, "run_s": beat["run_s"] + 2}
    (run_dir / "history.jsonl").write_text("\n".join([*lines[:-2], json.dumps(beat)]) + '\n{"event": "end", "ti')
    written = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text("\n".join(written.splitlines()[:5]) + '\n{"step": 6, "lo')
    ran, told = call(report.main, run_dir), measured.of(run_dir)
    assert ran.code == 0 and "step 5 of 6" in ran.out and "ended without a message" in ran.out
    assert told["starts"][-1]["to_step"] == 5 and told["starts"][-1]["how"] == ""
    with pytest.raises(RuntimeError), history.record_attempt(run_dir, 4, goodput.Account(),
                                                   {"on": "here", "cause": "after a kill"}), \
            metrics.MetricsWriter(run_dir / "metrics.jsonl") as writer:
        rows.cut_after(writer.path, 4)
        raise RuntimeError("the power went")
    told = measured.of(run_dir)
    assert told["step"] == 4 and goodput.UNKNOWN in told["starts"][1]["how"]
    assert [(one["from_step"], one["to_step"], one["steps_again"]) for one in told["starts"]] == [
        (0, 4, 0), (4, 5, 0), (4, 4, 1)]
    assert "the power went" in told["state"] and told["time_s"]["steps taken again"] > 0
    standing_alone(pages.page(told))


@pytest.mark.parametrize("host, words", [(socket.gethostname(), "at work: pid"),
                                         ("elsewhere", "as its lock file says")])
def test_a_run_at_work_is_seen_by_its_lock_and_is_not_disturbed(run_dir, host, words):
    owner = {"host": host, "pid": os.getpid(), "began": rundir._began(os.getpid()), "time": 1.0, "nonce": "x"}
    (run_dir / ".lock").write_text(json.dumps(owner))
    assert words in measured.of(run_dir)["state"]
    (run_dir / ".lock").write_text(json.dumps(owner | {"began": "0", "host": socket.gethostname()}))
    assert measured.of(run_dir)["state"] == "finished", "the process is gone"


def test_a_run_without_a_step_has_a_page_that_says_so(run_dir):
    for name in ("metrics.jsonl", "history.jsonl", "cost.json"):
        (run_dir / name).unlink()
    shutil.rmtree(run_dir / "checkpoints")
    ran = call(report.main, run_dir, "--html", "none.html")
    assert (ran.code, ran.out.splitlines()) == (0, ["tiny: step 0 of 6, 0 tokens; has not taken a step"])
    read = standing_alone(pages.page(measured.of(run_dir)))
    assert "No step is written yet" in read.words and "no cost.json" in read.words


def test_lines_that_are_no_rows_are_left_out_of_the_report_and_counted(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(
        "[run]\nname = 'x'\n[training]\nsteps = 3\n[data]\nsource = 'stdlib'\nglobal_batch = 2\nseq_len = 4\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('what?\n\n{"step": 1, "loss": 2.5}\n{"step": 2, "loss": "low"}\n')
    ran = call(report.main, "run")
    assert (ran.code, ran.err) == (0, "2 lines of run/metrics.jsonl are not metrics rows and are ignored\n")
    assert "x: step 1 of 3, 8 tokens" in ran.out and "2.5000 now" in ran.out


CONFIG = "[run]\nname = 'x'\n[training]\nsteps = 100\nobjective = '{}'\n[data]\nglobal_batch = 2\nseq_len = 4\n"


def written(directory, losses, how="finished", objective="", starts=1, **columns) -> dict:
    """What a run with these losses measured. how: its last try ended. columns: more of each row."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG.format(objective))
    lines = [{"step": step, "loss": loss} | {key: values[step - 1] for key, values in columns.items()}
             for step, loss in enumerate(losses, 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for k in range(starts):
        of_all = {"time": 1000.0 * (k + 1), "run_s": 100.0, "step": len(losses), "counted_s": 40.0}
        spent = {"spent_s": {"steps": 40.0, "compile": 50.0, "start": 10.0}}
        found += [{"event": "start", **of_all, "time": 1000.0 * k + 900, "run_s": 0.0, "step": 0, "elapsed_s": 0.0, "down_s": 0.0,
                   "again_s": 0.0, "steps_again": 2 * (k > 0), "uptime_s": 1.0, "boot": "b", "on": "here", "cause": "",
                   **spent, "counted_s": 0.0},
                  {"event": "end", **of_all, "how": how if k == starts - 1 else "killed", **spent}]
    (directory / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return measured.of(directory)


FALLING = [6.0 - 0.03 * k for k in range(100)]


@pytest.mark.parametrize("losses, more, said", [
    (FALLING, {}, r"Healthy: loss fell from 5.865 \(first tenth\) to 3.165 \(last tenth\), 40% of 100.0 s in steps that count, compile took 50%\."),
    ([*FALLING[:50]], {"how": "stopped on request"}, r"Stopped on request after step 50 of 100, healthy: loss fell"),
    ([*FALLING[:50]], {"how": "RuntimeError: no"}, r"Failed after step 50 of 100, healthy until then: loss fell"),
    ([*FALLING[:50]], {"how": ""}, r"Ended without a message after step 50 of 100, healthy until then"),
    ([*FALLING[:99], None], {}, r"Diverged: the loss of the last step is not finite"),
    ([*FALLING[:50], None], {"how": "X: too many"}, r"Failed after step 51 of 100, diverged: the loss of the last step"),
    ([None] * 100, {}, r"Diverged: the loss of the last step is not finite"),
    ([6.0], {"how": "stopped on request"}, r"Stopped on request after step 1 of 100, too short to judge: loss 6 after 1 step,"),
    ([2.5] * 100, {}, r"Steady: loss level at 2.5"),
    (FALLING, {"skipped": [k % 10 == 3 for k in range(100)]}, r"To be looked at: loss fell .*, 10 steps skipped"),
    (FALLING, {"val_loss": [None] * 98 + [3.0, 4.0]}, r"To be looked at: .* validation at 4.000, above its best of 3.000"),
    (FALLING, {"starts": 10}, r"Healthy: .*, 10 starts, 18 steps taken again\."),
    ([0.1] * 100, {"objective": "rl", "reward": [k / 100 for k in range(100)]},
     r"Healthy: reward rose from 0.045 \(first tenth\) to 0.945"),
    ([0.1] * 100, {"objective": "rl", "reward": [1 - k / 100 for k in range(100)]}, r"Getting worse: reward fell"),
    ([0.693 - 0.005 * k for k in range(100)], {"objective": "dpo"}, r"Healthy: loss fell from 0.6705 \(first tenth\) to 0.2205"),
    ([], {"how": "ValueError: no data"}, r"No step is finished yet: ValueError: no data\."),
])
def test_the_verdict_of_a_run_is_one_sentence_that_is_right(losses, more, said, tmp_path):
    told = written(tmp_path / "run", losses, **more)
    assert re.match(said, pages.verdict(told)), pages.verdict(told)
    read = standing_alone(pages.page(told))
    assert pages.verdict(told) in read.words
    assert ("loss, a pair" in read.words) == (more.get("objective") == "dpo")


# ---- several runs ----------------------------------------------------------------------------------------------------


def two(tmp_path, **second) -> tuple[str, str]:
    """Two runs, of which the second learns faster, or is another one."""
    written(tmp_path / "a", FALLING, tokens_per_s=[100.0] * 100)
    written(tmp_path / "b", **({"losses": [6.0 - 0.04 * k for k in range(100)], "tokens_per_s": [150.0] * 100} | second))
    path = tmp_path / "b" / "config.toml"
    path.write_text(path.read_text().replace("name = 'x'", "name = 'y'") + "[optimizer]\nlearning_rate = 0.02\n")
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_two_runs_are_compared_in_text_json_and_a_page(tmp_path):
    ran = call(report.main, *two(tmp_path), "--html", "both.html")
    assert ran.code == 0 and "y has the lowest loss after 800 tokens, 2.0600 against 3.0450" in ran.out, ran
    assert "y is 50% faster than the slowest" in ran.out and re.search(r"optimizer.learning_rate +– +0.02", ran.out)
    assert "run.name" not in ran.out
    told = json.loads(call(report.main, str(tmp_path / "a"), str(tmp_path / "b"), "--json").out)
    assert [row["key"] for row in told["differs"]] == ["optimizer.learning_rate"] and told["notes"] == []
    page = Path("both.html").read_text()
    read = standing_alone(page)
    assert embedded(page) == told and "y has the lowest loss" in read.words
    assert page.split('id="loss"')[1].split("</div>")[0].count('class="curve ') == 2
    assert {str(run["loss"]["last"]) for run in told["runs"]} <= read.exact
    assert "Reward" not in read.words and "Validation loss" not in read.words


@pytest.mark.parametrize("second, said", [
    ({"objective": "rl", "reward": [0.5] * 100}, "the objectives differ: losses are not comparable"),
    ({"losses": [None] * 100}, "y diverged"),
    ({"losses": []}, "The runs have too few steps"),
    ({"losses": [5.0]}, "after 8 tokens"),
    ({"losses": FALLING, "tokens_per_s": [100.0] * 100}, "are equal, 3.0450"),
    ({"val_loss": [None] * 99 + [3.0]}, "validation loss, last")])
def test_runs_that_cannot_be_compared_have_the_reason(second, said, tmp_path):
    ran = call(report.main, *two(tmp_path, **second), "--html", "both.html")
    assert ran.code == 0 and said in ran.out, ran
    standing_alone(Path("both.html").read_text())


@pytest.mark.parametrize("speeds, said", [
    ([150.0] * 3, "too few rows to compare speeds: y has 0 after the first 3 steps, but 6 are needed"),
    ([1.0] * 3 + [150.0] * 5, "too few rows to compare speeds: y has 5 after the first 3 steps, but 6 are needed"),
    ([1.0] * 3 + [150.0] * 6, "y is 50% faster than the slowest"),
    ([80.0, 150.0, 150.0] * 5, "the speeds differ by less than those of one run's steps (y 80 to 150, x 100 to 100 tokens/s)"),
    ([100.0] * 20, "all are equally fast")])
def test_speeds_are_compared_where_the_rows_of_both_runs_can_tell(speeds, said, tmp_path):
    ran = call(report.main, *two(tmp_path, losses=FALLING[:len(speeds)], tokens_per_s=speeds))
    assert ran.code == 0 and said in ran.out, ran.out


@pytest.mark.parametrize("count", [6, 7, 8, 9, 10, 50, 104, 1000])
def test_the_bounds_of_a_median_hold_as_often_as_they_say(count):
    """By the binomial distribution: the number of values below the median."""
    low, high = measured._bounds_of_median(np.arange(count, dtype=float))
    outside = 2 * sum(math.comb(count, below) for below in range(int(low) + 1)) / 2**count
    assert low + high == count - 1 and outside <= 0.05, (count, outside)


def test_runs_with_one_name_are_told_by_their_directories_and_hostile_names_are_text(tmp_path):
    first, second = two(tmp_path)
    Path(second, "config.toml").write_text(Path(first, "config.toml").read_text())
    told = compared.of([first, second])
    assert [run["label"] for run in told["runs"]] == [first, second] and told["differs"] == []
    assert "their run files are equal except for name and directory" in compared.text(told)
    evil = f"\x1b]0;owned\x07{pages_samples.HOSTILE}\nnote: all is well"
    Path(second, "config.toml").write_text(Path(first, "config.toml").read_text().replace("'x'", json.dumps(evil)))
    ran = call(report.main, first, second, "--html", "both.html")
    assert ran.code == 0 and not [one for one in ran.out if not one.isprintable() and one != "\n"]
    assert "\nnote" not in ran.out
    page = Path("both.html").read_text()
    assert page.count("<script") == 2 and "<img" not in page and standing_alone(page)


def test_runs_with_other_batches_are_compared_over_tokens_and_long_ones_are_thinned(tmp_path):
    first, second = two(tmp_path, losses=[6.0 - 5e-5 * k for k in range(5000)],
                        tokens_per_s=[1.0] * 5000)
    path = Path(second, "config.toml")
    path.write_text(path.read_text().replace("global_batch = 2", "global_batch = 4"))
    assert compared.of([second, first])["common_tokens"] == 800
    told = compared.of([first, second])
    assert told["common_tokens"] == 800 and told["runs"][1]["loss_at_common"] == pytest.approx(6.0 - 49 * 5e-5)
    page = compared_pages.page(told, compared.verdict(told), compared.numbers(told))
    assert ">tokens</text>" in page and len(page) < 400_000
    assert all(len(points) <= 1.1 * compared.MOST_POINTS for run in told["runs"] for points in run["curves"].values())


def test_a_rising_loss_is_no_healthy_run(tmp_path):
    assert pages.verdict(written(tmp_path / "run", FALLING[::-1])).startswith("Getting worse: loss rose")


def test_a_curve_of_many_rows_has_its_mean_and_a_wide_one_is_logarithmic(tmp_path):
    noise = [3.0 + (k % 2) for k in range(400)]
    told = written(tmp_path / "run", noise, grad_norm=[1.0] * 399 + [1e6])
    rows = told["rows"]
    assert rows["window"] == 11 and all(3.4 < value < 3.6 for value in rows["smoothed"]["loss"])
    page = pages.page(told)
    assert "the mean of the 11 rows around it" in page and "gradient norm (logarithmic)" in page
    assert "The same over the logarithm of steps" in page
    few = written(tmp_path / "few", noise[:20])
    assert few["rows"]["smoothed"] == {} and "rows around it" not in pages.page(few)
    holes = measured._smooth(np.array([1.0, np.nan, 3.0]), 3)
    assert holes[0] == 1 and np.isnan(holes[1]) and holes[2] == 3


def test_an_axis_is_linear_where_only_noise_is_small_and_a_constant_is_no_curve(tmp_path):
    noise = [0.1 * (1 + k % 3) if k != 70 else 1e-6 for k in range(100)]
    told = written(tmp_path / "run", noise, objective="rl", grad_norm=[1e-12 * (1 + 1e-9 * (k % 2)) for k in range(100)])
    page = pages.page(told)
    assert "logarithmic)" not in page and "policy loss" in page and "nats a token" not in page
    heights = set(re.findall(r"[ML][\d.]+ ([\d.]+)", re.search(r'path d="([^"]*)" class="curve pale s4"', page)[1]))
    assert len(heights) == 1, "a constant is a level line"
    one = pages.page(written(tmp_path / "one", [6.0]))
    assert one.count("<circle") == 2 and one.count(">1</text>") == 2 * 1


@pytest.mark.full
def test_the_page_of_a_run_of_100000_steps_is_small_and_fast(tmp_path):
    began = time.process_time()
    page = pages.page(written(tmp_path / "run", [2.0 + 1 / k for k in range(1, 100_001)],
                              grad_norm=[1.0 + k % 5 for k in range(100_000)]))
    assert len(page) < 1_200_000 and time.process_time() - began < 10


def test_a_long_run_keeps_its_spikes_and_its_validations():
    rows = [{"step": k, "loss": 9.0 if k == 70_001 else None if k == 5 else 2.0 + 1 / k,
             "val_loss": 2.5 if k % 9_973 == 0 else None,
             "step_time_s": 1.0, "tokens_per_s": 5.0} for k in range(1, 100_001)]
    columns = {key: [math.nan if row.get(key) is None else row[key] for row in rows] for key in measured.CURVES}
    told = measured._curves(columns, np.ones(len(rows), bool))
    assert max(value for value in told["loss"] if value) == 9.0 and len(told["step"]) <= measured.MOST_ROWS + 20
    assert [step for step, value in zip(told["step"], told["val_loss"]) if value] == list(range(9_973, 100_001, 9_973))
    points = [(step, value) for step, value in zip(range(100_000), [0.0] * 50_000 + [1.0] + [0.0] * 49_999)]
    assert (50_000,
            1.0) in pages.pictures.thin(points) and len(pages.pictures.thin(points)) <= pages.pictures.MOST_POINTS


def test_hostile_names_in_a_run_directory_are_text(run_dir):
    told = measured.of(run_dir)
    told |= {"name": pages_samples.HOSTILE, "dir": pages_samples.HOSTILE, "state": pages_samples.HOSTILE,
             "priced": pages_samples.inspected(name=pages_samples.HOSTILE)}
    told["changes"] = [{"step": 3, "key": pages_samples.HOSTILE, "from": "<b>", "to": None}]
    page = pages.page(told)
    standing_alone(page)
    assert page.count("<script") == 2 and "<img" not in page


@pytest.mark.parametrize("on_terminal", [False, True])
def test_control_characters_of_a_strangers_log_are_escaped(on_terminal, run_dir, monkeypatch):
    monkeypatch.setattr(say, "on_terminal", lambda stream=None: on_terminal)
    evil = "\x1b]0;owned\x07\x1b[2J\nstart 9: all is well\r\x9b31m"
    path = run_dir / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | dict.fromkeys({"how", "cause"} & line.keys(), evil)) + "\n"
                            for line in lines))
    config = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(config.replace('name = "tiny"', f"name = {json.dumps(evil)}"))
    ran = call(report.main, run_dir)
    assert ran.code == 0 and "\\x1b]0;owned\\x07" in ran.out and "\\x0astart 9" in ran.out
    assert not [one for one in ran.out if not one.isprintable() and one != "\n"]


def test_a_price_of_another_version_is_left_out_and_json_has_all_that_the_page_shows(run_dir, tmp_path):
    assert json.loads(call(report.main, run_dir, "--json").out) == json.loads(json.dumps(measured.of(run_dir)))
    cost = json.loads((run_dir / "cost.json").read_text())
    for key in ("memory_bytes", "collectives", "mesh"):
        (run_dir / "cost.json").write_text(json.dumps(cost | {key: {"new": 1}}))
        ran = call(report.main, run_dir, "--html", tmp_path / f"{key}.html")
        assert ran.code == 0 and "cost.json was written by another version" in ran.err, ran
        assert "there are no predictions to compare with" in (tmp_path / f"{key}.html").read_text()


def test_what_was_priced_stands_beside_what_was_measured(run_dir):
    told = measured.of(run_dir) | {"priced": pages_samples.inspected()}
    told["speed"] |= {"mfu": 0.36, "tokens_per_s": 52428.8}
    told["rows"]["mfu"] = [0.36] * len(told["rows"]["step"])
    read = Read(pages.page(told))
    for part in ("50% of what was priced", "83% of what was priced", "priced 104,858", "priced 43.2%", "50.0%"):
        assert part in read.words, part


def test_a_history_that_cannot_be_written_ends_no_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "history.jsonl").mkdir()
    with history.record_attempt(tmp_path, 0, goodput.Account(), {"on": "", "cause": ""}) as this:
        this.end("finished")
    assert "history.jsonl cannot be written" in capsys.readouterr().err
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with history.record_attempt(tmp_path / "nowhere", 0, goodput.Account(), {}) as this:
        this.end("finished")
    assert capsys.readouterr().err == "", "process 0 alone writes"


@browser.needed
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser_the_page_of_a_run_is_quiet(dark, trained, tmp_path):
    dom, console = browser.visit(pages.page(measured.of(trained)), tmp_path, dark=dark)
    assert console == [] and "finished" in dom
