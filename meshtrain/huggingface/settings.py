"""Converts config.json to keys of [model] and back, by the tables of `families`.

Reads the form of transformers 5 (rope_parameters, dtype) and of 4 (rope_theta and rope_scaling, torch_dtype); writes
the latter, which both read. Unknown keys, and keys that change the computation and are not supported, are errors.
"""
from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from meshtrain import files
from meshtrain.huggingface import safetensors
from meshtrain.huggingface.families import FAMILIES, HARMLESS, LACKING, MULTIMODAL, Family

CONFIG, GENERATION = "config.json", "generation_config.json"
_KNOWN = ", ".join([*FAMILIES, *MULTIMODAL])
MOST_BYTES = 1 << 24    # of a config.json
FLAGS = ("tie_embeddings", "mlp_bias", "attention_bias", "router_normalize")
NUMBERS = ("norm_eps", "score_softcap", "logit_softcap")
BIASES = {"all": True, "none": False}      # model.attention_bias, where attention_bias is a key of theirs
WINDOW_KEYS = ("layer_types", "sliding_window", "sliding_window_pattern", "rope_local_base_freq")
ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
# Rope type -> keys and their defaults; None: required.
SCALED = {
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "linear": {"factor": None},
    "yarn": {"factor": None, "beta_slow": 1.0, "beta_fast": 32.0, "original_max_position_embeddings": None},
}
WHOLE = ("original_max_position_embeddings",)


def read(directory: Path, name: str = CONFIG) -> dict:
    """The JSON object of config.json or a similar file. Raises: ValueError."""
    path = directory / name
    if not files.is_file(path):
        raise ValueError(f"there is no {name}; name a folder that has one beside its *.safetensors")

    def load() -> bytes:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)

    text = files.attempted(load, f"{path} cannot be read", "let it be read")
    if len(text) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES:,} bytes, which no such file is")
    return safetensors.parse_json(text, name)


def text_of(config: Mapping) -> Mapping:
    """The settings of the text model: of a multimodal model its text_config, with what the whole config.json decides;
    else `config` itself."""
    text = config.get("text_config")
    if str(config.get("model_type")) not in MULTIMODAL or not isinstance(text, dict):
        return config
    return text | {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}


def scale_block(config: Mapping) -> tuple[int, int] | None:
    """(rows, columns) of the blocks of float8 weights that share a scale; None: weights are not quantized. Raises:
    ValueError for quantization of other kinds."""
    given = text_of(config).get("quantization_config")
    if not given:
        return None
    method, block = (given.get("quant_method"), given.get("weight_block_size")) if isinstance(given, dict) else ("", 0)
    if method != "fp8" or given.get("fmt", "e4m3") != "e4m3" or not isinstance(block, list) or len(block) != 2 \
            or not all(type(n) is int and n > 0 for n in block):
        raise ValueError(f"{CONFIG}: quantization_config={_shown(given)}: quantized weights cannot be read, but for "
                         f'float8 with scales by block: quant_method="fp8" with a weight_block_size')
    return block[0], block[1]


