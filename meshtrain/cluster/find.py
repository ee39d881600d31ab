"""Finds this process's index and the number of processes, from flags or a launcher's environment.

Priority: [distributed]; then process variables of JAX (JAX_PROCESS_ID, Kubeflow) and PyTorch (RANK, torchrun); then
Open MPI; then Slurm; then other launchers of MPI programs (RANKS). Two sources that disagree are refused, because a
batch script may have exported one of them for all its tasks. Only torchrun may run below another launcher; torchrun
then divides that launcher's task. This module knows no run, model or data, and starts nothing.
"""
from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import zlib
from collections.abc import Mapping, Sequence

from meshtrain import config
from meshtrain.cluster import gpus
from meshtrain.config import ConfigError

FIRST_PORT, NUM_PORTS = 10_000, 20_000      # below the ephemeral ports, which begin at 32768
SLURM_OWN_STEPS = 0xFFFFFFF0    # step ids from here up are Slurm's own: the batch script, salloc's shell
JAX = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
TORCH = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Variables that identify one start of a run, from launch.pod and from launchers that number processes. The launchers'
# are not used if flags number the processes: flags may join tasks of two jobs, or several srun steps, into one start.
OWN_STARTS = ("MESHTRAIN_START",)
STARTS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "FLUX_JOB_ID", "PALS_APID")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Names of a launcher's variables. local_size, local_rank: count and index among the processes of the host; the
    first variable that is set is used."""
    size: str
    rank: str
    local_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()


OPEN_MPI = Ranks("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",),
                 ("OMPI_COMM_WORLD_LOCAL_RANK",))
RANKS = (
    Ranks("FLUX_JOB_SIZE", "FLUX_TASK_RANK", (), ("FLUX_TASK_LOCAL_ID",)),
    *(Ranks(f"{name}_SIZE", f"{name}_RANK", (f"{name}_LOCAL_SIZE",), (f"{name}_LOCAL_RANK",))
      for name in ("MV2_COMM_WORLD", "MVP_COMM_WORLD", "JSM_NAMESPACE")),     # MVAPICH 2 and later, LSF's jsrun
    # Hydra (mpiexec of MPICH and Intel MPI) sets MPI_LOCAL… for the local processes; Cray PALS sets PMI's, too.
    Ranks("PMI_SIZE", "PMI_RANK", ("PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"),
          ("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID")),
)
RANK_ALONE = ("PALS_RANKID", "PMIX_RANK", "ALPS_APP_PE", "PMI_ID")      # no other variable has the number of ranks
MPI_JOBS = ("FLUX_JOB_ID", "PALS_APID", "PMI_JOBID", "PBS_JOBID", "SLURM_JOB_ID", "LSB_JOBID")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among `count`. coordinator: "host:port" of process 0. local_devices: indices of the process's own
    GPUs on this host; None: all visible GPUs. token: identifies this start; process 0 rejects other tokens."""
    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None
    token: str = dataclasses.field(default="", compare=False)

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def loopback(self) -> str:
        """The loopback address, if the cluster is meant for this machine only; else empty."""
        host = "127.0.0.1" if self.host == "localhost" else self.host
        with contextlib.suppress(ValueError):
            return host if ipaddress.ip_address(host).is_loopback else ""
        return ""


def cluster(section: config.Distributed, environ: Mapping[str, str]) -> Cluster | None:
    """Return the cluster described by [distributed], or else by a launcher's environment; None: a single process.

    section: coordinator_address, num_processes and process_id of a valid run. coordinator_address (or
    JAX_COORDINATOR_ADDRESS) alone only replaces the rendezvous address of a launcher. Raises: ConfigError if the
    description is incomplete or contradictory.
    """
    address = section.coordinator_address
    cluster_here: Cluster | None
    if section.num_processes:
        cluster_here = Cluster(address, section.num_processes, section.process_id, token=_token(environ, OWN_STARTS))
    else:
        cluster_here = _of_environment(environ, address)
        cluster_here = cluster_here and dataclasses.replace(cluster_here, token=_token(environ, (*OWN_STARTS, *STARTS)))
    if address and cluster_here is None:
        raise ConfigError(f"distributed.coordinator_address={address} is for several processes, but no launcher's "
                          "environment gives the index of this process; give distributed.num_processes and "
                          "distributed.process_id too")
    return cluster_here if cluster_here is not None and cluster_here.count > 1 else None


