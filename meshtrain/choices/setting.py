"""The inputs of a choice, its result, and the error with which it refuses a run."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax

from meshtrain.config.sections import Run
from meshtrain.hardware import Gpu
from meshtrain.sharding.rules import Layout

GPU_PLATFORMS = ("gpu", "cuda")
T = TypeVar("T", covariant=True)


class Place(NamedTuple):
    """Devices and the layout on them.

    platform: jax's name of the platform. gpu: the devices' row in the hardware table; None if it has none. installed:
    whether choices depend on the software that is installed here; False: the choices assume current versions of all
    software, as the planner does.
    """
    layout: Layout
    platform: str
    gpu: Gpu | None = None
    installed: bool = True

    @property
    def on_gpus(self) -> bool:
        return self.platform in GPU_PLATFORMS

    @property
    def gpu_name(self) -> str:
        """The GPU's name in the hardware table; "" if it has no row."""
        return self.gpu.name if self.gpu else ""


@dataclass(frozen=True, eq=False)
class Setting:
    """What the choices of a run may look at: the run, and the fields of a `Place`.

    device: one of the devices; None if they are only named.
    """
    run: Run
    layout: Layout
    platform: str
    gpu: Gpu | None = None
    device: jax.Device | None = None
    installed: bool = True

    @property
    def place(self) -> Place:
        return Place(self.layout, self.platform, self.gpu, self.installed)

    @property
    def on_gpus(self) -> bool:
        return self.place.on_gpus

    @property
    def gpu_name(self) -> str:
        """The GPU's name in the hardware table; "" if it has no row."""
        return self.place.gpu_name


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value that the run file leaves open. why: lines for the user, each shown once at the start, in inspect and in
    plan; empty if there is nothing to tell."""
    value: T
    why: tuple[str, ...] = ()


class Refusal(ValueError):
    """The run cannot be computed in this setting. faults: all of them, each with value, rule and remedy."""

    def __init__(self, *faults: str):
        self.faults = list(faults)
        super().__init__("\n".join(faults))
