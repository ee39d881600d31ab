"""All uses of jax's private API. If a version of jax lacks a private name, its function returns None or a safe value.

Tested with jax 0.10.2 and 0.12. This module knows no run and no model.
"""
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache


def backends_are_initialized() -> bool:
    """Return whether jax has started a backend; True if unknown."""
    try:
        from jax._src import xla_bridge
        return xla_bridge.backends_are_initialized()
    except (ImportError, AttributeError):
        return True


def coordination_client():
    """Return the client of jax's coordination service, with key_value_set(key, text), key_value_try_get(key) and
    wait_at_barrier(name, timeout_ms); None with one process, or if this jax lacks it."""
    try:
        from jax._src import distributed
        client = distributed.global_state.client
    except (ImportError, AttributeError):
        return None
    return client if all(hasattr(client, name)
                         for name in ("key_value_set", "key_value_try_get", "wait_at_barrier")) else None


def coordinator_host() -> str:
    """Return the host of process 0 in the coordinator address; "" with one process, or if unknown."""
    try:
        from jax._src import distributed
        return (distributed.global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
    except (ImportError, AttributeError):
        return ""


@contextlib.contextmanager
def programs_kept_in(directory: Path) -> Iterator[None]:
    """Context manager: use the directory as compilation cache of this process. By default, jax writes only the programs
    of process 0 to the cache. If this jax lacks the private name, other processes write nothing here, either."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    try:
        from jax._src import distributed
        index, distributed.global_state.process_id = distributed.global_state.process_id, 0
    except (ImportError, AttributeError):
        distributed = None

    def use(*values):
        for name, value in zip(names, values):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    use(str(directory), 0)
    try:
        yield
    finally:
        use(*before)
        if distributed is not None:
            distributed.global_state.process_id = index


def as_written(eqn) -> contextlib.AbstractContextManager:
    """Return a context in which an evaluated equation of a jaxpr keeps its own source line, and its name follows the
    caller's name stack. If this jax lacks it, the context has no effect."""
    try:
        from jax._src import source_info_util
        name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        return source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack)
    except (ImportError, AttributeError, TypeError):
        return contextlib.nullcontext()


class CudnnAttention(NamedTuple):
    """cuDNN's flash attention with its log-sum-exp, and a backward that takes both from outside.

    The public jax.nn.dot_product_attention rounds the log-sum-exp to bfloat16 and has no such backward.
    forward(q_BTNH, k_BSKH, v_BSKH, causal, window, scale) -> o_BTNH, lse_BNT float32.
    backward(q, k, v, o, lse_BNT, do, causal, window, scale) -> dq, dk, dv in the dtype of q.
    window: number of tokens that a query sees, if causal; 0: all. Arrays are bfloat16 or float16.
    Both must be called with all mesh axes manual (inside shard_map).
    """
    forward: Callable
    backward: Callable


def cudnn_attention() -> CudnnAttention | None:
    """Return cuDNN's attention; None if this jax has another interface to it."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as fused
        forward_p, backward_p = fused._dot_product_attention_fwd_p_wrapper, fused._dot_product_attention_bwd_p_wrapper
        causal_or_not = {True: fused.MaskType.CAUSAL, False: fused.MaskType.NO_MASK}
        options = dict(seed=42, dropout_rate=0.0, variadic_args=(False, False), layout=fused.AttentionLayout.BTNH.value)
        known = inspect.signature(fused._dot_product_attention_fwd_impl).parameters
    except (ImportError, AttributeError):
        return None
    if "score_mod" in known:        # from jax 0.11 on
        options["score_mod"] = None
    if not {"scale", "mask_type", "is_training", "sliding_window_length", *options} <= set(known):
        return None

    def absent(q, count):           # bias, sequence lengths, offsets, page tables
        return [jnp.zeros(0, q.dtype)] * count

    def settings_of(causal, window, scale):
        return dict(mask_type=causal_or_not[causal], sliding_window_length=window or None, scale=scale, **options)

    def forward(q, k, v, *how):
        return forward_p.bind(q, k, v, *absent(q, 7), is_training=True, **settings_of(*how))

    def backward(q, k, v, o, lse, do, *how):
        return backward_p.bind(q, k, v, *absent(q, 7), lse, o, do, **settings_of(*how))

    return CudnnAttention(forward, backward)


def put_arguments_on_host(lowered: jax.stages.Lowered, numbers: Sequence[int]) -> None:
    """Mark flat arguments of a lowered program as stored in pinned host memory; does nothing if this jax lacks the
    private names. Absent devices have no memories, so shardings for them lose the memory's kind."""
    try:
        from jax._src.lib.mlir import ir
        module, kept = lowered._lowering.stablehlo(), sorted(lowered._lowering.compile_args["kept_var_idx"])
        with module.context:
            main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
            attributes = [{named.name: named.attr for named in argument} for argument in main.arg_attrs]
            for number in numbers:
                attributes[kept.index(number)]["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(argument) for argument in attributes])
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, StopIteration):
        pass        # `assembly.compile_step` checks the program


def frames(eqn) -> list[tuple[str, int]]:
    """Return the (file, line) of the Python frames that wrote an equation of a jaxpr, innermost first; [] if this jax
    lacks them."""
    try:
        return [(frame.file_name, frame.line_num) for frame in eqn.source_info.traceback.frames]
    except AttributeError:
        return []


def name_stack(eqn) -> str:
    """Return the name scopes in which an equation of a jaxpr was traced; "" if this jax lacks them."""
    try:
        return str(eqn.source_info.name_stack)
    except AttributeError:
        return ""


def manual_axes(eqn) -> frozenset[str]:
    """Return the mesh axes over which a shard_map equation runs its body once for each position. Raises: KeyError if
    this jax has another parameter for them."""
    return frozenset(eqn.params["newly_manual_axes"])
