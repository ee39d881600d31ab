"""Converts config.json to keys of [model] and back, with the tables of `families`.

Reads the form of transformers 5 (rope_parameters, dtype) and 4 (rope_theta and rope_scaling, torch_dtype). Writes the
latter, which both versions read. Unknown keys, and unsupported keys that change the computation, are errors.
"""
from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshtrain import files, pattern
from meshtrain.config.sections import Model
from meshtrain.huggingface import safetensors, spellings
from meshtrain.huggingface.families import FAMILIES, HARMLESS, LACKING, MULTIMODAL, Family
from meshtrain.huggingface.spellings import EVERY_KEYS, IDLE_ROPE_KEYS, LAYER_NAMES, quote
from meshtrain.storage.model_folder import CONFIG

GENERATION = "generation_config.json"
Get = Callable[[str], Any]      # key of a family -> its value in config.json, or the default of the family
_KNOWN = ", ".join([*FAMILIES, *MULTIMODAL])
MOST_BYTES = 1 << 24    # of a config.json
MOST_LAYERS = 10_000
FLAGS = ("tie_embeddings", "mlp_bias", "router_normalize", "linear.conv_bias", "kinds.F.tie_values")
NUMBERS = ("norm_eps", "score_softcap", "logit_softcap", "router_scale", "linear.step_min", "linear.step_max")
# Keys that may be null or 0: the feature is off, or the value is derived.
OPTIONAL = ("num_kv_heads", "head_dim", "window", "score_softcap", "logit_softcap", "latent.query_dim",
            "router_groups.0", "router_groups.1", "kinds.F.num_kv_heads", "kinds.F.head_dim", "num_experts",
            "shared_expert_dim", "expert_mlp_dim", "mlp_dim", "linear.step_min", "linear.step_max")
WINDOW_KEYS = ("layer_types", "sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
               "rope_local_base_freq")
MLP_KEYS = ("mlp_layer_types", "first_k_dense_replace", "num_dense_layers", "mlp_only_layers", "decoder_sparse_step")
ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
# Keys of the source that an export does not copy, because it writes the same settings in another form.
WRITTEN_ANEW = ("rope_parameters", "rope_scaling", "dtype", "quantization_config", "linear_attn_config",
                "per_layer_config", "hybrid_override_pattern", "rotary_dim", *EVERY_KEYS, "no_rope_layer_interval")
# Rope type -> keys and their defaults; None: required.
YARN = {"factor": None, "beta_slow": 1.0, "beta_fast": 32.0, "original_max_position_embeddings": None}
SCALED = {
    "default": {}, "proportional": {"factor": 1.0},
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "linear": {"factor": None}, "yarn": YARN,
    "longrope": dict.fromkeys(("factor", "original_max_position_embeddings", "short_factor", "long_factor")),
}
OF_YARN = ("attention_factor", "mscale", "mscale_all_dim", "truncate")
WHOLE = ("original_max_position_embeddings",)
WORD = re.compile(r"([\w.]+?)(?:\^([-\d.]+)|([*+])([\w.]+)|\?([\w.]+):([\w.]+))?")
# Keys of [model] that decide what a model computes: always, with experts, with attention, and for each mixer. The other
# keys belong to a run.
COMPUTED = ("vocab_size", "embed_dim", "num_layers", "norm", "norm_eps", "norm_offset", "activation", "multipliers",
            "layer_scale", "position", "logit_softcap", "tie_embeddings", "mlp_bias")
OF_EXPERTS = ("num_experts", "experts_per_token", "expert_mlp_dim", "shared_expert_dim", "shared_expert_gate",
              "router_score", "router_normalize", "router_scale", "router_groups", "router_bias")
OF_ATTENTION = ("attention_bias", "attention_gate", "score_softcap", "latent")
BY_MIXER = ("num_heads", "num_kv_heads", "head_dim", "qk_norm", "attention_sinks", "tie_values")


def read(directory: Path, name: str = CONFIG) -> dict:
    """Return the JSON object in config.json or a similar file. Raises: ValueError."""
    path = directory / name
    if not files.is_file(path):
        raise ValueError(f"there is no {name}; name a folder that has one next to its *.safetensors")
    text = files.attempt(lambda: files.read_start(path, MOST_BYTES), f"{path} cannot be read", "make it readable")
    if len(text) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES:,} bytes, the limit for such a file")
    return safetensors.parse_json(text, name)


def text_of(config: Mapping) -> Mapping:
    """Return the settings of the text model. For a multimodal model this is text_config, with the keys that the whole
    config.json decides; else it is `config` itself."""
    text = config.get("text_config")
    if str(config.get("model_type")) not in MULTIMODAL or not isinstance(text, dict):
        return config
    return text | {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}


