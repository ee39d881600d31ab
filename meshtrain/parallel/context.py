"""Attention over sequences that are split along the mesh axis `context`: one of three methods, whichever engine.

`ring` passes keys and values round, `gather` gathers them, `ulysses` deals out heads instead of tokens. Each is a module
with `order` (of the tokens over the devices), `forward` and `backward`, both written out: nothing here is differentiated.
"""
from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import jax
from jax.sharding import get_abstract_mesh

from meshtrain.parallel import gather, ring, ulysses

AXIS = "context"
METHODS: dict[str, ModuleType] = {"ring": ring, "gather": gather, "ulysses": ulysses}


class Split(NamedTuple):
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