def _of_environment(environ: Mapping[str, str], address: str) -> Cluster | None:
    names = {*JAX, *TORCH, *LOCAL, *RANK_ALONE, *(name for ranks in RANKS for name in (
        ranks.size, ranks.rank, *ranks.local_size, *ranks.local_rank))}
    environ = {name: value for name, value in environ.items() if value or name not in names}
    numbered = _ranks(environ)
    ranks = numbered[0] if numbered else None
    # mpirun starts its daemons by srun: both environments are set, and Slurm's describes the daemon.
    srun = (ranks is not OPEN_MPI and "SLURM_PROCID" in environ
            and int(environ.get("SLURM_STEP_ID", SLURM_OWN_STEPS)) < SLURM_OWN_STEPS
            and not (ranks and _of_daemons(environ, ranks)))
    launched = srun or ranks is not None
    named = [(words, described) for words, find in ((JAX, _jax), (TORCH, _torch))
             if (described := find(environ, address, launched))]
    places = [(_join(environ, words[:2]), described.count, described.index) for words, described in named]
    if launched and "TORCHELASTIC_RUN_ID" not in environ:
        step = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        for keys in [*[(step, "SLURM_PROCID")] * srun, *((ranks.size, ranks.rank) for ranks in numbered)]:
            count, index = (_whole(environ, key) for key in keys)
            if count > 1:       # a single task may start several processes itself
                places.append((_join(environ, keys), count, index))
    if len({place[1:] for place in places}) > 1:
        raise ConfigError(f"the environment describes this process in {len(places)} ways that contradict each other: "
                          f"{'; '.join(said for said, _, _ in places)}; unset the variables that are not meant "
                          "(a batch script that exports them gives every task the same), or give "
                          "--distributed.coordinator_address, --distributed.num_processes and "
                          "--distributed.process_id, which take precedence")
    if named:
        return named[0][1]
    address = address or _address(environ)
    if launched:
        return _slurm(environ, address) if srun else _mpiexec(environ, address, ranks)
    alone = [name for name in (*(ranks.rank for ranks in RANKS), *RANK_ALONE) if name in environ]
    if alone and "SLURM_PROCID" not in environ:       # salloc's shell may have one
        raise ConfigError(f"{_join(environ, alone)} is one process of a launcher, but no variable gives the number of "
                          "processes; give --distributed.coordinator_address HOST:PORT, --distributed.num_processes "
                          f"and --distributed.process_id, or unset {', '.join(alone)} for a single process")
    return None


def _ranks(environ: Mapping[str, str]) -> list[Ranks]:
    """Return the launchers that number this process. If a launcher has several processes, launchers with a single
    process are left out. A launcher that counts the processes of this host comes first."""
    if OPEN_MPI.rank in environ:
        return [OPEN_MPI]
    numbering = [ranks for ranks in RANKS if ranks.size in environ and ranks.rank in environ]
    several = [ranks for ranks in numbering if _place(environ, ranks.size, ranks.rank)[0] > 1] or numbering
    return sorted(several, key=lambda ranks: not any(name in environ for name in ranks.local_size))


def _of_daemons(environ: Mapping[str, str], ranks: Ranks) -> bool:
    """Return whether Slurm's tasks are daemons of another launcher, one on each node, which start these processes."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    return _whole(environ, ranks.size) > tasks and set(_tasks_per_node(per_node)) == {1}


def _jax(environ: Mapping[str, str], address: str, launched: bool) -> Cluster | None:
    """Return the cluster in the variables of Kubeflow's JAX runtime; None if they are not set. The address alone is
    allowed if a launcher provides the rest."""
    given = [name for name in JAX if name in environ]
    if not given or launched and given == ["JAX_COORDINATOR_ADDRESS"]:
        return None
    _whole_or_nothing(environ, JAX, address)
    count, index = _place(environ, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    return Cluster(address or _address(environ), count, index)


def _torch(environ: Mapping[str, str], address: str, launched: bool) -> Cluster | None:
    """Return the cluster in the variables of torchrun and Kubeflow's PyTorch runtime; None if they are not set. Below
    srun and mpirun, batch scripts export all of them but RANK for every task. Without RANK they are ignored."""
    if not any(name in environ for name in TORCH) or launched and "RANK" not in environ:
        return None
    _whole_or_nothing(environ, TORCH, address)
    count, index = _place(environ, "WORLD_SIZE", "RANK")
    own = _local_rank(environ)
    if address or "MASTER_ADDR" not in environ:
        return Cluster(address, count, index, own)
    host, port = environ["MASTER_ADDR"], _whole(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is not a port; use one from 1 to 65535 that is free on {host}")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":   # torchrun itself listens there
        port = _port(f"{host}:{port} {environ.get('TORCHELASTIC_RUN_ID')} {environ.get('TORCHELASTIC_RESTART_COUNT')}")
    return Cluster(join_address(host, port), count, index, own)


def _local_rank(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the GPUs of PyTorch's local rank; None: all visible GPUs. If the number of processes on the host is
    unknown, the process gets one GPU, as in PyTorch."""
    if "LOCAL_RANK" not in environ:
        return None
    if "LOCAL_WORLD_SIZE" in environ:
        local_count, index = _place(environ, "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        return gpus.own(index, local_count, environ)
    index, seen = _whole(environ, "LOCAL_RANK"), len(gpus.visible(environ))
    if 1 < seen <= index:
        raise ConfigError(f"LOCAL_RANK={index} has no GPU of its own: this process sees {seen} GPUs; start at most "
                          f"{seen} processes per host, or set LOCAL_WORLD_SIZE, which divides the GPUs among processes")
    return None if seen == 1 else (index,)


def _address(environ: Mapping[str, str]) -> str:
    address = environ.get("JAX_COORDINATOR_ADDRESS", "")
    if address and not config.is_address(address):
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} is not HOST:PORT; use e.g. node1:12345, with a port that "
                          f"is free on that host")
    return address


