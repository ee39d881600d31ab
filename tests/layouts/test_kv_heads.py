"""Where tensor ranks outnumber the key and value heads, a head is computed by several ranks, and nothing else
changes."""
import jax
import parity
import pytest

import sampling
import test_layouts
from meshtrain import assembly, config

GQA, MQA = dict(num_kv_heads=2), dict(num_kv_heads=1)
ALL = dict(qk_norm="head", attention_bias="qkv")


def run_of(rule: str, mesh: dict, model: dict, **sections) -> config.Run:
    run = test_layouts.run_of(rule, mesh, ALL | model)
    return config.Run(**run.model_dump(exclude=set(sections)), **sections)


CASES = [
    (MQA, "zero3", dict(fsdp=2, stage=2, tensor=2), dict(pipeline=dict(schedule="zero_bubble"))),
]
GRID = [
    (GQA, "zero3", dict(fsdp=2, tensor=4), {}),
    (MQA, "zero3", dict(context=2, stage=2, tensor=2), dict(context=dict(method="ring"))),
    (GQA | dict(qk_norm="all_heads"), "zero3", dict(fsdp=2, tensor=4), {}),
    (GQA, "tensor", dict(data=2, tensor=4), {}),
    (MQA, "ddp", dict(tensor=8), {}),
    (GQA, "zero1", dict(stage=2, tensor=4), dict(pipeline=dict(schedule="1f1b"))),
    (GQA, "zero3", dict(context=2, tensor=4), dict(context=dict(method="ring"))),
    (MQA, "zero3", dict(context=2, tensor=4), dict(context=dict(method="ulysses"))),
    (GQA, "zero3", dict(context=2, tensor=4), dict(context=dict(method="gather"))),
]  # fmt: skip


@pytest.mark.parametrize(
    "model, rule, mesh, sections", [*CASES, *(pytest.param(*case, marks=sampling.GRID) for case in GRID)],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value)
def test_more_tensor_ranks_than_kv_heads_equal_one_device(model, rule, mesh, sections):
    case = parity.check(run_of(rule, mesh, model, **sections))
    assert any("key and value heads" in note for note in case.made.notes)


@pytest.mark.parametrize("heads, kv, tensor", [(8, 2, 8), (8, 4, 2), (4, 2, 8), (12, 4, 6)])
def test_heads_are_repeated_only_where_ranks_share_them_evenly(heads, kv, tensor):
    run = run_of("tensor", dict(tensor=tensor), dict(num_heads=heads, num_kv_heads=kv, mlp_dim=96, vocab_size=768))
    devices = jax.devices() * 2
    accepted = (heads, kv, tensor) in ((8, 2, 8), (8, 4, 2))
    if not accepted:
        with pytest.raises(config.ConfigError, match="does not divide"):
            assembly.assemble(run.replaced(mesh={"tensor": tensor}),
                              devices[:tensor])
        return
    made = assembly.assemble(run, devices[:tensor])
    key = made.program.step.state.sharding.params["layers"]["attention"]["key"]["kernel"]
    assert ("tensor" in jax.tree.leaves(tuple(key.spec))) == (tensor <= kv)     # whole on every rank where it is shared
    assert bool([note for note in made.notes if "key and value heads" in note]) == (tensor > kv)
