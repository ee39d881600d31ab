"""The names of our keys in other trainers, for messages.

The trainers are Megatron-LM, torchtitan, MaxText, transformers and nanoGPT. A run file cannot use these names.
"""
from __future__ import annotations

# section.key: the other names for it, with underscores
WORDS = {
    "run.dir": "output_dir dump_folder base_output_directory save out_dir save_dir",
    "run.name": "run_name job_name exp_name experiment",
    "mesh.data": "dp dp_size data_parallel data_parallel_size data_parallel_replicate_degree ici_data_parallelism "
                 "dcn_data_parallelism dp_replicate",
    "mesh.fsdp": "data_parallel_shard_degree ici_fsdp_parallelism dp_shard fsdp_size zero_size",
    "mesh.tensor": "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
                   "ici_tensor_parallelism",
    "mesh.stage": "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
                  "pipeline_model_parallel_size ici_pipeline_parallelism",
    "mesh.context": "cp cp_size context_parallel context_parallel_size context_parallel_degree sp_size "
                    "ici_context_parallelism",
    "sharding.rules": "ep ep_size expert_parallel expert_parallel_size expert_parallel_degree "
                      "expert_model_parallel_size zero_stage zero sequence_parallel use_distributed_optimizer "
                      "sharding_strategy fsdp_strategy",
    "pipeline.schedule": "pipeline_parallel_schedule pp_schedule",
    "pipeline.chunks": "num_virtual_stages_per_pipeline_rank virtual_pipeline_model_parallel_size",
    "model.embed_dim": "hidden_size d_model dim n_embd base_emb_dim emb_dim",
    "model.num_layers": "num_hidden_layers n_layers n_layer base_num_decoder_layers depth",
    "model.mtp_layers": "mtp_num_layers num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers",
    "training.mtp_weight": "mtp_loss_scaling_factor",
    "model.num_heads": "num_attention_heads n_heads n_head base_num_query_heads",
    "model.num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups base_num_kv_heads",
    "model.head_dim": "kv_channels head_size",
    "model.mlp_dim": "intermediate_size ffn_hidden_size ffn_dim base_mlp_dim",
    "model.max_seq_len": "max_position_embeddings",
    "model.norm_eps": "rms_norm_eps layernorm_epsilon layer_norm_eps",
    "model.compute_dtype": "dtype precision bf16 fp16 mixed_precision mixed_precision_param torch_dtype",
    "model.matmul_dtype": "fp8 float8 enable_fp8 quantization",
    "model.attention": "attn_implementation attention_backend use_flash_attn flash_attention",
    "model.num_experts": "num_local_experts n_routed_experts moe_num_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk top_k",
    "distill.top_tokens": "top_k",
    "data.seq_len": "seq_length sequence_length max_seq_length max_target_length context_length block_size max_length",
    "data.global_batch": "batch_size global_batch_size train_batch_size per_device_batch_size micro_batch_size "
                         "local_batch_size per_device_train_batch_size",
    "data.paths": "data_path dataset_path train_files dataset train_data data_dir",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_name hf_tokenizer_path hf_assets_path",
    "training.steps": "max_steps train_iters num_steps total_steps max_iters train_steps num_train_steps",
    "training.microbatches": "gradient_accumulation_steps grad_accum accumulate_grad_batches num_microbatches",
    "training.remat": "activation_checkpoint activation_checkpointing activation_checkpoint_mode recompute "
                      "recompute_granularity gradient_checkpointing remat_policy",
    "training.grad_clip": "clip_grad max_norm max_grad_norm gradient_clip_val gradient_clipping_threshold",
    "optimizer.learning_rate": "lr max_lr peak_lr",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.b1": "beta1 adam_beta1 adam_b1", "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.offload": "optimizer_cpu_offload optimizer_memory_host_offload offload_optimizer",
    "optimizer.schedule": "lr_decay_style lr_scheduler lr_scheduler_type decay_type",
    "optimizer.warmup_steps": "warmup warmup_iters lr_warmup_iters num_warmup_steps warmup_ratio",
    "optimizer.decay_steps": "lr_decay_iters decay_ratio",
    "optimizer.final_fraction": "min_lr min_lr_factor min_lr_ratio",
    "lora.rank": "lora_r lora_rank", "lora.alpha": "lora_alpha", "lora.targets": "target_modules lora_targets",
    "lora.init_from": "adapter_path adapter_name_or_path peft_path lora_path peft_model_id",
    "validation.every": "eval_interval eval_steps eval_every", "validation.batches": "eval_iters eval_batches",
    "checkpoint.every": "save_interval save_steps checkpoint_interval checkpoint_period checkpointing_steps",
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep",
    "checkpoint.init_from": "load load_path resume_from pretrained_checkpoint initial_load_path model_name_or_path",
    "metrics.every": "log_interval log_freq logging_steps log_period",
    "metrics.wandb": "wandb_project enable_wandb", "metrics.tensorboard": "tensorboard_dir enable_tensorboard",
}
# options of other trainers: the command that replaces each here
OPTIONS = {
    "dry_run": "to test a run file without training: python -m meshtrain.check RUN.toml",
    "validate": "to test a run file without training: python -m meshtrain.check RUN.toml",
    "print_config": "to print every key: python -m meshtrain.check RUN.toml --print-config",
    "version": "to print the version: python -m meshtrain --version",
}


def find_key(word: str, section: str = "") -> str:
    """Return our section.key for another trainer's name, regardless of dashes and capitals; "" if no key matches. A key
    of `section` takes precedence."""
    name = word.lower().replace("-", "_").rpartition(".")[2]
    keys = [key for key, words in WORDS.items() if name in words.split()]
    return min(keys, key=lambda key: not key.startswith(f"{section}."), default="")
