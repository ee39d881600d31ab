"""The weight sync of RL: the values are the cast's, to the bit; it sends the bytes that the sampler lacks, and no more."""
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import assembly, config, trained
from meshtrain.cost.program import audit, compile
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.names import MATMUL_ROLES

RULES = Path(__file__).resolve().parent.parent / "sharding_rules"
MODEL = dict(vocab_size=512, embed_dim=64, num_layers=2, num_heads=8, num_kv_heads=4, mlp_dim=128)
LAYOUTS = {
    "zero3 fsdp 8": ("zero3", dict(fsdp=8)), "zero3 tensor 2": ("zero3", dict(fsdp=4, tensor=2)),
    "zero3 mixed": ("zero3", dict(data=2, fsdp=2, tensor=2)), "zero1": ("zero1", dict(data=2, fsdp=4)),
    "context": ("zero3", dict(fsdp=4, context=2)), "ddp": ("ddp", dict(data=8)), "tensor": ("tensor", dict(tensor=8))}
MOST = 1.05
SPLIT = '[params]\nheads = ["tensor", "fsdp"]\nmlp = ["tensor", "fsdp"]\n[activations]\nbatch = "data"\n' \
        'heads = ["tensor", "fsdp"]\nmlp = ["tensor", "fsdp"]\n'


def run_of(rule: str, mesh: dict, dtype: str = "float32", **sections) -> config.Run:
    return config.Run(mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")),
                      **{"model": MODEL | dict(compute_dtype=dtype), "data": dict(
                          source="prompts", paths=("p.jsonl",), seq_len=64, global_batch=8),
                         "training": dict(objective="rl"),
                         "rl": dict(prompts=4, samples=2, max_tokens=8, reward="exact"), **sections})


def lacking(sampler: trained.Sampler) -> float:
    """Bytes of the sampler's share of each parameter that lie on other devices before the sync."""
    made, total = sampler.made, 0.0
    sizes = made.layout.sizes
    shards = lambda layout, table, info: {axis for entry in layout.spec(table, info.axes) if entry
                                          for axis in ((entry,) if isinstance(entry, str) else entry)}
    for info in made.model.parameters():
        item = jnp.dtype(made.run.model.compute_dtype if info.role in MATMUL_ROLES else info.dtype).itemsize
        wanted = shards(sampler.layout, "params", info)
        rest = math.prod(sizes[axis] for axis in shards(made.layout, "optimizer", info) - wanted)
        share = info.size * item / math.prod(sizes[axis] for axis in wanted)
        total += share * (1 - 1 / rest)
    return total


def sent(sampler: trained.Sampler) -> tuple[int, object]:
    """(bytes that a device sends, the compiled program)."""
    made = sampler.made
    frozen = [sampler.made.model.divided(made.state_shapes.params).trained]
    compiled = made.program.compiled(sampler._move, *frozen)
    found = audit.read(compiled.as_text(), made.mesh)
    assert not found.broken_permutes
    return sum(one.bytes for one in found.collectives), compiled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_the_cast_to_the_bit_and_travel_once(layout, dtype):
    made = assembly.assemble(run_of(*LAYOUTS[layout], dtype), jax.devices())
    sampler = trained.Sampler(made)
    with jax.set_mesh(made.mesh):
        stored = made.program.compiled(made.program.initialize)().params
        found = sampler.generator(stored).params
        for info in made.model.parameters():
            get = lambda tree: functools.reduce(dict.__getitem__, info.path, tree)
            cast = np.asarray(get(stored)).astype(dtype) if info.role in MATMUL_ROLES else np.asarray(get(stored))
            assert np.array_equal(np.asarray(get(found)), cast), info.name
            assert get(found).sharding.spec == sampler.layout.spec("params", info.axes) or get(
                found).sharding.is_equivalent_to(jax.sharding.NamedSharding(
                    made.mesh, sampler.layout.spec("params", info.axes)), get(found).ndim)
        width = 2 if dtype == "bfloat16" else 1       # CPU programs gather bfloat16 as float32
        assert sent(sampler)[0] <= MOST * width * lacking(sampler)
        sampler.release()
        assert not sampler._generator.params


