"""The only definition of a run file's keys: type, default, range and the line that --help prints.

Sections are frozen and strict: "8" is not 8, 1.5 is not 1, true is not 1; only an integer may be given for a float. A
section fills in derived values when it is built, so other modules never see the 0 that means "derive it". This module
imports no jax and knows no mesh and no model. `config.problems` checks keys against each other.
"""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from meshtrain import custom
from meshtrain.config.named import OneOf
from meshtrain.pattern import MIXERS, MLPS
from meshtrain.names import LORA_ALSO, LORA_EXPERTS, LORA_TARGETS, PIPELINE_SCHEDULES, PLACEMENT


def key(default, description: str, **limits):
    """Declare a key of a section. description: its text in --help."""
    return Field(default, description=description, **limits)


def fill(section, **values):
    """Write derived values into a section under construction or into a copy. pydantic's setter refuses frozen sections.
    The values do not count as given: section.model_fields_set does not change."""
    section.__dict__.update(values)
    return section


def at_home(path: str) -> str:
    """Expand ~ in `path`; return it unchanged if there is no such home directory."""
    try:
        return os.path.expanduser(path)
    except ValueError:      # e.g. a null character in the user's name
        return path


def wrap_string(given):
    """Return one string as a list of one. Text that begins as a list stays text: it is a list with a mistake."""
    return (given,) if isinstance(given, str) and given and not given.startswith("[") else given


# The keys of model.rope_scaling that each type reads. ROPE_OPTIONS: further keys that a type reads; they are written
# only if they differ from their defaults. EVERY_ROPE: the same, for all types.
ROPE_TYPES = {"default": (), "linear": ("factor",),
              "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
              "yarn": ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings"),
              "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
              "proportional": ()}
EVERY_ROPE = ("partial_rotary_factor", "llama_4_scaling_beta")
ROPE_OPTIONS = {"yarn": ("truncate", "attention_factor", "mscale", "mscale_all_dim"), "longrope": ("attention_factor",),
                "proportional": ("factor",)}
# Path of a file or directory. ~ is expanded here, because a shell does not expand it in `--run.dir=~/…`.
PathKey = Annotated[str, AfterValidator(at_home)]
Strings = Annotated[tuple[str, ...], BeforeValidator(wrap_string)]
Paths = Annotated[tuple[PathKey, ...], BeforeValidator(wrap_string)]
# Keys whose value may be code of the run's own. docs/extend.md describes what each is called with.
ACTIVATION = "a function of (gate, up), or of (up), that returns an array of their shape and dtype"
OPTIMIZER = ("a function of (cfg, roles) that returns an optax.GradientTransformation: the direction of the update, "
             "before weight decay and learning rate")
SCHEDULE = "a function of (cfg, steps) that returns a function: number of steps taken -> learning rate, a scalar"
OBJECTIVE = ("a subclass of meshtrain.training.objective.Objective whose `head` returns (what is differentiated, loss, "
             "LayerStats), sums over a microbatch")