def stop_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an answer: eos_token_id of generation_config.json, or else of config.json. Raises:
    ValueError."""
    for name in (GENERATION, CONFIG):
        found = text_of(read(directory, name)).get("eos_token_id") if files.is_file(directory / name) else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
            raise ValueError(f"{directory / name}: eos_token_id={_shown(found)} is not a token id or a list of them")
        return tuple(ids)
    return ()


def longest(directory: Path) -> int:
    """max_position_embeddings: the longest sequence that the model was made for; 0 if not given."""
    found = text_of(read(directory)).get("max_position_embeddings")
    return found if type(found) is int and found > 0 else 0


def family_of(config: Mapping) -> Family:
    """The family of the text model. Raises: ValueError for an unsupported one."""
    whole, kind = config.get("model_type"), text_of(config).get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{CONFIG}: model_type={_shown(kind)} is not a family that can be read; known are {_KNOWN}")
    inside = f' in text_config of model_type="{whole}"' if kind != whole else ""
    if kind in LACKING:
        raise ValueError(f'{CONFIG}: model_type="{kind}"{inside} needs {LACKING[kind]}, which [model] does not have; '
                         f"known are {_KNOWN}")
    if kind in FAMILIES and (not inside or kind in MULTIMODAL[whole]):
        return FAMILIES[kind]
    if kind in MULTIMODAL:
        raise ValueError(f'{CONFIG}: model_type="{kind}" has no text_config with its text model; give the file as '
                         f"published")
    near = difflib.get_close_matches(kind, [*FAMILIES, *MULTIMODAL], n=1)
    guess = f'did you mean "{near[0]}"? Known' if near and not inside else "known"
    raise ValueError(f'{CONFIG}: model_type="{kind}"{inside} is not a family that can be read; {guess} are {_KNOWN}')


def model_keys(config: Mapping, family: Family) -> dict:
    """The keys of [model] that a config.json fixes. Raises: ValueError, a line for each difference to transformers."""
    config = text_of(config)
    config = {**config, **{key: config[alias] for alias, key in family.aliases.items() if alias in config
                           and key not in config}}
    get = lambda key: config[key] if key in config else family.defaults.get(key)
    keys, faults = dict(family.fixed), []
    for theirs, ours in family.keys.items():
        value = get(theirs)
        if value is None and theirs in family.multiples:
            source, times = family.multiples[theirs]
            value = get(source) * times if type(get(source)) is int else None
        if value is None and ours[0] in ("num_kv_heads", "head_dim", "window", "score_softcap", "logit_softcap"):
            continue        # derived, or disabled
        faults += _fault(theirs, value, ours[0])
        keys |= {one: float(value) if one in NUMBERS and type(value) is int else value for one in ours}
    if "attention_bias" in family.keys:
        keys["attention_bias"] = next((ours for ours, theirs in BIASES.items()
                                       if theirs is keys["attention_bias"]), "none")
    for key, allowed in family.only.items():
        value = get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            faults.append(f"{CONFIG}: {key}={_shown(value)} cannot be computed; only "
                          f"{' or '.join(map(_shown, allowed))} can")
    rope, wrong = _rope(config, family)
    if family.every and not faults:
        kinds, more = _kinds(config, family, keys)
        keys |= kinds
        wrong += more
    if not family.every and "sliding_attention" in (kinds := config.get("layer_types")
                                                    or ()) and len(set(map(str, kinds))) > 1:
        faults.append(f"{CONFIG}: layer_types={_shown(kinds)}: [model] has one window for all layers")
    try:
        scale_block(config)
    except ValueError as error:
        faults.append(str(error))
    known = {"quantization_config", *family.keys, *family.only, *family.aliases, *HARMLESS, *WINDOW_KEYS,
             *(ROPE_KEYS if family.ropes else ())}
    for key in sorted(set(config) - known):
        if config[key] not in (None, False, [], {}) and not key.startswith("_"):
            faults.append(f"{CONFIG}: {key}={_shown(config[key])}: it is not known here, and may change what is "
                          f"computed; take it out of a copy if it does not")
    if not faults:
        heads, width = keys["num_heads"], keys["embed_dim"]
        if heads % keys.get("num_kv_heads", heads):
            faults.append(f"{CONFIG}: {keys['num_kv_heads']} key and value heads do not divide {heads} heads")
        if "head_dim" not in keys and width % heads:
            faults.append(f"{CONFIG}: {heads} heads do not divide the width of {width}, and there is no head_dim")
    if faults := faults + wrong:
        raise ValueError("\n".join(faults))
    if not keys.get("global_every"):
        rope.pop("local_rope_theta", None)
    return keys | rope


def config_of(model, family: Family, dtype: str, longest: int, source: Mapping) -> dict:
    """config.json of a model. model: the keys of [model] as attributes. longest: trained sequence length. source: the
    original config.json, whose other keys are kept."""
    if (text := text_of(source)) is not source:
        made = config_of(model, family, dtype, longest, text)
        whole = {key: value for key, value in source.items() if key not in ("dtype", "quantization_config")}
        return whole | {"text_config": made, "torch_dtype": dtype, "tie_word_embeddings": model.tie_embeddings}
    kept = {key: value for key, value in source.items()
            if key not in ("rope_parameters", "dtype", "quantization_config", *family.aliases)}
    made = kept | {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": dtype}
    made |= {theirs: getattr(model, ours[0]) for theirs, ours in family.keys.items()}
    if "attention_bias" in family.keys:
        made["attention_bias"] = BIASES[model.attention_bias]
    made |= {key: allowed[0] for key, allowed in family.only.items() if source.get(key) not in allowed}
    if family.every:
        every = (model.global_every or model.num_layers + 1) if model.window else 1
        made["layer_types"] = [_KINDS[(i + 1) % every == 0] for i in range(model.num_layers)]
        made["rope_local_base_freq"] = model.local_rope_theta or model.rope_theta
    made |= {key: made[key] or None for key in made if key.endswith("_softcapping")}
    if "sliding_window" in made:
        made["sliding_window"] = made["sliding_window"] or None     # null, because some classes have a default window
    if not family.ropes:
        return made
    made |= {"max_position_embeddings": max(longest, source.get("max_position_embeddings") or 0),
             "rope_theta": model.rope_theta}
    made["rope_scaling"] = None if model.rope_scaling.rope_type == "default" else dict(model.rope_scaling)
    return made


def family_for(model) -> Family:
    """The first family that computes what a model does. Raises: ValueError if there is none."""
    for family in FAMILIES.values():
        sizes = {one for ours in family.keys.values() for one in ours}
        heads = "num_kv_heads" in sizes or model.num_kv_heads == model.num_heads
        width = "head_dim" in sizes or model.head_dim * model.num_heads == model.embed_dim
        rope = model.rope_scaling.rope_type in ("default", *family.ropes) or model.position != "rope"
        biases = "attention_bias" not in family.keys or model.attention_bias in BIASES
        if heads and width and rope and biases and all(
                getattr(model, key) == value for key, value in family.fixed.items()):
            return family
    asked = dict.fromkeys([*FAMILIES["llama"].fixed, *(FAMILIES["mixtral"].fixed if model.num_experts else ())])
    given = ", ".join(f"model.{key}={_shown(getattr(model, key))}" for key in asked)
    raise ValueError(f"no family of Hugging Face's computes this model ({given}); known are {_KNOWN}")


def _rope(config: Mapping, family: Family) -> tuple[dict, list[str]]:
    """(keys of [model], faults)."""
    if not family.ropes:
        return {}, []
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local = {}
    if isinstance(given, dict) and "full_attention" in given:
        given, local = given["full_attention"], given.get("sliding_attention", {})
    if not isinstance(given, dict) or not isinstance(local, dict):
        return {}, [f"{CONFIG}: rope_parameters={_shown(given)} is no object"]
    given = {key: value for key, value in given.items() if value is not None}
    theta = given.pop("rope_theta", config.get("rope_theta") or family.defaults["rope_theta"])
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    faults = [] if _is_number(theta) else [f"{CONFIG}: rope_theta={_shown(theta)} is not a number larger than 0"]
    if kind not in family.ropes:
        return {}, [*faults,
                    f"{CONFIG}: rope_type={_shown(kind)} cannot be computed; only {' or '.join(family.ropes)} can"]
    keys = {"rope_theta": float(theta)} if not faults else {}
    for key, harmless in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if given.get(key) == harmless:
            del given[key]
    scaling = {"rope_type": kind}
    for key, absent in SCALED.get(kind, {}).items():
        value = given.pop(key, absent)
        if not _is_number(value) or (key in WHOLE and type(value) is not int):
            faults.append(f"{CONFIG}: {key}={_shown(value)} of the rope is not a number larger than 0")
        scaling[key] = value if key in WHOLE or not _is_number(value) else float(value)
    sharpness = given.get("attention_factor")       # of YaRN, where it is the one that `model.rope.angles` applies
    if kind == "yarn" and not faults and _is_number(sharpness) and math.isclose(
            sharpness, 0.1 * math.log(scaling["factor"]) + 1, rel_tol=1e-6):
        del given["attention_factor"]
    keys |= {"rope_scaling": scaling} if kind in SCALED else {}
    if family.every and not faults:
        base = local.get("rope_theta", config.get("rope_local_base_freq")
                         or family.defaults.get("rope_local_base_freq") or theta)
        if not _is_number(base) or local.get("rope_type", "default") != "default":
            faults.append(f"{CONFIG}: the rope of layers with a window, {_shown(local or base)}, cannot be computed; "
                          f"only default can")
        elif base != theta or kind in SCALED:
            keys["local_rope_theta"] = float(base)
    if given:
        faults += [f"{CONFIG}: {key}={_shown(value)} of the rope cannot be computed" for key, value in given.items()]
    return keys, faults


def _kinds(config: Mapping, family: Family, keys: Mapping) -> tuple[dict, list[str]]:
    """(keys of [model] on which layers have a window, faults)."""
    count = keys["num_layers"]
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or family.every
    every = every if type(every) is int and every > 0 else family.every
    kinds = config.get("layer_types") or [_KINDS[(i + 1) % every == 0] for i in range(min(count, 10_000))]
    if not isinstance(kinds, list) or len(kinds) != count:
        return {}, [f"{CONFIG}: layer_types={_shown(kinds)} does not name each of {count} layers"]
    every = kinds.index(_KINDS[True]) + 1 if _KINDS[True] in kinds else count + 1
    if set(map(str, kinds)) == {_KINDS[True]}:
        return {"window": 0}, []
    if any(kind != _KINDS[(i + 1) % every == 0] for i, kind in enumerate(kinds)):
        return {}, [f"{CONFIG}: layer_types={_shown(kinds)}: only {_KINDS[False]} with {_KINDS[True]} as every n-th "
                    f"can be computed"]
    return {"global_every": every}, []


_KINDS = {False: "sliding_attention", True: "full_attention"}


def _fault(theirs: str, value, ours: str) -> list[str]:
    if value is None:
        return [f"{CONFIG}: {theirs} is not there; every family needs it"]
    if ours in FLAGS:
        return [] if type(value) is bool else [f"{CONFIG}: {theirs}={_shown(value)} is not true or false"]
    if ours in NUMBERS:
        return [] if _is_number(value) else [f"{CONFIG}: {theirs}={_shown(value)} is not a number larger than 0"]
    least = 2 if ours == "vocab_size" else 1
    if type(value) is not int or not least <= value < 2**31:
        return [f"{CONFIG}: {theirs}={_shown(value)} is not a whole number from {least} to {2**31 - 1}"]
    return []


def _is_number(value) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _shown(value) -> str:
    return json.dumps(value)[:80]
