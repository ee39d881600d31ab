"""Compares keys of config.json that have the same meaning.

If two such keys differ and transformers 5.24 has a rule for the keys, the choice of transformers is taken and reported;
else config.json is refused, and the message has both keys. `settings` and `families` decide which of the keys a family
reads.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from meshtrain.huggingface.families import Family
from meshtrain.storage.model_folder import CONFIG

# Groups of names for one number; a family may read several names of a group.
NAMES = (("num_experts", "num_local_experts"), ("num_experts_per_tok", "experts_per_token", "num_experts_per_token"),
         ("first_k_dense_replace", "num_dense_layers"))
# key -> key of linear_attn_config
IN_LINEAR = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim",
             "linear_conv_kernel_dim": "short_conv_kernel_size"}
# key -> key of per_layer_config's objects
IN_LAYERS = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
EVERY_KEYS = ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern",
              "global_attn_every_n_layers")
LAYER_NAMES = {"mamba": "linear_attention", "attention": "full_attention", "M": "linear_attention",
               "*": "full_attention", "E": "moe", "-": "mlp"}
LETTERS = {name: letter for letter, name in LAYER_NAMES.items() if len(letter) == 1}
EPSILONS = ("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
# Keys for positions in images, or for what other keys say.
IDLE_ROPE_KEYS = ("mrope_section", "mrope_interleaved", "max_position_embeddings")
BY_LAYER = ("full_attention", "sliding_attention")


def compare(config: Mapping, family: Family) -> tuple[list[str], list[str]]:
    """Return (faults, notes) on the settings of a text model."""
    given = {key: value for key, value in config.items() if value is not None}
    pairs = [_pairs_of(given, names) for names in (*NAMES, *((key, alias) for alias, key in family.aliases.items()))]
    pairs += [*_pairs_inside(given), _pairs_of(given, EVERY_KEYS, _interval), _rotary(given, family), _blocks(given)]
    faults = [_differ(spellings) for spellings in pairs if len({_comparable(value) for _, value in spellings}) > 1]
    faults += [f"{CONFIG}: {key}={quote(given[key])} is not L…LG; only a pattern in which just the last layer has "
               f"full attention can be computed" for key in EVERY_KEYS if isinstance(given.get(key), str)
               and not re.fullmatch("L*G", given[key])]
    notes = [*_layers(given, family), *_epsilons(given, family)]
    if family.fixed["position"] == "rope":
        _, more, told = rope(config, family)
        faults, notes = faults + more, notes + told
    return list(dict.fromkeys(faults)), notes


def rope(config: Mapping, family: Family) -> tuple[Mapping, list[str], list[str]]:
    """Return (the object that describes the rope, faults, notes). As in transformers, rope_scaling takes precedence
    over rope_parameters."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    given = new or old or family.defaults.get("rope_parameters") or {}
    if old and not new and isinstance(given, dict) and family.defaults.get("rope_parameters") and not any(
            key in given for key in BY_LAYER):
        return given, [f"{CONFIG}: rope_scaling={quote(old)} does not say for which layers it is; give "
                       f"rope_parameters with an object for each kind of layer"], []
    if not all(isinstance(spelling, dict) for spelling in (new or {}, old or {})):
        return given, [], []        # `settings` reports the fault
    if new and old:
        theta = config.get("rope_theta") or family.defaults.get("rope_theta")
        ours, theirs = (_comparable_rope(spelling, theta) for spelling in (new, old))
        both = f"{CONFIG}: rope_parameters={quote(new)} and rope_scaling={quote(old)} describe different ropes"
        if any(key in spelling for key in BY_LAYER for spelling in (new, old)) and ours != theirs:
            return given, [f"{both} for several kinds of layers; remove one of them"], []
        if ours.get("rope_theta") != theirs.get("rope_theta"):
            return given, [f"{both}, the second with a rope_theta of {theirs.get('rope_theta')}; remove one of them, "
                           f"or give both the same rope_theta"], []
        if ours != theirs:
            told = [f"{both}; rope_scaling is taken, as transformers does"]
            return old, [], told + _within(old, config, family)
    return given, [], _within(given, config, family)