MIXER = "a class made by (cfg, rngs) and called with (ex, x_BTD, inputs), which returns an array like x_BTD"
DOCUMENTS = "a function of (path), or without arguments, that yields documents: a str, or token ids"
Activation = Annotated[str, OneOf(("swiglu", "geglu", "swiglu_clamped", "gelu", "relu2"), ACTIVATION)]
OptimizerName = Annotated[str, OneOf(("adamw", "lion", "adafactor", "muon"), OPTIMIZER)]
Schedule = Annotated[str, OneOf(("cosine", "linear", "wsd", "constant"), SCHEDULE)]
ObjectiveName = Annotated[str, OneOf(("next_token", "dpo", "distill", "rl"), OBJECTIVE)]
FORMATS = ("", "stdlib", "text", "jsonl", "chat", "parquet", "arrow", "tokens")
ComponentSource = Annotated[str, OneOf(FORMATS, DOCUMENTS)]
DataSource = Annotated[str, OneOf((*FORMATS, "preferences", "prompts", "mixture"), DOCUMENTS)]
CustomMixer = Annotated[str, OneOf((), MIXER)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class Identity(Section):
    """[run]: the run's name, its directory, and the form of its output."""

    name: str = key("run", "name of the run")
    dir: PathKey = key("", "directory of the run's files, or s3://… or gs://…; empty = runs/<name>")
    extends: PathKey = key(
        "", "another run file, relative to this one or shipped; it gives the keys that this file leaves out")
    code: tuple[str, ...] = key(
        (), "path and digest of each file of the run's own code; the program writes it and ignores a given value",
        strict=False)
    seed: int = key(0, "seed of the initialization, the data order and dropout", ge=0, lt=2**32)
    compilation_cache: str = key(
        "~/.cache/meshtrain", "cache of compiled programs for later runs, up to 8 GiB; empty = off")
    sample_tokens: int = key(0, "tokens of text to generate after the last step; 0 = none", ge=0)
    sample_prompt: str = key("", "text that the sample continues")
    log_format: Literal["auto", "plain", "time", "json"] = key(
        "auto", "form of printed lines: plain = only the text, time = with time, process and level, json = an object "
        "per line; auto = time in files and pipes of several processes, else plain")

    @model_validator(mode="after")
    def _fill_in(self):
        # removes slashes at the end of an address, but not those of its scheme: "s3:" would be a directory
        directory = re.sub(r"(?<![:/])/+$", "", self.dir) if "://" in self.dir else self.dir
        return fill(self, dir=directory or f"runs/{self.name}")


class Mesh(Section):
    """[mesh]: the number of devices along each axis."""

    data: int = key(1, "replicas that see different sequences; -1 = the devices that are left", ge=-1)
    fsdp: int = key(
        1, "devices that see different sequences and shard the states (ZeRO); -1 = the devices that are left", ge=-1)
    tensor: int = key(1, "devices over which each matmul is sharded; -1 = the devices that are left", ge=-1)
    stage: int = key(1, "pipeline stages; -1 = the devices that are left", ge=-1)
    context: int = key(1, "devices over which each sequence is sharded; -1 = the devices that are left", ge=-1)
    placement: tuple[str, ...] = key(PLACEMENT, "the five axes, from the slowest link to the fastest", strict=False)
    full_devices: int = key(
        0, "number of devices for which training.microbatches is set: on fewer devices, the axis with -1 shrinks and "
        "training.microbatches grows; 0 = all present", ge=0)
    simulated_devices: int = key(
        0, "CPU devices to simulate, the total over all processes; 0 = the real devices", ge=0, le=4096)


class Sharding(Section):
    """[sharding]: which mesh axes split which dimensions."""

    rules: PathKey = key("sharding_rules/ddp.toml", "rule file: a path, or the name of a shipped one, e.g. zero3")


class Table(Section):
    """A key whose value is a table. Only keys that differ from their defaults are written."""

    def __iter__(self):
        yield from ((name, value) for name, field in type(self).model_fields.items()
                    if (value := getattr(self, name)) != field.default)

    @model_serializer
    def _serialize(self) -> dict:
        return dict(self)


class RopeScaling(Table):
    """model.rope_scaling, with the keys of Hugging Face's config.json. Keys that the type does not read keep their
    defaults."""

    rope_type: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = key(
        "default", "scaled frequencies: default: none; linear: all; llama3, yarn: the low ones; longrope: each by its "
                   "own factor; proportional: none, but partial rotation with the frequencies of whole heads")
    partial_rotary_factor: float = key(1.0, "fraction of each head that is rotated, from its start", gt=0, le=1)
    factor: float = key(1.0, "divisor of the frequencies; longrope: the longest sequence over the original", ge=1)
    low_freq_factor: float = key(1.0, "llama3: wavelengths above the original length / this are scaled in full", gt=0)
    high_freq_factor: float = key(4.0, "llama3: wavelengths below the original length / this are unchanged", gt=0)
    beta_slow: float = key(
        1.0, "yarn: pairs that turn less often than this over the original length are scaled in full", gt=0)
    beta_fast: float = key(
        32.0, "yarn: pairs that turn more often than this over the original length are unchanged", gt=0)
    truncate: bool = key(True, "yarn: the two bounds are rounded to whole pairs")
    attention_factor: float = key(0.0, "yarn, longrope: factor on queries and keys; 0 = derived from factor", ge=0)
    mscale: float = key(0.0, "yarn, with mscale_all_dim: weight in the derived attention_factor; 0 = none", ge=0)
    mscale_all_dim: float = key(0.0, "yarn, with mscale: weight in the divisor of that factor; 0 = none", ge=0)
    short_factor: tuple[float, ...] = key(
        (), "longrope: divisors of the frequencies up to the original length", strict=False)
    long_factor: tuple[float, ...] = key(
        (), "longrope: divisors of the frequencies in runs with a longer data.seq_len", strict=False)
    original_max_position_embeddings: int = key(
        8192, "llama3, yarn, longrope, llama_4_scaling_beta: sequence length before the scaling", ge=1, lt=2**31)
    llama_4_scaling_beta: float = key(
        0.0, "queries grow with the log of their position over the original length, times this; 0 = off", ge=0)

    def __iter__(self):
        fixed = ("rope_type", *ROPE_TYPES[self.rope_type])
        options = [*EVERY_ROPE, *ROPE_OPTIONS.get(self.rope_type, ())]
        if self.llama_4_scaling_beta and "original_max_position_embeddings" not in fixed:
            options.append("original_max_position_embeddings")
        fields = type(self).model_fields
        yield from ((name, getattr(self, name)) for name in fields
                    if name in fixed or name in options and getattr(self, name) != fields[name].default)


class MixerKeys(Table):
    """model.kinds.LETTER: keys of [model] with a value of their own for the layers of one mixer. A key that is left out
    has the value of [model]."""

    num_heads: int | None = key(None, "query heads", ge=1)
    num_kv_heads: int | None = key(None, "key and value heads", ge=1)
    head_dim: int | None = key(None, "width of a head", ge=1)
    window: int | None = key(None, "tokens that a token attends to, including itself", ge=1)
    rope_theta: float | None = key(None, "base of the rotation frequencies", gt=0)
    rope_scaling: RopeScaling | None = key(None, "scaled frequencies")
    qk_norm: Literal["off", "head", "all_heads", "head_and_values", None] = key(None, "norm of queries and keys")
    norm_placement: Literal["before", "after", "both", None] = key(None, "norms before mixer and MLP, after, or both")
    attention_sinks: bool | None = key(None, "a learned score per head in the softmax's denominator")
    tie_values: bool | None = key(None, "values are the projected keys")


class Kinds(Table):
    """model.kinds: keys of [model] by mixer, e.g. {W = {rope_theta = 10000.0}}."""

    F: MixerKeys = key(MixerKeys(), "layers that attend to all earlier tokens")
    W: MixerKeys = key(MixerKeys(), "layers with a window")
    N: MixerKeys = key(MixerKeys(), "layers without rope that attend to all earlier tokens")
    V: MixerKeys = key(MixerKeys(), "layers without rope with a window")
    G: MixerKeys = key(MixerKeys(), "layers of the gated delta rule")
    K: MixerKeys = key(MixerKeys(), "layers of Kimi delta attention")
    M: MixerKeys = key(MixerKeys(), "layers of Mamba-2")


class LinearKeys(Table):
    """model.linear: the recurrent mixers (G, K, M). Each value head has a state of key_dim × value_dim. In Mamba-2, key
    heads are groups, key_dim is the width of the state, and value_dim is the width of a head."""

    key_heads: int = key(0, "heads of queries and keys; 0 = no such layers", ge=0)
    value_heads: int = key(0, "heads of values, a multiple of key_heads", ge=0)
    key_dim: int = key(128, "width of queries and keys", ge=1)
    value_dim: int = key(128, "width of values", ge=1)
    conv_width: int = key(4, "taps of the short convolution", ge=1)
    conv_bias: bool = key(False, "biases of the convolution")
    beta_scale: float = key(1.0, "upper bound of the update rates; with 2, eigenvalues may be negative", gt=0, le=2)
    norm_eps: float = key(0.0, "eps of the output's norm; 0 = model.norm_eps", ge=0)
    step_min: float = key(0.0, "M: smallest time step", ge=0)
    step_max: float = key(0.0, "M: largest time step; 0 = no bound", ge=0)


class LatentKeys(Table):
    """model.latent: attention whose queries, keys and values are computed from narrow latents (MLA, arXiv:2405.04434).
    head_dim is the width of queries and keys, including the rotated part."""

    kv_dim: int = key(0, "width of the latent of keys and values; 0 = plain attention", ge=0)
    query_dim: int = key(0, "width of the latent of queries; 0 = none", ge=0)
    rope_dim: int = key(0, "width of the rotated part; all heads share its key", ge=0)
    value_dim: int = key(0, "width of a value; 0 = head_dim", ge=0)


class CustomKeys(Table):
    """model.custom: mixers of the run's own by their letters, e.g. {X = "mixers.py:Mixer"}."""

    X: CustomMixer = key("", "class of the mixer X")
    Y: CustomMixer = key("", "class of the mixer Y")
    Z: CustomMixer = key("", "class of the mixer Z")


class Multipliers(Table):
    """model.multipliers: constant factors of activations."""

    embedding: float = key(1.0, "the embedding", gt=0)
    residual: float = key(1.0, "outputs of mixer and MLP", gt=0)
    score: float = key(0.0, "query-key products; 0 = 1 / sqrt(head_dim)", ge=0)
    logits: float = key(1.0, "the logits", gt=0)


class Model(Section):
    """[model]: the shape of the transformer; Llama-like by default."""

    preset: str = key("", "a shape of configs/models/; other model keys override its values")
    vocab_size: int = key(512, "rows of the embedding (bytes and one separator need 257)", ge=2, le=2**30)
    embed_dim: int = key(256, "width of the residual stream", ge=1)
    num_layers: int = key(4, "transformer layers", ge=1, le=10_000)
    mtp_layers: int = key(0, "depths of multi-token prediction, each like the last layer with attention", ge=0, le=3)
    mixers: str = key(
        "", "mixer of each layer, repeated up to num_layers; * at the end repeats the last letter: " + ", ".join(
            f"{letter} {row.words}" for letter, row in MIXERS.items()) + "; empty = W with a window, else F")
    mlps: str = key(
        "", "MLP of each layer, like mixers: " + ", ".join(f"{letter} {what}" for letter, what in MLPS.items())
        + "; empty = e with experts, else d")
    kinds: Kinds = key(Kinds(), "keys that differ by mixer, e.g. {W = {rope_theta = 10000.0}}")
    num_heads: int = key(4, "query heads", ge=1)
    num_kv_heads: int = key(0, "key and value heads; 0 = num_heads", ge=0)
    head_dim: int = key(0, "width of a head; 0 = embed_dim / num_heads", ge=0)
    mlp_dim: int = key(768, "width of the MLP", ge=1)
    norm: Literal["rmsnorm", "layernorm"] = key("rmsnorm", "normalization around mixer and MLP and before the head")
    norm_placement: Literal["before", "after", "both"] = key(
        "before", "norms before mixer and MLP, after them, or both")
    norm_eps: float = key(1e-5, "added to the variance in a norm", gt=0)
    norm_offset: float = key(0.0, "added to a norm's weights; with 1 (Gemma) stored weights are around 0", ge=0, le=1)
    activation: Activation = key("swiglu", "swiglu, geglu and swiglu_clamped have three matrices, gelu and relu2 two")
    multipliers: Multipliers = key(Multipliers(), "constant factors, e.g. {residual = 0.22, logits = 0.1}")
    layer_scale: bool = key(False, "multiply each layer's output by a fixed number of its own")
    embedding_std: float = key(
        0.02, "standard deviation of the embedding's initial weights; use 1 with experts and an untied head", gt=0)
    position: Literal["rope", "learned"] = key("rope", "rotated queries and keys, or a learned table")
    max_seq_len: int = key(
        0, "rows of the table of learned positions, or the sequence length for longrope; 0 = data.seq_len", ge=0)
    rope_theta: float = key(10000.0, "base of the rotation frequencies", gt=0)
    rope_scaling: RopeScaling = key(
        RopeScaling(), 'scaled frequencies, as config.json has them, e.g. {rope_type = "yarn", factor = 4.0}')
    qk_norm: Literal["off", "head", "all_heads", "head_and_values"] = key(
        "off", "norm of queries and keys: over each head, or over all heads together; head_and_values: of values, too")
    window: int = key(0, "tokens that a token attends to, including itself; 0 = all earlier ones", ge=0)
    score_softcap: float = key(0.0, "bound of the attention scores (softcap, by tanh); 0 = off", ge=0)
    logit_softcap: float = key(0.0, "bound of the head's logits (softcap, by tanh); 0 = off", ge=0)
    attention_bias: Literal["none", "qkv", "all"] = key(
        "none", "biases of queries, keys and values, or of the output too")
    attention_gate: bool = key(False, "multiply attention's output by a sigmoid of a projection of the layer's input")
    attention_sinks: bool = key(False, "a learned score per head in the softmax's denominator")
    tie_values: bool = key(False, "values are the projected keys, before norm and rope")
    latent: LatentKeys = key(
        LatentKeys(), "attention by latents (MLA), e.g. {kv_dim = 512, rope_dim = 64, value_dim = 128}")
    linear: LinearKeys = key(LinearKeys(), "the recurrent mixers, e.g. {key_heads = 16, value_heads = 32}")
    custom: CustomKeys = key(CustomKeys(), 'classes of the mixers X, Y and Z, e.g. {X = "mixers.py:Mixer"}')
    mlp_bias: bool = key(False, "biases of the MLP and of experts")
    num_experts: int = key(0, "experts per layer, instead of its MLP; 0 = a dense model", ge=0)
    experts_per_token: int = key(0, "experts per token; 0 = 2, if there are experts", ge=0)
    expert_mlp_dim: int = key(0, "width of an expert; 0 = mlp_dim", ge=0)
    shared_expert_dim: int = key(0, "width of an additional MLP for all tokens; 0 = none", ge=0)
    shared_expert_gate: bool = key(False, "multiply the shared MLP's output by a sigmoid of a projection of its input")
    router_score: Literal["softmax", "sigmoid"] = key(
        "softmax", "scores of the experts: a softmax over all experts, or a sigmoid of each")
    router_normalize: bool = key(
        True, "weights of the chosen experts sum to 1 (with softmax: a softmax over the chosen ones)")
    router_scale: float = key(1.0, "factor of the weights", gt=0)
    router_groups: tuple[int, ...] = key(
        (), "[groups of experts, groups that a token may use]; groups are ranked by their two best experts; empty = "
        "none", strict=False)
    router_bias: Literal["none", "choice", "logits"] = key(
        "none", "choice: biases that affect only the choice (experts.bias_rate enables and moves them); logits: "
                "trained biases")
    tie_embeddings: bool = key(False, "the head is the transposed embedding")
    embedding_dropout: float = key(0.0, "dropout after the embedding", ge=0, lt=1)
    residual_dropout: float = key(0.0, "dropout of the outputs of attention and MLP", ge=0, lt=1)
    attention: Literal["auto", "blockwise", "cudnn", "mosaic", "pallas"] = key(
        "auto", "engine of attention; auto: by GPU and shape; blockwise: XLA, anywhere; cudnn: whole rows; pallas: "
        "packed documents; mosaic: packed documents on H100 and H200")
    mlp: Literal["auto", "xla", "mosaic"] = key(
        "auto", "engine of dense MLPs: auto: xla (not yet compared with mosaic on a GPU); mosaic: activation fused "
        "into the matmuls, on H100 and H200")
    param_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of stored matrices and tables; bfloat16: rounded stochastically. All else is float32")
    compute_dtype: Literal["float32", "bfloat16"] = key("bfloat16", "dtype of activations and gathered weights")
    matmul_dtype: Literal["auto", "bfloat16", "float8"] = key(
        "auto", "dtype of the layers' matmuls and of the gathered weights: compute_dtype, or float8 (H100 and later)")

    @model_validator(mode="after")
    def _fill_in(self):
        fill(self, mixers=self.mixers or ("W" if self.window else "F"),
                mlps=self.mlps or ("e" if self.num_experts else "d"))
        # A head_dim that cannot be derived stays 0, which `problems` reports.
        if self.num_experts:
            fill(self, experts_per_token=self.experts_per_token or min(2, self.num_experts),
                    expert_mlp_dim=self.expert_mlp_dim or self.mlp_dim)
        derived_head_dim = 0 if self.embed_dim % self.num_heads else self.embed_dim // self.num_heads
        return fill(self, num_kv_heads=self.num_kv_heads or self.num_heads,
                       head_dim=self.head_dim or derived_head_dim)

    @property
    def gated(self) -> bool:
        """Whether MLPs and experts have two inward projections."""
        if custom.is_path(self.activation):
            return custom.count_arguments(self.activation) == 2
        return self.activation not in ("gelu", "relu2")

    def of(self, mixer: str) -> Model:
        """Return the section with the keys that the layers of this mixer have for themselves."""
        keys = getattr(self.kinds, mixer, None)
        given = dict(keys) if keys is not None and keys.model_fields_set else {}
        return self.model_copy(update=given) if given else self


# The source of a file by its suffix. .gz and .zst are removed first. A file X without a suffix holds tokens if X.bin
# exists, because Megatron names its data so.
SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".npy": "tokens",
            ".bin": "tokens", ".idx": "tokens"}


