"""The weights of a training run, where its sampler reads them: the same values, in two named moves, and drawn from
without a new program."""
import functools
import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain import assembly, config, trained
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.model import params
from meshtrain.names import MATMUL_ROLES
from meshtrain.rl import samplers
from meshtrain.shipped import locate_shipped

MODEL = dict(vocab_size=97, embed_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=96)
EXPERTS = MODEL | dict(mlps="de", num_experts=4, experts_per_token=2, expert_mlp_dim=32)


def assembled(mesh: dict, rule: str = "zero3", devices=None, model=MODEL, **sections) -> assembly.Assembly:
    """dtype float32 where the model does not say otherwise."""
    run = config.Run(mesh=mesh, sharding=dict(rules=str(locate_shipped(f"sharding_rules/{rule}.toml"))),
                     model=dict(compute_dtype="float32") | model, data=dict(seq_len=64, global_batch=8), **sections)
    return assembly.assemble(run, devices or jax.devices()[:math.prod(mesh.values())])


@functools.cache
def started(mesh: tuple, rule: str = "zero3", **keys):
    """(the assembled run, the parameters of seed 0)."""
    made = assembled(dict(mesh), rule, **{name: dict(value) for name, value in keys.items()})
    return made, assembly.initialize(made).params


LAYOUTS = [(("fsdp", 8),), (("fsdp", 4), ("tensor", 2)), (("data", 2), ("fsdp", 2), ("tensor", 2)),
           (("fsdp", 2), ("context", 2))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_the_sampler_reads_the_cast_of_what_is_trained_bit_for_bit(mesh, dtype):
    made, stored = started(mesh, model=tuple((MODEL | dict(compute_dtype=dtype)).items()))
    read = samplers.make(made).weights(stored)

    def check(info, w):
        wanted = np.asarray(functools.reduce(dict.__getitem__, info.path, stored))
        wanted = wanted.astype(jnp.dtype(dtype)) if info.role in MATMUL_ROLES else wanted
        assert w.dtype == wanted.dtype and (np.asarray(w) == wanted).all(), info.name
        over = {axis for dim in w.sharding.spec for axis in ([dim] if isinstance(dim, str) else dim or ())}
        assert over <= {"tensor"}, info.name
        return "tensor" in over
    split = jax.tree.leaves(params.map_params(made.model.parameters(), check, read))
    assert any(split) == (dict(mesh).get("tensor", 1) > 1)


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]


def drawn(generator, mesh) -> list:
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return generator.complete(PROMPTS, GenerationLimits(12, (0, 1)), Picking(1.0), 3, samples=[2, 3, 4],
                                  counters=[(1, row) for row in range(3)])


@functools.cache
def alone(**keys) -> list:
    made, stored = started((("fsdp", 1),), **keys)
    return drawn(samplers.make(made).generator(stored), made.mesh)


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_every_layout_draws_what_one_device_draws(mesh):
    made, stored = started(mesh)
    found = drawn(samplers.make(made).generator(stored), made.mesh)
    assert [one.tokens for one in found] == [one.tokens for one in alone()]
    for one, wanted in zip(found, alone()):
        np.testing.assert_allclose(one.logprobs, wanted.logprobs, atol=1e-5)


def test_experts_that_are_stored_over_fsdp_draw_what_one_device_draws():
    model = tuple(EXPERTS.items())
    made, stored = started((("data", 2), ("fsdp", 2), ("tensor", 2)), "zero3_experts_fsdp", model=model)
    sampler = samplers.make(made)
    assert sampler.weights(stored)["layers"]["layers"]["moe"]["up"].sharding.spec == P(None, None, None, "tensor")
    found = drawn(sampler.generator(stored), made.mesh)
    assert [one.tokens for one in found] == [one.tokens for one in alone(model=model)]


def test_programs_are_compiled_once_and_a_batch_leaves_no_array_behind(monkeypatch):
    made, stored = started((("fsdp", 4), ("tensor", 2)))
    sampler, names, expected = samplers.make(made), [], alone()     # what is kept of it is there before
    compiled = trained.Compiler.__call__

    def note(self, name, *args):
        if self is sampler.compile:
            names.append(name)
        return compiled(self, name, *args)
    monkeypatch.setattr(trained.Compiler, "__call__", note)
    held = lambda: (gc.collect(), sum(x.nbytes for x in jax.live_arrays()))[1]
    drawn(sampler.generator(stored), made.mesh)
    first, before = list(names), held()
    double = jax.tree.map(lambda w: 2 * w, stored)
    generator = sampler.generator(double)
    assert drawn(generator, made.mesh) != expected, "the weights are those given"
    del generator, double
    assert names == first and len(set(names)) == len(names) == 4
    assert held() == before


