"""Groups of weights with their own learning rate, weight decay or rule, and the learning rates of muP.

[optimizer.groups] is an ordered table, like the rules of big_vision: each weight has the treatment of the first row
whose pattern matches it. muP (arXiv:2203.03466, table 3: rates, no multipliers) keeps a learning rate that was found on
a narrow model right for a wide one. m is the ratio of a matrix's own fan-in to its fan-in in the narrow model, not the
ratio of embed_dim: the two ratios differ where the MLP's width relative to embed_dim changes. Sources: for Adam,
arXiv:2203.03466; for Muon, whose updates have the spectral norm 0.2 √max(fan-in, fan-out) here, arXiv:2310.17813.
"""
from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
from collections.abc import Iterable, Sequence

from meshtrain import custom
from meshtrain.config.sections import WeightGroup, WeightGroups, Model, Optimizer
from meshtrain.model import transformer
from meshtrain.model.params import ParamInfo
from meshtrain.names import MATMUL_ROLES, ROLES
from meshtrain.units import amount

ROLE = "role:"
OTHERS = "others"       # the weights that no pattern matches
DECAYED = (*MATMUL_ROLES, "router")     # roles with weight decay if no group says otherwise
SCALED = ("matrix", "head", "router")   # roles whose rate muP lowers with their fan-in
PLAIN = WeightGroup()


@dataclasses.dataclass(frozen=True)
class Treatment:
    """How a weight is updated. group: its pattern. rate: factor of the learning rate. eps: factor of optimizer.eps."""
    group: str
    rate: float
    decay: float
    rule: str
    eps: float = 1.0


def assign(cfg: Optimizer, infos: Sequence[ParamInfo], model: Model) -> list[Treatment]:
    """Return the treatment of each weight. infos: one per trained weight. model: the run's [model] section, for muP.

    Raises: ValueError with a line for each fault.
    """
    rows = cfg.groups.rows
    widths, faults = _find_widths(cfg, infos, model) if cfg.groups.preset else ({}, [])
    members: dict[str, list[ParamInfo]] = {pattern: [] for pattern in rows}
    treatments = []
    for info in infos:
        pattern = next((pattern for pattern in rows if _matches(pattern, info)), OTHERS)
        if pattern != OTHERS:
            members[pattern].append(info)
        treatments.append(treat(cfg, info.role, pattern, rows.get(pattern, PLAIN), widths.get(info.name)))
    for pattern, row in rows.items():
        faults += _find_faults(cfg, pattern, row, members[pattern], infos)
    if faults:
        raise ValueError("\n".join(faults))
    return treatments


def _matches(pattern: str, info: ParamInfo) -> bool:
    """Return whether the pattern matches. None matches the biases that balance experts: no optimizer moves them."""
    if info.role == "balance":
        return False
    if pattern.startswith(ROLE):
        return info.role == pattern.removeprefix(ROLE)
    return fnmatch.fnmatchcase(info.name, pattern)


def treat(cfg: Optimizer, role: str, pattern: str = OTHERS, row: WeightGroup = PLAIN, wider: float | None = None
          ) -> Treatment:
    """Return the treatment of a weight. wider: m of muP; None: no muP, or a weight whose rate muP keeps."""
    rule = row.rule or ("adamw" if cfg.name == "muon" and role != "matrix" else cfg.name)
    decay = row.decay if row.decay is not None else cfg.weight_decay if role in DECAYED else 0.0
    if wider is None:
        return Treatment(pattern, row.rate, decay, rule)
    # The update of muon has a spectral norm of rate · 0.2 √max(in, out), which has to grow as √(out / in).
    return Treatment(pattern, row.rate * (wider ** -0.5 if rule == "muon" else 1 / wider), decay, rule,
                     1.0 if rule == "muon" else 1 / wider)


