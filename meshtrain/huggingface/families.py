"""Model families of Hugging Face that can be read and written, as data: tensors, settings, and unsupported features.

`tensors` maps the name of a Hugging Face tensor to our parameters, with the form of `forms`. Placeholders in a name:

    {l}         a layer's number
    {m}, {f}    the number of a layer's mixer or MLP, if each is a layer of its own
    {d}         the number of a depth of MTP, which follows the layers; its parameters are those of mtp_1
    {e}         an expert's number; our parameters stack the experts
    [{e}]       one expert's part of a tensor that has all experts
    {qkv}       q, k and v: three tensors that are read as one

A fused tensor lists its parts in order. Entries for parameters that a layer lacks (a bias, a tied head) are ignored. If
a parameter has several names, the name in the folder is read, and the first one is written. torch Linear weights are
[out, in]; GPT-2's Conv1D is [in, out]. Our rope is half-split.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type of config.json.

    prefix: prefix of tensor names in a model with a head; bare models lack it. keys: key of config.json -> the key of
    [model] that it sets, or several. `a.b` is key b of the table a; `a^p` sets a to the value to the power p; `a*b` and
    `a+b` set a to the value times or plus our b; `a?x:y` sets a to x for true and y for false. Values from `keys` take
    precedence over `fixed`. defaults: the class's values of absent keys (null is a value). multiples: key -> (other
    key, n): a null or absent key is n times the other. fixed: keys of [model] that the architecture fixes. only: key ->
    supported values, the first of which is written; empty: any value. layers: type of a layer -> letter of its mixer;
    without a list of layers, every n-th layer has the last type (n = `every`; 0: none). aliases: other name -> key, if
    the class reads both names.
    """
    model_type: str
    architecture: str
    prefix: str
    tensors: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, str]
    defaults: Mapping[str, object]
    fixed: Mapping[str, object]
    only: Mapping[str, tuple]
    multiples: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    layers: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"full_attention": "F"})
    every: int = 0
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_sublayers(self) -> bool:
        """Whether mixers and MLPs are layers of their own, each with a number."""
        return "layers_block_type" in self.defaults