def test_only_adapters_move_again():
    made, stored = started((("fsdp", 8),), lora=(("rank", 2),))
    sampler, moved = samplers.make(made), []
    first = sampler.weights(stored)
    step = params.map_params(made.model.parameters(), lambda info, w: w + 1 if info.trainable else w, stored)
    second = sampler.weights(step)

    def check(info, w):
        again, now = (functools.reduce(dict.__getitem__, info.path, tree) for tree in (second, step))
        moved.append(info.trainable)
        assert (w is again) != info.trainable, info.name
        np.testing.assert_array_equal(np.asarray(again), np.asarray(now))
    params.map_params(made.model.parameters(), check, first)
    assert any(moved) and not all(moved)


def test_what_already_lies_there_is_not_copied():
    made, stored = started((("fsdp", 1),))
    assert all(a is b for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(samplers.make(made).weights(stored))))


# ---- a rule file of the sampler's ------------------------------------------------------------------------------------


BY_FSDP = """
[params]
heads = "tensor"
kv_heads = "tensor"
mlp = ["tensor", "fsdp"]
vocab = "tensor"
[activations]
batch = "data"
heads = "tensor"
kv_heads = "tensor"
mlp = ["tensor", "fsdp"]
vocab = "tensor"
"""


def test_a_rule_file_splits_the_mlp_further_and_draws_the_same(tmp_path):
    (tmp_path / "rules.toml").write_text(BY_FSDP)
    made, stored = started((("data", 2), ("fsdp", 2), ("tensor", 2)), rl=(("rules", str(tmp_path / "rules.toml")),))
    sampler = samplers.make(made)
    read = sampler.weights(stored)
    assert read["layers"]["mlp"]["gate"]["kernel"].sharding.spec == P(None, None, ("tensor", "fsdp"))
    assert [one.tokens for one in drawn(sampler.generator(stored), made.mesh)] == [one.tokens for one in alone()]


@pytest.mark.parametrize(("lines", "faults"), [
    ('[params]\nembed = "fsdp"\n[activations]\nbatch = ["data", "fsdp"]', [
        "[params] embed = ['fsdp']", "would be gathered over fsdp for every token; take fsdp out of it, or out of batch",
        "mesh.tensor=2, but no rule"]),
    ('[params]\nmlp = "fsdp"\n[activations]\nbatch = ["data", "tensor"]', [
        "splits mlp over fsdp, but [activations] does not"]),
    ('[activations]\nbatch = ["data", "fsdp", "tensr"]', ["did you mean 'tensor'"]),
    ('[activations]\nbatch = ["data", "fsdp"]\nmlp = ["fsdp"]\n[params]\nmlp = "fsdp"', [
        "mesh axis 'fsdp' shards both 'batch' and 'mlp'"])], ids=["gathered", "whole activations", "misspelt", "twice"])
def test_every_fault_of_a_rule_file_is_told(tmp_path, lines, faults):
    (tmp_path / "rules.toml").write_text(lines)
    with pytest.raises(config.ConfigError) as told:
        samplers.make(assembled(dict(data=2, fsdp=2, tensor=2), rl=dict(rules=str(tmp_path / "rules.toml"))))
    for fault in faults:
        assert fault in str(told.value)


def test_a_shipped_rule_file_is_found_by_its_name_and_its_idle_axis_told(tmp_path):
    rows = samplers.make(assembled(dict(data=2, fsdp=2, tensor=2), rl=dict(rules="sharding_rules/ddp.toml"))).ex.layout
    assert rows.batch_axes == ("data", "fsdp") and rows.mesh_axes("activations", "residual_seq") == ()
    with pytest.raises(config.ConfigError, match="mesh.context=2"):
        samplers.make(assembled(dict(data=2, fsdp=2, context=2), rl=dict(rules="sharding_rules/ddp.toml")))
