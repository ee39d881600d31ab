"""The kinds of a model's layers, from `model.mixers` and `model.mlps`, and their grouping into repeated periods.

A layer consists of a mixer (attention or a recurrence) and an MLP. Layers that repeat with a period are computed by one
scan over the periods, so only the layers of one period are compiled.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:       # the sections check patterns by this file
    from meshtrain.config.sections import Model


@dataclasses.dataclass(frozen=True)
class Mixer:
    """What a letter of `model.mixers` means. words: the letter's description in --help. family: ATTENTION, RECURRENT or
    CUSTOM (the user's code, in `model.custom`), "" without a mixer. windowed, rotated: whether the mixer has
    model.window, rope."""
    words: str
    family: str
    windowed: bool = False
    rotated: bool = False

    @property
    def attends(self) -> bool:
        return self.family == ATTENTION

    @property
    def recurs(self) -> bool:
        return self.family == RECURRENT


ATTENTION, RECURRENT, CUSTOM = "attention", "recurrent", "custom"
MIXERS = {
    "F": Mixer("attention to all tokens", ATTENTION, rotated=True),
    "W": Mixer("attention within model.window", ATTENTION, windowed=True, rotated=True),
    "N": Mixer("as F, without rope", ATTENTION),
    "V": Mixer("as W, without rope", ATTENTION, windowed=True),
    "G": Mixer("gated delta rule", RECURRENT),
    "K": Mixer("Kimi delta attention", RECURRENT),
    "M": Mixer("Mamba-2", RECURRENT),
    "X": Mixer("the class model.custom.X", CUSTOM),
    "Y": Mixer("the class model.custom.Y", CUSTOM),
    "Z": Mixer("the class model.custom.Z", CUSTOM),
    ".": Mixer("none", ""),
}
MLPS = {"d": "dense", "e": "experts", ".": "none"}
LONGEST_PERIOD = 12


def mixer(letter: str) -> Mixer:
    """Return the row of a letter. Raises: ValueError for a letter without a row."""
    if letter not in MIXERS:
        raise ValueError(f"there is no mixer {letter!r}; the table of letters has {', '.join(MIXERS)}")
    return MIXERS[letter]


def has(cfg: Model, family: str) -> bool:
    """Return whether a layer has a mixer of this family."""
    return any(mixer(letter).family == family for letter in present(cfg))


class Kind(NamedTuple):
    """The letters of one layer: keys of MIXERS and MLPS."""
    mixer: str
    mlp: str


class Stretch(NamedTuple):
    """Consecutive layers: the layers of `period`, repeated `repeats` times. leading: whether they come before the
    stages of a pipeline."""
    name: str
    period: tuple[Kind, ...]
    repeats: int
    leading: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.period) * self.repeats


def repeat(pattern: str, length: int) -> str:
    """Return a pattern repeated to this length. If it ends with *, only the letter before * is repeated."""
    if pattern.endswith("*"):
        return (pattern[:-1] + pattern[-2] * length)[:length]
    return (pattern * length)[:length]


def kinds(cfg: Model) -> tuple[Kind, ...]:
    """Return the kind of each layer. cfg: the section [model]."""
    return _kinds(cfg.mixers, cfg.mlps, cfg.num_layers)


def depth_kind(cfg: Model) -> Kind:
    """Return the kind of the layer of each MTP depth: that of the model's last layer with attention, if there is one.
    """
    return next((kind for kind in reversed(kinds(cfg)) if mixer(kind.mixer).attends), kinds(cfg)[-1])


@functools.lru_cache(256)
def _kinds(mixers: str, mlps: str, num_layers: int) -> tuple[Kind, ...]:
    return tuple(map(Kind, repeat(mixers, num_layers), repeat(mlps, num_layers)))


def present(cfg: Model) -> frozenset[str]:
    """Return the letters of the layers' mixers."""
    return _present(cfg.mixers, cfg.mlps, cfg.num_layers)


@functools.lru_cache(256)
def _present(mixers: str, mlps: str, num_layers: int) -> frozenset[str]:
    return frozenset(kind.mixer for kind in _kinds(mixers, mlps, num_layers))


def rope_mixers(cfg: Model) -> dict:
    """Return letter -> settings of the mixers with rope that the model has."""
    letters = present(cfg) if cfg.position == "rope" else ()
    return {letter: cfg.of(letter) for letter in MIXERS if letter in letters and mixer(letter).rotated}


def rope_width(cfg: Model) -> int:
    """Return the number of a head's dims that rope rotates: the first dims, or with latent attention the last. cfg: the
    settings of one mixer."""
    if cfg.latent.kv_dim:
        return cfg.latent.rope_dim
    whole = cfg.rope_scaling.rope_type == "proportional"        # the other pairs have frequency 0
    return cfg.head_dim if whole else int(cfg.head_dim * cfg.rope_scaling.partial_rotary_factor)


def share(cfg: Model, mixers: str = "", mlps: str = "") -> float:
    """Return the share of the layers whose mixer or MLP is one of these letters."""
    return _share(cfg.mixers, cfg.mlps, cfg.num_layers, mixers, mlps)


@functools.lru_cache(1024)
def _share(cfg_mixers: str, cfg_mlps: str, num_layers: int, mixers: str, mlps: str) -> float:
    return sum(kind.mixer in mixers or kind.mlp in mlps for kind in _kinds(cfg_mixers, cfg_mlps, num_layers)
               ) / num_layers


def stretches(cfg: Model) -> tuple[Stretch, ...]:
    """Return the layers as stretches: leading layers, a repeated period, and the incomplete last repeat. Irregular
    layers give several periods.

    Leading layers (dense layers before experts, and others before the period) are in no stage of a pipeline.
    """
    return _stretches(cfg.mixers, cfg.mlps, cfg.num_layers)


@functools.lru_cache(256)
def _stretches(of_mixers: str, of_mlps: str, num_layers: int) -> tuple[Stretch, ...]:
    layers = _kinds(of_mixers, of_mlps, num_layers)
    length, mlps = len(layers), "".join(kind.mlp for kind in layers)
    dense = length - len(mlps.lstrip("d")) if mlps.lstrip("d").strip("e") == "" else length
    dense = dense if dense < length else 0
    # Further layers become leading ones only if a period then repeats at least twice.
    periods = [(lead + period, lead) for lead in range(dense, min(length, dense + LONGEST_PERIOD + 1))
               for period in _periods(layers[lead:])[:1] if lead == dense or 2 * period <= length - lead]
    if not periods:
        return tuple(Stretch(f"part{i}", *part) for i, part in enumerate(_parts(layers)))
    cost, lead = min(periods)
    period, rest = layers[lead:][:cost - lead], length - lead
    whole, left = divmod(rest, len(period))
    made = []
    if lead:
        tiled = _tile(layers[:lead])
        made.append(Stretch("dense_layers" if len(tiled) == 1 else "dense_periods", tiled, lead // len(tiled), True))
    made.append(Stretch("layers" if len(period) == 1 else "periods", period, whole))
    if left:
        tiled = _tile(period[:left])
        made.append(Stretch("left", tiled, left // len(tiled)))
    return tuple(made)


def _periods(layers: tuple[Kind, ...]) -> list[int]:
    """Return the lengths of the periods of these layers, the shortest first. The last repeat may be incomplete."""
    return [p for p in range(1, min(len(layers), LONGEST_PERIOD) + 1) if layers[p:] == layers[:-p]]


def _tile(layers: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Return the shortest period that gives these layers by complete repeats."""
    return next(layers[:p] for p in range(1, len(layers) + 1)
                if len(layers) % p == 0 and layers[:p] * (len(layers) // p) == layers)


def _parts(layers: tuple[Kind, ...]) -> list[tuple[tuple[Kind, ...], int]]:
    """Return the layers as [(period, repeats)] with the fewest layers to compile."""
    best: list = [(0, [])]
    for end in range(1, len(layers) + 1):
        options = []
        for start in range(end):
            tiled = _tile(layers[start:end])
            if len(tiled) <= LONGEST_PERIOD:
                cost, parts = best[start]
                options.append((cost + len(tiled), len(parts) + 1, [*parts, (tiled, (end - start) // len(tiled))]))
        cost, _, parts = min(options, key=lambda option: option[:2])
        best.append((cost, parts))
    return best[-1][1]


def leading(cfg: Model) -> int:
    """Return the number of layers before the stages of a pipeline."""
    return _leading_and_period(cfg.mixers, cfg.mlps, cfg.num_layers)[0]


def count_staged(cfg: Model) -> int:
    """Return the number of layers in the stages of a pipeline."""
    return cfg.num_layers - leading(cfg)


def period(cfg: Model) -> int:
    """Return the length of the period. Stages of a pipeline hold complete periods. 0: the layers have no period."""
    return _leading_and_period(cfg.mixers, cfg.mlps, cfg.num_layers)[1]


@functools.lru_cache(256)
def _leading_and_period(mixers: str, mlps: str, num_layers: int) -> tuple[int, int]:
    """Return (`leading`, `period`) of a pattern."""
    parts = _stretches(mixers, mlps, num_layers)
    first = next(stretch for stretch in parts if not stretch.leading)
    return (sum(stretch.num_layers for stretch in parts if stretch.leading),
            0 if first.name.startswith("part") else len(first.period))


def count_padded(cfg: Model, virtual_stages: int) -> int:
    """Return the number of layers in stages, including the identity layers that fill equal stages of whole periods."""
    together = max(1, period(cfg)) * virtual_stages
    return -(-count_staged(cfg) // together) * together


def kv_heads_of(cfg: Model) -> dict[str, int]:
    """Return the number of key and value heads of each kind of mixer that the model has."""
    heads = {}
    for letter in sorted(present(cfg)):
        if mixer(letter).recurs:
            heads["recurrence"] = cfg.linear.key_heads
        elif mixer(letter).attends and not cfg.latent.kv_dim:
            own = cfg.of(letter).num_kv_heads
            heads["attention" + f" ({letter})" * (own != cfg.num_kv_heads)] = own
    return heads
