"""What a run reports about its own costs while it trains: memory, FLOPs and cost.json."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax

from meshtrain import devices, files, hardware
from meshtrain.assembly import Assembly
from meshtrain.config import ConfigError
from meshtrain.inspection import measured, memory, report, teacher_forward
from meshtrain.inspection.inspected import Inspected
from meshtrain.journal.journal import Flops
from meshtrain.run import phases, say
from meshtrain.units import amount, size


def check_memory(made: Assembly) -> None:
    """Check that this machine's memory has room for the state of simulated devices, or for moments in host memory.
    Raises: ConfigError."""
    local = jax.local_devices()
    if local[0].platform != "cpu":
        if (moments := len(local) * memory.host_moments(made)) > devices.machine_bytes():
            raise ConfigError(f"optimizer.offload=true: the moments of {amount(len(local), 'GPU')} take "
                              f"{size(moments)} of this host, which has {size(devices.machine_bytes())}; use more "
                              f'hosts, or optimizer.moments_dtype="bfloat16"')
        return
    held = memory.formula(made)
    teacher = teacher_forward.TeacherForward(made, None, {}).memory_bytes["weights"] if made.run.distill.teacher else 0
    state_bytes = len(local) * (held["params"] + held["optimizer"] + teacher)
    if state_bytes > (has := devices.memory_bytes(local)):
        simulated = amount(len(local), "simulated device")
        raise ConfigError(f"the weights and the optimizer's state take {size(state_bytes)}"
                          f"{', with the teacher,' * bool(teacher)} on {simulated} of this machine, which has "
                          f"{size(has)}; use a smaller model, or train it on GPUs (inspect and plan work without GPUs)")


def write_cost(made: Assembly, step: Callable, directory: Path) -> None:
    """Print the memory of a device, and write cost.json, the output of `inspect --json`, which `meshtrain.report`
    compares with measurements. step: the compiled training step. Only process 0 writes; a failure is printed."""
    if jax.process_index():
        return
    try:
        with phases.moving("pricing the step"):
            priced = Inspected(made, step)        # without XLA's log, which only `inspect` reads
            local = made.mesh.local_devices
            needed = len(local) * (priced.memory_bytes["total"] or 0)
            shared = f"\n{len(local)} devices: {size(needed)} of this machine's {size(devices.memory_bytes(local))}" \
                if local[0].platform == "cpu" else ""
            say.out(report.memory_table(priced) + shared)
            costs = report.as_json(priced)
        files.replace(directory / measured.COST, json.dumps(costs))
    except Exception as error:      # a run must not fail because its costs are unknown
        say.err(f"{directory / measured.COST} is not written ({files.describe(error)}); training continues, and the "
                f"report will have no predictions")


def memory_reader(made: Assembly, step: Callable) -> Callable[[], int]:
    """Return a function that returns the bytes in use on a device, or those of the compiled step if the backend does
    not report them."""
    device = made.mesh.local_devices[0]
    of_program = memory.measure(made, step)["total"]

    def read() -> int:
        return (device.memory_stats() or {}).get("bytes_in_use", of_program)
    return read


def flops_of_step(made: Assembly) -> Flops:
    """Return the FLOPs of a step, without a peak if the hardware table lacks the device."""
    run = made.run
    tokens = run.data.global_batch * run.data.seq_len
    gpu = hardware.from_device_kind(made.mesh.devices.flat[0].device_kind)
    peak = gpu and gpu.peak(run.model.compute_dtype)
    return Flops(tokens * teacher_forward.flops_per_token(made), peak * made.mesh_spec.num_devices if peak else None)
