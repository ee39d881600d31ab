"""Adapts a run to fewer devices than planned: the same batches in more microbatches, so that activations per device do
not grow.

mesh.full_devices is the number of devices that training.microbatches is meant for. The mesh axis of size -1 shrinks to
the available devices. Each device runs more microbatches with the same number of sequences. FSDP shards become larger.
"""
from __future__ import annotations

from meshtrain import config, design
from meshtrain.config import ConfigError, Run
from meshtrain.model import transformer
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout


def fit(run: Run, num_devices: int) -> tuple[Run, str]:
    """Return (the run adapted to these devices, with its layout and mesh.full_devices resolved; a note for the user, ""
    if no device is missing).

    Raises: ConfigError if the batch cannot be split over these devices.
    """
    full = run.mesh.full_devices
    plain = config.on_devices(run, num_devices)
    plain = plain.model_copy(update={"mesh": plain.mesh.model_copy(update={"full_devices": 0})})
    if not full or num_devices >= full:
        return plain, ""
    sizes, wanted = config.mesh_sizes(run, num_devices), config.mesh_sizes(run, full)
    with config.user_errors():
        loaded = rules.load(config.on_devices(run, full).sharding.rules)
    (shrunk,) = (axis for axis in AXES if getattr(run.mesh, axis) == -1)
    batch_axes = loaded.mesh_axes("activations", "batch")
    if shrunk not in batch_axes:
        raise ConfigError(f"mesh.{shrunk}=-1 shrinks from {wanted[shrunk]} to {sizes[shrunk]} on {num_devices} of "
                          f"mesh.full_devices={full} devices, so each device would hold more of the model; give -1 to "
                          f"an axis that splits the batch "
                          f"({', '.join(f'mesh.{axis}' for axis in batch_axes) or 'none in these rules'}), or leave "
                          f"full_devices out")
    batch, before = run.data.global_batch, run.training.microbatches
    num_shards, num_shards_before = (Layout(loaded, of).num_shards(batch_axes) for of in (sizes, wanted))
    held = max(1, batch // (before * num_shards_before))      # sequences of a microbatch on each device
    count = next((m for m in range(before, batch + 1) if batch % (m * num_shards) == 0
                  and batch // (m * num_shards) <= held), 0)
    if not count:
        use = max(n for n in range(1, num_shards + 1) if batch % n == 0)
        raise ConfigError(f"data.global_batch={batch} cannot be split over {num_shards} shards (mesh.{shrunk}=-1 on "
                          f"{num_devices} devices); use a number of devices that divides it, e.g. {use}, or another "
                          "batch")
    note = (f"{num_devices} of {full} devices: mesh.{shrunk}={sizes[shrunk]} (of {wanted[shrunk]}), "
            f"training.microbatches={count} (of {before}); the batch stays {batch}, {batch // count // num_shards} "
            f"sequences a device at a time")
    return plain.replace(training={"microbatches": count}), note


def check(run: Run, num_devices: int) -> None:
    """Check that the run has a layout on this number of devices, without starting a backend. Raises: ConfigError."""
    run, _ = fit(run, num_devices)
    with config.user_errors():
        loaded, model = rules.load(run.sharding.rules), transformer.of_run(run)
    if faults := design.lay_out(run, config.mesh_sizes(run, num_devices), loaded, model).faults:
        raise ConfigError(*faults)