def scale_block(config: Mapping) -> tuple[int, int] | None:
    """Return (rows, columns) of the blocks of float8 weights that share a scale; None: no float8. If a matrix has a
    single scale, the block is larger than any matrix. Raises: ValueError for other quantization, except MXFP4."""
    given = text_of(config).get("quantization_config")
    if not given or isinstance(given, dict) and given.get("quant_method") == "mxfp4":
        return None
    method, block = (given.get("quant_method"), given.get("weight_block_size")) if isinstance(given, dict) else ("", 0)
    block = [2**31, 2**31] if block is None and given.get("activation_scheme") == "static" else block
    if method != "fp8" or given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn") or not isinstance(block, list) \
            or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ValueError(f"{CONFIG}: quantization_config={quote(given)} cannot be read; quantized weights must be "
                         'float8 with scales by block (quant_method="fp8" with weight_block_size) or mxfp4')
    return block[0], block[1]


def stop_ids(directory: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer: eos_token_id of generation_config.json, else of config.json. Raises:
    ValueError."""
    return eos_ids(directory, GENERATION) or eos_ids(directory, CONFIG)


def eos_ids(directory: Path, name: str) -> tuple[int, ...]:
    """Return eos_token_id of the file `name` in a folder; () if the key or the file is missing. Raises: ValueError."""
    eos = text_of(read(directory, name)).get("eos_token_id") if files.is_file(directory / name) else None
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise ValueError(f"{directory / name}: eos_token_id={quote(eos)} is not a token id or a list of them")
    return tuple(ids)


def longest(directory: Path) -> int:
    """Return max_position_embeddings, the longest sequence that the model was made for; 0 if the key is not given."""
    length = text_of(read(directory)).get("max_position_embeddings")
    return length if type(length) is int and length > 0 else 0


def family_of(config: Mapping) -> Family:
    """Return the family of the text model. Raises: ValueError if the family is not supported."""
    whole, kind = config.get("model_type"), text_of(config).get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{CONFIG}: model_type={quote(kind)} is not a family that can be read; known: {_KNOWN}")
    inside = f' in text_config of model_type="{whole}"' if kind != whole else ""
    if kind in LACKING:
        raise ValueError(f'{CONFIG}: model_type="{kind}"{inside} needs {LACKING[kind]}, which [model] does not have; '
                         f"known: {_KNOWN}")
    if kind in FAMILIES and (not inside or kind in MULTIMODAL[whole]):
        return FAMILIES[kind]
    if kind in MULTIMODAL:
        raise ValueError(f'{CONFIG}: model_type="{kind}" has no text_config with its text model; give the file as '
                         f"published")
    near = difflib.get_close_matches(kind, [*FAMILIES, *MULTIMODAL], n=1)
    guess = f'did you mean "{near[0]}"? Known' if near and not inside else "known"
    raise ValueError(f'{CONFIG}: model_type="{kind}"{inside} is not a family that can be read; {guess}: {_KNOWN}')


@dataclasses.dataclass(frozen=True)
class Word:
    """How a key of config.json sets a key of [model], see `Family.keys`."""
    path: str
    power: float = 1.0
    sign: str = ""          # "*" or "+", with `other`, another key of ours
    other: str = ""
    choice: tuple = ()      # for true, for false

    @staticmethod
    def of(text: str) -> Word:
        path, power, sign, other, yes, no = WORD.fullmatch(text).groups()

        def plain(word: str) -> float | str:
            return float(word) if re.fullmatch(r"[\d.]+", word) else word

        return Word(path, float(power or 1), sign or "", other or "", (plain(yes), plain(no)) if yes else ())

    def ours(self, value: Any, flat: Mapping) -> Any:
        if self.choice:
            return self.choice[not value]
        if self.sign:
            return value * flat[self.other] if self.sign == "*" else value + flat[self.other]
        if self.power != 1:
            return float(value) ** self.power
        return float(value) if self.is_number else value

    def theirs(self, value: Any, model: Model) -> Any:
        if self.choice:
            return self.choice.index(value) == 0
        if self.path == "multipliers.score":
            value = value or model.head_dim ** -0.5
        if self.sign:
            other = _value(model, self.other)
            return value // other if self.sign == "*" else value - other
        if self.power != 1:
            value = value ** (1 / self.power)
            return round(value) if math.isclose(value, round(value), rel_tol=1e-9) else value
        return None if self.path in OPTIONAL and not value and self.path not in ("num_experts", "shared_expert_dim") \
            and not self.path.startswith("linear.") else value

    @property
    def is_number(self) -> bool:
        return self.path in NUMBERS or self.path.startswith("multipliers.")


def _value(model: Model, path: str) -> Any:
    """Return the value of a key of [model], of a table in [model], or of a tuple. A key of a mixer that is not set has
    the value of [model]."""
    first, _, rest = path.partition(".")
    if first == "kinds":
        letter, _, rest = rest.partition(".")
        return getattr(model.of(letter), rest)
    value = getattr(model, first)
    if first == "router_groups":
        return value[int(rest)] if value else 1
    return getattr(value, rest) if rest else value


def model_keys(config: Mapping, family: Family) -> dict:
    """Return the keys of [model] that a config.json fixes. Raises: ValueError with a line for each setting that cannot
    be computed as in transformers."""
    given = config = text_of(config)
    config, get = _in_one_form(config, family)
    flat, faults, last = dict(family.fixed), spellings.compare(given, family)[0], []
    for theirs, texts in family.keys.items():
        value = get(theirs)
        if value is None and theirs in family.multiples:
            source, times = family.multiples[theirs]
            value = get(source) * times if type(get(source)) is int else None
        for word in map(Word.of, texts.split()):
            if value is None and word.path in OPTIONAL:
                continue
            fault = _fault(theirs, value, word)
            faults += fault
            if word.sign:
                last.append((word, value))
            elif not fault:
                flat[word.path] = word.ours(value, flat)
    for key, allowed in family.only.items():
        value = get(key)
        if value is not None and allowed and not any(
                type(value) is type(choice) and value == choice for choice in allowed):
            faults.append(f"{CONFIG}: {key}={quote(value)} cannot be computed; only "
                          f"{' or '.join(map(quote, allowed))} can")
    wrong: list[str] = []
    if not faults:
        flat |= {word.path: word.ours(value, flat) for word, value in last}
        layers, wrong = _layers(config, get, family, flat)
        flat |= layers
        rope, more = _rope(config, get, family, flat) if not wrong else ({}, [])
        flat, wrong = flat | rope, wrong + more
    try:
        scale_block(given)
    except ValueError as error:
        faults.append(str(error))
    for key in sorted(set(given) - _readable_keys(family)):
        if given[key] not in (None, False, [], {}) and not key.startswith("_"):
            faults.append(f"{CONFIG}: {key}={quote(given[key])}: this key is unknown, and may change what is "
                          f"computed; if it does not, remove it from a copy of the file")
    if not faults + wrong:
        heads, width = flat["num_heads"], flat["embed_dim"]
        if heads % flat.get("num_kv_heads", heads):
            faults.append(f"{CONFIG}: {flat['num_kv_heads']} key and value heads do not divide {heads} heads")
        if "head_dim" not in flat and width % heads:
            faults.append(f"{CONFIG}: {heads} heads do not divide the width of {width}, and there is no head_dim")
    if faults := faults + wrong:
        raise ValueError("\n".join(faults))
    return _nest(_plain(flat))


def _readable_keys(family: Family) -> set[str]:
    def has(*names: str) -> bool:
        return any(name in family.defaults for name in names)

    return {"quantization_config", *family.keys, *family.only, *family.aliases, *family.defaults, *HARMLESS,
            *WINDOW_KEYS, *(EVERY_KEYS if len(family.layers) > 1 else ()), *(MLP_KEYS if has(*MLP_KEYS) else ()),
            *(ROPE_KEYS if family.fixed["position"] == "rope" else ()), *(new for new, old in (
                ("no_rope_layer_interval", "no_rope_layers"), ("rotary_dim", "partial_rotary_factor"),
                ("per_layer_config", "global_head_dim")) if has(old))}


def _in_one_form(config: Mapping, family: Family):
    """Return (config.json with its settings in one form, a look-up that falls back to the class's defaults)."""
    config = dict(config)
    for alias, key in family.aliases.items():
        if alias in config:
            config.setdefault(key, config[alias])
    if isinstance(linear := config.get("linear_attn_config"), dict):
        config |= {key: linear[theirs] for key, theirs in spellings.IN_LINEAR.items() if theirs in linear}
        full, linear = linear.get("full_attn_layers"), linear.get("kda_layers")
        if isinstance(full, list) and isinstance(linear, list) and not config.get("layer_types"):
            config["layer_types"] = spellings.of_linear(full, linear)
    if isinstance(letters := config.get("hybrid_override_pattern"), str) and not config.get("layers_block_type"):
        config["layers_block_type"] = list(letters)
    if "global_head_dim" in family.keys:
        of_layers = config.get("per_layer_config")      # of layers with full attention; shapes are checked later
        for layer in list(of_layers.values())[:1] if isinstance(of_layers, dict) else []:
            config |= {ours: layer[key] for ours, key in spellings.IN_LAYERS.items()
                       if isinstance(layer, dict) and key in layer}
        if not config.get("attention_k_eq_v"):
            config.pop("num_global_key_value_heads", None)
    if "partial_rotary_factor" in family.defaults and (share := spellings.rotary_share(config, family)) is not None:
        config.setdefault("partial_rotary_factor", share)

    def get(key: str) -> Any:
        return config[key] if key in config else family.defaults.get(key)

    if "time_step_least" in family.keys and isinstance(limit := get("time_step_limit"), list) and len(limit) == 2:
        least, most = limit         # without bound: Infinity, or as transformers 5 writes it
        config |= {"time_step_least": least or None,
                   "time_step_most": None if isinstance(most, dict) or most == math.inf else most}
    return config, get


def config_of(model: Model, family: Family, dtype: str, longest: int, source: Mapping) -> dict:
    """Return the config.json of a model. model: the section [model]. longest: trained sequence length. source: the
    original config.json. Its other keys are kept. A key whose old value still describes the model keeps that value as
    it was written."""
    if (text := text_of(source)) is not source:
        made = config_of(model, family, dtype, longest, text)
        whole = {key: value for key, value in source.items() if key not in ("dtype", "quantization_config")}
        return whole | {"text_config": made, "torch_dtype": dtype, "tie_word_embeddings": model.tie_embeddings}
    old, get = _in_one_form(source, family)
    made = {key: value for key, value in source.items() if key not in (*WRITTEN_ANEW, *family.aliases)}
    made |= {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": dtype}
    for theirs, texts in family.keys.items():
        words = [Word.of(text) for text in texts.split()]
        word = next((word for word in words if _value(model, word.path)), words[0])
        if word.path in OF_EXPERTS and not model.num_experts and word.path != "num_experts":
            continue        # no layer reads it
        said, value = get(theirs), word.theirs(_value(model, word.path), model)
        same = theirs in old and not _fault(theirs, said, word) and not word.sign and word.theirs(
            word.ours(said, {}), model) == value
        if theirs.startswith("time_step_") and theirs not in family.defaults:
            continue        # time_step_limit has it
        made[theirs] = said if same else value
    made |= {key: allowed[0] for key, allowed in family.only.items()
             if allowed and (key not in source or source[key] not in allowed)}
    made |= _layer_keys(model, family, get)
    if model.mtp_layers and "mtp.fc.weight" in family.tensors:
        made["mtp_num_hidden_layers"] = 1
    elif model.mtp_layers and any("{d}" in name for name in family.tensors):
        made["num_nextn_predict_layers"] = model.mtp_layers
    elif model.mtp_layers and family.has_sublayers:
        blocks = depth_sublayers(model)
        made |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": blocks,
                 "mtp_hybrid_override_pattern": "".join(spellings.LETTERS[block] for block in blocks)}
    if "time_step_least" in family.keys:
        made["time_step_limit"] = [model.linear.step_min, model.linear.step_max or math.inf]
    if family.fixed["position"] == "rope":
        made |= {"max_position_embeddings": max(longest, source.get("max_position_embeddings") or 0)}
        made |= _rope_keys(model, family, source)
    return made


def _layer_keys(model: Model, family: Family, get: Get) -> dict:
    """Return the keys of config.json on the kinds of the layers."""
    names = {mixer: name for name, mixer in reversed(family.layers.items())}
    names = {"F": "full_attention", "N": "full_attention", "W": "sliding_attention"} | names
    mixers, mlps = ([kind[i] for kind in pattern.kinds(model)] for i in (0, 1))
    made: dict[str, Any] = {}
    dense = len(mlps) - len("".join(mlps).lstrip("d"))
    if "layers_block_type" in family.defaults:
        kinds = [name for pair in zip(map(names.get, mixers), map({"e": "moe", "d": "mlp"}.get, mlps))
                 for name in pair if name]
        return {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
    if len(family.layers) > 1:
        made["layer_types"] = [names.get(mixer, mixer) for mixer in mixers]
    if "no_rope_layers" in family.defaults:
        made |= {"no_rope_layers": [int(mixer == "F") for mixer in mixers], "layer_types": ["full_attention"] * len(
            mixers)}
    if "position_embedding_type" in family.defaults:
        made["position_embedding_type"] = "rope" if "F" in mixers else "nope"
    made |= {key: dense for key in ("first_k_dense_replace", "num_dense_layers") if get(key) is not None}
    if "mlp_layer_types" in family.defaults:
        made["mlp_layer_types"] = ["dense" if mlp == "d" else "sparse" for mlp in mlps]
    if "mlp_only_layers" in family.defaults:
        made |= {"mlp_only_layers": [i for i, mlp in enumerate(mlps) if mlp == "d"], "decoder_sparse_step": 1}
    return made


def _rope_keys(model: Model, family: Family, source: Mapping) -> dict:
    """Return the keys of config.json that describe the rope, in the form of transformers 4, which transformers 5 also
    reads. A rope_parameters of the source that has more keys is kept if it agrees with the model."""
    given = None if source.get("rope_scaling") else source.get("rope_parameters")
    scaling = dict(model.rope_scaling)
    mixers = "".join(mixer for mixer, _ in pattern.kinds(model))
    if not set("FW") & set(mixers) and family.layers.get("full_attention") == "F":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}     # none
    local, nested = model.of("W"), isinstance(family.defaults.get("rope_parameters"), dict)
    if isinstance(given, dict) and (nested or any(key in given for key in IDLE_ROPE_KEYS)):
        flat = {"mixers": mixers, "head_dim": model.head_dim}
        keys, faults = _rope(source, lambda key: source.get(key, family.defaults.get(key)), family, flat)
        if not faults and _nest(keys).items() <= _nest({"rope_theta": model.rope_theta, "rope_scaling": scaling}
                                                           | _of_window(local, model)).items():
            return {"rope_parameters": given}
    scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
    if nested:
        return {"rope_parameters": {"full_attention": scaling | {"rope_theta": model.rope_theta}, "sliding_attention":
                                    dict(local.rope_scaling) | {"rope_theta": local.rope_theta}}}
    made = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if "partial_rotary_factor" in family.defaults:
        made["partial_rotary_factor"] = scaling.pop("partial_rotary_factor", 1.0)
    if scaling["rope_type"] == "longrope":
        made["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if scaling == {"rope_type": "default"}:
        made["rope_scaling"] = None
    if "rope_local_base_freq" in family.defaults:
        made["rope_local_base_freq"] = local.rope_theta
    return made


def _of_window(local: Any, model: Model) -> dict:
    """Return the rope's keys in the layers with a window; empty if equal to the model's. local: an object with the keys
    of these layers."""
    keys = {"rope_theta": local.rope_theta, "rope_scaling": dict(local.rope_scaling)}
    same = keys == {"rope_theta": model.rope_theta, "rope_scaling": dict(model.rope_scaling)}
    return {} if same else {f"kinds.W.{key}": value for key, value in keys.items()}


def family_for(model: Model) -> Family:
    """Return the first family whose config.json is read back as this model. Raises: ValueError if no family fits."""
    for family in FAMILIES.values():
        try:
            back = type(model)(**model_keys(config_of(model, family, "float32", 0, {}), family))
        except (ValueError, ArithmeticError, AttributeError):     # the family cannot express the value of a key
            continue
        if _near(_deciding_values(back), _deciding_values(model)):
            return family
    asked = dict.fromkeys([*FAMILIES["llama"].fixed, *(FAMILIES["mixtral"].fixed if model.num_experts else ())])
    given = ", ".join(f"model.{key}={quote(getattr(model, key))}" for key in asked)
    raise ValueError(f"no Hugging Face family computes this model ({given}, model.mixers={quote(model.mixers)}, "
                     f"model.mlps={quote(model.mlps)}); known: {_KNOWN}")


def _deciding_values(model: Model) -> dict:
    """Return the values that decide what a model computes; those of each mixer separately."""
    mixers, mlps = ({kind[i] for kind in pattern.kinds(model)} for i in (0, 1))
    values = {"layers": pattern.kinds(model)} | {key: getattr(model, key) for key in (
        *COMPUTED, *(OF_EXPERTS if "e" in mlps else ()), *(("mlp_dim",) if "d" in mlps else ()),
        *(OF_ATTENTION if mixers & set("FWNV") else ()), *(("linear",) if mixers & set("GKM") else ()),
        *(("max_seq_len",) if model.position == "learned" else ()))}
    for letter in mixers - {"."}:
        own = model.of(letter)
        keys = ("norm_placement", *(BY_MIXER if letter in "FWNV" else ()), *(("window",) if letter in "WV" else ()), *(
            ("rope_theta", "rope_scaling") if letter in "FW" and model.position == "rope" else ()))
        values |= {f"{letter}.{key}": getattr(own, key) for key in keys}
    score = values["multipliers"].score or model.head_dim ** -0.5
    return values | {"multipliers": dict(values["multipliers"]) | {"score": score}}


def _near(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_near(a[key], b[key]) for key in a)
    return a == b


def _layers(config: Mapping, get: Get, family: Family, flat: dict) -> tuple[dict, list[str]]:
    """Return (keys of [model] on the kinds of the layers, faults)."""
    keys: dict[str, Any] = {}
    faults: list[str] = []
    if "layers_block_type" in family.defaults:
        mixers, mlps, faults = _pairs(get("layers_block_type"), family)
        keys["num_layers"] = len(mixers)
    else:
        mixers, faults = _mixers(get, family, flat)
        mlps, more = _mlps(get, family, flat)
        faults += more
    if faults:
        return {}, faults
    if "e" not in mlps:
        keys |= {key: 0 for key in ("num_experts", "shared_expert_dim")} | {"shared_expert_gate": False}
    if not any(mixer in "WV" for mixer in mixers):
        keys["window"] = 0
    elif not flat.get("window"):
        faults = [f"{CONFIG}: some layers have a window, but sliding_window={quote(get('sliding_window'))}"]
    return keys | {"mixers": shortest(mixers), "mlps": shortest(mlps)}, faults


def _mixers(get: Get, family: Family, flat: dict) -> tuple[list[str], list[str]]:
    """Return (letter of each layer's mixer, faults)."""
    count, names, window = flat["num_layers"], get("layer_types"), flat.get("window")
    usual, *_, other = *family.layers, *family.layers
    if not names:
        every = next((get(key) for key in EVERY_KEYS if get(key)), family.every)
        every = len(every) if isinstance(every, str) else every if type(every) is int else 0
        names = [other if every and (i + 1) % every == 0 else usual for i in range(count)]
        if "W" in family.layers.values() and not window:
            names = ["full_attention"] * count
    if not isinstance(names, list) or len(names) != count:
        return [], [f"{CONFIG}: layer_types={quote(names)} does not name each of {count} layers"]
    names = [LAYER_NAMES.get(str(name), str(name)) for name in names]
    letters = dict(family.layers)
    if len(letters) == 1:       # one kind for all layers
        letters = {"full_attention": "W" if window else "F", "sliding_attention": "W"}
        if len(set(names)) > 1 and set(names) <= set(letters):
            return [], [f"{CONFIG}: layer_types={quote(names)}: this family has one window for all layers"]
    elif letters.get("full_attention") == "N" and "sliding_attention" in letters and not window:
        letters["full_attention"] = "F"     # rope only if no layer has a window
    theta = (get("rope_parameters") or {"rope_theta": get("rope_theta")}).get("rope_theta", 0)
    if get("position_embedding_type") != "rope" if "position_embedding_type" in family.defaults else \
            "linear_attention" in letters and theta is None:
        letters["full_attention"] = "N"
    if strange := sorted(set(names) - set(letters)):
        return [], [f"{CONFIG}: layer_types: {quote(strange[0])} cannot be computed in this family; only "
                    f"{' and '.join(letters)} can"]
    mixers = [letters[name] for name in names]
    if "no_rope_layers" in family.defaults:
        every = get("no_rope_layer_interval") or 4
        rotated = get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
        if not isinstance(rotated, list) or len(rotated) != len(mixers):
            return [], [f"{CONFIG}: no_rope_layers={quote(rotated)} does not name each of {count} layers"]
        mixers = [mixer if turned else "N" for mixer, turned in zip(mixers, rotated)]
    return mixers, []


def _mlps(get: Get, family: Family, flat: dict) -> tuple[list[str], list[str]]:
    """Return (letter of each layer's MLP, faults)."""
    count, kinds, step = flat["num_layers"], get("mlp_layer_types"), get("decoder_sparse_step")
    first = get("first_k_dense_replace") if get("first_k_dense_replace") is not None else get("num_dense_layers")
    if not flat.get("num_experts"):
        return ["d"] * count, []
    if not any(key in family.defaults for key in MLP_KEYS):
        return ["e"] * count, []
    if isinstance(kinds, list) and len(kinds) == count and set(kinds) <= {"dense", "sparse"}:
        return ["d" if kind == "dense" else "e" for kind in kinds], []
    first = 1 if first is None and kinds == family.defaults.get("mlp_layer_types", ()) else first
    if type(first) is int and first >= 0:
        return ["d" if i < first else "e" for i in range(count)], []
    if isinstance(dense := get("mlp_only_layers") or [], list) and type(step) is int and step > 0:
        return ["d" if i in dense or (i + 1) % step else "e" for i in range(count)], []
    return [], [f"{CONFIG}: these keys do not say which layers have experts: " + ", ".join(
        f"{key}={quote(get(key))}" for key in MLP_KEYS if key in family.defaults)]


def _pairs(names: Any, family: Family) -> tuple[list[str], list[str], list[str]]:
    """Return (mixers, MLPs, faults) for layers that are a mixer or an MLP each. A layer of ours is a mixer and the MLP
    that follows it."""
    mixers: list[str] = []
    mlps: list[str] = []
    letters = {name: (0, mixer) for name, mixer in family.layers.items()} | {"moe": (1, "e"), "mlp": (1, "d")}
    for name in names if isinstance(names, list) and names else [None]:
        side, letter = letters.get(LAYER_NAMES.get(str(name), str(name)), (2, ""))
        if side == 2:
            return [], [], [f"{CONFIG}: layers_block_type={quote(names)}: only {', '.join(letters)} can be computed"]
        if side == 0 or not mlps or mlps[-1] != ".":
            mixers.append(".")
            mlps.append(".")
        (mixers, mlps)[side][-1] = letter
    return mixers, mlps, []


def shortest(letters: Sequence[str]) -> str:
    """Return the shortest pattern for `model.mixers` or `model.mlps` that gives these letters."""
    whole = "".join(letters)
    period = next(whole[:p] for p in range(1, len(whole) + 1) if (whole[:p] * len(whole))[:len(whole)] == whole)
    ended = whole.rstrip(whole[-1]) + whole[-1] + "*"
    return min(period, ended, key=len)


def sublayers(model: Model) -> tuple[list[int], list[int]]:
    """Return (numbers of the layers' mixers, numbers of the layers' MLPs), for models whose mixers and MLPs are layers
    of their own. -1: the layer has no mixer or no MLP."""
    numbers = itertools.count()
    pairs = [tuple(next(numbers) if letter != "." else -1 for letter in kind) for kind in pattern.kinds(model)]
    return [mixer for mixer, _ in pairs], [mlp for _, mlp in pairs]


def depth_sublayers(model: Model) -> list[str]:
    """Return the names of the mixer and the MLP of an MTP depth, for models in which these are layers of their own."""
    return ["full_attention", *{"e": ["moe"], "d": ["mlp"]}.get(pattern.depth_kind(model).mlp, [])]


def further_layers(config: Mapping) -> int:
    """Return the number of layers that follow the model's layers and predict further tokens (MTP)."""
    text = text_of(config)
    count = text.get("num_nextn_predict_layers", text.get("num_mtp_layers"))
    return count if type(count) is int and count > 0 else 0


def _rope(config: Mapping, get: Get, family: Family, flat: Mapping) -> tuple[dict, list[str]]:
    """Return (keys of [model] on the rope, faults)."""
    if family.fixed["position"] != "rope" or not set("FW") & set(flat["mixers"]):
        return {}, []
    given, _, _ = spellings.rope(config, family)        # `model_keys` has the faults
    local, base = None, get("rope_local_base_freq")
    if isinstance(given, dict) and ("full_attention" in given or "sliding_attention" in given):
        given, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if not isinstance(given, dict) or not isinstance(local or {}, dict):
        return {}, [f"{CONFIG}: rope_parameters={quote(given)} is not a JSON object"]
    keys, faults = _one_rope(given, config, get, family)
    if local is None and "rope_local_base_freq" in family.defaults:
        local = {"rope_theta": base or keys.get("rope_theta")}
    if "W" in flat["mixers"] and local is not None and not faults:
        of_window, faults = _one_rope({"rope_theta": keys["rope_theta"]} | local, config, get, family)
        if of_window != keys:
            keys |= {f"kinds.W.{key}": value for key, value in of_window.items()}
    scaling = keys.get("rope_scaling", {})
    if family.fixed.get("multipliers.score") == "mscale" and scaling.get("mscale_all_dim"):
        m = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        keys["multipliers.score"] = flat["head_dim"] ** -0.5 * m * m
    return keys, faults


def _one_rope(given: Mapping, config: Mapping, get: Get, family: Family) -> tuple[dict, list[str]]:
    """Return ({rope_theta, rope_scaling}, faults) for one object of rope_parameters or rope_scaling."""
    given = {key: value for key, value in given.items() if value is not None and key not in IDLE_ROPE_KEYS}
    theta = given.pop("rope_theta", config.get("rope_theta") or family.defaults["rope_theta"])
    kind, original = spellings.kind_of(given), spellings.original_length(given, config)
    given = {key: value for key, value in given.items() if key not in ("type", "rope_type")}
    faults = [] if _is_number(theta) else [f"{CONFIG}: rope_theta={quote(theta)} is not a number larger than 0"]
    if not isinstance(kind, str) or kind not in SCALED:
        return {}, [*faults, f"{CONFIG}: rope_type={quote(kind)} cannot be computed; only {' or '.join(SCALED)} can"]
    if kind == "longrope":
        longest = get("max_position_embeddings")
        if original is not None:
            given["original_max_position_embeddings"] = original
        if _is_number(longest) and _is_number(original):
            given.setdefault("factor", longest / original)
    scaling = {"rope_type": kind}
    for key, absent in SCALED[kind].items():
        value = given.pop(key, absent)
        if key.endswith("_factor") and isinstance(value, list) and value and all(map(_is_number, value)):
            scaling[key] = tuple(map(float, value))
            continue
        if not _is_number(value) or key in ("short_factor", "long_factor") or (key in WHOLE and type(value) is not int):
            faults.append(f"{CONFIG}: {key}={quote(value)} of the rope, {kind}, is not a number larger than 0")
        scaling[key] = value if key in WHOLE or not _is_number(value) else float(value)
    turned = given.pop("partial_rotary_factor", get("partial_rotary_factor"))
    if turned not in (None, 1.0):
        if not _is_number(turned) or turned > 1 or kind != "proportional" and "partial_rotary_factor" not in \
                family.defaults:
            faults.append(f"{CONFIG}: partial_rotary_factor={quote(turned)} of the rope cannot be computed")
        scaling["partial_rotary_factor"] = turned
    for key in (*OF_YARN, "llama_4_scaling_beta"):
        value = given.get(key)
        allowed = kind in ("yarn", "longrope") if key in OF_YARN else key in family.defaults
        if allowed and key in given and (type(value) is bool if key == "truncate" else _is_number(value)):
            scaling[key] = given.pop(key) if key == "truncate" else float(given.pop(key))
    given = {key: value for key, value in given.items() if key != "truncate" or value is not True}
    if kind == "yarn" and not faults and math.isclose(
            scaling.get("attention_factor", 0.0), 0.1 * math.log(scaling["factor"]) + 1, rel_tol=1e-6):
        del scaling["attention_factor"]     # it equals the computed one
    faults += [f"{CONFIG}: {key}={quote(value)} of the rope cannot be computed" for key, value in given.items()]
    return {"rope_theta": float(theta), "rope_scaling": scaling} if not faults else {}, faults


def _plain(flat: dict) -> dict:
    """Return the keys without those that no layer reads, and without overrides that change nothing."""
    groups = [flat.pop(f"router_groups.{i}", 1) for i in (0, 1)]
    if "router_groups" not in flat and "num_experts" in flat:
        flat["router_groups"] = ()
    if flat["num_experts"] and groups[0] > 1:
        flat["router_groups"] = tuple(groups)
    if not flat["num_experts"]:
        flat = {key: value for key, value in flat.items() if key not in OF_EXPERTS or key == "num_experts"}
    if flat.get("multipliers.score") == "mscale":
        del flat["multipliers.score"]
    return {key: value for key, value in flat.items() if not key.startswith("kinds.F.") or value != flat.get(
        key.split(".")[2], ())}


def _nest(flat: Mapping) -> dict:
    """Return the tables of dotted keys. All tables are present, because a key that is not in them is decided, too."""
    made = {table: {} for table in ("kinds", "linear", "latent", "multipliers")}
    for path, value in flat.items():
        *tables, last = path.split(".")
        place = made
        for table in tables:
            place = place.setdefault(table, {})
        place[last] = value
    return made


def _fault(theirs: str, value: Any, word: Word) -> list[str]:
    if value is None:
        return [f"{CONFIG}: {theirs} is missing; every family needs it"]
    if word.path in FLAGS or word.choice:
        return [] if type(value) is bool else [f"{CONFIG}: {theirs}={quote(value)} is not true or false"]
    if word.is_number:
        least = 0 if word.path in ("linear.step_min", "linear.step_max") else math.ulp(0)
        return [] if type(value) in (int, float) and least <= value < math.inf else [
            f"{CONFIG}: {theirs}={quote(value)} is not a number larger than 0"]
    least = 2 if word.path == "vocab_size" else 0 if word.path in ("num_experts", "shared_expert_dim") else 1
    most = MOST_LAYERS if word.path == "num_layers" else 2**31 - 1
    if type(value) is not int or not least <= value <= most:
        return [f"{CONFIG}: {theirs}={quote(value)} is not a whole number from {least} to {most}"]
    return []


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
