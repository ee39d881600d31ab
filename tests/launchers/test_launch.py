"""The launcher on this machine: its help, and what it gives to every process; mistakes: test_mistakes."""
import sys
from pathlib import Path

import pytest

from meshtrain.launch import local
from meshtrain import config, run_files
from meshtrain.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_help_is_exit_0(capfd):
    assert local.main(["--help"]) == 0 and "--processes N" in capfd.readouterr().out
    with pytest.raises(SystemExit) as ended:
        local.main(["--processes", "2", "--", "--help"])
    assert ended.value.code == 0 and "--training.steps" in capfd.readouterr().out


def test_every_process_gets_the_run_and_its_place():
    rest = ["configs/quickstart.toml", "--training.steps", "6"]
    lines = local.commands(rest, 4, 12345)
    for index, line in enumerate(lines):
        assert line[:3] == [sys.executable, "-m", "meshtrain.train"]
        run = run_files.load(line[3:])
        assert run.training.steps == 6
        assert run.distributed == config.Distributed(
            coordinator_address="127.0.0.1:12345", num_processes=4, process_id=index)
    assert local.commands(rest, 1, 12345) == [[sys.executable, "-m", "meshtrain.train", *rest]], "one is a plain run"


def test_the_gpus_that_the_launcher_sees_are_divided_evenly():
    run = run_files.load(["--mesh.simulated_devices", "0"])
    seen = {"CUDA_VISIBLE_DEVICES": "4,GPU-x,7,0", "HOME": "/h"}
    for count, own in ((4, ["4", "GPU-x", "7", "0"]), (2, ["4,GPU-x", "7,0"]), (1, ["4,GPU-x,7,0"])):
        given = local.environments(run, count, seen)
        assert [environ["CUDA_VISIBLE_DEVICES"] for environ in given] == own
        assert {environ["HOME"] for environ in given} == {"/h"}
    with pytest.raises(ConfigError,
                       match="--processes 3 cannot share 4 GPUs evenly; use 1 or 2 or 4 processes, or mesh.sim"):
        local.environments(run, 3, seen)
    for too_few in ("4", "", "-1"):
        with pytest.raises(ConfigError, match="--processes 2 cannot share [01] GPUs evenly; use (1|one) process"):
            local.environments(run, 2, {"CUDA_VISIBLE_DEVICES": too_few})


def test_a_longer_meeting_may_be_asked_for_under_the_launcher():
    run = run_files.load(["--distributed.timeout_s", "900"])
    assert len(local.environments(run, 2, {})) == 2


def test_simulated_devices_leave_the_gpus_alone():
    for environ in local.environments(run_files.load([]), 4, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert environ["CUDA_VISIBLE_DEVICES"] == ""
