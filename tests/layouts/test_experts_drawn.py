"""Random models with experts, meshes, rule files and schedules: on each the loss and every gradient leaf of a loop over
experts."""
import dataclasses
import math
import random

import jax
import numpy as np
import pytest
from sampling import GRID

import experts
import test_experts
from meshtrain import assembly, config, design
from meshtrain.choices import experts as choices
from meshtrain.choices.setting import Choice, Setting
from meshtrain.names import AXES, NO_TARGET
from meshtrain.parallel.experts import all_to_all, dispatch
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec

EXPERT_AXES = ([], ["fsdp"], ["data"], ["tensor"], ["fsdp", "tensor"], ["tensor", "fsdp"],
               ["data", "fsdp"], ["context"], ["context", "fsdp"])
# Models as narrow as 6: rounding that their norms magnify was 4.4e-5 of a leaf's largest gradient at most in 74 draws.
TOLERANCE = 6e-5


def rules_of(rng, sizes: dict) -> str:
    """The text of a rule file: its axes may be of size 1 on this mesh."""
    expert_axes = rng.choice(EXPERT_AXES)
    free = [axis for axis in ("data", "fsdp", "tensor", "context") if axis not in expert_axes]
    inner = [free.pop(rng.randrange(len(free)))] if rng.random() < 0.35 else []
    params = {"embed": rng.choice(([], ["fsdp"], ["data", "fsdp"], ["fsdp", "data"], ["data", "fsdp", "context"])),
              "expert": expert_axes,
              "expert_mlp": inner, "expert_embed": rng.sample(free, rng.randint(0, min(2, len(free))))}
    where = rng.choice(("params", "params", "grads", "optimizer"))      # ZeRO-3, 2 or 1 of embed
    moved = {"embed": params.pop("embed")} if where != "params" else {}
    acts = {"batch": rng.choice((["data", "fsdp"], ["fsdp", "data"]))}
    acts["residual_seq"] = ["context"] * (sizes["context"] > 1) + ["tensor"] * (rng.random() < 0.6)
    acts["seq"] = ["context"] * (sizes["context"] > 1)
    if sizes["stage"] > 1:
        params["layers"] = ["stage"]
    tables = {"params": params} | ({where: params | moved} if moved else {}) | {"activations": acts}
    return "\n".join(f"[{name}]\n" + "\n".join(f"{key} = {axes}".replace("'", '"')
                                               for key, axes in table.items() if axes)
                     for name, table in tables.items())


