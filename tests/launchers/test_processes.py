"""Several processes: who they are, and that they meet or say who did not."""
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain import config, devices, run_files
from meshtrain.cluster import find, gpus, meet
from meshtrain.cluster.find import Cluster
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError, Distributed

ROOT = Path(__file__).resolve().parent.parent.parent
NOTHING = Distributed()
# What srun sets for the sixth of 8 tasks on 2 hosts with 4 GPUs each that every task sees.
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_NODELIST": "gpu[01-08]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPI4 = MPIRUN | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPI5 = MPIRUN | {"PMIX_NAMESPACE": "prterun-gpu-07-3903919@1",
                 "PMIX_SERVER_URI41": "prterun-gpu-07-3903919@0.1;tcp4://127.0.0.1:57983"}


def told(address="", count=0, index=-1) -> Distributed:
    return Distributed(coordinator_address=address, num_processes=count, process_id=index)


# ---- who we are ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [
    {}, {"HOME": "/root"},
    # the batch script
    {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"},
    # batch step, salloc
    SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)},
    SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
    MPI4 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, {"PMI_SIZE": "4"},
    SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA), "PMIX_RANK": "0"},
], ids=["nothing", "home", "batch script", "batch step", "salloc", "one task", "one rank", "PMI", "Flux", "no rank",
        "salloc with PMIx"])
def test_a_process_that_nobody_started_among_others_is_alone(environ):
    assert find.cluster(NOTHING, environ) is None


def test_slurm_tells_rank_count_first_host_and_gpu():
    found = find.cluster(NOTHING, SRUN)
    assert (found.host, found.count, found.index, found.local_devices) == ("gpu07", 8, 5, (1,))
    assert 10_000 <= found.port < 32_768 and not found.loopback


def test_all_tasks_of_a_job_meet_at_one_port_and_other_jobs_and_steps_at_others():
    ranks = {find.cluster(NOTHING, SRUN | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % 4),
                                           "SLURM_NODEID": str(i // 4)})
             for i in range(8)}
    assert len({found.coordinator for found in ranks}) == 1 and {found.index for found in ranks} == set(range(8))
    others = {find.cluster(NOTHING, SRUN | change).port
              for change in ({}, {"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4711" + "0" * 6})}
    assert len(others) == 4


@pytest.mark.parametrize("nodes, first", [
    ("node1", "node1"), ("node1,node2", "node1"), ("node[001-004]", "node001"), ("node[3,7-9],other", "node3"),
    ("a-b.c[10-12]", "a-b.c10"), ("rack[1-2]n[03,07-9],x", "rack1n03"), ("n[1-2]-ib", "n1-ib")])
def test_the_first_host_of_a_node_list(nodes, first):
    assert find.cluster(NOTHING, SRUN | {"SLURM_STEP_NODELIST": nodes}).host == first


@given(st.lists(st.integers(1, 12), min_size=2, max_size=9), st.data())
def test_every_slurm_task_knows_how_many_share_its_host(per_node, data):
    runs = []       # as Slurm writes it: 4(x2),3
    for tasks in per_node:
        if runs and runs[-1][0] == tasks:
            runs[-1][1] += 1
        else:
            runs.append([tasks, 1])
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in runs)
    node = data.draw(st.integers(0, len(per_node) - 1))
    environ = SRUN | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_STEP_NUM_TASKS": str(sum(per_node)),
                      "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    del environ["CUDA_VISIBLE_DEVICES"]
    assert find.cluster(NOTHING, environ).local_devices == (None if per_node[node] == 1 else (0,))


@pytest.mark.parametrize("visible, more, own", [
    ("0,1,2,3", {}, (1,)), ("GPU-a,GPU-b,GPU-c,GPU-d", {}, (1,)), ("0,1,2,3,4,5,6,7", {}, (2, 3)), (None, {}, (1,)),
    ("2", {}, None), ("0,1,2,3", {"SLURM_GPUS_ON_NODE": "16"}, None), ("0,1,2,3", {"SLURM_GPUS_ON_NODE": "4"}, (1,)),
    ("0,1,2,3", {"SLURM_GPUS_PER_TASK": "4"}, None), ("0,1,2,3", {"SLURM_GPUS_PER_TASK": "a100:4"}, None),
    ("", {}, (1,))])
