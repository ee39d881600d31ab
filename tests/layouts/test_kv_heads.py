"""Where tensor ranks outnumber the key and value heads, a head is computed by several ranks, and nothing else
changes. Steps on layouts: `test_cells`."""
import jax
import pytest

import test_layouts
from meshtrain import assembly, config


@pytest.mark.parametrize("heads, kv, tensor", [(8, 2, 8), (8, 4, 2), (4, 2, 8), (12, 4, 6)])
def test_heads_are_repeated_only_where_ranks_share_them_evenly(heads, kv, tensor):
    run = test_layouts.run_of("tensor", dict(tensor=tensor), dict(
        qk_norm="head", attention_bias="qkv", num_heads=heads, num_kv_heads=kv, mlp_dim=96, vocab_size=768))
    devices = jax.devices() * 2
    accepted = (heads, kv, tensor) in ((8, 2, 8), (8, 4, 2))
    if not accepted:
        with pytest.raises(config.ConfigError, match="does not divide"):
            assembly.assemble(run.replace(mesh={"tensor": tensor}),
                              devices[:tensor])
        return
    made = assembly.assemble(run, devices[:tensor])
    key = made.program.step.state.sharding.params["layers"]["attention"]["key"]["kernel"]
    assert ("tensor" in jax.tree.leaves(tuple(key.spec))) == (tensor <= kv)     # whole on every rank where it is shared
    assert bool([note for note in made.notes if "key and value heads" in note]) == (tensor > kv)
