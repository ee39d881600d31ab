"""Where tensor ranks outnumber the key and value heads, a head is computed by several ranks, and nothing else
changes."""
import jax
import parity
import pytest

import sampling
import test_layouts
from meshtrain import assembly, config
from meshtrain.cost.program import audit, compile
from test_layouts import RULES

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


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
@pytest.mark.long
@pytest.mark.cell
@pytest.mark.parametrize("rule, mesh", [("ddp", dict(data=2, tensor=8)), ("zero3", dict(fsdp=2, tensor=8))])
def test_repeated_heads_move_no_activation_and_cost_no_matmul_more_on_gpus(rule, mesh):
    """Against a model with as many kv heads as ranks: the same matmuls, the same traffic but for the gradients of the
    heads."""
    L, M, D, H, K = 2, 4, 512, 64, 4

    def step(num_kv_heads):
        run = config.Run(
            mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")),
            model=dict(vocab_size=1024, embed_dim=D, num_layers=L, num_heads=16, num_kv_heads=num_kv_heads, head_dim=H,
                       mlp_dim=512),
            data=dict(seq_len=512, global_batch=32), training=dict(microbatches=M, remat="full"))
        made = assembly.assemble(run, compile.topology("h100:16"))
        return audit.read(made.program.compile().as_text(), made.mesh)
    shared, own = step(K), step(8)
    assert shared.flops == own.flops and not shared.broken_permutes

    def tensor_bytes(program, dtype):
        return sum(c.payload_bytes for c in program.collectives if any(a.startswith("tensor") for a in c.axes)
                   and c.dtype == dtype)
    assert tensor_bytes(shared, "bf16") == tensor_bytes(own, "bf16")
    gradients = 2 * L * M * D * K * H * 4           # of keys' and values' weights, per layer and microbatch
    assert tensor_bytes(shared, "f32") - tensor_bytes(own, "f32") <= 2.5 * gradients
