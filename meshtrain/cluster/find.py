"""Which process of how many this is: from flags, Open MPI's environment or Slurm's.

This module knows no run, model or data, and starts nothing.
"""
from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import zlib
from collections.abc import Mapping

from meshtrain.cluster import gpus
from meshtrain.config import ConfigError

FIRST_PORT, NUM_PORTS = 10_000, 20_000      # below 32768, where systems take ports for outgoing connections
SLURM_OWN_STEPS = 0xFFFFFFF0    # step ids from here up are Slurm's own: the batch script, salloc's shell


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process among `count`. coordinator: "host:port" of process 0. local_devices: the GPUs of this host that are
    its own; None = all that it sees."""
    coordinator: str
    count: int
    index: int
    local_devices: tuple[int, ...] | None = None

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False


def cluster(section, environ: Mapping[str, str]) -> Cluster | None:
    """The cluster that [distributed] or, where that is empty, Open MPI or Slurm describes; None = a single process.

    section: coordinator_address, num_processes and process_id of a sound run. coordinator_address alone moves the
    meeting place of what a launcher describes. Raises: ConfigError where that cannot be told.
    """
    address = section.coordinator_address
    if section.num_processes:
        found = Cluster(address, section.num_processes, section.process_id)
    else:
        # mpirun starts its daemons by srun, so below it both environments are there, and Slurm's is that of the daemon.
        found = _open_mpi(environ, address) or _slurm(environ, address)
    if address and found is None:
        raise ConfigError(f"distributed.coordinator_address={address} is for several processes, and neither srun nor "
                          "mpirun started this one; give distributed.num_processes and distributed.process_id too")
    return found if found is not None and found.count > 1 else None


def _slurm(environ: Mapping[str, str], address: str) -> Cluster | None:
    """The tasks of one srun. A batch script and salloc's shell see most of these variables, and are not tasks."""
    step = int(environ.get("SLURM_STEP_ID", SLURM_OWN_STEPS))
    if "SLURM_PROCID" not in environ or step >= SLURM_OWN_STEPS:
        return None
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1"))
    local_count = per_node[min(int(environ.get("SLURM_NODEID", 0)), len(per_node) - 1)]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    host = "127.0.0.1" if local_count == count else _first_host(nodes)
    return Cluster(address or f"{host}:{_port(environ.get('SLURM_JOB_ID', '0') + '.' + str(step))}", count,
                   int(environ["SLURM_PROCID"]), gpus.own(int(environ.get("SLURM_LOCALID", 0)), local_count, environ))


def _open_mpi(environ: Mapping[str, str], address: str) -> Cluster | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    count, local_count = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    own = gpus.own(int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), local_count, environ)
    if not address:
        # Open MPI 4 tells where mpirun listens, 5 names its jobs after mpirun's host: prterun-HOST-PID@1.
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        jobs = [environ[key] for key in sorted(environ) if key == "PMIX_NAMESPACE" or key.startswith("PMIX_SERVER_URI")]
        listens = re.search(r"tcp6?://(?:\[([^],]+)|([^,:]+))", uri)
        named = next(filter(None, (re.match(r"prte(?:run)?-(.+)-\d+@", job) for job in jobs)), None)
        host = "127.0.0.1" if local_count == count else listens[1] or listens[2] if listens else named[1] if named else None
        if host is None:
            raise ConfigError(f"mpirun started {count} processes and does not tell where process 0 is; "
                              "give --distributed.coordinator_address HOST:PORT, with a free port of the host of rank 0")
        job = uri.split(";")[0] or (named[0] if named else jobs[0] if jobs else "")
        address = f"{f'[{host}]' if ':' in host else host}:{_port(job)}"
    return Cluster(address, count, int(environ["OMPI_COMM_WORLD_RANK"]), own)


def _first_host(nodes: str) -> str:
    """'rack[1-2]n[03,07-9],other' -> 'rack1n03'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """'4(x2),3' -> [4, 4, 3]."""
    return [int(tasks) for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]


def _port(job: str) -> int:
    """The same in all processes of a job, and most likely another in the next job on this host."""
    return FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
