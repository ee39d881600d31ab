"""Who we are by the environments of torchrun, Kubeflow and PyTorch's scripts; what is said in part, or twice, is
told."""
from pathlib import Path

import pytest

from meshtrain.commands import train
from meshtrain.cluster import find, gpus
from meshtrain.cluster.find import Cluster
from meshtrain.config import ConfigError, Distributed

from commands import call, refused

ROOT = Path(__file__).resolve().parent.parent.parent
NOTHING = Distributed()
# What torchrun sets for the sixth of 8 processes on 2 hosts (torch 2.9, --rdzv-backend=c10d).
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "4711",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
EXPORTED = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
KUBEFLOW = {"JAX_COORDINATOR_ADDRESS": "llama-node-0-0.llama:6666", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "5"}
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(gpus.glob, "glob", lambda pattern: [])


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def told(environ, *parts, section=NOTHING):
    with pytest.raises(ConfigError) as raised:
        find.cluster(section, environ)
    assert [part for part in parts if part not in str(raised.value)] == [], raised.value


def test_variables_exported_by_hand_tell_rank_count_address_and_gpu():
    assert find.cluster(NOTHING, EXPORTED) == Cluster("gpu07:29500", 8, 5, (1,))
    assert find.cluster(NOTHING, without(EXPORTED, "LOCAL_RANK")) == Cluster("gpu07:29500", 8, 5, None)
    assert find.cluster(NOTHING, EXPORTED | {"MASTER_ADDR": "fe80::1"}).coordinator == "[fe80::1]:29500"
    assert find.cluster(NOTHING, EXPORTED | {"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_torchruns_own_port_is_left_to_torchrun_and_each_of_its_restarts_takes_another():
    """Its agent listens at MASTER_PORT, and the processes are to be its clients there."""
    def found(i, restart=0):
        mine = {"RANK": str(i), "LOCAL_RANK": str(i % 4), "TORCHELASTIC_RESTART_COUNT": str(restart)}
        return find.cluster(NOTHING, TORCHRUN | mine | {"GROUP_RANK": str(i // 4)})

    everyone = [found(i) for i in range(8)]
    assert len({one.coordinator for one in everyone}) == 1 and [one.index for one in everyone] == list(range(8))
    assert everyone[0].host == "gpu07" and everyone[0].port != 29500 and 10_000 <= everyone[0].port < 32_768
    assert [one.local_devices for one in everyone] == [(i % 4,) for i in range(8)]
    assert len({found(0, restart).port for restart in range(4)}) == 4
    assert find.cluster(NOTHING, TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).port == 29500


def test_kubeflows_variables_tell_rank_count_and_address():
    assert find.cluster(NOTHING, KUBEFLOW) == Cluster("llama-node-0-0.llama:6666", 8, 5, None)


@pytest.mark.parametrize("local, visible, own", [
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "0,1,2,3", (1,)),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "0,1,2,3", (2, 3)),
    ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "7", None),
    ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "0,1,2,3", None),
    ({"LOCAL_RANK": "1"}, "0,1,2,3", (1,)), ({"LOCAL_RANK": "3"}, "7", None), ({"LOCAL_RANK": ""}, "0,1", None)])
def test_torchruns_local_rank_takes_its_share_of_the_gpus(local, visible, own):
    environ = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE") | local | {"CUDA_VISIBLE_DEVICES": visible}
    assert find.cluster(NOTHING, environ).local_devices == own


@pytest.mark.parametrize("environ, parts", [
    (EXPORTED | {"LOCAL_RANK": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, ["LOCAL_RANK=4", "sees 2", "at most 2"]),
    (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"]),
    (TORCHRUN | {"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
    (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, ["WORLD_SIZE=0"]),
    (TORCHRUN | {"RANK": "-1"}, ["RANK=-1", "whole number"]),
    (TORCHRUN | {"WORLD_SIZE": "eight"}, ["WORLD_SIZE=eight"]),
    (EXPORTED | {"MASTER_PORT": "0"}, ["MASTER_PORT=0", "65535"]),
    (EXPORTED | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
    (KUBEFLOW | {"JAX_PROCESS_ID": "8"}, ["JAX_PROCESS_ID=8", "JAX_NUM_PROCESSES=8"]),
    (KUBEFLOW | {"JAX_PROCESS_ID": "1.5"}, ["JAX_PROCESS_ID=1.5", "whole number"]),
    (KUBEFLOW | {"JAX_COORDINATOR_ADDRESS": "llama"}, ["JAX_COORDINATOR_ADDRESS=llama", "HOST:PORT"])])
def test_what_no_process_can_be_is_told_with_its_variable(environ, parts):
    told(environ, *parts)


@pytest.mark.parametrize("names", [("RANK",), ("WORLD_SIZE",), ("MASTER_ADDR",), ("MASTER_PORT",),
                                   ("MASTER_ADDR", "MASTER_PORT"),
                                   ("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")])
def test_half_of_pytorchs_variables_is_told_with_what_is_missing(names):
    half = {name: EXPORTED[name] for name in names}
    missing = [name for name in find.TORCH if name not in names]
    told(half, *(f"{name}={EXPORTED[name]}" for name in names), *missing, "not set")
    told(half | {name: "" for name in missing}, *missing, "not set")     # set to nothing is not set


@pytest.mark.parametrize("names", [("JAX_PROCESS_ID",), ("JAX_NUM_PROCESSES",), ("JAX_COORDINATOR_ADDRESS",),
                                   ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")])
def test_half_of_jaxs_variables_is_told_with_what_is_missing(names):
    half = {name: KUBEFLOW[name] for name in names}
    told(half, *(name for name in find.JAX if name not in names), "not set")
    if "JAX_PROCESS_ID" in names:
        told(half | SRUN, "not set")


def test_an_address_of_jax_alone_moves_the_meeting_place_of_what_srun_describes():
    alone = {"JAX_COORDINATOR_ADDRESS": "a:12345"}
    for launcher in (SRUN, MPIRUN):
        plain, moved = find.cluster(NOTHING, launcher), find.cluster(NOTHING, launcher | alone)
        assert moved == Cluster("a:12345", plain.count, plain.index, plain.local_devices)


def test_a_given_address_stands_for_that_of_the_environment():
    given = Distributed(coordinator_address="b:1")
    assert find.cluster(given, EXPORTED).coordinator == find.cluster(given, KUBEFLOW).coordinator == "b:1"
    for environ in (without(KUBEFLOW, "JAX_COORDINATOR_ADDRESS"), without(EXPORTED, "MASTER_ADDR", "MASTER_PORT")):
        assert (find.cluster(given, environ).coordinator, find.cluster(given, environ).index) == ("b:1", 5)


def test_flags_win_over_every_environment_even_a_broken_one():
    flags = Distributed(coordinator_address="a:12345", num_processes=4, process_id=3)
    for environ in (TORCHRUN, KUBEFLOW, {"RANK": "9"}, SRUN | {"JAX_PROCESS_ID": "x"}):
        assert find.cluster(flags, environ) == Cluster("a:12345", 4, 3)


def test_what_batch_scripts_export_for_all_tasks_names_nobody_below_srun():
    shared = {"MASTER_ADDR": "gpu01", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
    for launcher in (SRUN, MPIRUN):
        assert find.cluster(NOTHING, launcher | shared) == find.cluster(NOTHING, launcher)


@pytest.mark.parametrize("launcher", [SRUN, MPIRUN], ids=["srun", "mpirun"])
@pytest.mark.parametrize("named", [EXPORTED, KUBEFLOW], ids=["PyTorch", "jax"])
def test_variables_that_agree_with_the_launcher_are_taken_and_others_told(launcher, named):
    assert find.cluster(NOTHING, launcher | named) == find.cluster(NOTHING, named)
    for first in ({"RANK": "0"}, {"WORLD_SIZE": "4", "RANK": "3"}) if "RANK" in named else ({"JAX_PROCESS_ID": "0"},):
        wrong = launcher | named | first
        told(wrong, *(f"{name}={value}" for name, value in first.items()), "contradict",
             "unset", "--distributed.process_id",
                *(["SLURM_PROCID=5"] if launcher is SRUN else ["OMPI_COMM_WORLD_RANK=5"]))


def test_two_descriptions_without_a_launcher_must_agree():
    assert find.cluster(NOTHING, EXPORTED | KUBEFLOW).coordinator == KUBEFLOW["JAX_COORDINATOR_ADDRESS"]
    told(EXPORTED | KUBEFLOW | {"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4", "RANK=5", "contradict")


def test_torchrun_divides_the_task_of_srun_that_it_stands_below():
    """`srun --ntasks-per-node=1 torchrun --nproc-per-node=4`: two tasks, eight processes."""
    task = SRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
                   "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert find.cluster(NOTHING, task | TORCHRUN) == find.cluster(NOTHING, TORCHRUN)


def test_the_only_task_of_a_step_may_start_several_processes_itself():
    alone = SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
                    "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert find.cluster(NOTHING, alone | EXPORTED) == find.cluster(NOTHING, EXPORTED)


def test_a_requeued_job_meets_at_another_port_in_all_its_tasks():
    def port(restarts, index):
        return find.cluster(NOTHING, SRUN | {"SLURM_RESTART_COUNT": restarts, "SLURM_PROCID": index}).port
    assert len({port(restarts, "5") for restarts in "0123"}) == 4
    assert port("2", "0") == port("2", "5")
    assert find.cluster(NOTHING, SRUN).port == port("0", "5")


def test_a_start_is_told_by_its_job_and_its_count_of_restarts_the_same_in_all_its_tasks():
    def token(environ, section=NOTHING):
        return find.cluster(section, environ).token
    assert token(SRUN | {"SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "0"}) == token(SRUN | {"SLURM_RESTART_COUNT": "2"})
    assert len({token(SRUN), token(SRUN | {"SLURM_JOB_ID": "4712"}), token(SRUN | {"SLURM_RESTART_COUNT": "1"}),
                token(TORCHRUN)}) == 4
    assert token(TORCHRUN) == token(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"})
    flags = Distributed(coordinator_address="a:12345", num_processes=4, process_id=3)
    assert token(SRUN, flags) == "", "flags may join the tasks of two jobs"
    assert token(SRUN | {"MESHTRAIN_START": "3"}, flags) == "MESHTRAIN_START=3"


def test_half_an_environment_ends_the_command_with_2_and_one_message(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    refused(call(train.main), "WORLD_SIZE=1 RANK=1 describe a process only together with MASTER_ADDR, MASTER_PORT")