def _whole_or_nothing(environ: Mapping[str, str], names: Sequence[str], address: str) -> None:
    """Check the variables that describe a process. Raises: ConfigError if only some of them are set."""
    missing = [name for name in names if name not in environ]
    if address:     # it replaces these variables
        missing = [name for name in missing if name not in ("JAX_COORDINATOR_ADDRESS", "MASTER_ADDR", "MASTER_PORT")]
    if missing:
        raise ConfigError(f"{_join(environ, names)} describe a process only together with {', '.join(missing)}, which "
                          f"{'is' if len(missing) == 1 else 'are'} not set; set all of {', '.join(names)}, or none for "
                          f"a single process")


def _place(environ: Mapping[str, str], count_name: str, index_name: str) -> tuple[int, int]:
    count, index = _whole(environ, count_name), _whole(environ, index_name)
    if not 0 <= index < count:
        raise ConfigError(f"{index_name}={index} is not one of {count_name}={count} processes; they are counted from 0 "
                          f"to {count_name} - 1")
    return count, index


def _whole(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", environ.get(name, "").strip()):
        raise ConfigError(f"{name}={environ.get(name, '')} is not a whole number; correct it, or unset it if no "
                          f"launcher has set it")
    return int(environ[name])


def _join(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _token(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return NAME=VALUE of the variables that are set and not empty."""
    return _join({name: value for name, value in environ.items() if value}, names)


def _slurm(environ: Mapping[str, str], address: str) -> Cluster:
    """Return the cluster of the tasks of one srun. Batch scripts and salloc's shell are no tasks."""
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1"))
    local_count = per_node[min(int(environ.get("SLURM_NODEID", 0)), len(per_node) - 1)]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    host = "127.0.0.1" if local_count == count else _first_host(nodes)
    # A requeued job may find its old port still held by an unkillable process.
    job = ".".join((environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"],
                    environ.get("SLURM_RESTART_COUNT", "0")))
    own = gpus.own(int(environ.get("SLURM_LOCALID", 0)), local_count, environ)
    return Cluster(address or f"{host}:{_port(job)}", count, int(environ["SLURM_PROCID"]), own)


def _mpiexec(environ: Mapping[str, str], address: str, ranks: Ranks) -> Cluster:
    """Return the cluster of the ranks of MPI, jsrun or Flux. Only Open MPI gives the host on which process 0 may be."""
    count, index = _place(environ, ranks.size, ranks.rank)
    here = next((_whole(environ, name) for name in ranks.local_size if name in environ), 0)
    local = next((_whole(environ, name) for name in ranks.local_rank if name in environ), None)
    if not here and (nodes := int(environ.get("FLUX_JOB_NNODES") or 0)):
        here = count // nodes if count % nodes == 0 else 0
    own = None if local is None or local >= here else gpus.own(local, here, environ)
    if not address:
        host, job = _of_mpirun(environ) if ranks is OPEN_MPI else ("", f"{ranks.rank} {_token(environ, MPI_JOBS)}")
        host = "127.0.0.1" if here == count else host
        address = join_address(host, _port(job)) if host else ""
    if not address and count > 1:
        raise ConfigError(f"{_join(environ, (ranks.size, ranks.rank))}: a launcher started {count} processes and does "
                          f"not give the host of process 0; give --distributed.coordinator_address HOST:PORT, with the "
                          f"host of rank 0 and a free port (or also --distributed.num_processes and "
                          f"--distributed.process_id, which take precedence)")
    return Cluster(address, count, index, own)


def _of_mpirun(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (mpirun's host, its job). Open MPI 4 gives mpirun's address; Open MPI 5 names jobs after its host:
    prterun-HOST-PID@1."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    jobs = [environ[key] for key in sorted(environ) if key == "PMIX_NAMESPACE" or key.startswith("PMIX_SERVER_URI")]
    named = next(filter(None, (re.match(r"prte(?:run)?-(.+)-\d+@", job) for job in jobs)), None)
    listens = re.search(r"tcp6?://(?:\[([^],]+)|([^,:]+))", uri)
    host = listens[1] or listens[2] if listens else named[1] if named else ""
    return host, uri.split(";")[0] or (named[0] if named else "".join(jobs[:1]))


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: 'rack[1-2]n[03,07-9],other' -> 'rack1n03'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: '4(x2),3' -> [4, 4, 3]."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _port(job: str) -> int:
    """Return a port that is the same in all processes of a job, and probably differs in the next job on this host."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
