"""The inputs of a choice, its result, and the error with which it refuses a run."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from meshtrain.config.sections import Run
from meshtrain.hardware import Gpu
from meshtrain.sharding.rules import Layout

GPU_PLATFORMS = ("gpu", "cuda")
T = TypeVar("T", covariant=True)


@dataclass(frozen=True, eq=False)
class Place:
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
class Setting(Place):
    """What the choices of a run may look at: the run and its place."""
    run: Run = field(kw_only=True)


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
