"""The launchers, as `meshtrain.launch`: in a checkout they lie in launch/ beside the package, in a wheel here."""
from typing import TYPE_CHECKING

from meshtrain.shipped import shipped

if TYPE_CHECKING:
    from launch import elastic, local, pod, ray, restart, samplers, supervise  # noqa: F401

__path__ = [str(shipped("launch"))]