def kind_of(given: Mapping) -> object:
    """Return the type of one object of rope_parameters or rope_scaling. Names of transformers' first releases are
    translated."""
    kind = given.get("rope_type", given.get("type", "default"))
    return "longrope" if kind == "su" or kind == "yarn" and "short_factor" in given else kind


def original_length(given: Mapping, config: Mapping) -> object:
    """Return original_max_position_embeddings of a rope. For longrope the key outside the object takes precedence, as
    in transformers."""
    name = "original_max_position_embeddings"
    return config[name] if kind_of(given) == "longrope" and config.get(name) is not None else given.get(name)


def _within(given: Mapping, config: Mapping, family: Family) -> list[str]:
    """Return notes on keys that are both inside and outside the object of a rope, and on its two names of a type."""
    whole = given.get("full_attention") if isinstance(given.get("full_attention"), dict) else given
    local = given.get("sliding_attention")
    keys = [("rope_theta", whole, "rope_theta")]
    if "partial_rotary_factor" in family.defaults:
        keys.append(("partial_rotary_factor", whole, "partial_rotary_factor"))
    if isinstance(local, dict):
        keys.append(("rope_theta", local, "rope_local_base_freq"))
    notes = [f"{CONFIG}: {outside}={quote(config[outside])} and {inside}={quote(part[inside])} inside the rope; "
             f"the second is taken, as transformers does" for inside, part, outside in keys
             if config.get(outside) is not None and part.get(inside) is not None and config[outside] != part[inside]]
    name = "original_max_position_embeddings"
    if config.get(name) is not None and whole.get(name) is not None and config[name] != whole[name]:
        notes.append(f"{CONFIG}: {name}={quote(config[name])} and {quote(whole[name])} inside the rope; "
                     f"{quote(original_length(whole, config))} is taken, as transformers does")
    if "rope_type" in whole and "type" in whole and whole["type"] != "mrope" and kind_of(
            {**whole, "rope_type": whole["type"]}) != kind_of(whole):
        kinds = f"rope_type={quote(whole['rope_type'])} and type={quote(whole['type'])}"
        notes.append(f"{CONFIG}: {kinds} of the rope; the first is taken, as transformers does")
    return notes


def _comparable_rope(given: Mapping, theta: object) -> dict:
    comparable = {key: _comparable(value) for key, value in given.items()
             if value is not None and key not in (*IDLE_ROPE_KEYS, "type", "rope_type")}
    return comparable if any(key in given for key in BY_LAYER) else {
        "rope_theta": theta, "original_max_position_embeddings": None, **comparable, "rope_type": kind_of(given)}


def _pairs_of(given: Mapping, names: Iterable[str],
              read: Callable[[Any], object] = lambda value: value) -> list[tuple[str, object]]:
    return [(name, read(given[name])) for name in names if name in given]


def _interval(value: object) -> object:
    return len(value) if isinstance(value, str) else value


def _pairs_inside(given: Mapping) -> Iterator[list[tuple[str, object]]]:
    """Yield groups of (key, value) for settings that may also be inside another object."""
    linear, layers = given.get("linear_attn_config"), given.get("per_layer_config")
    layer = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    for home, table, keys in (("linear_attn_config", linear, IN_LINEAR), ("per_layer_config", layer, IN_LAYERS)):
        if not isinstance(table, dict):
            continue
        for key, inside in keys.items():
            if key != "num_global_key_value_heads" or given.get("attention_k_eq_v"):
                inner = _pairs_of(table, [inside])
                yield _pairs_of(given, [key]) + [(f"{home}.{name}", value) for name, value in inner]
    if isinstance(linear, dict):
        full, recurrent = linear.get("full_attn_layers"), linear.get("kda_layers")
        if isinstance(full, list) and isinstance(recurrent, list) and isinstance(given.get("layer_types"), list):
            names = of_linear(full, recurrent)
            yield [("layer_types", [LAYER_NAMES.get(str(name), name) for name in given["layer_types"]]),
                   ("linear_attn_config.full_attn_layers", names)]


