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

from meshtrain import config, run_files
from meshtrain.commands import slurm

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
from meshtrain import config, run_files
from meshtrain.commands import slurm
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


def submitted(tmp_path, python: str, code: int, *argv: str, rule: str = RULE, script: Path = SBATCH,
              **more: str) -> subprocess.CompletedProcess:
    """The batch script with stand-ins for srun, scontrol and python on the PATH."""
    (tmp_path / "said").mkdir(exist_ok=True)
    for name, interpreter, text in (("srun", sys.executable, SRUN), ("python", sys.executable, rule + python),
                                    ("scontrol", "/bin/sh", f'echo "$@" > {tmp_path}/asked\n')):
        (tmp_path / name).write_text(f"#!{interpreter}\n{text}")
        (tmp_path / name).chmod((tmp_path / name).stat().st_mode | stat.S_IXUSR)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "CODE": str(code),
                            "VIRTUAL_ENV": "given",
                            "SAID": str(tmp_path / "said"), "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0",
                            "SLURM_NTASKS": "2",
                            "SLURM_JOB_NUM_NODES": "8", "SLURM_GPUS_PER_NODE": "8"} | more
    return subprocess.run(["bash", str(script), *argv], env=environ, text=True, capture_output=True, timeout=100)


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
    assert config.mesh_sizes(run_files.load([files[0]]), gpus)


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


# ---- a job that `meshtrain slurm` prints -----------------------------------------------------------------------------


RUN = '[run]\nname = "mine"\n[mesh]\nfsdp = -1\n[data]\nsource = "stdlib"\nglobal_batch = 64\n[model]\nembed_dim = 512\n'


@pytest.fixture
def printed(tmp_path, monkeypatch, capfd):
    """The job of a run file for these options, printed in a directory of the user's own."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.toml").write_text(RUN)
    monkeypatch.chdir(home)

    def printed(*words: str) -> tuple[int, str, str]:
        code = slurm.main(["run.toml", *words])
        told = capfd.readouterr()
        return code, told.out, told.err
    return printed


def sbatch_options(text: str) -> dict[str, str]:
    """Options as sbatch reads them: #SBATCH lines before the first command, each up to a comment."""
    head = text[:re.search(r"^[^#\n]", text, re.MULTILINE).start()]
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", head, re.MULTILINE))


def test_a_printed_job_has_the_options_the_run_and_the_environment(printed, tmp_path):
    code, text, told = printed("--nodes", "4", "--partition", "gpu", "--account", "us", "--time", "1-00:00:00",
                               "--container", "registry/image:1", "--training.steps", "7", "--run.name", "two words")
    options, home = sbatch_options(text), tmp_path / "home"
    assert (code, told) == (0, "") and subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    wanted = {"nodes": "4", "gpus-per-node": "8", "partition": "gpu", "account": "us", "time": "1-00:00:00",
              "job-name": "two_words", "chdir": str(home), "output": f"{home}/runs/slurm-%j.out"}
    assert options | wanted == options and "qos" not in options and (home / "runs").is_dir()
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in text and "--container-image=registry/image:1" in text
    assert "set -- run.toml --training.steps 7 --run.name 'two words'" in text
    own = SBATCH.read_text().splitlines()
    assert sum(line not in own for line in text.splitlines()) <= 14       # the rest is the shipped script


@pytest.mark.parametrize("asked, line", [
    ((), "#SBATCH --signal=TERM@300  "), (("--signal", "USR1@600"), "#SBATCH --signal=USR1@600  "),
    (("--signal", "SIGINT@65535"), "#SBATCH --signal=INT@65535  ")])
def test_a_printed_job_has_the_signal_that_is_asked_for(printed, asked, line):
    code, text, told = printed("--nodes", "4", *asked)
    assert (code, told) == (0, "") and text.count("#SBATCH --signal=") == 1 and line in text
    assert all(len(one) <= 132 for one in text.splitlines() if "--signal" in one)


def test_a_printed_job_runs_what_it_was_printed_for(printed, tmp_path):
    _, text, _ = printed("--nodes", "8", "--training.steps", "7")
    script = tmp_path / "job.sbatch"
    script.write_text(text.replace(f"export PATH={Path(sys.executable).parent}:$PATH", ""))    # the stand-ins' path
    job = submitted(tmp_path, ARGUMENTS, 0, script=script)
    assert job.returncode == 0, job
    said = json.loads((tmp_path / "said" / "0").read_text())
    assert said == ["-u", "-m", "meshtrain.train", "run.toml", "--training.steps", "7"]


@pytest.mark.parametrize("words, told", [
    (("--nodes", "0"), "--nodes 0 is not a whole number"), ((), "--nodes is missing"),
    (("--nodes", "2", "--mesh.fsdp", "8"), "mesh.fsdp=8 takes 8 devices, and there are 16"),
    (("--nodes", "3"), "does not divide"), (("--nodes", "2", "--time", "tomorrow"), "is not a time of Slurm"),
    (("--nodes", "2", "--signal", "B:USR1@300"), "is sent only to the batch script"),
    (("--nodes", "2", "--signal", "KILL@300"), "--signal KILL@300 is not SIGNAL@SECONDS, with a signal that stops a run (INT, TERM, HUP, USR1"),
    (("--nodes", "2", "--signal", "USR1"), "seconds before the time limit"),
    (("--nodes", "2", "--signal", "TERM@0"), "use e.g. --signal USR1@600"),
    (("--nodes", "2", "--signal", "TERM@65536"), "1 to 65535 seconds"),
    (("--nodes", "2", "--partition", "a b"), "is not a name that Slurm accepts"),
    (("--nodes", "2", "--mesh.simulated_devices", "16"), "requests CPU devices"),
    (("--nodes", "2", "--training.stepz", "1"), "did you mean training.steps"),
    (("other.toml", "--nodes", "2"), "other.toml is a second run file")])
def test_a_job_that_cannot_be_is_one_message_and_makes_nothing(printed, tmp_path, words, told):
    code, text, said = printed(*words)
    assert (code, text) == (2, "") and told in said and said.count("error: ") == 1
    assert not (tmp_path / "home" / "runs").exists()
