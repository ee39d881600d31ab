"""The attention that a run file asks for: an engine on each device, and a method for sequences that are split along `context`.

`ring` passes keys and values round, `gather` gathers them, `ulysses` splits heads instead of tokens. Each is a module
with `order` (of the tokens over the devices), `forward` and `backward`, both written out: nothing here is differentiated.
"""
from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import get_abstract_mesh

from meshtrain.kernels import blockwise, cudnn
from meshtrain.kernels.engine import Engine
from meshtrain.layout.rules import Layout
from meshtrain.parallel import gather, ring, ulysses

AXIS = "context"
METHODS: dict[str, ModuleType] = {"ring": ring, "gather": gather, "ulysses": ulysses}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(method, layout, q_BTNH, k_BSKH, v_BSKH, segments_BT):
    """Causal attention within segments: [B, T, N, H] from N query heads and K key/value heads (N a multiple of K).

    method: forward(layout, q, k, v, segments) -> o, lse and backward(layout, q, k, v, segments, o, lse, do) -> dq, dk, dv.
    """
    return method.forward(layout, q_BTNH, k_BSKH, v_BSKH, segments_BT)[0].astype(q_BTNH.dtype)


def _attend_forward(method, layout, q_BTNH, k_BSKH, v_BSKH, segments_BT):
    o_BTNH, lse_BTN = method.forward(layout, q_BTNH, k_BSKH, v_BSKH, segments_BT)
    # Named, so that selective remat keeps them and the backward never repeats the forward loop.
    o_BTNH = checkpoint_name(o_BTNH.astype(q_BTNH.dtype), "attention_o")
    lse_BTN = checkpoint_name(lse_BTN, "attention_lse")
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, o_BTNH, lse_BTN)


def _attend_backward(method, layout, saved, do_BTNH):
    q, k, v = saved[:3]
    dq, dk, dv = method.backward(layout, *saved, do_BTNH)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


attend.defvjp(_attend_forward, _attend_backward)


class Local(NamedTuple):
    """The method where every device holds whole sequences: one engine, all pairs of queries and keys."""
    engine: Engine

    def forward(self, layout, q, k, v, segments):
        return self.engine.forward(q, k, v, segments, segments, True)

    def backward(self, layout, q, k, v, segments, o, lse, do):
        return self.engine.backward(q, k, v, segments, segments, o, lse, do, True)


class ContextParallel(NamedTuple):
    """The method as attention sees it: arrays [B, T, …] of the whole mesh, or, where `context` is manual already (inside a
    pipeline), those of this device."""
    method: ModuleType
    engine: tuple

    def forward(self, layout, q_BTNH, k_BTKH, v_BTKH, segments_BT):
        specs = _specs(layout, q="heads", k="kv_heads", v="kv_heads", s=None)
        return _call(self.method.forward, self.engine, specs, (specs[0], _specs(layout, lse="heads")[0]),
                     q_BTNH, k_BTKH, v_BTKH, segments_BT)

    def backward(self, layout, q_BTNH, k_BTKH, v_BTKH, segments_BT, o_BTNH, lse_BTN, do_BTNH):
        specs = _specs(layout, q="heads", k="kv_heads", v="kv_heads", s=None, o="heads", lse="heads", do="heads")
        return _call(self.method.backward, self.engine, specs, specs[:3],
                     q_BTNH, k_BTKH, v_BTKH, segments_BT, o_BTNH, lse_BTN, do_BTNH)


def _call(function, engine, in_specs, out_specs, *args):
    local = lambda *args: function(engine, *args, axis=AXIS)
    if AXIS in get_abstract_mesh().manual_axes:
        return local(*args)
    # All axes are manual, those of size 1 too: cuDNN's partitioning rule cannot stand in a region that is partly so.
    # check_vma guards transposition, and both directions are written out.
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)


def _specs(layout, **heads):
    """PartitionSpecs of [B, T, heads, …], or [B, T] for None."""
    return tuple(layout.spec("activations", ("batch", "seq", *([axis] if axis else []))) for axis in heads.values())


# ---- what a run file asks for --------------------------------------------------------------------------------------------------------


