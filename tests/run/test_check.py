"""`check` finds what can be known before the start: that nothing is wrong, that a step does not fit, each mistake."""
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from commands import call, home, tiny  # noqa: F401

from meshtrain import config, run_files
from meshtrain.commands import check, plan, train
from meshtrain.storage import buckets, web
from meshtrain.units import size

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = ("--data.source", "stdlib")       # the shipped files name files of a user's own


def rows(*words) -> tuple[int, list[dict]]:
    ran = call(check.main, *words, "--json")
    return ran.code, json.loads(ran.out)


def verdicts(found: list[dict]) -> dict[str, str]:
    return {row["part"]: row["verdict"] for row in found if row["verdict"] != check.NOTE}


def test_the_quickstart_is_in_order_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, found = rows()
    assert code == 0 and set(verdicts(found).values()) == {check.OK}
    assert list(tmp_path.iterdir()) == []
    ran = call(check.main)
    assert ran.out.endswith("no problem found\n") and "✗" not in ran.out


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.toml")))
def test_the_layout_of_every_shipped_file_fits_the_gpus_that_it_names(name, tmp_path, monkeypatch):
    run = run_files.load([f"configs/{name}"])
    fixed = [getattr(run.mesh, axis) for axis in config.AXES]
    if run.mesh.simulated_devices:
        pytest.skip("it is for simulated devices")
    count = math.prod(fixed) if -1 not in fixed else 64 if "64" in name else 8
    monkeypatch.chdir(tmp_path)
    gpu = "h200" if "GPUs of 141 GB" in (ROOT / "configs" / name).read_text() else "h100"
    code, found = rows(f"configs/{name}", "--topology", f"{gpu}:{count}")
    assert verdicts(found)["layout"] == check.OK and verdicts(found)["memory"] == check.OK, found
    (speed,) = [row["text"] for row in found if row["part"] == "speed"]
    assert "MFU" in speed and "s a step" in speed


def test_what_does_not_fit_is_3_with_what_takes_the_memory_and_the_command_that_finds_a_layout():
    words = ("configs/llama3-70b.toml", *KEYS, "--data.paths", "[]", "--mesh.fsdp", 8, "--mesh.tensor", 1)
    code, found = rows(*words, "--topology", "h100:8")
    (memory,) = [row for row in found if row["part"] == "memory"]
    assert code == check.DOES_NOT_FIT == 3 and memory["verdict"] == check.UNFIT
    assert "python -m meshtrain.plan configs/llama3-70b.toml --gpus 8 --gpu h100" in memory["text"]
    code, found = rows(*words, "--topology", "h100:8", "--data.seq_len", 0)
    assert code == 2, "a mistake counts more"


@pytest.mark.parametrize("name, told", [("file", "is a file"), ("directory", "config.toml in it is a directory")])
def test_every_part_is_looked_at_whatever_the_others_have_shown(name, told, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory/config.toml").mkdir(parents=True)
    code, found = rows("--mesh.fsdp", 3, "--data.source", "text", "--data.paths", '["nothing/*.txt"]', "--run.dir",
                       tmp_path / name)
    wrong = [row["text"] for row in found if row["verdict"] == check.WRONG]
    assert code == 2 and len(wrong) == 3, wrong
    assert [any(part in text for text in wrong) for part in ("mesh.fsdp=3", "nothing/*.txt", told)] == [True] * 3


def test_ids_beyond_the_vocabulary_are_found_without_reading_all(tmp_path):
    np.array([1, 2, 600, 3] * 9, np.uint16).tofile(tmp_path / "a.bin")
    code, found = rows("--data.source", "tokens", "--data.paths", f'["{tmp_path}/a.bin"]', "--data.bos_token", 2)
    (data,) = [row for row in found if row["part"] == "data"]
    assert code == 2 and "ids up to 600" in data["text"] and "model.vocab_size=601" in data["text"]


def test_a_run_that_may_go_on_says_from_where_and_with_what(home, tiny, tmp_path):
    run = tmp_path / "run"
    assert call(train.main, *tiny, "--training.steps", 2, "--run.dir", run).code == 0
    code, found = rows(*tiny, "--training.steps", 4, "--run.dir", run, "--optimizer.weight_decay", 0.5)
    (there,) = [row for row in found if row["part"] == "run.dir"]
    assert code == 0 and "a run that resumes after step 2" in there["text"] and "optimizer.weight_decay" in there["text"]
    code, found = rows(*tiny, "--run.dir", run, "--run.seed", 7)
    assert code == 2 and any("run.seed=7" in row["text"] for row in found if row["verdict"] == check.WRONG)


def test_a_directory_that_cannot_be_written_is_a_mistake_and_stays_as_it_was(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    code, found = rows("--run.dir", tmp_path / "locked" / "run")
    assert code == 2 and any("cannot be written" in row["text"] for row in found)


def test_its_price_is_the_planners(tmp_path):
    found = plan.make_plans(plan.COMMAND.read(["llama3-8b", "--gpus", "8", "--gpu", "h100"]))
    (tmp_path / "best.toml").write_text(plan.run_file(found.run, found.best, "best.toml"))
    code, told = rows(tmp_path / "best.toml", *KEYS, "--data.paths", "[]", "--topology", "h100:8")
    texts = {row["part"]: row["text"] for row in told}
    assert texts["memory"].startswith(f"{size(found.best.price.memory_bytes['total'])} of ")
    assert texts["speed"].startswith(f"{found.best.price.step_s:.3g} s a step, ")


@pytest.mark.parametrize("words", [
    ("--data.source", "text", "--data.paths", '["s3://nowhere/*.txt"]'), ("--data.tokenizer", "gs://nowhere/tokenizer.json"),
    ("--data.source", "mixture", "--data.mixture", '[{source = "text", paths = ["https://nowhere.invalid/a.txt"]}]')])
def test_offline_no_server_is_asked(words, monkeypatch):
    def refuse(*args, **keys):
        raise AssertionError("a server is asked")
    for protocol in (buckets, web):
        monkeypatch.setattr(protocol, "list_files", refuse)
        monkeypatch.setattr(protocol, "look_up", refuse)
    monkeypatch.setattr(buckets, "children", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    code, found = rows("--offline", "--run.dir", "s3://nowhere/run", *words)
    assert code == 0 and verdicts(found)["data"] == verdicts(found)["run.dir"] == check.LEFT