@pytest.mark.skipif(bool(compile.missing_wheels()), reason=f"no {compile.missing_wheels()}")
@pytest.mark.parametrize("rule, mesh", [("zero3", dict(fsdp=8)), ("zero3", dict(fsdp=4, tensor=2)), ("zero1", dict(fsdp=8))])
def test_gpus_send_each_byte_once_and_hold_no_second_copy(rule, mesh):
    model = dict(vocab_size=32768, embed_dim=1024, num_layers=8, num_heads=16, num_kv_heads=8, mlp_dim=4096)
    made = assembly.assemble(run_of(rule, mesh, model=model), compile.topology("h100:8"))
    sampler = trained.Sampler(made)
    with jax.set_mesh(made.mesh):
        found, compiled = sent(sampler)
    assert found <= MOST * lacking(sampler)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.6 * memory.output_size_in_bytes


def drawn(made, params):
    sampler = trained.Sampler(made)
    with jax.set_mesh(made.mesh):
        found = sampler.generator(params).complete(
            [[256, 97], [256, 98, 99], [256, 100, 101, 102, 103]], GenerationLimits(12, (256,)), Picking(1.0), 3,
            samples=[3, 2, 3], counters=[(7, row) for row in range(3)])
    return [one.tokens for one in found], [one.logprobs for one in found], sampler


@pytest.mark.parametrize("layout", ["zero3 mixed", "context", "rules"])
def test_answers_are_those_of_one_device(layout, tmp_path):
    rule, mesh = LAYOUTS["zero3 mixed" if layout == "rules" else layout]
    rl = dict(prompts=4, samples=2, max_tokens=8, reward="exact")
    if layout == "rules":
        (tmp_path / "sampler.toml").write_text(SPLIT)
        rl["rules"] = str(tmp_path / "sampler.toml")
    made = assembly.assemble(run_of(rule, mesh, rl=rl), jax.devices())
    alone = assembly.assemble(run_of("ddp", dict(data=1)), jax.devices()[:1])
    with jax.set_mesh(alone.mesh):
        p = alone.program.compiled(alone.program.initialize)().params
    p = jax.tree.map(lambda x: 4 * np.asarray(x), p)
    there = jax.device_put(p, made.program.step.state.sharding.params)
    tokens, logprobs, sampler = drawn(made, there)
    wanted, numbers, _ = drawn(alone, jax.device_put(p, alone.program.step.state.sharding.params))
    assert tokens == wanted
    for one, other in zip(logprobs, numbers, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-4)      # logits are up to 100
    kept = dict(sampler._generator._kept)
    with jax.set_mesh(made.mesh):
        sampler.generator(there).complete([[256, 97]], GenerationLimits(12), Picking(1.0), samples=[8])
    assert kept.items() <= sampler._generator._kept.items() and len(sampler._moves) == 2 - (not jax.tree.leaves(
        made.model.divided(p).frozen))


def test_frozen_weights_are_laid_out_once():
    made = assembly.assemble(run_of("zero3", dict(fsdp=8), lora=dict(rank=2)), jax.devices())
    sampler = trained.Sampler(made)
    with jax.set_mesh(made.mesh):
        stored = made.program.compiled(made.program.initialize)().params
        first = jax.tree.leaves(made.model.divided(sampler.generator(stored).params).frozen)
        sampler.release()
        again = jax.tree.leaves(made.model.divided(sampler.generator(stored).params).frozen)
        assert first and all(a is b for a, b in zip(first, again, strict=True))
        whole = trained.Sampler(assembly.assemble(run_of("zero3", dict(fsdp=8)), jax.devices()))
        assert sent(sampler)[0] < 0.2 * sent(whole)[0]


def test_rules_that_do_not_fit_are_told(tmp_path):
    (tmp_path / "sampler.toml").write_text(SPLIT)
    rl = dict(prompts=4, samples=2, max_tokens=8, reward="exact", rules=str(tmp_path / "sampler.toml"))
    made = assembly.assemble(run_of("zero3", dict(fsdp=8), rl=rl, model=MODEL | dict(num_heads=4, mlp_dim=124)),
                             jax.devices())
    with pytest.raises(config.ConfigError, match="rl.rules: .*heads=4 does not divide"):
        trained.Sampler(made)
