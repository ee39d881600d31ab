"""Model families of Hugging Face that can be read and written, as data: tensors, settings, and unsupported features.

`tensors` maps a Hugging Face tensor to parameters of ours, with the form of `forms`; {l} is a layer's number, {e} an
expert's (stacked in ours). A fused tensor lists its parts in order. Entries for parameters that a model lacks (a bias,
a tied head) are ignored. torch Linear weights are [out, in]; GPT-2's Conv1D is [in, out]. Rope is half-split on both
sides.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Family:
    """One model_type of config.json.

    prefix: prefix of tensor names in a model with a head; bare models lack it. keys: key of config.json -> equal keys
    of [model]. defaults: the class's values of absent keys (null is a value). multiples: key -> (key, n): the value of
    a null or absent key. fixed: keys of [model] that the architecture fixes. only: key -> supported values; the first
    is written. every: default n, if every n-th layer has no window. aliases: other names of keys, where the class
    reads both. ropes: supported rope types; empty: no rope.
    """
    model_type: str
    architecture: str
    prefix: str
    tensors: Mapping[str, tuple[str, ...]]
    keys: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, object]
    fixed: Mapping[str, object]
    only: Mapping[str, tuple]
    multiples: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    every: int = 0
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "llama3", "linear", "yarn")


LAYER = "model.layers.{l}."
LLAMA_TENSORS = {
    "model.embed_tokens.weight": ("embedding/table: V D -> V D",),
    "model.norm.weight": ("final_norm/scale: D -> D",),
    "lm_head.weight": ("head/kernel: V D -> D V",),
    LAYER + "input_layernorm.weight": ("layers/attention_norm/scale: D -> D",),
    LAYER + "post_attention_layernorm.weight": ("layers/mlp_norm/scale: D -> D",),
    LAYER + "self_attn.q_proj.weight": ("layers/attention/query/kernel: (N H) D -> D N H",),
    LAYER + "self_attn.k_proj.weight": ("layers/attention/key/kernel: (K H) D -> D K H",),
    LAYER + "self_attn.v_proj.weight": ("layers/attention/value/kernel: (K H) D -> D K H",),
    LAYER + "self_attn.o_proj.weight": ("layers/attention/out/kernel: D (N H) -> N H D",),
    LAYER + "self_attn.q_proj.bias": ("layers/attention/query/bias: (N H) -> N H",),
    LAYER + "self_attn.k_proj.bias": ("layers/attention/key/bias: (K H) -> K H",),
    LAYER + "self_attn.v_proj.bias": ("layers/attention/value/bias: (K H) -> K H",),
    LAYER + "self_attn.o_proj.bias": ("layers/attention/out/bias: D -> D",),
    LAYER + "self_attn.q_norm.weight": ("layers/attention/query_norm/scale: H -> H",),
    LAYER + "self_attn.k_norm.weight": ("layers/attention/key_norm/scale: H -> H",),
    LAYER + "mlp.gate_proj.weight": ("layers/mlp/gate/kernel: F D -> D F",),
    LAYER + "mlp.up_proj.weight": ("layers/mlp/up/kernel: F D -> D F",),
    LAYER + "mlp.down_proj.weight": ("layers/mlp/down/kernel: D F -> F D",),
    LAYER + "mlp.gate_proj.bias": ("layers/mlp/gate/bias: F -> F",),
    LAYER + "mlp.up_proj.bias": ("layers/mlp/up/bias: F -> F",),
    LAYER + "mlp.down_proj.bias": ("layers/mlp/down/bias: D -> D",),
}
EXPERTS = {name: ours for name, ours in LLAMA_TENSORS.items() if ".mlp." not in name}
MIXTRAL_TENSORS = EXPERTS | {
    LAYER + "block_sparse_moe.gate.weight": ("layers/moe/router: E D -> D E",),
    LAYER + "block_sparse_moe.experts.{e}.w1.weight": ("layers/moe/gate: W D -> D W",),
    LAYER + "block_sparse_moe.experts.{e}.w3.weight": ("layers/moe/up: W D -> D W",),
    LAYER + "block_sparse_moe.experts.{e}.w2.weight": ("layers/moe/down: D W -> W D",),
}
QWEN3_MOE_TENSORS = EXPERTS | {
    LAYER + "mlp.gate.weight": ("layers/moe/router: E D -> D E",),
    LAYER + "mlp.experts.{e}.gate_proj.weight": ("layers/moe/gate: W D -> D W",),
    LAYER + "mlp.experts.{e}.up_proj.weight": ("layers/moe/up: W D -> D W",),
    LAYER + "mlp.experts.{e}.down_proj.weight": ("layers/moe/down: D W -> W D",),
}
OLMOE_TENSORS = QWEN3_MOE_TENSORS | {
    LAYER + "self_attn.q_norm.weight": ("layers/attention/query_norm/scale: (N H) -> N H",),
    LAYER + "self_attn.k_norm.weight": ("layers/attention/key_norm/scale: (K H) -> K H",),
}
FUSED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
PHI3_TENSORS = {name: ours for name, ours in LLAMA_TENSORS.items() if not any(part in name for part in FUSED)} | {
    LAYER + "self_attn.qkv_proj.weight": (
        "layers/attention/query/kernel: *(N H) D -> D N H", "layers/attention/key/kernel: *(K H) D -> D K H",
        "layers/attention/value/kernel: *(K H) D -> D K H"),
    LAYER + "mlp.gate_up_proj.weight": ("layers/mlp/gate/kernel: *F D -> D F", "layers/mlp/up/kernel: *F D -> D F"),
}
# Norms after attention and MLP; query and key norms over all heads.
OLMO2_TENSORS = {name: ours for name, ours in LLAMA_TENSORS.items() if "layernorm" not in name} | {
    LAYER + "post_attention_layernorm.weight": ("layers/attention_post_norm/scale: D -> D",),
    LAYER + "post_feedforward_layernorm.weight": ("layers/mlp_post_norm/scale: D -> D",),
    LAYER + "self_attn.q_norm.weight": ("layers/attention/query_norm/scale: (N H) -> N H",),
    LAYER + "self_attn.k_norm.weight": ("layers/attention/key_norm/scale: (K H) -> K H",),
}
# Norms before and after.
GEMMA3_TENSORS = {name: ours for name, ours in LLAMA_TENSORS.items() if "post_attention_layernorm" not in name} | {
    LAYER + "post_attention_layernorm.weight": ("layers/attention_post_norm/scale: D -> D",),
    LAYER + "pre_feedforward_layernorm.weight": ("layers/mlp_norm/scale: D -> D",),
    LAYER + "post_feedforward_layernorm.weight": ("layers/mlp_post_norm/scale: D -> D",),
}
BLOCK = "transformer.h.{l}."
GPT2_TENSORS = {
    "transformer.wte.weight": ("embedding/table: V D -> V D",),
    "transformer.wpe.weight": ("position/table: C D -> C D",),
    "transformer.ln_f.weight": ("final_norm/scale: D -> D",),
    "transformer.ln_f.bias": ("final_norm/bias: D -> D",),
    "lm_head.weight": ("head/kernel: V D -> D V",),
    BLOCK + "ln_1.weight": ("layers/attention_norm/scale: D -> D",),
    BLOCK + "ln_1.bias": ("layers/attention_norm/bias: D -> D",),
    BLOCK + "ln_2.weight": ("layers/mlp_norm/scale: D -> D",),
    BLOCK + "ln_2.bias": ("layers/mlp_norm/bias: D -> D",),
    BLOCK + "attn.c_attn.weight": (
        "layers/attention/query/kernel: D *(N H) -> D N H", "layers/attention/key/kernel: D *(K H) -> D K H",
        "layers/attention/value/kernel: D *(K H) -> D K H"),
    BLOCK + "attn.c_attn.bias": (
        "layers/attention/query/bias: *(N H) -> N H", "layers/attention/key/bias: *(K H) -> K H",
        "layers/attention/value/bias: *(K H) -> K H"),
    BLOCK + "attn.c_proj.weight": ("layers/attention/out/kernel: (N H) D -> N H D",),
    BLOCK + "attn.c_proj.bias": ("layers/attention/out/bias: D -> D",),
    BLOCK + "mlp.c_fc.weight": ("layers/mlp/up/kernel: D F -> D F",),
    BLOCK + "mlp.c_fc.bias": ("layers/mlp/up/bias: F -> F",),
    BLOCK + "mlp.c_proj.weight": ("layers/mlp/down/kernel: F D -> F D",),
    BLOCK + "mlp.c_proj.bias": ("layers/mlp/down/bias: D -> D",),
}

KEYS = {
    "vocab_size": ("vocab_size",), "hidden_size": ("embed_dim",), "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",), "num_key_value_heads": ("num_kv_heads",), "head_dim": ("head_dim",),
    "intermediate_size": ("mlp_dim",), "rms_norm_eps": ("norm_eps",), "tie_word_embeddings": ("tie_embeddings",),
}
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
FIXED = {"norm": "rmsnorm", "norm_placement": "before", "norm_offset": 0.0, "activation": "swiglu",
         "scale_embedding": False,
         "position": "rope", "qk_norm": "off", "attention_bias": "none", "mlp_bias": False,
         "window": 0, "global_every": 0, "local_rope_theta": 0.0, "attention_scale_dim": 0,
         "score_softcap": 0.0, "logit_softcap": 0.0, "num_experts": 0}
ONLY = {"hidden_act": ("silu",)}

LLAMA = Family(
    "llama", "LlamaForCausalLM", "model.", LLAMA_TENSORS,
    KEYS | {"mlp_bias": ("mlp_bias",), "attention_bias": ("attention_bias",)},
    DEFAULTS | {"mlp_bias": False, "attention_bias": False},
    {key: value for key, value in FIXED.items() if not key.endswith("_bias")}, ONLY)
WINDOW = {"sliding_window": ("window",)}
EVERYWHERE = {key: value for key, value in FIXED.items() if key != "window"}
MISTRAL = Family(
    "mistral", "MistralForCausalLM", "model.", LLAMA_TENSORS, KEYS | WINDOW,
    DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}, EVERYWHERE, ONLY)
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", "model.", LLAMA_TENSORS, KEYS, DEFAULTS | {"num_key_value_heads": 32},
    FIXED | {"attention_bias": "qkv"}, ONLY | {"use_sliding_window": (False,)})
SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM", "model.", LLAMA_TENSORS, KEYS,
    DEFAULTS | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    FIXED | {"attention_bias": "qkv"},
    ONLY | {"attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)})
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", "model.", LLAMA_TENSORS, KEYS, DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    FIXED | {"qk_norm": "head"}, ONLY | {"use_sliding_window": (False,), "attention_bias": (False,)})
PHI3 = Family(
    "phi3", "Phi3ForCausalLM", "model.", PHI3_TENSORS, KEYS | WINDOW, DEFAULTS | {"rms_norm_eps": 1e-5}, EVERYWHERE,
    ONLY | {"partial_rotary_factor": (1.0,)}, ropes=("default",))
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", "model.", OLMO2_TENSORS, KEYS, DEFAULTS | {"rms_norm_eps": 1e-5},
    FIXED | {"norm_placement": "after", "qk_norm": "all_heads"}, ONLY | {"attention_bias": (False,)})
ALTERNATING = {key: value for key, value in FIXED.items() if key not in ("window", "global_every", "local_rope_theta")}
OLMO3 = Family(
    "olmo3", "Olmo3ForCausalLM", "model.", OLMO2_TENSORS, KEYS | WINDOW,
    DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    ALTERNATING | {"norm_placement": "after", "qk_norm": "all_heads"}, ONLY | {"attention_bias": (False,)}, every=4)
# Its first releases call the tanh form gelu.
TANH = ("gelu_pytorch_tanh", "gelu")
GEMMA = Family(
    "gemma", "GemmaForCausalLM", "model.", LLAMA_TENSORS, KEYS,
    DEFAULTS | {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "hidden_act": TANH[0]},
    FIXED | {"activation": "geglu", "norm_offset": 1.0, "scale_embedding": True},
    {"hidden_act": TANH, "hidden_activation": TANH[:1], "attention_bias": (False,),
     "use_bidirectional_attention": (False,)})
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", "model.", GEMMA3_TENSORS,
    KEYS | WINDOW | {"query_pre_attn_scalar": ("attention_scale_dim",)},
    GEMMA.defaults | {"num_key_value_heads": 4, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 4096,
                      "query_pre_attn_scalar": 256, "vocab_size": 262208, "num_attention_heads": 8},
    {key: value for key, value in ALTERNATING.items() if key != "attention_scale_dim"} | {
        "activation": "geglu", "norm_offset": 1.0, "scale_embedding": True, "norm_placement": "both",
        "qk_norm": "head"},
    {"hidden_act": TANH, "hidden_activation": TANH[:1], "attention_bias": (False,),
     "use_bidirectional_attention": (False,),
     "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)}, every=6)
GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", "model.",
    {name: ours for name, ours in GEMMA3_TENSORS.items() if "_norm.weight" not in name},
    GEMMA3.keys | {"attn_logit_softcapping": ("score_softcap",), "final_logit_softcapping": ("logit_softcap",)},
    {key: value for key, value in GEMMA3.defaults.items() if key != "rope_local_base_freq"} | {
        "rope_theta": 1e4, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    {key: value for key, value in GEMMA3.fixed.items() if not key.endswith("_softcap")} | {"qk_norm": "off"},
    {key: value for key, value in GEMMA3.only.items() if not key.endswith("_softcapping")}, every=2,
    aliases={"sliding_window_size": "sliding_window"})     # the 9B and 27B have both
GPT2 = Family(
    "gpt2", "GPT2LMHeadModel", "transformer.", GPT2_TENSORS,
    {"vocab_size": ("vocab_size",), "n_embd": ("embed_dim",), "n_layer": ("num_layers",), "n_head": ("num_heads",),
     "n_positions": ("max_seq_len",), "n_inner": ("mlp_dim",), "layer_norm_epsilon": ("norm_eps",),
     "tie_word_embeddings": ("tie_embeddings",)},
    {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    FIXED | {"norm": "layernorm", "activation": "gelu", "position": "learned", "attention_bias": "all",
             "mlp_bias": True},
    {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
     "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    multiples={"n_inner": ("n_embd", 4)}, ropes=())

# intermediate_size is the experts' (or that of dense layers, which no model here has).
ROUTED = {key: value for key, value in FIXED.items() if key != "num_experts"} | {
    "router_score": "softmax", "router_scale": 1.0, "router_groups": (), "router_bias": False, "shared_expert_dim": 0,
    "first_dense_layers": 0}
CHOSEN = {"num_experts_per_tok": ("experts_per_token",)}
MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", "model.", MIXTRAL_TENSORS,
    {key: ours for key, ours in KEYS.items() if key != "intermediate_size"} | WINDOW | CHOSEN | {
        "num_local_experts": ("num_experts",), "intermediate_size": ("expert_mlp_dim",)},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2,
                "num_local_experts": 8, "rope_theta": 1e6},
    {key: value for key, value in ROUTED.items() if key != "window"} | {"router_normalize": True}, ONLY)
NORMALIZED = {"num_experts": ("num_experts",), "norm_topk_prob": ("router_normalize",)}
OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", "model.", OLMOE_TENSORS,
    {key: ours for key, ours in KEYS.items() if key != "intermediate_size"} | CHOSEN
    | NORMALIZED | {"intermediate_size": ("expert_mlp_dim",)},
    DEFAULTS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "num_experts": 64, "norm_topk_prob": False},
    ROUTED | {"qk_norm": "all_heads"}, ONLY | {"attention_bias": (False,), "clip_qkv": (None,)},
    aliases={"num_local_experts": "num_experts"})
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", "model.", QWEN3_MOE_TENSORS,
    KEYS | CHOSEN | NORMALIZED | {"moe_intermediate_size": ("expert_mlp_dim",)},
    DEFAULTS | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
                "moe_intermediate_size": 768},
    ROUTED | {"qk_norm": "head"},
    ONLY | {"attention_bias": (False,), "use_sliding_window": (False,), "mlp_only_layers": ([],),
            "decoder_sparse_step": (1,)},
    aliases={"num_local_experts": "num_experts"})

# If a model fits several families, the first is written.
FAMILIES = {one.model_type: one for one in (LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, OLMO2, OLMO3, GEMMA, GEMMA2, GEMMA3,
                                            GPT2, SEED_OSS, MIXTRAL, OLMOE, QWEN3_MOE)}

# Known but unsupported: what [model] lacks for them.
LACKING = {
    "qwen2_moe": "a gate of the shared expert",
    "gpt_oss": "attention sinks, biases of the router and of experts, a clamped SwiGLU and weights in MXFP4",
    "deepseek_v3": "multi-head latent attention and weights in float8 with scales by block",
    "ministral3": "a scale of the queries by their position", "llama4": "chunked attention",
    "mllama": "layers that attend to images",
    "qwen2_vl": "other inputs than text", "qwen2_5_vl": "other inputs than text",
}

# Multimodal model_types -> the families of their text models, whose settings are text_config. The other tensors are
# carried to an export.
MULTIMODAL = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
# (what a multimodal folder has in place of a text model's prefix, what it has before the name of its head).
TEXT_PREFIXES = (("language_model.model.", "language_model."), ("model.language_model.", ""))

# Keys of config.json that change no logit: for trainers, tokenizers or generation.
HARMLESS = frozenset("""
    architectures model_type torch_dtype dtype transformers_version auto_map use_cache initializer_range
    max_position_embeddings bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens attention_dropout attn_pdrop
    embd_pdrop resid_pdrop embedding_dropout hidden_dropout residual_dropout n_ctx original_max_position_embeddings
    max_window_layers
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    finetuning_task id2label label2id num_labels problem_type output_attentions output_hidden_states output_scores
    return_dict return_dict_in_generate torchscript chunk_size_feed_forward gradient_checkpointing
    reorder_and_upcast_attn attn_implementation max_length min_length do_sample temperature top_k top_p typical_p
    num_beams num_beam_groups diversity_penalty early_stopping repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences bad_words_ids remove_invalid_values
    exponential_decay_length_penalty tokenizer_class prefix name_or_path use_bfloat16 tf_legacy_loss pruned_heads
    unsloth_version unsloth_fixed pretraining_tp output_router_logits router_aux_loss_coef router_jitter_noise
    is_llama_config max_sequence_length is_decoder use_flash_attn cache_implementation transformers.js_config
""".split())