def _find_faults(cfg: Optimizer, pattern: str, row: WeightGroup, members: Sequence[ParamInfo],
                 infos: Sequence[ParamInfo]) -> Iterable[str]:
    """Yield the reasons why a row cannot be applied. members: the weights of its group."""
    name = f"optimizer.groups.{json.dumps(pattern)}"
    if pattern.startswith(ROLE) and pattern.removeprefix(ROLE) not in ROLES:
        yield (f"{name}: there is no role {json.dumps(pattern.removeprefix(ROLE))}; use one of "
               f"{', '.join(ROLE + role for role in ROLES if role != 'balance')}")
    elif pattern == f"{ROLE}balance" or not members and any(
            info.role == "balance" and fnmatch.fnmatchcase(info.name, pattern) for info in infos):
        yield f"{name}: no optimizer moves the biases that balance experts; experts.bias_rate is their rate"
    elif not members:
        taken = [info for info in infos if _matches(pattern, info)]
        example = next((info.name for info in infos if info.role == "matrix"), infos[0].name)
        yield f"{name} matches no trained weight" + (
            f" outside the earlier groups: {taken[0].name} is in one; the first match counts, so put this row before it"
            if taken else f"; the names are as in the table of `meshtrain inspect`, e.g. {example}, or "
                          f"{', '.join(ROLE + role for role in dict.fromkeys(one.role for one in infos))}")
    if row.rate == 0:
        yield (f"{name}.rate=0 freezes nothing: gradients, moments and weight decay remain; to train only some "
               f"weights use [lora], or give a small rate")
    if row.rule and cfg.name not in ("adamw", "muon"):
        yield (f'{name}.rule={json.dumps(row.rule)} chooses between "adamw" and "muon", but '
               f'optimizer.name={json.dumps(cfg.name)}; use "adamw" or "muon" there, or leave the rule out')
    if row.rule == "muon" and (others := [info for info in members if info.role != "matrix"]):
        yield (f'{name}.rule="muon" orthogonalizes matrices of layers, but {others[0].name} is of the role '
               f'{json.dumps(others[0].role)}; use "role:matrix", or a narrower pattern')


def _find_widths(cfg: Optimizer, infos: Sequence[ParamInfo], model: Model) -> tuple[dict[str, float], list[str]]:
    """Return (m by the name of each weight whose rate muP scales, faults)."""
    name = 'optimizer.groups: preset="mup"'
    base = Model(**cfg.groups.base)
    faults = []
    if custom.is_path(cfg.name) or cfg.name not in ("adamw", "muon"):
        faults.append(f'{name} has rates for "adamw" and "muon", but optimizer.name={json.dumps(cfg.name)}; use one of '
                      f"them")
    if model.tie_embeddings:
        faults.append(f"{name}: with model.tie_embeddings=true one table is embedding and head, which have different "
                      f"rates; use model.tie_embeddings=false")
    if model.multipliers.logits != base.multipliers.logits:
        faults.append(f"{name} lowers the head's rate, and model.multipliers.logits={model.multipliers.logits:g} "
                      f"(base: {base.multipliers.logits:g}) would lower its logits again; use the base's value")
    score, at_base = (one.multipliers.score or one.head_dim ** -0.5 for one in (model, base))
    wanted = at_base * base.head_dim / model.head_dim
    if model.head_dim != base.head_dim and not math.isclose(score, wanted, rel_tol=1e-3):
        faults.append(f"{name}: model.head_dim={model.head_dim} is not the base's {base.head_dim}, and scores have to "
                      f"fall with 1 / head_dim; use model.multipliers.score={wanted:.6g}, or the base's head_dim")
    narrow = {info.name: info for info in transformer.build(base).parameters()}
    scaled = [info for info in infos if info.role in SCALED]
    if missing := [info.name for info in scaled if info.name not in narrow]:
        return {}, [*faults, f"{name}: the base has no {missing[0]}; use a base with the same kinds of layers and "
                             f"another width"]
    return {info.name: _fan_in(info) / _fan_in(narrow[info.name]) for info in scaled}, faults


def _fan_in(info: ParamInfo) -> int:
    inputs = info.matrix_dims[0] if info.matrix_dims else [len(info.shape) - 2]     # a router may be stacked
    return math.prod(info.shape[dim] for dim in inputs)


def describe(cfg: Optimizer, infos: Sequence[ParamInfo], model: Model) -> list[str]:
    """Return a line for each group, or for each part of a group that muP treats alike: its weights, parameters, rate,
    decay and rule. Without groups there are no lines. Raises: as `assign`."""
    if cfg.groups == WeightGroups():
        return []
    alike: dict[Treatment, list[ParamInfo]] = {}
    for info, treatment in zip(infos, assign(cfg, infos, model), strict=True):
        if info.role != "balance":
            alike.setdefault(treatment, []).append(info)
    order, lines = [*cfg.groups.rows, OTHERS], []
    for treatment, members in sorted(alike.items(), key=lambda item: order.index(item[0].group)):
        names = [info.name for info in members]
        group = treatment.group if treatment.group == OTHERS else json.dumps(treatment.group)
        eps = f", eps × {treatment.eps:g}" if treatment.eps != 1 else ""
        lines.append(f"optimizer.groups, {group}: {amount(len(names), 'weight')} ({', '.join(names[:2])}"
                     f"{', …' * (len(names) > 2)}) with {amount(sum(info.size for info in members), 'parameter')}: "
                     f"rate × {treatment.rate:g}{eps}, decay {treatment.decay:g}, {treatment.rule}")
    return lines