def of_linear(full: list, recurrent: list) -> list[str]:
    """Return the type of each layer by linear_attn_config, which numbers the layers from 1."""
    return [("linear_attention", "full_attention")[i + 1 in full] for i in range(len(full + recurrent))]


def _blocks(given: Mapping) -> list[tuple[str, object]]:
    return _pairs_of(given, ("layers_block_type", "hybrid_override_pattern"), lambda value: [
        LAYER_NAMES.get(str(block), block) for block in value] if isinstance(value, (list, str)) else value)


def rotary_share(config: Mapping, family: Family) -> float | None:
    """Return rotary_dim as a share of the head size; None if there is no rotary_dim."""
    width = config.get("head_dim") or family.defaults.get("head_dim")
    if not width and all(type(config.get(key)) is int for key in ("hidden_size", "num_attention_heads")):
        width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    turned = config.get("rotary_dim")
    return turned / width if type(turned) is int and type(width) is int and width > 0 else None


def _rotary(given: Mapping, family: Family) -> list[tuple[str, object]]:
    share, inside = rotary_share(given, family), given.get("rope_parameters") or given.get("rope_scaling")
    if share is None:
        return []
    pairs = [("rotary_dim", share), *_pairs_of(given, ["partial_rotary_factor"])]
    if isinstance(inside, dict) and inside.get("partial_rotary_factor") is not None:
        pairs.append(("partial_rotary_factor of the rope", inside["partial_rotary_factor"]))
    return pairs


def _layers(given: Mapping, family: Family) -> Iterator[str]:
    """Yield notes on layers where a list of types and an interval contradict each other."""
    names, usual, other = given.get("layer_types"), *(list(family.layers)[i] for i in (0, -1))
    for key in EVERY_KEYS:
        every = _interval(given.get(key))
        if len(family.layers) > 1 and isinstance(names, list) and type(every) is int and every > 0 and [
                LAYER_NAMES.get(str(name), name) for name in names] != [
                other if (i + 1) % every == 0 else usual for i in range(len(names))]:
            yield (f"{CONFIG}: layer_types names other layers than {key}={quote(given[key])}; layer_types is taken, "
                   f"as transformers does")
    rotated, every = given.get("no_rope_layers"), given.get("no_rope_layer_interval")
    if isinstance(rotated, list) and rotated and type(every) is int and every > 0 and rotated != [
            int((i + 1) % every != 0) for i in range(len(rotated))]:
        yield (f"{CONFIG}: no_rope_layers names other layers than no_rope_layer_interval={every}; no_rope_layers is "
               f"taken, as transformers does")


def _epsilons(given: Mapping, family: Family) -> Iterator[str]:
    read = next((key for key in EPSILONS if key in family.keys), "")
    for key in EPSILONS:
        if key != read and key in family.only and {key, read} <= given.keys() and given[key] != given[read]:
            yield (f"{CONFIG}: {read}={quote(given[read])} and {key}={quote(given[key])}; the first is taken, as "
                   f"transformers does")


def _differ(pairs: list[tuple[str, object]]) -> str:
    said = " and ".join(f"{key}={quote(value)}" for key, value in pairs)
    return f"{CONFIG}: {said} are the same setting with different values; remove the wrong ones"


def _comparable(value: Any) -> object:
    """Return a hashable value. Numbers that differ only by rounding have the same one."""
    if type(value) in (int, float) and math.isfinite(value):
        return float(f"{value:.9g}")
    return value if isinstance(value, (bool, str)) else json.dumps(value, sort_keys=True)


def quote(value: object) -> str:
    """Return the beginning of a value as JSON, for messages."""
    return json.dumps(value)[:80]
