"""launch/slurm.sbatch with stand-ins for srun, scontrol and the training command; tests/launchers/test_slurm.py has a real
Slurm."""
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain import config

ROOT = Path(__file__).resolve().parent.parent.parent
SBATCH = ROOT / "launch" / "slurm.sbatch"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# srun: two tasks on this machine with what Slurm tells them; its code is the highest of theirs.
SRUN = r'''
import os, subprocess, sys
argv = sys.argv[1:]
while argv[0].startswith("-"):
    option = argv.pop(0)
    assert "=" in option, option
    if "SRUN_SAID" in os.environ:
        print(option, file=open(os.environ["SRUN_SAID"], "a"))
tasks = [subprocess.Popen(argv, env=os.environ | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node[1-1]"}) for i in range(2)]
sys.exit(max(task.wait() for task in tasks))
'''
# What stands for `python -u -m meshtrain.train …`: it leaves its arguments, and its place, and ends as it is told.
ARGUMENTS = '''
import json, os, sys
from pathlib import Path
Path(os.environ["SAID"], os.environ["SLURM_PROCID"]).write_text(json.dumps(sys.argv[1:]))
sys.exit(int(os.environ["CODE"]))
'''
PLACE = '''
import json, os
from pathlib import Path
from meshtrain import config
from meshtrain.cluster import find, meet
cluster = find.cluster(config.Distributed(), os.environ)
meet.meet(cluster, 30)
Path(os.environ["SAID"], str(cluster.index)).write_text(json.dumps([cluster.coordinator, cluster.local_devices]))
'''


# The rule of restarts is the real one, and who counts the hosts.
RULE = '''
import os, sys
if sys.argv[1:3] in (["-m", "meshtrain.launch.restart"], ["-m", "meshtrain.launch.elastic"]):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
'''


def submitted(tmp_path, python: str, code: int, *argv: str, rule: str = RULE,
              **more: str) -> subprocess.CompletedProcess:
    """The batch script with stand-ins for srun, scontrol and python on the PATH."""
    (tmp_path / "said").mkdir(exist_ok=True)
    for name, interpreter, text in (("srun", sys.executable, SRUN), ("python", sys.executable, rule + python),
                                    ("scontrol", "/bin/sh", f'echo "$@" > {tmp_path}/asked\n')):
        (tmp_path / name).write_text(f"#!{interpreter}\n{text}")
        (tmp_path / name).chmod((tmp_path / name).stat().st_mode | stat.S_IXUSR)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CODE": str(code),
                            "SAID": str(tmp_path / "said"), "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0",
                            "SLURM_NTASKS": "2",
                            "SLURM_JOB_NUM_NODES": "8", "SLURM_GPUS_PER_NODE": "8"} | more
    return subprocess.run(["bash", str(SBATCH), *argv], env=environ, text=True, capture_output=True, timeout=100)


def test_the_batch_script_is_bash_and_names_what_exists():
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    text = SBATCH.read_text()
    assert text.startswith("#!")
    files = re.findall(r"configs/\S+\.toml", text)
    assert files and all((ROOT / file).is_file() for file in files)
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE).start()
    assert text.rfind("#SBATCH") < first_command, "sbatch reads no options after the first command"
    gpus = int(re.search(r"--nodes=(\d+)", text)[1]) * int(re.search(r"--gpus-per-node=(\d+)", text)[1])
    assert not re.search("^#SBATCH --ntasks", text, re.MULTILINE), "a job with a range of nodes would not shrink"
    assert config.mesh_sizes(config.load([files[0]]), gpus)


def test_the_tasks_of_a_batch_script_find_each_other(tmp_path):
    job = submitted(tmp_path, PLACE, 0)
    assert job.returncode == 0, job
    said = [json.loads((tmp_path / "said" / str(index)).read_text()) for index in range(2)]
    assert len({address for address, _ in said}) == 1 and [own for _, own in said] == [[0], [1]]


@pytest.mark.parametrize("argv", [[], ["configs/quickstart.toml", "--run.name", "two words"]], ids=["default", "given"])
def test_every_task_gets_the_run(argv, tmp_path):
    job = submitted(tmp_path, ARGUMENTS, 0, *argv)
    assert job.returncode == 0, job
    for index in range(2):
        said = json.loads((tmp_path / "said" / str(index)).read_text())
        assert said == ["-u", "-m", "meshtrain.train", *(argv or ["configs/llama3-8b-64.toml"])]


