"""The depths of multi-token prediction as the formulas see them: a model of their own layers, which each loss visits.

A depth costs a layer, the two matrices of its merge, one more pass through the head, and one more look-up of
embeddings. It runs after the last layer, in the loss of each microbatch; in a pipeline all stages compute it.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.model import mtp
from meshtrain.model.params import ParamInfo
from meshtrain.names import LEADING


def split(rows: Iterable[ParamInfo], cfg: Model) -> tuple[list[ParamInfo], list[ParamInfo]]:
    """Return (the other parameters, those of the depths). Equal parameters of the depths are one row [depths, …], as
    those of layers are."""
    others, first = [], []
    for info in rows:
        if not mtp.of_depth(info.path):
            others.append(info)
        elif info.path[0] == mtp.name(1):
            first.append(dataclasses.replace(info, path=("depths", *info.path[1:]), axes=(LEADING, *info.axes),
                                             shape=(cfg.mtp_layers, *info.shape)))
    return others, first


def section(cfg: Model) -> Model:
    """Return the [model] section of the depths' layers."""
    kind = pattern.depth_kind(cfg)
    without = {} if kind.mlp == "e" else dict(num_experts=0, shared_expert_dim=0)
    return cfg.model_copy(update=dict(num_layers=cfg.mtp_layers, mtp_layers=0, mixers=kind.mixer, mlps=kind.mlp)
                          | without)
