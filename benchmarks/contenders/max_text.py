"""MaxText 0.2.5 by its own settings for GPUs, `configs/gpu/models/llama3_8b.yml`.

Its attention there is TransformerEngine's, which has no wheel for jax: cuDNN's by jax takes its place. That one leaves
out documents without a word (maxtext#4476), so rows are whole. variant: "" as its file says, whose embedding is a
matmul with one-hot rows, or "lookup".
"""
from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks.contenders.case import BETAS, CLIP, DECAY, LEARNING_RATE, Case

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")        # without Google's cloud libraries

# XLA's flags of configs/gpu/a3/llama_2_7b/1vm.sh, without its dump
FLAGS = ("--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false "
         "--xla_gpu_enable_command_buffer= --xla_gpu_enable_highest_priority_async_stream=true "
         "--xla_gpu_all_reduce_combine_threshold_bytes=134217728 --xla_gpu_all_gather_combine_threshold_bytes=134217728 "
         "--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864 --xla_gpu_pipeline_all_gather=on "
         "--xla_gpu_pipeline_reduce_scatter=on --xla_gpu_pipeline_all_reduce=on "
         "--xla_gpu_enable_while_loop_double_buffering=true --xla_gpu_enable_all_gather_combine_by_dim=false "
         "--xla_gpu_enable_reduce_scatter_combine_by_dim=false --xla_disable_hlo_passes=rematerialization")


def configure(case: Case, count: int, variant: str, on_cpu: bool):
    """Return MaxText's configuration of a case on `count` devices."""
    import maxtext
    from maxtext.configs import pyconfig
    folder = Path(maxtext.__file__).parent / "configs"
    keys = {"base_emb_dim": case.embed_dim, "base_num_query_heads": case.num_heads,
            "base_num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim, "base_mlp_dim": case.mlp_dim,
            "base_num_decoder_layers": case.num_layers, "vocab_size": case.vocab_size,
            "rope_max_timescale": int(case.rope_theta), "normalization_layer_epsilon": case.norm_eps,
            "max_target_length": case.seq_len, "per_device_batch_size": case.rows,
            "gradient_accumulation_steps": case.microbatches, "dtype": case.dtype, "weight_dtype": "float32",
            "learning_rate": LEARNING_RATE, "adam_b1": BETAS[0], "adam_b2": BETAS[1], "adam_weight_decay": DECAY,
            "warmup_steps_fraction": 0.0, "learning_rate_final_fraction": 1.0, "gradient_clipping_threshold": CLIP,
            "ici_fsdp_parallelism": count, "max_segments_per_seq": -1,
            "attention": "dot_product" if on_cpu else "cudnn_flash_jax", "hardware": "cpu" if on_cpu else "gpu",
            "use_iota_embed": variant != "lookup", "override_model_config": True, "enable_checkpointing": False,
            "dataset_type": "synthetic", "steps": 1000, "run_name": "peers", "base_output_directory": "/dev/null",
            "skip_jax_distributed_system": True, "enable_goodput_recording": False, "log_config": False}
    if not on_cpu and count > 1:        # else its batch is that of the devices of this process
        keys |= {"compile_topology": "a3", "compile_topology_num_slices": max(1, count // 8)}
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()]
    with contextlib.redirect_stdout(sys.stderr):
        return pyconfig.initialize(["", str(folder / "gpu" / "models" / "llama3_8b.yml"), *words])


def build(case: Case, devices, variant: str = ""):
    """Return (jitted step, abstract state and batch, the mesh, a context to trace in, init of the state)."""
    import maxtext.trainers.pre_train.train_compile as compiling
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.common import train_state_nnx
    from maxtext.optimizers import optimizers
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, model_creation_utils, sharding
    on_cpu = devices[0].platform == "cpu"
    cfg = configure(case, len(devices), variant, on_cpu)
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", cfg.remove_size_one_mesh_axis_from_type)
    axes = (AxisType.Auto,) * len(cfg.mesh_axes)
    mesh = Mesh(maxtext_utils.create_device_mesh(cfg, devices), cfg.mesh_axes, axis_types=axes)
    args, kwargs, state_at, _, model = compiling.get_shaped_inputs(mesh, cfg)
    params_at, state_at = sharding.maybe_update_params_sharding_with_opt(cfg, state_at)
    given_at = sharding.build_zero1_input_state_mesh_shardings(cfg, state_at, params_at)
    step, ins, outs, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, sharding.get_input_data_sharding(cfg, mesh), given_at, model, cfg, params_at)
    jitted = jax.jit(step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donated)

    def enter():
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(logical_axis_rules(cfg.logical_axis_rules))
        return stack

    def init():
        make, model = model_creation_utils.create_nnx_abstract_model(cfg, mesh)
        tx = optimizers.get_optimizer(cfg, maxtext_utils.create_learning_rate_schedule(cfg), model, mesh=mesh)

        def make_state():
            made = make()
            return nnx.state(train_state_nnx.TrainStateNNX(made, nnx.Optimizer(made, tx, wrt=nnx.Param)))
        with enter():
            return jax.jit(make_state, out_shardings=state_at)()
    return jitted, args, kwargs, mesh, enter, init


class Trainer:
    """The contract is `case.Trainer`."""

    def __init__(self, case: Case, variant: str = ""):
        from flax import nnx
        jitted, args, kwargs, self.mesh, self.enter, self.init = build(case, jax.devices()[:1], variant)
        self.settings = "its llama3_8b.yml, attention by jax" + (", embedding looked up" if variant else "")
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(nnx.filter_state(args[0].model, nnx.Param)))
        self.shapes = args[1]
        if (rows := self.shapes["inputs"].shape[0]) != case.microbatches * case.rows:
            raise ValueError(f"MaxText takes {rows} rows a step, and the case has {case.microbatches * case.rows}")
        with self.enter():
            self.program = jitted.lower(*args, **kwargs).compile()

    def reset(self) -> None:
        self.state = None
        self.state = self.init()

    def place(self, batch):
        targets = batch["targets"]
        arrays = {"inputs": batch["tokens"], "inputs_position": batch["positions"],
                  "targets_position": batch["positions"], "inputs_segmentation": np.ones_like(targets),
                  "targets": np.maximum(targets, 0), "targets_segmentation": (targets >= 0).astype(np.int32)}
        return {name: jax.device_put(arrays[name], shape.sharding) for name, shape in self.shapes.items()}

    def step(self, placed):
        self.state, metrics = self.program(self.state, placed)
        return metrics["scalar"]["learning/loss"]

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def peak_bytes(self) -> int:
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
