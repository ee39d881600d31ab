"""Joins the processes of a run: which of how many this is, what it prints, who watches it, which devices it has."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

import jax

from meshtrain import devices, elastic, run_files
from meshtrain.cluster import agree, find, watch
from meshtrain.cluster.watch import Watchdog
from meshtrain.config import Run
from meshtrain.run import phases, say, stops


@dataclasses.dataclass(frozen=True)
class Joined:
    """What a process knows once it has joined. run: adapted to the devices. devices: those of all processes."""
    run: Run
    devices: Sequence[jax.Device]
    watchdog: Watchdog


@contextlib.contextmanager
def join(run: Run, argv: Sequence[str]) -> Iterator[Joined]:
    """Context manager: join the processes of a run and start the devices. argv: the words of the command line.

    Raises: ConfigError, PeerError.
    """
    cluster = find.cluster(run.distributed, os.environ)
    # The index of this process is not a setting of the run.
    run = run.model_copy(update={"distributed": run.distributed.without_place()})
    index, count = (cluster.index, cluster.count) if cluster else (0, 1)
    say.format_lines(run.run.log_format, index, count)
    if index:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")      # only process 0 prints
    limits = watch.PhaseLimits(run.training.step_timeout_s, run.distributed.timeout_s,
                               *[run.training.phase_timeout_s] * 3)
    with watch.on(limits, index, count, say.err) as watchdog:
        with phases.phase(f"meeting {count} processes" if count > 1 else "starting the devices"):
            all_devices, run = start_devices(run, argv, cluster)
        run, fewer = elastic.fit(run, len(all_devices))
        stops.end_together(agree.part)
        if fewer:
            say.out(fewer)
        yield Joined(run, all_devices, watchdog)


def start_devices(run: Run, argv: Sequence[str], cluster: find.Cluster | None) -> tuple[Sequence[jax.Device], Run]:
    """Start the devices. Return (devices to use, run). Without a run file or a mesh, the quickstart uses GPUs if there
    are any."""
    if not run_files.names_mesh(argv) and devices.gpus_expected():
        run = run.replace(mesh={"simulated_devices": 0})
        all_devices = devices.start(run, cluster)
        run = devices.on_gpus(run, len(all_devices))
        say.out(f"found {len(all_devices)} × {all_devices[0].device_kind}: training on {run.mesh.fsdp}, all on the "
                f"axis fsdp")
        return all_devices[:run.mesh.fsdp], run
    if run.mesh.simulated_devices:      # checked before devices start, each of which takes threads and memory
        elastic.check(run, run.mesh.simulated_devices)
    return devices.start(run, cluster), run