def drawn(rng, path) -> config.Run:
    sizes = dict.fromkeys(AXES, 1) | {"stage": rng.choice((1, 1, 2, 3, 4))}
    for axis in rng.sample(("data", "fsdp", "tensor", "context"), 4):
        sizes[axis] = rng.choice([n for n in (1, 2, 2, 3, 4, 5, 7) if n <= 8 // math.prod(sizes.values())])
    path.write_text(rules_of(rng, sizes))
    stage, tensor, split = sizes["stage"], sizes["tensor"], sizes["context"] * sizes["tensor"]
    E, schedule = rng.randint(1, 12), rng.choice(("auto", *schedules.NAMES))
    chunks, layers = 1 + (stage > 1 and schedule in schedules.INTERLEAVED), rng.randint(stage, stage + 3)
    microbatches = rng.choice((1, 2)) * stage if chunks > 1 else rng.choice((1, 2, 3))
    swiglu = dict(activation="swiglu", shared_expert_dim=rng.choice((0, 5)),
                  mlps="d" * rng.choice((0, 1, layers - 1)) + "e*")
    groups = rng.choice([n for n in range(1, E + 1) if E % n == 0])
    model = dict(
        vocab_size=rng.choice((61, 257, 300)), embed_dim=math.prod(sizes.values()) // stage * rng.choice((3, 5, 8)),
        num_layers=layers, head_dim=4,
        num_kv_heads=rng.choice((1, 2)), num_heads=2 * tensor, mlp_dim=rng.choice((5, 18)),
        num_experts=E, experts_per_token=rng.choice((1, min(2, E), E)),
        expert_mlp_dim=rng.choice((7, 10, 36)), router_score=rng.choice(("softmax", "sigmoid")),
        router_normalize=rng.random() < 0.6,
        router_scale=rng.choice((1.0, 2.5)), router_groups=(groups, rng.randint(1, groups)), compute_dtype="float32",
        **rng.choice((swiglu, swiglu, dict(activation="gelu"), dict(activation="geglu"))))
    return config.Run(
        mesh=sizes | dict(placement=rng.sample(AXES, len(AXES))), sharding=dict(rules=str(path)), model=model,
        experts=test_experts.EXPERTS | dict(dispatch=rng.choice(("gather", "all_to_all"))),
        data=dict(seq_len=2 * split * rng.randint(1, 3) if split > 1 else rng.randint(3, 17),
                  global_batch=sizes["data"] * sizes["fsdp"] * microbatches * rng.randint(1, 3)),
        training=dict(microbatches=microbatches, loss_chunk=rng.choice((7, 24)),
                      remat=rng.choice(("none", "selective", "full", "offload"))),
        pipeline=dict(schedule=schedule, chunks=chunks) if stage > 1 else {},
        context=dict(method=rng.choice(("ring", "gather", "ulysses"))) if sizes["context"] > 1 else {})


def sound(rng, path) -> config.Run:
    """The first run that is not refused."""
    while True:
        try:
            run = drawn(rng, path)
            # Bytes as data would ask for a larger vocabulary; the batch here is made of numbers.
            if not [one for one in config.problems(run) if "data.source" not in one]:
                design.make(run, MeshSpec({axis: getattr(run.mesh, axis) for axis in AXES}, run.mesh.placement),
                                "cpu", None)
                return run
        except config.ConfigError:
            pass


def packed(run: config.Run, rng) -> dict:
    """Documents of a few tokens, a fifth of the targets missing; some sequences end with padding, or are nothing
    else."""
    B, T = run.data.global_batch, run.data.seq_len
    starts, index = (rng.random((B, T)) < 0.1) | (np.arange(T) == 0), np.tile(np.arange(T), (B, 1))
    tokens, targets = (rng.integers(0, run.model.vocab_size, (B, T)) for _ in range(2))
    padding = np.tile(np.arange(T), (B, 1)) >= np.where(rng.random((B, 1)) < 0.3, rng.integers(0, T, (B, 1)), T)
    padding[0] = False      # one token has a target
    batch = {"tokens": tokens, "targets": np.where((rng.random((B, T)) < 0.2) | padding, NO_TARGET, targets),
             "index": index,
             "segments": np.where(padding, 0, np.cumsum(starts, 1)),
             "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1), "sequence": np.arange(B)}
    return {name: a.astype(np.int32) for name, a in batch.items()}


@pytest.mark.parametrize("number", [pytest.param(number, marks=GRID) for number in range(4)])
def test_random_experts_on_random_layouts_compute_what_a_loop_over_experts_does(number, tmp_path, monkeypatch):
    rng = random.Random(number)
    run = sound(rng, tmp_path / "rules.toml")
    choose, spare = choices.choose, rng.choice((dispatch.CAPACITY_FACTOR, 0.3))

    def choose_with_spare(setting: Setting) -> Choice:
        chosen = choose(setting)
        return dataclasses.replace(chosen, value=dataclasses.replace(chosen.value, capacity_factor=spare))
    monkeypatch.setattr(choices, "choose", choose_with_spare)
    monkeypatch.setattr(all_to_all, "CAPACITY_FACTOR", rng.choice((all_to_all.CAPACITY_FACTOR, 0.3)))
    batch, dumped = packed(run, np.random.default_rng(number)), run.model_dump()
    monkeypatch.setattr(test_experts, "batch", lambda: batch)
    monkeypatch.setattr(test_experts, "TOLERANCE", TOLERANCE)
    one = config.Run(model=dumped["model"], experts=dumped["experts"] | dict(dispatch="auto"),
                     sharding=dict(rules="sharding_rules/ddp.toml"))
    fresh = jax.jit(assembly.assemble(one, jax.devices()[:1]).model.init)
    # nobody, or all, to the second
    leaning = rng.choice((0.0, 0.0, -1e3, 1e3)) * (np.arange(run.model.num_experts) == 1)
    moved = lambda path, leaf: {"router": lambda: leaf * 2, "bias": lambda: leaf + leaning}.get(
        path[-1].key, lambda: leaf)()
    for seed in range(12):
        params = jax.device_get(jax.tree_util.tree_map_with_path(moved, fresh(jax.random.key(seed))))
        nll, grads, counts, gap = experts.gradients(dumped["model"], dumped["experts"], params, batch)
        if gap > test_experts.GAP:
            break
    else:
        pytest.skip("no parameters with clear choices")
    test_experts.assert_equal(run, (params, nll, grads, counts),
                              jax.devices()[:math.prod(getattr(run.mesh, axis) for axis in AXES)])