def source_of(paths: tuple[str, ...]) -> str:
    """Return the source of these files or globs by their suffixes; "" if it is unknown or there are several."""
    sources = set()
    for path in paths:
        path = at_home(path)
        known = SUFFIXES.get(os.path.splitext(path.removesuffix(".gz").removesuffix(".zst"))[1].lower(), "")
        sources.add(known or ("tokens" if os.path.isfile(f"{path}.bin") else ""))
    return sources.pop() if len(sources) == 1 else ""


class TemplateArguments(Section):
    """data.template_arguments: any names, with values that JSON has."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_json(self):
        try:
            json.dumps(self.model_extra, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("has a value that JSON cannot represent, such as a date; write it as a string") from None
        return self


class Component(Section):
    """One source of data.mixture."""

    source: ComponentSource = key("", "as data.source")
    paths: Paths = key((), "as data.paths", strict=False)
    field: str = key("text", "as data.field")
    weight: float = key(1.0, "share of the tokens, relative to the other weights", gt=0)
    name: str = key("", "name of its loss in the metrics, val_loss/NAME; empty = its position in data.mixture, from 0")
    validation_paths: Paths = key((), "as data.validation_paths", strict=False)

    @model_validator(mode="after")
    def _fill_in(self):
        return fill(self, source=self.source or source_of(self.paths))


class Data(Section):
    """[data]: the data, and the size of a batch."""

    source: DataSource = key(
        "", "stdlib: the sources of Python's library; mixture: data.mixture; else the format of data.paths (chat: "
        "conversations as lines of JSON); empty = by the suffix of data.paths")
    paths: Paths = key(
        (), "files or globs, also at s3://, gs://, hf:// and https://; text and jsonl may end in .gz or .zst; tokens: "
        "X.tokens.npy with X.ends.npy, or X.bin, also as X", strict=False)
    field: str = key("text", "key (jsonl) or column (parquet, arrow) of a document's text")
    split_at: str = key(
        "", "marker that splits text, jsonl, parquet and arrow into documents, e.g. <|endoftext|>; it is removed")
    mixture: tuple[Component, ...] = key(
        (), 'several sources: [{source="jsonl", paths=["a.jsonl"], weight=0.7}, …]; weight: share of tokens',
        strict=False)
    tokenizer: PathKey = key("bytes", "bytes, or a tokenizer.json: its path or address, or hf://OWNER/NAME")
    bos_token: str = key(
        "", "token before every document; empty = the tokenizer's; give its id if tokens have no tokenizer")
    eos: str = key(
        "", "token after every document, its last target; empty = that of the model of checkpoint.init_from, else the "
            "token before every document; give its id if tokens have no tokenizer")
    chat_template: PathKey = key(
        "", "for chat: a template file, a model folder, or the name of a shipped one, e.g. qwen3; empty = next to the "
        "tokenizer, or in run.dir/hf")
    template_arguments: TemplateArguments = key(
        TemplateArguments(), "variables for the chat template, unless a line's chat_template_kwargs set them, "
        "e.g. {enable_thinking = false}")
    loss_on: Literal["assistant", "all"] = key("assistant", "loss targets of chat: the assistant's tokens, or all")
    faulty: Literal["stop", "leave out"] = key(
        "stop", "a faulty line of chat or preferences ends the run, or is left out and reported at every start")
    cache: PathKey = key(
        "", "directory of the token cache and of copies of files at addresses; empty = .meshtrain next to the first "
            "file or in run.dir, and for copies ~/.cache/meshtrain-files")
    seq_len: int = key(256, "target tokens per sequence", ge=1)
    global_batch: int = key(16, "sequences per step, over all devices and microbatches", ge=1)
    validation_fraction: float = key(0.02, "share of the data held out for validation; 0 = none", ge=0, lt=1)
    validation_paths: Paths = key((), "files to validate on, instead of a held-out share", strict=False)
    validation_sources: tuple[Component, ...] = key(
        (), 'sources to validate on, each with its own curve, instead of a held-out share: tables as in data.mixture',
        strict=False)
    packing: Literal["stream", "whole"] = key(
        "stream", "stream: concatenate documents and cut them into sequences; whole: never cut a document, pad the rest"
    )
    document_mask: bool = key(True, "attention stays within each document of a packed sequence")
    skip_batches: int = key(0, "training batches to skip once, at the start or resume", ge=0, le=10**9)

    @model_validator(mode="after")
    def _fill_in(self):
        return fill(self, source=self.source or ("mixture" if self.mixture else source_of(self.paths)))


class Training(Section):
    """[training]: the step."""

    steps: int = key(100, "optimizer steps", ge=1, lt=2**31)
    microbatches: int = key(1, "microbatches per step", ge=1)
    remat: Literal["none", "selective", "full", "offload"] = key(
        "none", "what the backward recomputes instead of storing; offload: as full, with layers' inputs in host memory")
    grad_clip: float = key(1.0, "largest global norm of the gradient; 0 = off", ge=0)
    ema: float = key(
        0.0, "decay of an exponential moving average of the trained weights, e.g. 0.999, beside them; 0 = none", ge=0,
        lt=1)
    objective: ObjectiveName = key(
        "next_token", "the next token, preferences (DPO), a teacher's predictions ([distill]), or rewards of sampled "
                      "answers ([rl])")
    dpo_beta: float = key(0.1, "DPO's beta: weight of the divergence from the reference", gt=0)
    mtp_weight: float = key(
        0.1, "weight of the mean loss of model.mtp_layers; 0 = the step leaves them out and keeps their weights", ge=0)
    z_loss: float = key(0.0, "weight of the z-loss (squared log-partition), which keeps logits small; 0 = off", ge=0)
    loss_chunk: int = key(2048, "tokens whose logits are in memory at once; a smaller number is slower on GPUs", ge=1)
    deterministic: bool = key(
        False, "the same bits in every run on the same GPUs, but slower; CPUs always give the same bits")
    check_replicas_every: int = key(
        0, "steps between checks that replicas have the same bits, also before each save; 0 = none", ge=0)
    max_skipped_steps: int = key(
        10, "skipped steps in a row (for example without a finite gradient) that end the run", ge=1)
    loss_spike: Literal["off", "warn", "skip", "rollback"] = key(
        "warn", "reaction to a loss far above earlier ones: warn, skip the step, or roll back to a checkpoint and skip "
        "the batches")
    spike_threshold: float = key(
        10.0, "a spike exceeds the median of the last 128 losses by this many times their spread", ge=1)
    step_timeout_s: int = key(
        0, "time limit of a step in seconds; 0 = 10 times the median step, at least 60; -1 = no limit", ge=-1)
    phase_timeout_s: int = key(
        3600, "time limit in seconds of compiling, restoring or initializing, saving, and each batch of a validation; "
        "-1 = no limit", ge=-1)


class WeightGroup(Table):
    """A row of optimizer.groups: what the weights of a group have for themselves."""

    rate: float = key(1.0, "factor of the learning rate", ge=0)
    decay: float | None = key(None, "weight decay; left out: the one that the weights' roles have", ge=0)
    rule: Literal["adamw", "muon", None] = key(None, "adamw or muon; left out: that of optimizer.name")


def _check_base(value: object) -> object:
    if not isinstance(value, (str, dict)):
        raise PydanticCustomError("base_type", "is neither a name nor a table")
    return value


class WeightGroups(Table):
    """optimizer.groups: rows by pattern, of which the first that matches a weight counts; or muP's rates, or both."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, WeightGroup]

    preset: Literal["", "mup"] = key("", "mup: rates that carry over from a narrower model")
    # When a run file is read, the base's keys of [model] take the place of its name, so that they are kept.
    base: Annotated[Any, AfterValidator(_check_base)] = key(
        "", "mup: the model for which the learning rate was tuned: a preset, a run file, or a table of [model]")

    @property
    def rows(self) -> dict[str, WeightGroup]:
        """The rows by their patterns, in their order."""
        return self.__pydantic_extra__ or {}

    def __iter__(self):
        yield from super().__iter__()
        yield from self.rows.items()


