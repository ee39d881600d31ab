"""Chooses what computes a run's layers: one independent choice for each kind of layer. Refuses float8 and mixers that
the devices or the layout do not allow."""
from __future__ import annotations

import jax

from meshtrain import hardware
from meshtrain.choices import attention, experts, mlp, recurrence
from meshtrain.choices.setting import Choice, Refusal, Setting
from meshtrain.config.sections import Run
from meshtrain.model.execution import Engines
from meshtrain.model.transformer import find_lacking
from meshtrain.sharding.rules import Layout

# field of Engines -> module with its `choose`, in the order in which their lines are shown
CHOICES = {"attention": attention, "recurrence": recurrence, "mlp": mlp, "experts": experts}


def choose(setting: Setting) -> Choice[Engines]:
    """Make every choice of CHOICES. Raises: Refusal with the faults of all of them."""
    chosen: dict[str, Choice] = {}
    faults: list[str] = []
    for name, module in CHOICES.items():
        try:
            chosen[name] = module.choose(setting)
        except Refusal as refusal:
            faults += refusal.faults
    if faults:
        raise Refusal(*faults)
    values = {name: choice.value for name, choice in chosen.items()}
    return Choice(Engines(**values, by_kernels=hardware.runs_kernels(setting.gpu)),
                  tuple(line for choice in chosen.values() for line in choice.why))


def find_float8_faults(run: Run, platform: str, gpu: hardware.Gpu | None, device: jax.Device | None) -> list[str]:
    """Return the reasons why the devices have no float8 matmuls, if the run uses them.

    platform, gpu: as in `Place`. device: one of the devices; None if they are only named."""
    if run.model.matmul_dtype != "float8" or platform == "cpu":
        return []
    if not hardware.lacks_float8(gpu, getattr(device, "compute_capability", None)):
        return []
    name = gpu.name if gpu else device and device.device_kind
    return [f'model.matmul_dtype="float8": {name} has no float8 matmuls (e4m3fn, e5m2), which NVIDIA GPUs have since '
            f'H100; use model.matmul_dtype="auto", or other GPUs']


def find_mixer_faults(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot run the model's mixers; empty if it can. Raises: ValueError if code of
    the run's own cannot be loaded."""
    size = layout.sizes["context"]
    return [f"mesh.context={size}: {mixer} gets a part of each sequence, in permuted order; if it reads other tokens "
            "only through ex.engines, set `context = True` in its class, otherwise use mesh.context=1"
            for mixer in (find_lacking(run.model, "context") if size > 1 else ())]
