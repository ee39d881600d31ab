"""A Slurm of one's own on this machine: munged, slurmctld and slurmds as root, all files in one folder, nothing of the
system's used.

Debian has it: slurmctld, slurmd, slurm-client and munge. Its nodes are this machine under the names n1, n2, … in a
mount namespace with an /etc/hosts of its own; their GPUs are empty files, which Slurm counts and shows in
CUDA_VISIBLE_DEVICES.
"""
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SBATCH = ROOT / "launch" / "slurm.sbatch"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODE_TIMEOUT_S = 20

CONF = """\
ClusterName=meshtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/socket/munge
StateSaveLocation={home}/state
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdSpoolDir={home}/spool/%n
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=15
SlurmdTimeout={timeout}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=64 RealMemory=2000 Gres=gpu:2
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60 OverSubscribe=NO
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=9 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster here; empty: there can."""
    names = [name for name in NEEDED if not shutil.which(name)]
    if names:
        return f"no {', '.join(names)}: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
    if os.geteuid():
        return "Slurm's daemons are started as root here"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return "no mount namespaces, in which the nodes have names"
    return ""


def wait(what, condition, limit_s):
    """Returns what condition() does once it is true; fails the test after limit_s."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if got := condition():
            return got
        time.sleep(0.2)
    raise AssertionError(f"not within {limit_s} s: {what() if callable(what) else what}")


class Slurm:
    """Commands, and what the daemons know of a job."""

    def __init__(self, home: Path, nodes: int):
        self.home, self.nodes = home, nodes
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | {
            "SLURM_CONF": str(home / "slurm.conf"), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        # The script says `python`; a test's interpreter may have another name.
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (home / "bin" / "python").chmod(0o755)

    def start(self) -> None:
        host, home = socket.gethostname().partition(".")[0], self.home
        for folder in ("munge", "socket", "state", "spool", "dev"):
            (home / folder).mkdir()
        # munged refuses sockets in a folder that others may not enter, and keys that others may read.
        (home / "munge").chmod(0o700)
        (home / "socket").chmod(0o755)
        (home / "munge" / "key").write_bytes(os.urandom(128))
        (home / "munge" / "key").chmod(0o400)
        port = _free_ports(self.nodes + 1)
        (home / "slurm.conf").write_text(CONF.format(home=home, host=host, port=port,
                                                     first=port + 1, last=port + self.nodes,
                                                     nodes=self.nodes, timeout=NODE_TIMEOUT_S))
        for gpu in ("gpu0", "gpu1"):
            (home / "dev" / gpu).touch()
        (home / "gres.conf").write_text(f"Name=gpu File={home}/dev/gpu[0-1]\n")
        (home / "cgroup.conf").write_text("CgroupAutomount=no\n")
        names = " ".join(f"n{i + 1}" for i in range(self.nodes))
        (home / "hosts").write_text(f"127.0.0.1 localhost {host} {names}\n")
        self._call("munged", "--force", *(f"--{option}={home}/{place}" for option, place in (
            ("key-file", "munge/key"), ("socket", "socket/munge"), ("pid-file", "munge/pid"), ("log-file", "munge/log"),
            ("seed-file", "munge/seed"))))
        self._call("slurmctld", "-f", home / "slurm.conf", "-i")
        for i in range(self.nodes):
            (home / "spool" / f"n{i + 1}").mkdir()
            self.start_node(i + 1)
        wait("all nodes idle", lambda: self("sinfo", "-h", "-p", "low", "-t", "idle",
                                            "-o", "%D").strip() == str(self.nodes), 60)

    def start_node(self, number: int) -> None:
        named = f"mount --bind {self.home}/hosts /etc/hosts && exec slurmd -f {self.home}/slurm.conf -N n{number}"
        self._call("unshare", "-m", "--propagation", "private", "sh", "-c", named)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self._call("scancel", "-u", "root", "--quiet")
            wait("all jobs gone", lambda: not self("squeue", "-h").strip(), 60)
        for path in [*self.home.glob("slurmd-*.pid"), self.home / "slurmctld.pid", self.home / "munge" / "pid"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)

    def _call(self, *words) -> None:
        subprocess.run([str(word) for word in words], env=self.environ, check=True, capture_output=True, timeout=60)

    def __call__(self, *words, **options) -> str:
        """What a command of Slurm's says."""
        return subprocess.run([str(word) for word in words], env=self.environ, text=True, timeout=60, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options).stdout

    def submit(self, folder: Path, options, argv, **environ) -> "Job":
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        said = subprocess.run(["sbatch", "--parsable", f"--chdir={folder}", *options,
                               str(SBATCH), *map(str, argv)], text=True,
                              env=self.environ | environ, cwd=folder, capture_output=True, timeout=60)
        assert said.returncode == 0, said
        return Job(self, int(said.stdout), folder)


class Job:
    def __init__(self, slurm: Slurm, number: int, folder: Path):
        self.slurm, self.number, self.folder = slurm, number, folder

    def about(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.slurm("scontrol", "show", "job", self.number).split()
                    if "=" in word)

    def told(self) -> str:
        """What a test that fails says of it."""
        about = self.about()
        return " ".join(f"{name}={about.get(name)}"
                        for name in ("JobState", "Reason", "ExitCode", "Restarts")) + "\n" + self.output[-1500:]

    @property
    def state(self) -> str:
        return self.about().get("JobState", "")

    @property
    def output(self) -> str:
        path = self.folder / "runs" / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, state: str, limit_s: float) -> float:
        """Waits for a state; seconds that it took."""
        began = time.monotonic()
        wait(lambda: f"{state}: {self.told()}", lambda: self.state == state, limit_s)
        return time.monotonic() - began

    def go_on(self, limit_s: float = 120) -> None:
        """A job that is back in the queue is held back for two minutes, because nodes refuse it in the second in which
        it ended; a test waits for less."""
        time.sleep(4)
        self.slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        wait(lambda: f"to start: {self.told()}", lambda: self.state == "RUNNING", limit_s)

    def tasks(self) -> dict[int, int]:
        """SLURM_PROCID → pid of the tasks that train."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = dict(pair.split("=", 1)
                               for pair in (path / "environ").read_bytes().decode(errors="replace").split("\0")
                               if "=" in pair)
                if environ.get("SLURM_JOB_ID") == str(self.number) and environ.get("SLURM_STEP_ID") == "0" \
                        and environ.get("SLURM_CONF") == str(self.slurm.home / "slurm.conf") \
                        and b"\0meshtrain.train\0" in (path / "cmdline").read_bytes():
                    found[int(environ["SLURM_PROCID"])] = int(path.name)
        return found


def rows(directory: Path) -> list[dict]:
    """Whole rows of a run's metrics."""
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
                if line.endswith("\n")]
    return []


def _free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    for first in range(17_000, 29_000, 10):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    cluster = Slurm(tmp_path_factory.mktemp("slurm") / "cluster", 2)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
