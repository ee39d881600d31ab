"""Refuses GPUs without float8 matmuls. `model.float8` computes them."""
from __future__ import annotations

from meshtrain import hardware
from meshtrain.choices.setting import Setting


def problems(setting: Setting) -> list[str]:
    """Return the reasons why the devices have no float8 matmuls, if the run has some. The layout has no influence."""
    if setting.run.model.matmul_dtype != "float8" or setting.platform == "cpu":
        return []
    if not hardware.lacks_float8(setting.gpu, getattr(setting.device, "compute_capability", None)):
        return []
    name = setting.gpu_name or setting.device and setting.device.device_kind
    return [f'model.matmul_dtype="float8": {name} has no float8 matmuls (e4m3fn, e5m2), which NVIDIA GPUs have since '
            f'H100; use model.matmul_dtype="auto", or other GPUs']