def test_the_tasks_of_a_host_share_its_gpus_evenly_unless_each_is_shown_its_own(visible, more, own, monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: [])
    environ = {key: value for key, value in SRUN.items() if key != "CUDA_VISIBLE_DEVICES"} | more
    environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    assert find.cluster(NOTHING, environ).local_devices == own


def test_two_tasks_on_a_host_of_four_gpus_take_two_each(monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(4)])
    two = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
    unset = {key: value for key, value in two.items() if key != "CUDA_VISIBLE_DEVICES"}
    for environ in (two, unset):
        assert [find.cluster(NOTHING, environ | {"SLURM_LOCALID": i}).local_devices for i in "01"] == [(0, 1), (2, 3)]
    mpi = MPI5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert find.cluster(NOTHING, mpi).local_devices == (2, 3)


def test_gpus_that_do_not_divide_among_the_tasks_of_a_host_are_refused():
    three = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,5", "SLURM_NODEID": "0"}
    with pytest.raises(ConfigError,
                       match="3 processes on .* cannot share its 4 GPUs evenly; start 1 or 2 or 4 processes per"):
        find.cluster(NOTHING, three)


@pytest.mark.parametrize("taken, told", [
    ([("a", 4, 4)] * 2 + [("b", 4, 8)] * 2, "2 processes on a took 4 GPUs each; 2 processes on b took 4 GPUs each"),
    ([("a", 1, 4)] * 2, "2 processes on a took 1 GPU each; 2 of its 4 visible GPUs stay idle"),
    ([(host, 1, 8) for host in "abc" for _ in range(8)], "8 processes on each of 3 hosts took 1 GPU each"),
    ([("a", 8, 8), ("b", 8, 8)], "1 process on each of 2 hosts took 8 GPUs each")])
def test_what_the_processes_took_is_told_against_what_they_see(taken, told):
    assert gpus.shares(taken) == told


def test_tasks_of_one_host_meet_on_loopback():
    one = {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    assert find.cluster(NOTHING, SRUN | one).loopback
    assert find.cluster(NOTHING, MPI5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}).loopback


@pytest.mark.parametrize("environ, host", [
    (MPI4, "10.96.0.1"), (MPI5, "gpu-07"),
    (MPIRUN | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"}, "fe80::b9b:ac5d")],
    ids=["4", "5", "IPv6"])
def test_open_mpi_tells_rank_count_and_mpiruns_host(environ, host):
    found = find.cluster(NOTHING, environ)
    assert (found.host, found.count, found.index, found.local_devices) == (host, 8, 5, (1,))
    assert 10_000 <= found.port < 32_768
    elsewhere = environ | {"OMPI_COMM_WORLD_RANK": "1",
                           "PMIX_SERVER_URI41": "prterun-gpu-07-3903919@0.9;tcp4://127.0.0.1:1"}
    assert find.cluster(NOTHING, elsewhere | {"OMPI_MCA_orte_hnp_uri": environ.get("OMPI_MCA_orte_hnp_uri", "")}
                          ).coordinator == found.coordinator


def test_mpirun_inside_a_slurm_job_is_open_mpi():
    """mpirun starts its daemons by srun: there are two of those, and eight processes."""
    assert find.cluster(NOTHING, MPI5 | SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}).index == 5
    assert find.cluster(NOTHING, MPI5 | SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}).count == 8


def test_mpirun_that_does_not_tell_its_host_asks_for_the_address_and_takes_it():
    with pytest.raises(ConfigError, match="--distributed.coordinator_address HOST:PORT"):
        find.cluster(NOTHING, MPIRUN)
    assert find.cluster(told("a:12345"), MPIRUN) == Cluster("a:12345", 8, 5, (1,))


PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}
HYDRA = PMI | {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = PMI | {"PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_RANK": "1",
              "PMI_LOCAL_SIZE": "4"}
FLUX = {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2",
        "FLUX_TASK_LOCAL_ID": "1"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in
           {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()}


@pytest.mark.parametrize("environ, own", [
    (PMI, None), (HYDRA, (1,)), (PALS, (1,)), (FLUX, (1,)), (FLUX | PMI, (1,)), (MVAPICH, (1,)), (MVAPICH | PMI, (1,)),
    (SRUN | HYDRA | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}, (1,))],
    ids=["PMI", "Hydra", "PALS", "Flux", "Flux with PMI", "MVAPICH", "MVAPICH with PMI", "Hydra's daemons under srun"])
def test_ranks_of_other_launchers_are_taken_and_their_address_is_asked_for(environ, own):
    environ = environ | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    with pytest.raises(ConfigError, match="(PMI|FLUX|MV2).*=8 .*=5.*coordinator_address.*num_processes.*process_id"):
        find.cluster(NOTHING, environ)
    assert find.cluster(told("a:12345"), environ) == Cluster("a:12345", 8, 5, own)
    assert find.cluster(NOTHING, environ | {"JAX_COORDINATOR_ADDRESS": "b:12345"}) == Cluster("b:12345", 8, 5, own)
    assert find.cluster(told("c:12345", 4, 3), environ) == Cluster("c:12345", 4, 3)


def test_ranks_of_one_host_meet_on_loopback_at_a_port_of_their_job():
    def found(**more):
        return find.cluster(NOTHING, HYDRA | {"MPI_LOCALNRANKS": "8", "CUDA_VISIBLE_DEVICES": ""} | more)
    assert found().loopback and found() == found(HOME="/") and (found().count, found().index) == (8, 5)
    assert found(PBS_JOBID="1").port != found(PBS_JOBID="2").port


@pytest.mark.parametrize("more", [PMI, HYDRA, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMIX_RANK": "5"}, {"PMI_SIZE": ""}])
@pytest.mark.parametrize("launcher", [SRUN, MPI5], ids=["srun", "mpirun"])
def test_slurm_and_open_mpi_stay_what_they_are_where_they_number_by_pmi_too(launcher, more):
    assert find.cluster(NOTHING, launcher | more) == find.cluster(NOTHING, launcher)


@pytest.mark.parametrize("environ, parts", [
    ({"PALS_RANKID": "1"}, ["PALS_RANKID=1", "unset PALS_RANKID for a single process"]),
    ({"PMIX_RANK": "0", "PMI_RANK": "0"}, ["PMI_RANK=0 PMIX_RANK=0"]),
    (PMI | {"PMI_RANK": "8"}, ["PMI_RANK=8", "PMI_SIZE=8"]), (PMI | {"PMI_SIZE": "all"}, ["PMI_SIZE=all"]),
    (PMI | FLUX | {"PMI_RANK": "4"}, ["FLUX_TASK_RANK=5", "PMI_RANK=4", "contradict"]),
    (SRUN | PMI | {"PMI_RANK": "4"}, ["SLURM_PROCID=5", "PMI_RANK=4", "contradict"]),
    (PMI | {"RANK": "4", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, ["PMI_RANK=5", " RANK=4"])])
def test_ranks_that_describe_no_process_are_told_with_the_three_flags(environ, parts):
    with pytest.raises(ConfigError) as raised:
        find.cluster(NOTHING, environ)
    whole = "whole number" in str(raised.value) or "counted from 0" in str(raised.value)
    for part in parts + [f"--distributed.{name}" for name in ("coordinator_address", "num_processes", "process_id")
                         if not whole]:
        assert part in str(raised.value)


def test_flags_win_over_the_environment():
    for environ in ({}, SRUN, MPI4, PMI, {"PMIX_RANK": "1"}):
        assert find.cluster(told("a:12345", 4, 3), environ) == Cluster("a:12345", 4, 3)
    assert find.cluster(told("a:12345", 1, 0), SRUN) is None
    assert find.cluster(told("a:12345"), SRUN) == Cluster("a:12345", 8, 5, (1,))


def test_an_address_alone_without_a_launcher_is_refused():
    with pytest.raises(ConfigError, match="coordinator_address=a:12345.*num_processes and distributed.process_id"):
        find.cluster(told("a:12345"), {})


@pytest.mark.parametrize("address, count, index, parts", [
    ("", 2, 0, ["coordinator_address", "all three"]), ("a:12345", 2, -1, ["process_id=-1", "all three"]),
    ("a:12345", 0, 1, ["num_processes=0", "all three"]), ("a:12345", 2, 2, ["process_id=2", "0 to 1"]),
    ("a", 2, 1, ['="a"', "HOST:PORT"]), ("a:0", 2, 1, ["HOST:PORT"]), ("a:65536", 2, 1, ["HOST:PORT"]),
    ("::1:80", 2, 1, ["HOST:PORT"]), ("a:12345", -1, 0, ["num_processes=-1"])])
def test_contradicting_flags_are_told_by_name(address, count, index, parts, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = ["--distributed.coordinator_address", address, f"--distributed.num_processes={count}",
            f"--distributed.process_id={index}"]
    with pytest.raises(ConfigError) as raised:
        run_files.load(argv)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("address", ["node1:12345", "10.0.0.1:12345", "[fe80::1]:12345", "localhost:1"])
def test_addresses_of_all_kinds_are_taken(address, monkeypatch):
    monkeypatch.chdir(ROOT)
    given_ = run_files.load([f"--distributed.coordinator_address={address}", "--distributed.num_processes=2",
                          "--distributed.process_id=1"]).distributed
    found = find.cluster(given_, {})
    assert found.port == int(address.rpartition(":")[2]) and "[" not in found.host
    assert bool(found.loopback) == (found.host == "localhost")


def test_the_time_to_meet_is_a_key_that_reaches_the_meeting_and_jax(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert config.Distributed().timeout_s == 300
    run = run_files.load(["--distributed.timeout_s", "900", "--distributed.heartbeat_timeout_s",
                       "60", "--mesh.simulated_devices", "0"])
    asked = []
    monkeypatch.setattr(meet, "start", lambda cluster, *seconds: asked.extend(seconds))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    devices.start(run, Cluster("a:12345", 2, 1))
    assert asked == [900, 60]


# ---- coming together -------------------------------------------------------------------------------------------------


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Meeting(threading.Thread):
    """One process that comes to the meeting; `result` is None or what it raised."""

    def __init__(self, address: str, count: int, index: int, timeout_s: float = 20, token: str = ""):
        super().__init__(daemon=True)
        self.cluster, self.timeout_s, self.result = Cluster(address, count, index,
                                                            token=token), timeout_s, "still waiting"
        self.start()

    def run(self):
        start = time.monotonic()
        try:
            meet.meet(self.cluster, self.timeout_s)
            self.result = None
        except Exception as error:
            self.result = error
        self.took_s = time.monotonic() - start

    def __call__(self):
        self.join(self.timeout_s + 10)
        return self.result


def connect(address: str, text: bytes = b"") -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    host, port = address.split(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(text)
            return connection
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def hello(index: int, count: int, pid: int = 1, left_s: float = 20, token: str = "") -> bytes:
    about = {"index": index, "count": count, "host": "elsewhere", "pid": pid, "left_s": left_s, "token": token}
    return meet.HELLO + json.dumps(about).encode() + b"\n"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_all_meet_in_whatever_order_they_come(order, address):
    meetings = []
    for index in order:
        meetings.append(Meeting(address, 4, index))
        time.sleep(0.1)
    assert [meeting() for meeting in meetings] == [None] * 4


NO_HELLOS = [b"[]", b"7", b"{}", b"null", b"[" * 4000, b'{"index": 1}',
             *(json.dumps({"index": 1, "count": 2, "host": "h", "pid": 1, "left_s": 20, "token": ""} | wrong).encode()
               for wrong in (
                 {"index": 99}, {"index": 2}, {"index": -1}, {"index": "1"}, {"index": True},
                 {"index": 1.0}, {"left_s": "20"},
                 {"left_s": None}, {"left_s": -1}, {"left_s": float("nan")}, {"count": [2]},
                 {"host": 7}, {"pid": "1"}, {"token": 7}))]


def test_a_process_of_another_run_or_start_disturbs_nothing_and_is_told(address, capfd):
    """Whatever it says of itself: other numbers, an index that is taken, no time left."""
    mine = {"token": "run.dir=runs/a SLURM_JOB_ID=7"}
    first = Meeting(address, 3, 0, timeout_s=2, **mine)
    for other in ({"count": 4}, {"index": 0}, {"left_s": 0}, {"token": ""}):
        with connect(address,
                     hello(**{"index": 2, "count": 3, "pid": 11, "token": "run.dir=runs/b"} | other)) as stranger:
            assert stranger.recv(100) == b""
    assert first.result == "still waiting", first.result
    assert (f"rejected at {address}: process 2 (elsewhere, pid 11) of run.dir=runs/b; this is {mine['token']}\n"
            in capfd.readouterr().err)
    second = Meeting(address, 3, 1, **mine)
    for error in (first(), second()):
        assert "process 2 of 3 did not connect" in str(error)
        assert f"Rejected, because this is {mine['token']}: process 2 (elsewhere, pid 11) of run.dir=runs/b" in str(
            error)


def test_strangers_do_not_disturb_the_meeting(address):
    first = Meeting(address, 2, 0)
    junk = [b"", b"GET / HTTP/1.1\r\n\r\n", meet.HELLO[:5], b"\0" * 100_000, meet.HELLO + b"no json\n",
            meet.HELLO + b"x" * 5000, *(meet.HELLO + text + b"\n" for text in NO_HELLOS)]
    with contextlib.ExitStack() as stack:
        for text in junk:
            with contextlib.suppress(OSError):      # it may be thrown out while it still speaks
                stack.enter_context(connect(address, text))
        connect(address).close()
        time.sleep(0.2)
        assert first.result == "still waiting", first.result
        second = Meeting(address, 2, 1)
        assert (first(), second()) == (None, None)


def test_who_does_not_come_is_named_by_all_who_did(address):
    meetings = [Meeting(address, 5, index, timeout_s=1) for index in (0, 1, 3)]
    for meeting in meetings:
        error = meeting()
        assert isinstance(error, PeerError) and meeting.took_s < 3, error
        assert str(error).startswith(f"processes 2 and 4 of 5 did not connect to {address} within 1 s"), error
        for index in (0, 1, 3):
            assert f"{index} ({socket.gethostname()}, pid {os.getpid()})" in str(error)


def test_who_is_missing_is_told_while_they_are_waited_for(address, monkeypatch, capfd):
    monkeypatch.setattr(meet, "TELL_AFTER_S", 0.3)
    first, last = Meeting(address, 4, 0), Meeting(address, 4, 3)
    time.sleep(1)
    assert first.result == "still waiting"
    assert re.fullmatch(rf"still waiting, up to \d+ s more: processes 1 and 2 of 4 have not connected to {address} "
                        rf"within \d s\n",
                        capfd.readouterr().err)
    assert [meeting() for meeting in (Meeting(address, 4, 1), Meeting(address, 4, 2), first, last)] == [None] * 4


def test_a_first_process_that_is_missing_is_told_while_it_is_waited_for(address, monkeypatch, capfd):
    monkeypatch.setattr(meet, "TELL_AFTER_S", 0.3)
    second, third = Meeting(address, 3, 1), Meeting(address, 3, 2)
    time.sleep(1)
    err = capfd.readouterr().err
    assert re.fullmatch(rf"still waiting, .*: process 0 of 3 has not answered at {address} within \d s \(Connection "
                        rf"refused\)\n", err)
    assert [meeting() for meeting in (Meeting(address, 3, 0), second, third)] == [None] * 3


def test_nobody_waits_longer_than_the_first_who_came(address):
    patient = Meeting(address, 3, 0, timeout_s=30)
    hasty = Meeting(address, 3, 1, timeout_s=1)
    assert "process 2 of 3 did not connect" in str(hasty()) and "process 2 of 3 did not connect" in str(patient())
    assert patient.took_s < 5


def test_a_process_that_comes_and_dies_has_not_come(address):
    first = Meeting(address, 3, 0, timeout_s=1)
    connect(address, hello(1, 3)).close()
    assert "processes 1 and 2 of 3 did not connect" in str(first())


def test_a_process_that_comes_again_is_welcome(address):
    first = Meeting(address, 3, 0)
    connect(address, hello(1, 3)).close()
    time.sleep(0.2)
    assert [meeting() for meeting in (first, Meeting(address, 3, 1), Meeting(address, 3, 2))] == [None] * 3


def test_a_missing_first_process_is_named_by_the_others(address):
    meeting = Meeting(address, 2, 1, timeout_s=1)
    error = meeting()
    assert isinstance(error, PeerError) and meeting.took_s < 3
    assert f"process 0 of 2 did not answer at {address} within 1 s (Connection refused)" in str(error)


@pytest.mark.parametrize("reply, why", [(b"HTTP/1.1 400 Bad Request\r\n", "another program listens there"),
                                        (b"", "the connection was lost")])
def test_another_program_at_the_port_is_told(reply, why):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting(f"127.0.0.1:{listener.getsockname()[1]}", 2, 1, timeout_s=0.5)
        listener.settimeout(0.1)
        while meeting.is_alive():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.recv(1000)
                connection.sendall(reply)
                connection.close()
        assert why in str(meeting())


def test_a_taken_port_is_told_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        error = Meeting(address, 2, 0)()
    assert isinstance(error, PeerError), "no mistake of the user: exit 1, and the next try takes another"
    assert address in str(error) and "in use" in str(error)


def test_processes_that_expect_other_numbers_are_named_by_both_and_may_be_of_an_older_start(address):
    meetings = [Meeting(address, 2, 0), Meeting(address, 3, 1)]
    for meeting in meetings:
        error = meeting()
        assert isinstance(error, PeerError) and meeting.took_s < 5
        assert "process 1" in str(error) and "num_processes=3" in str(error) and "has 2" in str(error)


def test_an_index_given_twice_is_told_with_both_hosts(address):
    first = Meeting(address, 3, 0)
    with connect(address, hello(1, 3, pid=11)) as one, connect(address, hello(1, 3, pid=12)):
        answer = one.makefile("rb").readline()
        error = first()
    assert isinstance(error, PeerError)
    for part in ("two processes have distributed.process_id=1", "pid 11", "pid 12"):
        assert part in str(error) and part.encode() in answer


def test_two_first_processes_are_told(address):
    first = Meeting(address, 3, 0)
    with connect(address, hello(0, 3, pid=11)):
        assert "two processes have distributed.process_id=0" in str(first()) and "pid 11" in str(first())


def test_many_missing_are_counted(address):
    assert "15, 16 and 283 more of 300 did not connect" in str(Meeting(address, 300, 0, timeout_s=0.2)())


@pytest.mark.parametrize("host, bound", [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("[::1]", "[::1]"),
                                         ("node1", None)])
def test_loopback_stays_on_loopback(host, bound, address, monkeypatch):
    cluster = Cluster(f"{host}:{address.split(':')[1]}", 2, 0)
    if bound:
        with meet._listen(cluster) as listener:
            assert listener.getsockname()[0] == bound.strip("[]")
    calls = {}
    monkeypatch.setattr(meet, "meet", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.update(options))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    before = jax.config.jax_enable_preemption_service
    try:
        meet.start(cluster, 400, 60)
    finally:
        jax.config.update("jax_enable_preemption_service", before)
    assert calls["coordinator_bind_address"] == (bound and f"{bound}:{cluster.port}")
    assert calls["cluster_detection_method"] == "deactivate" and calls["initialization_timeout"] == 400
    assert calls["heartbeat_timeout_seconds"] == 60


@pytest.mark.parametrize("given, meanwhile", [
    ({}, "node1"), ({"no_proxy": ".example.org,10.0.0.0/8"}, ".example.org,10.0.0.0/8,node1"),
    ({"no_proxy": "a", "no_grpc_proxy": "b"}, "b,node1"), ({"no_proxy": "a", "no_grpc_proxy": ""}, "a,node1")])
def test_jaxs_service_is_reached_without_the_proxy_and_all_else_with_it(given, meanwhile, monkeypatch):
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before, seen = dict(os.environ), []
    monkeypatch.setattr(meet, "meet", lambda *_: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)

    def initialize(*_, **__):
        seen.append(os.environ["no_grpc_proxy"])
        raise RuntimeError("no service")
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(RuntimeError):
        meet.start(Cluster("node1:12345", 2, 0), 400, 60)
    assert seen == [meanwhile] and dict(os.environ) == before