class Optimizer(Section):
    """[optimizer]: the update and the learning-rate schedule."""

    name: OptimizerName = key("adamw", "optimizer")
    learning_rate: float = key(3e-4, "peak learning rate", gt=0)
    b1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    b2: float = key(0.95, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = key(0.1, "decoupled weight decay of matrices", ge=0)
    moments_dtype: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of stored moments, which are the size of the weights; bfloat16: rounded stochastically")
    offload: bool = key(False, "keep moments in host memory; a step copies those of one layer at a time to the device")
    qk_clip: float = key(
        0.0, "after a step, scale down the query and key weights of heads whose scores may exceed this, e.g. 100; the "
        "bound of a score is the log-sum-exp; 0 = off", ge=0)
    groups: WeightGroups = key(
        WeightGroups(), "learning rates, weight decays and rules by the names of weights, e.g. "
                  '{"role:head" = {rate = 0.2, decay = 0.0}}')
    schedule: Schedule = key("cosine", "learning rate after the warm-up")
    warmup_steps: int = key(0, "steps of linear warm-up; may be longer than the run", ge=0)
    decay_steps: int = key(0, "steps of the final decay of wsd; cosine and linear fall until the last step", ge=0)
    final_fraction: float = key(0.1, "final learning rate as a share of the peak", ge=0, le=1)


class Lora(Section):
    """[lora]: adapters are trained, and the model is frozen."""

    rank: int = key(0, "inner width of the adapters; 0 = none, the whole model is trained", ge=0, le=2**20)
    alpha: float = key(16.0, "an adapter's output is multiplied by alpha / rank", gt=0)
    targets: Strings = key(
        (), f"projections with an adapter: any of {', '.join((*LORA_TARGETS, *LORA_EXPERTS))}; empty = all but "
        "those of routed experts", strict=False)
    also: Strings = key((), f"what is trained whole besides the adapters: any of {', '.join(LORA_ALSO)}", strict=False)
    init_from: PathKey = key("", "folder of adapters in PEFT's format that a new run starts from; decides rank, alpha, "
                             "targets and also")
    export: Literal["merged", "adapters"] = key(
        "merged", "content of checkpoint.export: the merged model, or the adapters in PEFT's format")


class Pipeline(Section):
    """[pipeline]: the schedule if mesh.stage is larger than 1."""

    schedule: Literal["auto", *PIPELINE_SCHEDULES] = key("auto", "order of forwards and backwards over the stages")
    chunks: int = key(1, "chunks of layers on each stage (interleaved schedules)", ge=1)


class Context(Section):
    """[context]: how attention reads the other shards of a sequence if mesh.context is larger than 1."""

    method: Literal["ring", "gather", "ulysses"] = key("ring", "how keys and values are exchanged")


class Experts(Section):
    """[experts]: how tokens reach their experts, and how experts are balanced, if model.num_experts is above 0."""

    dispatch: Literal["auto", "gather", "all_to_all"] = key(
        "auto", "gather all tokens over the axes of experts, or send each token to its experts; auto: the one that "
        "sends less")
    aux_loss: float = key(0.01, "weight of the balance loss; 0 = off", ge=0)
    balance: Literal["sequence", "batch"] = key(
        "sequence", "what the balance loss balances: each sequence, or the batches of all replicas together, by the "
                    "experts' shares in the previous step")
    z_loss: float = key(0.0, "weight of the router's squared log-partition; 0 = off", ge=0)
    bias_rate: float = key(0.0, "step of the biases towards experts with too few tokens, e.g. 0.001; 0 = off", ge=0)
    bias_rule: Literal["sign", "error"] = key(
        "sign", "sign: a bias moves by bias_rate; error: by bias_rate times the relative error of its expert's load")
    bias_warmup: int = key(0, "first batches of the run that move only the biases, before the first step", ge=0)


class Distill(Section):
    """[distill]: with training.objective = "distill" the model learns the predictions of a teacher, which is frozen."""

    teacher: PathKey = key("", "the teacher: a model folder with the run's vocabulary, or its address")
    rules: PathKey = key("", "rule file of the teacher; empty = sharding.rules")
    top_tokens: int = key(
        64, "the teacher's most likely tokens that are learned; all others are one class", ge=1, le=4096)
    divergence: Literal["forward", "reverse"] = key(
        "forward", "divergence of teacher and model: forward = KL(teacher, model), reverse = KL(model, teacher)")
    temperature: float = key(1.0, "divides the logits of both; the divergence is multiplied by its square", gt=0)
    weight: float = key(1.0, "weight of the divergence; the next-token loss has the rest, 1 - weight", gt=0, le=1)


class Rl(Section):
    """[rl]: with training.objective = "rl" the model draws answers to prompts, and learns from their rewards."""

    prompts: int = key(64, "prompts per batch, answered with the same weights", ge=1)
    samples: int = key(8, "answers per prompt; they form a group", ge=1)
    lag: int = key(0, "sample batch n with the weights of batch n - lag; above 0, separate processes sample", ge=0)
    max_tokens: int = key(512, "maximum tokens of an answer", ge=1)
    temperature: float = key(1.0, "temperature of sampling and of the trained log-probabilities", ge=1e-6)
    stop: Strings = key((), "strings that end an answer, in addition to the end tokens", strict=False)
    slots: int = key(
        0, "answers that are generated together on all devices; 0 = prompts × samples, or as many as fit", ge=0)
    rules: PathKey = key("", "rule file of the weights during sampling; empty = only tensor splits them")
    reward: PathKey = key(
        "", 'exact, number, choice or regex, against a column of the prompt\'s line; or a function, "rewards.py:score"')
    reward_workers: int = key(0, "scoring processes per host; 0 = half of its cores", ge=0)
    reward_timeout_s: float = key(10.0, "time limit of a score in seconds; its process is then killed", gt=0)
    reward_memory_gb: float = key(2.0, "memory limit of a scoring process", gt=0)
    reward_failures: Literal["drop", "zero", "stop"] = key(
        "drop", "an answer whose score failed: drop it from its group, give it reward 0, or end the run")
    reward_check: float = key(0.01, "share of the answers that are scored twice, to find unstable rewards", ge=0, le=1)
    advantage: Literal["group_std", "group", "loo", "batch_std"] = key(
        "group_std", "reward minus the mean of its group; group_std, batch_std: divided by the deviation of the group "
                     "or batch; loo: minus the mean of the other answers")
    aggregate: Literal["token", "sequence", "constant"] = key(
        "token", "loss: mean over all tokens; or mean over answers of each answer's mean, or of its sum / max_tokens")
    ratio: Literal["token", "sequence", "cispo"] = key(
        "token", "clipped ratio of new to old probabilities: per token, mean of an answer, or as a weight (cispo)")
    clip_low: float = key(0.2, "a ratio is at least 1 - this", ge=0, le=1)
    clip_high: float = key(0.2, "a ratio is at most 1 + this", ge=0)
    ratio_limit: float = key(0.0, "upper limit of the ratio in the unclipped term; 0 = no limit", ge=0)
    dual_clip: float = key(0.0, "upper limit of the loss with a negative advantage, as a multiple of it; 0 = off", ge=0)
    kl: float = key(0.0, "weight of the divergence from the weights that the run started from", ge=0)
    kl_form: Literal["k1", "k2", "k3", "k3_corrected"] = key(
        "k3", "estimate of the divergence: log-ratio, half its square, or exp(x) - x - 1, alone or times the ratio")
    entropy: float = key(0.0, "weight of the entropy bonus per token", ge=0)
    updates: int = key(1, "steps per batch of answers; each uses a part of the batch", ge=1)
    old: Literal["auto", "trainer", "sampler"] = key(
        "auto", "old log-probabilities of the ratios: the trainer's (auto: with updates or a lag), or the sampler's")
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = key(
        "none", "weight for sampler-trainer mismatch: their ratio, truncated at correction_limit, or 0 above it")
    correction_limit: float = key(2.0, "largest ratio of rl.correction", gt=0)
    filter: Literal["none", "equal"] = key(
        "none", "equal: replace groups with equal rewards, which teach nothing, by more prompts")
    truncated: Literal["keep", "mask"] = key("keep", "answers that max_tokens cut off: train on them, or drop them")
    keep: int = key(10, "newest batches of answers kept as text in run.dir/rollouts", ge=1)


class Validation(Section):
    """[validation]: the loss on held-out data."""

    every: int = key(0, "steps between validations; 0 = only after the last", ge=0)
    batches: int = key(8, "global batches per validation, of each source", ge=1)


class Checkpoint(Section):
    """[checkpoint]: what is saved, and the weights that a run starts from."""

    every: int = key(500, "steps between checkpoints; 0 = only after the last", ge=0)
    keep: int = key(2, "number of newest checkpoints to keep", ge=1)
    keep_every: int = key(0, "steps between additional checkpoints kept for ever; a multiple of every; 0 = none", ge=0)
    resume: Literal["auto", "never"] = key(
        "auto", "auto: resume from run.dir's newest checkpoint; never: raise an error if there is one")
    local_every: int = key(
        0, "steps between copies in local_dir, used after a crash if all hosts still have them; 0 = none", ge=0)
    local_dir: PathKey = key("", "directory on each host's own disk or in its memory, e.g. /dev/shm/meshtrain")
    step: int = key(
        0, "step to resume from (later ones are set aside); in a new run, the step of init_from; 0 = newest", ge=0)
    init_from: PathKey = key("",
                             "weights a new run starts from: another run's run.dir, or a folder of Hugging Face's, "
                             "which decides [model]; or the address of either, e.g. hf://OWNER/NAME")
    init_optimizer: bool = key(False, "also load the optimizer's state of init_from")
    export: Literal["off", "last", "every"] = key(
        "off", "write Hugging Face folders run.dir/export/STEP: after the last step, or with every checkpoint")


class Metrics(Section):
    """[metrics]: what a run logs, and where."""

    every: int = key(1, "steps between rows of metrics.jsonl", ge=1)
    tensorboard: bool = key(True, "the rows also as TensorBoard events, in run.dir/tensorboard")
    wandb: str = key("",
                     "project of Weights & Biases to which rows are also logged (with WANDB_MODE=offline in "
                     "run.dir/wandb); empty = none")
    mlflow: str = key("", "experiment of MLflow to which rows are also logged, on the server MLFLOW_TRACKING_URI; "
                          "empty = none")
    prometheus: int = key(0, "port at which process 0 serves the last row to Prometheus, as /metrics; 0 = none", ge=0,
                          le=65535)
    profile_steps: tuple[int, ...] = key(
        (), "first and last step to profile, e.g. [10, 12]; empty = none", strict=False)


class Distributed(Section):
    """[distributed]: this process among several; not needed under a launcher, which sets it (docs/pods.md)."""

    coordinator_address: str = key("", "HOST:PORT of process 0, with a free port; empty = given by the launcher")
    num_processes: int = key(0, "number of processes; 0 = given by the launcher, else one", ge=0)
    process_id: int = key(-1, "index of this process, from 0; -1 = given by the launcher", ge=-1)
    timeout_s: int = key(300, "seconds that processes wait for each other at the start", ge=1)
    heartbeat_timeout_s: int = key(
        30, "seconds without a heartbeat (a debugger, a live migration) before a process counts as lost", ge=10)

    def without_place(self) -> Distributed:
        """Return the section without the keys that identify this process."""
        return Distributed(timeout_s=self.timeout_s, heartbeat_timeout_s=self.heartbeat_timeout_s)


class Run(Section):
    """A complete run file, with derived values filled in."""

    run: Identity = Identity()
    mesh: Mesh = Mesh()
    sharding: Sharding = Sharding()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    pipeline: Pipeline = Pipeline()
    context: Context = Context()
    experts: Experts = Experts()
    distill: Distill = Distill()
    rl: Rl = Rl()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    distributed: Distributed = Distributed()

    def replace(self, **sections: dict) -> Run:
        """Copy the run with these keys set: replace(mesh={"tensor": 2}). Values are not checked."""
        return self.model_copy(update={name: getattr(self, name).model_copy(update=keys)
                                       for name, keys in sections.items()})

    @model_validator(mode="after")
    def _fill_in(self):
        if self.model.max_seq_len == 0 and (self.model.position == "learned" or any(
                self.model.of(mixer).rope_scaling.rope_type == "longrope" for mixer in MIXERS)):
            fill(self, model=self.model.model_copy(update={"max_seq_len": self.data.seq_len}))
        lines_of = {"dpo": "preferences", "rl": "prompts"}.get(self.training.objective)
        if lines_of and self.data.source == "jsonl" and "source" not in self.data.model_fields_set:
            fill(self, data=fill(self.data.model_copy(), source=lines_of))
        if self.model.num_experts and self.experts.bias_rate and self.model.router_bias == "none":
            fill(self, model=self.model.model_copy(update={"router_bias": "choice"}))
        return self
