"""The launchers, as `meshtrain.launch`. In a checkout they are in launch/ beside the package, in a wheel they are here.
"""
from typing import TYPE_CHECKING

from meshtrain.shipped import locate_shipped

if TYPE_CHECKING:
    from launch import elastic, local, pod, ray, restart, samplers, supervise  # noqa: F401

__path__ = [str(locate_shipped("launch"))]