@pytest.mark.parametrize("code, again", [(0, False), (2, False), (75, True), (1, True), (137, True)])
def test_a_job_goes_back_into_the_queue_unless_it_is_done_or_a_mistake(code, again, tmp_path):
    job = submitted(tmp_path, ARGUMENTS, code, "configs/quickstart.toml", "--run.dir", str(tmp_path / "run"))
    assert job.returncode == code, job
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked == ("requeue 4711\n" if again else "") and ("back into the queue" in job.stdout) == again
    assert (f"exit code {code}; back" in job.stdout) == (code in (1, 137)) and "error" not in job.stderr


@pytest.mark.parametrize("code, said", [(137, "exit code 137; the last line: oh no 1"),
                                        (75, "stopped on request, before")])
def test_a_job_that_fails_or_is_stopped_again_and_again_without_a_checkpoint_is_given_up(code, said, tmp_path):
    """Stopped: by a time limit that is shorter than a start."""
    run = ("configs/quickstart.toml", "--run.dir", str(tmp_path / "run"))
    speaks = (f"{ARGUMENTS[:-len(ARGUMENTS.splitlines()[-1]) - 1]}if os.environ['SLURM_PROCID'] == '1': print('oh no', "
              f"1, file=sys.stderr)\n")
    speaks += ARGUMENTS.splitlines()[-1]
    first, last = (submitted(tmp_path, speaks, code, *run, MAX_RESTARTS="1") for _ in range(2))
    assert "back into the queue" in first.stdout and re.search(
        "(failure|stop) 1 without a newer checkpoint", first.stderr)
    assert f"  1: {said}" in last.stderr and f"  2: {said}" in last.stderr
    assert last.returncode == code and "back into the queue" not in last.stdout
    assert "given up after 2 failures in a row" in last.stderr
    assert "back into the queue" in submitted(tmp_path, ARGUMENTS, 1, *run,
                                              MAX_RESTARTS="1").stdout, "submitted anew, it counts anew"


@pytest.mark.parametrize("hosts, fit, tasks", [(8, 8, None), (7, 4, 32)])
def test_a_job_on_fewer_hosts_takes_as_many_as_can_train_its_run(hosts, fit, tasks, tmp_path):
    job = submitted(tmp_path, ARGUMENTS, 0, "configs/llama3-8b-64.toml", "--mesh.full_devices",
                    "64", SLURM_JOB_NUM_NODES=str(hosts),
                    SLURM_GPUS_PER_NODE="h100:8", SRUN_SAID=str(tmp_path / "options"),
                    some="--of=the-submitter", words="--of the submitter")
    assert job.returncode == 0, job
    given, words = (tmp_path / "options").read_text().split(), json.loads((tmp_path / "said" / "0").read_text())
    assert "--of=the-submitter" not in given, "a variable of the submitter's environment"
    assert (f"--nodes={fit}" in given, f"--ntasks={tasks}" in given) == (fit < hosts,
                                                                         fit < hosts) and "--ntasks-per-node=8" in given
    assert words[3:] == ["configs/llama3-8b-64.toml", "--mesh.full_devices", "64",
                         *["--mesh.full_devices=64"] * (hosts < 8)]
    assert (f"{fit} of {hosts} hosts can train this run" in job.stdout) == (fit < hosts)


def test_a_mistake_is_told_once_before_anything_starts(tmp_path):
    job = submitted(tmp_path, ARGUMENTS, 0, "configs/quickstart.toml", "--training.stpes", "3")
    assert job.returncode == 2 and job.stderr.count("stpes") == 1 and not list((tmp_path / "said").iterdir())


@pytest.mark.parametrize("wait_s, slept", [("80", ""), ("120", ""), ("160", "40"), ("300", "180")])
def test_a_job_that_is_to_wait_longer_than_slurm_holds_it_back_waits_for_the_rest(wait_s, slept, tmp_path):
    (tmp_path / "sleep").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/slept\n')
    (tmp_path / "sleep").chmod(0o755)
    (tmp_path / "slept").touch()
    rule = f"{RULE}\nif 'meshtrain.launch.restart' in sys.argv:\n    print('{wait_s}')\n    sys.exit(0)\n".replace(
        '["-m", "meshtrain.launch.restart"], ', "")
    submitted(tmp_path, ARGUMENTS, 1, rule=rule)
    assert (tmp_path / "slept").read_text().strip() == slept