def token_order(run, sizes: Mapping[str, int]):
    """int64 [T]: which token stands at each place of a sequence that is split over context; None: as they come."""
    cp = sizes[AXIS]
    return METHODS[run.context.method].order(run.data.seq_len, cp) if cp > 1 else None


def problems(run, layout: Layout) -> list[str]:
    """What keeps the layout from splitting sequences over mesh.context, where that is larger than 1."""
    cp, rules_file = layout.sizes["context"], layout.rules.path
    if cp == 1:
        return []
    T, method, faults = run.data.seq_len, run.context.method, []
    seq, residual = (layout.mesh_axes("activations", axis) for axis in ("seq", "residual_seq"))
    if seq != ("context",):
        faults.append(f"{rules_file} [activations] seq = {list(seq)}: mesh.context={cp} splits every sequence; write "
                      "seq = \"context\", or set mesh.context to 1")
    elif residual[:1] != ("context",):
        faults.append(f"{rules_file} [activations] residual_seq = {list(residual)} does not begin with context, which splits "
                      "seq; write residual_seq = \"context\", or [\"context\", \"tensor\"]")
    chunks = cp if method == "ulysses" else 2 * cp
    ways = math.lcm(chunks, layout.ways(residual))
    if T % ways:
        near = " or ".join(str(n) for n in (T // ways * ways, -(-T // ways) * ways) if n)
        what = "mesh.context" if method == "ulysses" else "2 × mesh.context"
        also = f" and over {' × '.join(residual)}" if ways > chunks else ""
        faults.append(f"data.seq_len={T} cannot be split into {what} = {chunks} chunks of equal length{also}; use {near}")
    ways = layout.ways(layout.mesh_axes("activations", "heads"))
    if method == "ulysses" and run.model.num_heads // ways % cp:
        each = run.model.num_heads // ways
        faults.append(f"context.method=\"ulysses\" splits {each} heads (model.num_heads={run.model.num_heads} over tensor {ways}) "
                      f"over mesh.context={cp}, which does not divide; use ring or gather, or a mesh.context that divides {each}")
    return faults


def choose(run, sizes: Mapping[str, int], platform: str) -> tuple[Callable, str]:
    """The attention function (see `model.layers.Execution`) and a note on the choice: cuDNN on a GPU where no document mask stands in the way."""
    cp = sizes["context"]
    reasons = _against_cudnn(run, cp) if platform in ("gpu", "cuda") else None
    note = "" if reasons is None else "attention: cuDNN" if not reasons else (
        f"attention: blockwise XLA engine, because {'; '.join(reasons)}")
    if cp == 1:
        local = partial(attend, Local(blockwise.engine()))
        return cudnn.attend if reasons == [] else local, note
    chunk = run.data.seq_len // (2 * cp)
    # Four blocks a chunk at least: the diagonal blocks, half of them masked, are then 1/8 of a causal square of two chunks.
    block = blockwise.BLOCK if run.context.method == "ulysses" else min(blockwise.BLOCK, max(32, -(-chunk // 4)))
    engine = cudnn.engine() if reasons == [] else blockwise.engine(block)
    return partial(attend, ContextParallel(METHODS[run.context.method], engine)), note


def _against_cudnn(run, cp: int) -> list[str]:
    """Why cuDNN's kernel cannot serve this run; empty where it can."""
    reasons = []
    if run.data.document_mask:
        reasons.append("cuDNN's kernel has no document mask (data.document_mask=true)")
    if run.model.compute_dtype != "bfloat16":
        reasons.append(f"cuDNN's kernel takes bfloat16, not model.compute_dtype={run.model.compute_dtype}")
    if run.model.head_dim % 8 or run.model.head_dim > 128:
        reasons.append(f"cuDNN's kernel needs a head_dim that is a multiple of 8 up to 128, not {run.model.head_dim}")
    if run.training.deterministic:
        reasons.append("cuDNN's backward adds in no fixed order (training.deterministic=true)")
    if not importlib.util.find_spec("nvidia") or not _has_cudnn():
        reasons.append("the cuDNN library is not installed (extra 'gpu')")
    elif cp > 1 and cudnn.engine() is None:
        reasons.append("this version of jax does not offer cuDNN's blocks")
    return reasons


def _has_cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False