def _rows(where: str, **rows: str | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the tensors of one module: name -> forms. `.weight` is added to a name unless it ends with _, and a __ in
    it becomes a dot."""
    return {where + (name[:-1] if name.endswith("_") else f"{name}.weight").replace("__", "."):
            (texts,) if isinstance(texts, str) else texts for name, texts in rows.items()}


def _mlp(where: str, ours: str, width: str = "F", names: tuple = ("gate_proj", "up_proj", "down_proj")) -> dict:
    """Return the matrices of an MLP or of one expert. names: the names of gate, up and down, or only of up and down."""
    tail = "" if width == "W" else "/kernel"
    forms = (f"gate{tail}: {width} D -> D {width}", f"up{tail}: {width} D -> D {width}",
             f"down{tail}: D {width} -> {width} D")
    return _rows(where, **{name: f"{ours}/{form}" for name, form in zip(names, forms[-len(names):])})


def _without(table: Mapping, *parts: str) -> dict:
    """Return a table without the names that contain one of these parts."""
    return {name: ours for name, ours in table.items() if not any(part in name for part in parts)}


def _less(table: Mapping, *names: str) -> dict:
    return {name: value for name, value in table.items() if name not in names}


# ---- tensors ---------------------------------------------------------------------------------------------------------

LAYER = "model.layers.{l}."
ENDS = _rows("", model__embed_tokens="embedding/table: V D -> V D", model__norm="final_norm/scale: D -> D",
             lm_head="head/kernel: V D -> D V")
ATTENTION = _rows(
    LAYER + "self_attn.", q_proj="layers/attention/query/kernel: (N H) D -> D N H",
    k_proj="layers/attention/key/kernel: (K H) D -> D K H", v_proj="layers/attention/value/kernel: (K H) D -> D K H",
    o_proj="layers/attention/out/kernel: D (N H) -> N H D", q_proj__bias_="layers/attention/query/bias: (N H) -> N H",
    k_proj__bias_="layers/attention/key/bias: (K H) -> K H", v_proj__bias_="layers/attention/value/bias: (K H) -> K H",
    o_proj__bias_="layers/attention/out/bias: D -> D")
HEAD_NORMS = _rows(LAYER + "self_attn.", q_norm="layers/attention/query_norm/scale: H -> H",
                   k_norm="layers/attention/key_norm/scale: H -> H")
NORMS_OVER_HEADS = _rows(LAYER + "self_attn.", q_norm="layers/attention/query_norm/scale: (N H) -> N H",
                         k_norm="layers/attention/key_norm/scale: (K H) -> K H")
NORMS = _rows(LAYER, input_layernorm="layers/attention_norm/scale: D -> D",
              post_attention_layernorm="layers/mlp_norm/scale: D -> D")
POST_NORMS = _rows(LAYER, post_attention_layernorm="layers/attention_post_norm/scale: D -> D",
                   post_feedforward_layernorm="layers/mlp_post_norm/scale: D -> D")
BOTH_NORMS = POST_NORMS | _rows(LAYER, input_layernorm="layers/attention_norm/scale: D -> D",
                                pre_feedforward_layernorm="layers/mlp_norm/scale: D -> D")
DENSE = _mlp(LAYER + "mlp.", "layers/mlp") | _rows(
    LAYER + "mlp.", gate_proj__bias_="layers/mlp/gate/bias: F -> F", up_proj__bias_="layers/mlp/up/bias: F -> F",
    down_proj__bias_="layers/mlp/down/bias: D -> D")
WITHOUT_MLP = ENDS | ATTENTION | NORMS | HEAD_NORMS
LLAMA_TENSORS = WITHOUT_MLP | DENSE
W123 = ("w1", "w3", "w2")
# Each expert has a tensor, as transformers writes them, or one tensor has all, as in its memory and in some folders.
ALL_EXPERTS = {
    LAYER + "mlp.experts.gate_up_proj[{e}]": ("layers/moe/gate: *W D -> D W", "layers/moe/up: *W D -> D W"),
    LAYER + "mlp.experts.down_proj[{e}]": ("layers/moe/down: D W -> W D",)}
MIXTRAL_TENSORS = WITHOUT_MLP | _rows(LAYER + "block_sparse_moe.", gate="layers/moe/router: E D -> D E") | _mlp(
    LAYER + "block_sparse_moe.experts.{e}.", "layers/moe", "W", W123) | ALL_EXPERTS
EXPERTS = _mlp(LAYER + "mlp.experts.{e}.", "layers/moe", "W") | _rows(
    LAYER + "mlp.", gate="layers/moe/router: E D -> D E") | ALL_EXPERTS
QWEN3_MOE_TENSORS = LLAMA_TENSORS | EXPERTS
FUSED_QKV = _rows(LAYER + "self_attn.", qkv_proj=(
    "layers/attention/query/kernel: *(N H) D -> D N H", "layers/attention/key/kernel: *(K H) D -> D K H",
    "layers/attention/value/kernel: *(K H) D -> D K H"))
FUSED_MLP = _rows(LAYER + "mlp.", gate_up_proj=(
    "layers/mlp/gate/kernel: *F D -> D F", "layers/mlp/up/kernel: *F D -> D F"),
    down_proj="layers/mlp/down/kernel: D F -> F D")
PHI3_TENSORS = _without(WITHOUT_MLP, ".q_proj", ".k_proj", ".v_proj") | FUSED_QKV | FUSED_MLP
# Pairs of the rope are neighbours.
GLM4_TENSORS = ENDS | ATTENTION | FUSED_MLP | _rows(
    LAYER, input_layernorm="layers/attention_norm/scale: D -> D",
    post_self_attn_layernorm="layers/attention_post_norm/scale: D -> D",
    post_attention_layernorm="layers/mlp_norm/scale: D -> D",
    post_mlp_layernorm="layers/mlp_post_norm/scale: D -> D") | {
    f"{LAYER}self_attn.{name}_proj.{kind}": tuple(
        f"layers/attention/{ours}/{kind_}: ({N} {part}){D} ->{D} {N} {turned}"
        for part, turned in (("*(p 2)", "*(2 p)"), ("*z", "*z")))
    for name, ours, N in (("q", "query", "N"), ("k", "key", "K"))
    for kind, kind_, D in (("weight", "kernel", " D"), ("bias", "bias", ""))}
# Queries are projected from their latent or, without one, from the layer's input.
LATENT = _rows(
    LAYER + "self_attn.", q_a_proj="layers/attention/query_down/kernel: Q D -> D Q",
    q_a_layernorm="layers/attention/query_latent_norm/scale: Q -> Q",
    q_b_proj=("layers/attention/query/kernel: (N *P) Q -> Q N *P",
              "layers/attention/query/kernel: (N *(r 2)) Q -> Q N *(2 r)"),
    q_proj=("layers/attention/query/kernel: (N *P) D -> D N *P",
            "layers/attention/query/kernel: (N *(r 2)) D -> D N *(2 r)"),
    kv_a_proj_with_mqa=("layers/attention/latent/kernel: *L D -> D L",
                        "layers/attention/key_rope/kernel: *(r 2) D -> D (2 r)"),
    kv_a_layernorm="layers/attention/latent_norm/scale: L -> L",
    kv_b_proj=("layers/attention/key/kernel: (N *P) L -> L N P", "layers/attention/value/kernel: (N *U) L -> L N U"),
    o_proj="layers/attention/out/kernel: D (N U) -> N U D")
CHOICE = {LAYER + "mlp.gate.e_score_correction_bias": ("layers/moe/bias: E -> E",)}
SHARED = _mlp(LAYER + "mlp.shared_experts.", "layers/moe/shared", "S")


def _with_depth(tensors: dict, where: str, layer: Mapping[str, str], embedding_norm: str, hidden_norm: str, merge: str,
                norm: str) -> dict:
    """Return the table and the tensors of one MTP depth. The depth's layer has the tensor names of the model's layers.

    where: prefix of the depth's own tensors. layer: prefix of a model's layer -> that of the depth's layer. merge
    multiplies [embedding, state].
    """
    norms = {embedding_norm: "embedding_norm", hidden_norm: "hidden_norm", norm: "norm"}
    halves = (f"{DEPTH}from_embedding/kernel: M *D -> D M", f"{DEPTH}from_hidden/kernel: M *D -> D M")
    return tensors | {f"{where}{merge}.weight": halves} | _rows(
        where, **{name: f"{DEPTH}{ours}/scale: D -> D" for name, ours in norms.items()}) | {
        name.replace(theirs, there): tuple(text.replace("layers/", f"{DEPTH}layer/") for text in texts)
        for theirs, there in layer.items() for name, texts in tensors.items() if name.startswith(theirs)}


DEPTH = "mtp_1/"
FURTHER = "model.layers.{d}."
AS_DEEPSEEK_DEPTH = (FURTHER, {LAYER: FURTHER}, "enorm", "hnorm", "eh_proj", "shared_head__norm")
# Its norms and the merge are shared by further depths, which no published folder has.
AS_QWEN_DEPTH = ("mtp.", {LAYER: "mtp.layers.0."}, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
GLM4_MOE_TENSORS = _with_depth(LLAMA_TENSORS | EXPERTS | CHOICE | SHARED, *AS_DEEPSEEK_DEPTH)
DEEPSEEK_TENSORS = _with_depth(ENDS | NORMS | LATENT | DENSE | EXPERTS | CHOICE | SHARED, *AS_DEEPSEEK_DEPTH)
MINIMAX_TENSORS = MIXTRAL_TENSORS | NORMS_OVER_HEADS | {
    LAYER + "block_sparse_moe.e_score_correction_bias": ("layers/moe/bias: E -> E",)}
# Gate and up are every other column; blocks and scales (MXFP4) are transposed.
GPT_OSS_TENSORS = ENDS | ATTENTION | NORMS | {
    LAYER + "self_attn.sinks": ("layers/attention/sinks: N -> N",),
    LAYER + "mlp.router.weight": ("layers/moe/router: E D -> D E",),
    LAYER + "mlp.router.bias": ("layers/moe/router_bias: E -> E",),
    LAYER + "mlp.experts.gate_up_proj[{e}]": ("layers/moe/gate: D (W *1) -> D W", "layers/moe/up: D (W *1) -> D W"),
    LAYER + "mlp.experts.gate_up_proj_blocks[{e}]": (
        "layers/moe/gate: (W *1) D -> D W", "layers/moe/up: (W *1) D -> D W"),
    LAYER + "mlp.experts.gate_up_proj_bias": (
        "layers/moe/gate_bias: E (W *1) -> E W", "layers/moe/up_bias: E (W *1) -> E W"),
    LAYER + "mlp.experts.down_proj[{e}]": ("layers/moe/down: W D -> W D",),
    LAYER + "mlp.experts.down_proj_blocks[{e}]": ("layers/moe/down: D W -> W D",),
    LAYER + "mlp.experts.down_proj_bias": ("layers/moe/down_bias: E D -> E D",)}
# The gate of attention is in the query projection, after each head.
GATED_ATTENTION = _rows(LAYER + "self_attn.", q_proj=(
    "layers/attention/query/kernel: (N *H) D -> D N H", "layers/attention/gate/kernel: (N *H) D -> D N H"))
DECAY = {"A_log_": "layers/linear/A_log: n -> n", "dt_bias_": "layers/linear/dt_bias: n -> n"}
CONVS = ("layers/linear/query_conv/kernel: *(k d) 1 w -> w k d", "layers/linear/key_conv/kernel: *(k d) 1 w -> w k d",
         "layers/linear/value_conv/kernel: *(n v) 1 w -> w n v")
DELTA = _rows(LAYER + "linear_attn.", **DECAY, norm="layers/linear/norm/scale: v -> v",
              out_proj="layers/linear/out/kernel: D (n v) -> n v D", conv1d=CONVS)
QWEN3_5_TENSORS = LLAMA_TENSORS | GATED_ATTENTION | DELTA | _rows(
    LAYER + "linear_attn.", in_proj_qkv=(
        "layers/linear/query/kernel: *(k d) D -> D k d", "layers/linear/key/kernel: *(k d) D -> D k d",
        "layers/linear/value/kernel: *(n v) D -> D n v"),
    in_proj_z="layers/linear/gate/kernel: (n v) D -> D n v", in_proj_b="layers/linear/beta/kernel: n D -> D n",
    in_proj_a="layers/linear/decay/kernel: n D -> D n")
SHARED_GATED = _mlp(LAYER + "mlp.shared_expert.", "layers/moe/shared", "S") | _rows(
    LAYER + "mlp.", shared_expert_gate="layers/moe/shared_gate/kernel: 1 D -> D 1")
QWEN3_5_MOE_TENSORS = _with_depth(QWEN3_5_TENSORS | EXPERTS | SHARED_GATED, *AS_QWEN_DEPTH)
QWEN3_5_TENSORS = _with_depth(QWEN3_5_TENSORS, *AS_QWEN_DEPTH)
QWEN3_NEXT_TENSORS = _without(QWEN3_5_MOE_TENSORS, ".in_proj_") | _rows(
    LAYER + "linear_attn.", in_proj_qkvz=(       # all of one key head, then all of the next
        "layers/linear/query/kernel: (k *d) D -> D k d", "layers/linear/key/kernel: (k *d) D -> D k d",
        "layers/linear/value/kernel: (k *(g v)) D -> D (k g) v",
        "layers/linear/gate/kernel: (k *(g v)) D -> D (k g) v"),
    in_proj_ba=("layers/linear/beta/kernel: (k *g) D -> D (k g)", "layers/linear/decay/kernel: (k *g) D -> D (k g)"))
APART = {"q_proj": "layers/linear/query/kernel: (k d) D -> D k d",
         "k_proj": "layers/linear/key/kernel: (k d) D -> D k d",
         "v_proj": "layers/linear/value/kernel: (n v) D -> D n v", "b_proj": "layers/linear/beta/kernel: n D -> D n",
         "o_norm": "layers/linear/norm/scale: v -> v", "o_proj": "layers/linear/out/kernel: D (n v) -> n v D"}
# Norms before linear layers, after the others.
OLMO_HYBRID_TENSORS = ENDS | ATTENTION | DENSE | NORMS_OVER_HEADS | POST_NORMS | _rows(
    LAYER, attention_layer_norm="layers/attention_norm/scale: D -> D",
    feedforward_layer_norm="layers/mlp_norm/scale: D -> D") | _rows(
    "model.layers.{m}.", feedforward_layer_norm="layers/attention_post_norm/scale: D -> D") | _rows(   # as 5.23 writes
    LAYER + "linear_attn.", **APART, **DECAY, a_proj="layers/linear/decay/kernel: n D -> D n",
    g_proj="layers/linear/gate/kernel: (n v) D -> D n v") | {
    LAYER + "linear_attn.{qkv}_conv1d.weight": CONVS}
KIMI_TENSORS = ENDS | NORMS | LATENT | _rows(
    "model.layers.{m}.self_attn.", **APART, A_log_="layers/linear/A_log: 1 1 n 1 -> n",
    dt_bias_="layers/linear/dt_bias: (n d) -> n d", f_a_proj="layers/linear/decay_down/kernel: a D -> D a",
    f_b_proj="layers/linear/decay/kernel: (n d) a -> a n d", g_a_proj="layers/linear/gate_down/kernel: a D -> D a",
    g_b_proj="layers/linear/gate/kernel: (n v) a -> a n v",
    **{f"{one}_conv1d": text.replace("*", "") for one, text in zip("qkv", CONVS)}) | _rows(
    LAYER + "block_sparse_moe.", gate="layers/moe/router: E D -> D E",
    gate__e_score_correction_bias_="layers/moe/bias: E -> E") | _mlp(
    LAYER + "block_sparse_moe.experts.{e}.", "layers/moe", "W", W123) | _mlp(
    LAYER + "block_sparse_moe.shared_experts.", "layers/moe/shared", "S") | _mlp(
    LAYER + "mlp.", "layers/mlp") | _mlp(LAYER + "block_sparse_moe.", "layers/mlp")


def _mamba(where: str) -> dict:
    """Return the tensors of Mamba-2. One projection has gate, x, B, C and time step."""
    return _rows(
        where, **DECAY, D_="layers/linear/skip: n -> n", norm="layers/linear/norm/scale: (n v) -> n v",
        out_proj="layers/linear/out/kernel: D (n v) -> n v D", in_proj=(
            "layers/linear/gate/kernel: *(n v) D -> D n v", "layers/linear/value/kernel: *(n v) D -> D n v",
            "layers/linear/key/kernel: *(k d) D -> D k d", "layers/linear/query/kernel: *(k d) D -> D k d",
            "layers/linear/decay/kernel: *n D -> D n"),
        conv1d=CONVS[::-1],
        conv1d__bias_=("layers/linear/value_conv/bias: *(n v) -> n v", "layers/linear/key_conv/bias: *(k d) -> k d",
                       "layers/linear/query_conv/bias: *(k d) -> k d"))


# Without experts the shared MLP is the only one.
GRANITE_HYBRID_TENSORS = ENDS | ATTENTION | NORMS | _mamba(LAYER + "mamba.") | _rows(
    LAYER, block_sparse_moe__router__layer="layers/moe/router: E D -> D E", shared_mlp__input_linear=(
        "layers/moe/shared/gate/kernel: *S D -> D S", "layers/moe/shared/up/kernel: *S D -> D S"),
    shared_mlp__output_linear="layers/moe/shared/down/kernel: D S -> S D") | _rows(
    "model.layers.{f}.shared_mlp.", input_linear=(
        "layers/mlp/gate/kernel: *F D -> D F", "layers/mlp/up/kernel: *F D -> D F"),
    output_linear="layers/mlp/down/kernel: D F -> F D") | {
    LAYER + "block_sparse_moe.input_linear.weight[{e}]": ("layers/moe/gate: *W D -> D W", "layers/moe/up: *W D -> D W"),
    LAYER + "block_sparse_moe.output_linear.weight[{e}]": ("layers/moe/down: D W -> W D",)}
TWO = ("up_proj", "down_proj")
NEMOTRON_TENSORS = _with_depth(_rows(
    "", backbone__embeddings="embedding/table: V D -> V D", backbone__norm_f="final_norm/scale: D -> D",
    lm_head="head/kernel: V D -> D V", **{"backbone__layers__{m}__norm": "layers/attention_norm/scale: D -> D",
                                          "backbone__layers__{f}__norm": "layers/mlp_norm/scale: D -> D"}) | {
    name.replace(LAYER + "self_attn.", "backbone.layers.{m}.mixer."): ours
    for name, ours in _without(ATTENTION, ".bias").items()} | _mamba("backbone.layers.{m}.mixer.") | _mlp(
    "backbone.layers.{f}.mixer.", "layers/mlp", "F", TWO) | _mlp(
    "backbone.layers.{f}.mixer.experts.{e}.", "layers/moe", "W", TWO) | _mlp(
    "backbone.layers.{f}.mixer.shared_experts.", "layers/moe/shared", "S", TWO) | {
    "backbone.layers.{f}.mixer.gate.weight": ("layers/moe/router: E D -> D E",),
    "backbone.layers.{f}.mixer.gate.e_score_correction_bias": ("layers/moe/bias: E -> E",)}, "mtp.layers.", {
        "backbone.layers.{m}.": "mtp.layers.0.", "backbone.layers.{f}.": "mtp.layers.1."},
    "0__enorm", "0__hnorm", "0.eh_proj", "1__final_layernorm")
GEMMA3_TENSORS = ENDS | ATTENTION | HEAD_NORMS | BOTH_NORMS | DENSE
GEMMA4_TENSORS = GEMMA3_TENSORS | {LAYER + "layer_scalar": ("layers/layer_scale: 1 -> 1",)}
OLMO2_TENSORS = ENDS | ATTENTION | DENSE | NORMS_OVER_HEADS | POST_NORMS
BLOCK = "transformer.h.{l}."
GPT2_TENSORS = _rows(
    "", transformer__wte="embedding/table: V D -> V D", transformer__wpe="position/table: C D -> C D",
    transformer__ln_f="final_norm/scale: D -> D", transformer__ln_f__bias_="final_norm/bias: D -> D",
    lm_head="head/kernel: V D -> D V") | _rows(
    BLOCK, ln_1="layers/attention_norm/scale: D -> D", ln_1__bias_="layers/attention_norm/bias: D -> D",
    ln_2="layers/mlp_norm/scale: D -> D", ln_2__bias_="layers/mlp_norm/bias: D -> D", attn__c_attn=(
        "layers/attention/query/kernel: D *(N H) -> D N H", "layers/attention/key/kernel: D *(K H) -> D K H",
        "layers/attention/value/kernel: D *(K H) -> D K H"), attn__c_attn__bias_=(
        "layers/attention/query/bias: *(N H) -> N H", "layers/attention/key/bias: *(K H) -> K H",
        "layers/attention/value/bias: *(K H) -> K H"),
    attn__c_proj="layers/attention/out/kernel: (N H) D -> N H D",
    attn__c_proj__bias_="layers/attention/out/bias: D -> D",
    mlp__c_fc="layers/mlp/up/kernel: D F -> D F", mlp__c_fc__bias_="layers/mlp/up/bias: F -> F",
    mlp__c_proj="layers/mlp/down/kernel: F D -> F D", mlp__c_proj__bias_="layers/mlp/down/bias: D -> D")

# ---- settings --------------------------------------------------------------------------------------------------------

KEYS = {
    "vocab_size": "vocab_size", "hidden_size": "embed_dim", "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
    "intermediate_size": "mlp_dim", "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings",
}
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
FIXED = {"norm": "rmsnorm", "norm_placement": "before", "norm_offset": 0.0, "activation": "swiglu",
         "position": "rope", "qk_norm": "off", "attention_bias": "none", "attention_gate": False,
         "attention_sinks": False, "tie_values": False, "layer_scale": False, "mlp_bias": False,
         "window": 0, "score_softcap": 0.0, "logit_softcap": 0.0, "num_experts": 0}
ONLY = {"hidden_act": ("silu",)}
NO_BIAS, NO_WINDOW, ANY = {"attention_bias": (False,)}, {"use_sliding_window": (False,)}, ()
WINDOW = {"sliding_window": "window"}
SLIDING = {"sliding_attention": "W", "full_attention": "F"}
BIAS = {"attention_bias": "attention_bias?all:none"}

LLAMA = Family(
    "llama", "LlamaForCausalLM", "model.", LLAMA_TENSORS, KEYS | BIAS | {"mlp_bias": "mlp_bias"},
    DEFAULTS | {"mlp_bias": False, "attention_bias": False}, FIXED, ONLY)
MISTRAL = Family(
    "mistral", "MistralForCausalLM", "model.", LLAMA_TENSORS, KEYS | WINDOW,
    DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}, FIXED, ONLY)
MINISTRAL = dataclasses.replace(MISTRAL, model_type="ministral", architecture="MinistralForCausalLM", layers=SLIDING)
MINISTRAL3 = dataclasses.replace(
    MISTRAL, model_type="ministral3", architecture="Ministral3ForCausalLM",
    defaults=MISTRAL.defaults | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": None,
                                 "llama_4_scaling_beta": None})
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", "model.", LLAMA_TENSORS, KEYS, DEFAULTS | {"num_key_value_heads": 32},
    FIXED | {"attention_bias": "qkv"}, ONLY | NO_WINDOW)
SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM", "model.", LLAMA_TENSORS, KEYS,
    DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}, FIXED | {"attention_bias": "qkv"},
    ONLY | {"attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)})
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", "model.", LLAMA_TENSORS, KEYS, DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    FIXED | {"qk_norm": "head"}, ONLY | NO_WINDOW | NO_BIAS)
SMOLLM3 = Family(
    "smollm3", "SmolLM3ForCausalLM", "model.", LLAMA_TENSORS, KEYS,
    DEFAULTS | {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layers": None},
    FIXED, ONLY | NO_WINDOW | NO_BIAS | {"mlp_bias": (False,)})
PHI3 = Family(
    "phi3", "Phi3ForCausalLM", "model.", PHI3_TENSORS, KEYS | WINDOW,
    DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None, "partial_rotary_factor": 1.0}, FIXED, ONLY)
GLM4 = Family(
    "glm4", "Glm4ForCausalLM", "model.", GLM4_TENSORS, KEYS | {"attention_bias": "attention_bias?qkv:none"},
    DEFAULTS | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
                "partial_rotary_factor": 0.5}, FIXED | {"norm_placement": "both"}, ONLY)
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", "model.", OLMO2_TENSORS, KEYS, DEFAULTS | {"rms_norm_eps": 1e-5},
    FIXED | {"norm_placement": "after", "qk_norm": "all_heads"}, ONLY | NO_BIAS)
OLMO3 = dataclasses.replace(
    OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", keys=KEYS | WINDOW, layers=SLIDING, every=4,
    defaults=OLMO2.defaults | {"rope_theta": 5e5, "sliding_window": 4096, "rope_local_base_freq": None})
EXAONE4 = Family(
    "exaone4", "Exaone4ForCausalLM", "model.", OLMO2_TENSORS | HEAD_NORMS, KEYS | WINDOW,
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
    FIXED | {"norm_placement": "after", "qk_norm": "head"}, ONLY,
    layers={"sliding_attention": "W", "full_attention": "N"}, every=4)
# Gemma's first releases call the tanh form gelu.
TANH = ("gelu_pytorch_tanh", "gelu")
SCALED_EMBEDDING = {"hidden_size": "embed_dim multipliers.embedding^0.5"}
GEMMA = Family(
    "gemma", "GemmaForCausalLM", "model.", LLAMA_TENSORS, KEYS | SCALED_EMBEDDING,
    DEFAULTS | {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": TANH[0]},
    FIXED | {"activation": "geglu", "norm_offset": 1.0},
    NO_BIAS | {"hidden_act": TANH, "hidden_activation": TANH[:1], "use_bidirectional_attention": (False,)})
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", "model.", GEMMA3_TENSORS,
    GEMMA.keys | WINDOW | {"query_pre_attn_scalar": "multipliers.score^-0.5",
                           "attn_logit_softcapping": "score_softcap", "final_logit_softcapping": "logit_softcap"},
    GEMMA.defaults | {"num_key_value_heads": 4, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
                      "query_pre_attn_scalar": 256, "vocab_size": 262208, "num_attention_heads": 8},
    GEMMA.fixed | {"norm_placement": "both", "qk_norm": "head"}, GEMMA.only, layers=SLIDING, every=6)
GEMMA2 = dataclasses.replace(
    GEMMA3, model_type="gemma2", architecture="Gemma2ForCausalLM", tensors=_without(GEMMA3_TENSORS, "_norm.weight"),
    defaults=_less(GEMMA3.defaults, "rope_local_base_freq") | {
        "rope_theta": 1e4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fixed=GEMMA3.fixed | {"qk_norm": "off"}, every=2, aliases={"sliding_window_size": "sliding_window"})
GEMMA4 = Family(
    "gemma4_text", "Gemma4ForCausalLM", "model.", GEMMA4_TENSORS,
    GEMMA.keys | WINDOW | {"final_logit_softcapping": "logit_softcap", "global_head_dim": "kinds.F.head_dim",
                           "num_global_key_value_heads": "kinds.F.num_kv_heads",
                           "attention_k_eq_v": "kinds.F.tie_values"},
    GEMMA.defaults | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512,
                      "rope_theta": 1e6, "rope_local_base_freq": 1e4, "global_head_dim": 512,
                      "attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "rope_parameters": {
                          "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                             "rope_theta": 1e6},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    GEMMA.fixed | {"norm_offset": 0.0, "norm_placement": "both", "qk_norm": "head_and_values", "layer_scale": True,
                   "multipliers.score": 1.0},
    NO_BIAS | {"hidden_activation": TANH[:1], "hidden_size_per_layer_input": (0, None), "enable_moe_block": (False,),
               "num_kv_shared_layers": (0,), "use_double_wide_mlp": (False,), "num_experts": (None,),
               "use_bidirectional_attention": (None, "vision"), "vocab_size_per_layer_input": ANY},
    layers=SLIDING, every=6)
GRANITE_FACTORS = {"embedding_multiplier": "multipliers.embedding", "residual_multiplier": "multipliers.residual",
                   "attention_multiplier": "multipliers.score", "logits_scaling": "multipliers.logits^-1"}
GRANITE = Family(
    "granite", "GraniteForCausalLM", "model.", LLAMA_TENSORS, LLAMA.keys | GRANITE_FACTORS,
    LLAMA.defaults | dict.fromkeys(GRANITE_FACTORS, 1.0), FIXED, ONLY)
GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", "transformer.", GPT2_TENSORS,
    {"vocab_size": "vocab_size", "n_embd": "embed_dim", "n_layer": "num_layers", "n_head": "num_heads",
     "n_positions": "max_seq_len", "n_inner": "mlp_dim", "layer_norm_epsilon": "norm_eps",
     "tie_word_embeddings": "tie_embeddings"},
    {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    FIXED | {"norm": "layernorm", "activation": "gelu", "position": "learned", "attention_bias": "all",
             "mlp_bias": True},
    {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
     "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    multiples={"n_inner": ("n_embd", 4)})

# ---- experts ---------------------------------------------------------------------------------------------------------

# intermediate_size is the width of experts in ALL_ROUTED, of dense layers elsewhere.
ROUTED = FIXED | {
    "router_score": "softmax", "router_normalize": True, "router_scale": 1.0, "router_groups": (),
    "router_bias": "none", "shared_expert_dim": 0, "shared_expert_gate": False}
ALL_ROUTED = KEYS | {"intermediate_size": "expert_mlp_dim", "num_experts_per_tok": "experts_per_token"}
CHOSEN = {"num_experts_per_tok": "experts_per_token", "num_experts": "num_experts",
          "moe_intermediate_size": "expert_mlp_dim"}
MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", "model.", MIXTRAL_TENSORS,
    ALL_ROUTED | WINDOW | {"num_local_experts": "num_experts"},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "sliding_window": None,
                "num_local_experts": 8, "rope_theta": 1e6}, ROUTED, ONLY)
NORMALIZED = {"norm_topk_prob": "router_normalize"}
OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", "model.", WITHOUT_MLP | NORMS_OVER_HEADS | EXPERTS,
    ALL_ROUTED | NORMALIZED | {"num_experts": "num_experts"},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
    ROUTED | {"qk_norm": "all_heads"}, ONLY | NO_BIAS | {"clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"})
SPARSE_STEP = {"mlp_only_layers": [], "decoder_sparse_step": 1}
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", "model.", QWEN3_MOE_TENSORS, KEYS | CHOSEN | NORMALIZED,
    DEFAULTS | SPARSE_STEP | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "num_experts": 128,
                              "norm_topk_prob": False, "moe_intermediate_size": 768},
    ROUTED | {"qk_norm": "head"}, ONLY | NO_BIAS | NO_WINDOW, aliases={"num_local_experts": "num_experts"})
QWEN3_VL = dataclasses.replace(QWEN3, model_type="qwen3_vl_text")
GROUPS = {"n_group": "router_groups.0", "topk_group": "router_groups.1"}
# A sigmoid with a bias chooses the experts, in some models by groups; a shared expert is added.
SIGMOID = ROUTED | {"router_score": "sigmoid", "router_bias": "choice"}
DEEPSEEK_EXPERTS = _less(CHOSEN, "num_experts") | NORMALIZED | GROUPS | {
    "n_routed_experts": "num_experts", "routed_scaling_factor": "router_scale",
    "n_shared_experts": "shared_expert_dim*expert_mlp_dim"}
AS_DEEPSEEK = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,), "ep_size": ANY}
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", "model.", GLM4_MOE_TENSORS,
    KEYS | DEEPSEEK_EXPERTS | {"attention_bias": "attention_bias?qkv:none", "use_qk_norm": "qk_norm?head:off"},
    DEFAULTS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False,
                "partial_rotary_factor": 0.5, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
                "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1, "norm_topk_prob": True}, SIGMOID, ONLY | AS_DEEPSEEK)
LATENTS = {"q_lora_rank": "latent.query_dim", "kv_lora_rank": "latent.kv_dim", "qk_rope_head_dim": "latent.rope_dim",
           "v_head_dim": "latent.value_dim", "qk_nope_head_dim": "head_dim+latent.rope_dim"}
DEEPSEEK = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", "model.", DEEPSEEK_TENSORS,
    _less(KEYS, "head_dim") | LATENTS | DEEPSEEK_EXPERTS,
    DEFAULTS | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
                "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
                "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
                "qk_nope_head_dim": 128, "moe_intermediate_size": 2048, "num_key_value_heads": None},
    SIGMOID | {"multipliers.score": "mscale"},
    ONLY | NO_BIAS | AS_DEEPSEEK | {"rope_interleave": (True,), "head_dim": ANY, "qk_head_dim": ANY})
KIMI_K2 = dataclasses.replace(DEEPSEEK, model_type="kimi_k2")
GLM4_LITE = dataclasses.replace(
    DEEPSEEK, model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM",
    defaults=_less(DEEPSEEK.defaults, "first_k_dense_replace") | {
        "rms_norm_eps": 1e-5, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"], "q_lora_rank": 768, "v_head_dim": 256,
        "qk_nope_head_dim": 192, "moe_intermediate_size": 1536})
MINIMAX = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM", "model.", MINIMAX_TENSORS,
    ALL_ROUTED | {"num_local_experts": "num_experts"},
    DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256,
                "rope_theta": 5e6, "partial_rotary_factor": 1.0},
    SIGMOID | {"qk_norm": "all_heads"},
    ONLY | {"scoring_func": ("sigmoid",), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",),
            "use_routing_bias": (True,), "shared_intermediate_size": (0,), "sliding_window": (None,)} | dict.fromkeys(
        ("attn_type_list", "mlp_intermediate_size", "shared_moe_mode", "layernorm_full_attention_beta",
         "layernorm_linear_attention_beta", "layernorm_mlp_beta"), ANY))
GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM", "model.", GPT_OSS_TENSORS,
    ALL_ROUTED | WINDOW | BIAS | {"num_local_experts": "num_experts"},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
                "num_local_experts": 128, "attention_bias": True, "sliding_window": 128, "rope_theta": 150000.0},
    ROUTED | {
        "activation": "swiglu_clamped", "attention_sinks": True, "mlp_bias": True, "router_bias": "logits"},
    ONLY | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,), "experts_per_token": ANY, "initial_context_length": ANY},
    layers=SLIDING, every=2)

# ---- recurrent mixers ------------------------------------------------------------------------------------------------

RECURRENT = {"linear_attention": "G", "full_attention": "F"}
DELTA_KEYS = {"linear_num_key_heads": "linear.key_heads", "linear_num_value_heads": "linear.value_heads",
              "linear_key_head_dim": "linear.key_dim", "linear_value_head_dim": "linear.value_dim",
              "linear_conv_kernel_dim": "linear.conv_width"}
DELTA_DEFAULTS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                  "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
GATED = {"qk_norm": "head", "attention_gate": True, "norm_offset": 1.0}
QWEN3_5 = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", "model.", QWEN3_5_TENSORS, KEYS | DELTA_KEYS,
    DEFAULTS | DELTA_DEFAULTS | {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    FIXED | GATED, ONLY | NO_BIAS | {"attn_output_gate": (True,), "output_gate_type": ANY, "mlp_only_layers": ([],)},
    layers=RECURRENT, every=4)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5, model_type="qwen3_5_moe_text", architecture="Qwen3_5MoeForCausalLM", tensors=QWEN3_5_MOE_TENSORS,
    keys=_less(QWEN3_5.keys, "intermediate_size") | CHOSEN | {
        "shared_expert_intermediate_size": "shared_expert_dim"},
    defaults=QWEN3_5.defaults | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
                                 "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    fixed=ROUTED | GATED | {"shared_expert_gate": True},
    only=QWEN3_5.only | {"intermediate_size": ANY, "decoder_sparse_step": (1,), "norm_topk_prob": (True,)})
QWEN3_NEXT = dataclasses.replace(
    QWEN3_5_MOE, model_type="qwen3_next", architecture="Qwen3NextForCausalLM", tensors=QWEN3_NEXT_TENSORS,
    keys=QWEN3_5_MOE.keys | NORMALIZED | {"intermediate_size": "mlp_dim"},
    defaults=QWEN3_5_MOE.defaults | SPARSE_STEP | {"num_experts": 512, "num_experts_per_tok": 10,
                                                   "norm_topk_prob": True},
    only=QWEN3_5.only | {"mlp_only_layers": ANY})
OLMO_HYBRID = Family(
    "olmo_hybrid", "OlmoHybridForCausalLM", "model.", OLMO_HYBRID_TENSORS,
    KEYS | DELTA_KEYS | {"linear_allow_neg_eigval": "linear.beta_scale?2.0:1.0"},
    DEFAULTS | {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    FIXED | {"norm_placement": "after", "kinds.G.norm_placement": "before", "qk_norm": "all_heads",
             "linear.norm_eps": 1e-5},
    ONLY | NO_BIAS | dict.fromkeys(("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
                                    "linear_dt_init_floor"), ANY), layers=RECURRENT, every=4)
KIMI = Family(
    "kimi_linear", "KimiLinearForCausalLM", "model.", KIMI_TENSORS,
    _less(KEYS, "head_dim") | LATENTS | {
        "linear_num_heads": "linear.key_heads linear.value_heads", "linear_head_dim": "linear.key_dim linear.value_dim",
        "linear_conv_kernel_dim": "linear.conv_width", "num_experts": "num_experts",
        "num_experts_per_token": "experts_per_token", "moe_intermediate_size": "expert_mlp_dim",
        "num_shared_experts": "shared_expert_dim*expert_mlp_dim", "moe_renormalize": "router_normalize",
        "num_expert_group": "router_groups.0", "topk_group": "router_groups.1",
        "routed_scaling_factor": "router_scale"},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": None, "kv_lora_rank": 512, "q_lora_rank": None,
                "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "linear_num_heads": 32,
                "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_token": 8,
                "moe_intermediate_size": 1024, "num_shared_experts": 1, "moe_renormalize": True, "num_expert_group": 1,
                "topk_group": 1, "routed_scaling_factor": 2.446, "mlp_layer_types": ["dense"]},
    SIGMOID, ONLY | NO_BIAS | {"moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,),
                               "use_grouped_topk": (True,), "mla_use_nope": (True,), "head_dim": ANY,
                               "qk_head_dim": ANY, "model_max_length": ANY, "linear_attn_config": ANY},
    layers={"linear_attention": "K", "full_attention": "N"},
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token"})
GRANITE_HYBRID = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", "model.", GRANITE_HYBRID_TENSORS,
    KEYS | GRANITE_FACTORS | {
        "num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_mlp_dim", "shared_intermediate_size": "shared_expert_dim mlp_dim",
        "mamba_n_heads": "linear.value_heads", "mamba_n_groups": "linear.key_heads", "mamba_d_state": "linear.key_dim",
        "mamba_d_head": "linear.value_dim", "mamba_d_conv": "linear.conv_width", "mamba_conv_bias": "linear.conv_bias",
        "time_step_least": "linear.step_min", "time_step_most": "linear.step_max"},
    DEFAULTS | dict.fromkeys(GRANITE_FACTORS, 1.0) | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_conv_bias": True,
        "position_embedding_type": None, "time_step_limit": [0.0, float("inf")]},
    ROUTED, ONLY | NO_BIAS | {"mamba_proj_bias": (False,), "mamba_expand": ANY, "mamba_chunk_size": ANY,
                      "normalization_function": ("rmsnorm",), "mlp_bias": (False,)},
    layers={"linear_attention": "M", "full_attention": "F"})
NEMOTRON = Family(
    "nemotron_h", "NemotronHForCausalLM", "backbone.", NEMOTRON_TENSORS,
    _less(KEYS, "num_hidden_layers", "rms_norm_eps") | NORMALIZED | GROUPS | {
        "layer_norm_epsilon": "norm_eps", "ssm_state_size": "linear.key_dim", "mamba_num_heads": "linear.value_heads",
        "mamba_head_dim": "linear.value_dim", "n_groups": "linear.key_heads", "conv_kernel": "linear.conv_width",
        "use_conv_bias": "linear.conv_bias", "time_step_min": "linear.step_min", "n_routed_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "expert_mlp_dim",
        "moe_shared_expert_intermediate_size": "shared_expert_dim", "routed_scaling_factor": "router_scale"},
    DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5, "ssm_state_size": 128,
                "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
                "time_step_min": 0.001, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
                "moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
                "routed_scaling_factor": 1.0, "layers_block_type": None},
    {**SIGMOID, "activation": "relu2"},
    NO_BIAS | {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "moe_latent_size": (None,),
               "n_shared_experts": (1,), "sliding_window": (None,)} | dict.fromkeys(
        ("use_bias", "mlp_bias", "mamba_proj_bias"), (False,)) | dict.fromkeys(
        ("num_hidden_layers", "hybrid_override_pattern", "chunk_size", "expand", "time_step_floor", "time_step_max",
         "time_step_limit", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type",
         "mtp_hybrid_override_pattern", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32",
         "use_mamba_kernels", "hidden_act", "rms_norm_eps", "norm_eps", "partial_rotary_factor"), ANY),
    layers={"linear_attention": "M", "full_attention": "N"})

# If a model fits several families, the first is written.
FAMILIES = {one.model_type: one for one in (
    LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3, GPT2, SEED_OSS, MIXTRAL, OLMOE, QWEN3_MOE,
    MINISTRAL, MINISTRAL3, SMOLLM3, GLM4, EXAONE4, GRANITE, GPT_OSS, GLM4_MOE, DEEPSEEK, KIMI_K2, GLM4_LITE, MINIMAX,
    QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, OLMO_HYBRID, KIMI, GRANITE_HYBRID, NEMOTRON, GEMMA4, QWEN3_VL)}

# Known but unsupported model_types: the feature that [model] lacks.
LACKING = {kind: what for what, kinds in {
    "a decoder_sparse_step beside a gate of the shared expert": "qwen2_moe", "chunked attention": "llama4 llama4_text",
    "layers that attend to images": "mllama", "inputs other than text": "qwen2_vl qwen2_5_vl",
    "groups of experts ranked by their best one": "deepseek_v2", "routing in groups by softmax": "mistral4",
    "a sparse attention indexer": "deepseek_v32 glm_moe_dsa", "compressed attention": "deepseek_v4",
    "per-layer embeddings and AltUp": "gemma3n gemma3n_text", "attention and Mamba-2 in one layer": "falcon_h1",
    "a short convolution as a mixer": "lfm2 lfm2_moe", "xIELU": "apertus", "a table of its tensors": "afmoe",
    "attention and MLP side by side": "cohere cohere2", "lightning attention": "minimax bailing_hybrid",
    "norms of queries and keys after the rope": "hunyuan_v1_dense hunyuan_v1_moe",
    "experts that do nothing": "longcat_flash", "LayerNorm beside a rope": "starcoder2",
    "values narrower than keys without latents": "mimo_v2", "heads that differ by layer": "step3p5",
    "experts stored in either orientation": "qwen3_vl_moe"}.items() for kind in kinds.split()}

# Multimodal model_types -> the families of their text models, whose settings are text_config. The other tensors are
# carried to an export.
MULTIMODAL = {"gemma3": ("gemma3_text",), "gemma4": ("gemma4_text",), "mistral3": ("mistral", "ministral3"),
              "qwen3_vl": ("qwen3_vl_text",), "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",)}
# (what replaces the text model's prefix in a multimodal folder, what precedes the name of the head there).
TEXT_PREFIXES = (("language_model.model.", "language_model."), ("model.language_model.", ""))
# Prefixes of multi-token prediction heads, which are carried, too.
MTP = ("mtp.", "model.mtp.", "backbone.mtp.")

# Keys of config.json that change no logit: for trainers, tokenizers or generation.
HARMLESS = frozenset("""
    architectures model_type torch_dtype dtype transformers_version auto_map use_cache initializer_range
    max_position_embeddings bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens attention_dropout attn_pdrop
    embd_pdrop resid_pdrop embedding_dropout hidden_dropout residual_dropout n_ctx original_max_position_embeddings
    max_window_layers summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params finetuning_task id2label label2id num_labels problem_type output_attentions
    output_hidden_states output_scores return_dict return_dict_in_generate torchscript chunk_size_feed_forward
    gradient_checkpointing reorder_and_upcast_attn attn_implementation max_length min_length do_sample temperature top_k
    top_p typical_p num_beams num_beam_groups diversity_penalty early_stopping repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences bad_words_ids remove_invalid_values
    exponential_decay_length_penalty tokenizer_class prefix name_or_path use_bfloat16 tf_legacy_loss pruned_heads
    unsloth_version unsloth_fixed pretraining_tp output_router_logits router_aux_loss_coef router_jitter_noise
    num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_transformer_layers use_mtp mtp_num_hidden_layers
    mtp_use_dedicated_embeddings mtp_loss_scaling_factor mamba_ssm_dtype aux_loss_alpha seq_aux full_attn_mod
    interpolate_factor init_method is_llama_config max_sequence_length is_decoder use_flash_attn cache_implementation
    transformers.js_config
""".split())
