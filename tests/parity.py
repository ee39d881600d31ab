"""One harness for what every layout must do: a step on any mesh, by any rule file, is the step of one device.

The step that is compared is the compiled one that trains. After the first its optimizer's state is linear or
quadratic in every gradient leaf, so no gradient is taken in a look-alike.
"""
import dataclasses
import functools
import itertools
import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from meshtrain import assembly, config
from meshtrain.cost.program import audit
from meshtrain.model import params as params_of
from meshtrain.names import AXES, NO_TARGET
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training.state import State

RULES = Path(__file__).resolve().parent.parent / "sharding_rules"
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A run assembled on simulated devices, and its step."""
    made: assembly.Assembly
    step: jax.stages.Compiled

    @functools.cached_property
    def audit(self) -> audit.ProgramAudit:
        return audit.read(self.step.as_text(), self.made.mesh)


class Tolerance(NamedTuple):
    """Relative differences. state: of a leaf of the optimizer's state after the first step, against its largest
    element, or `floor` of the largest leaf's, where a leaf's true value is zero (the bias of a key) and it holds the
    rounding of what cancels."""
    loss: float
    norm: float
    state: float
    later_losses: float
    floor: float


# float32: sums in another order. Of a norm over six numbers some weights make a gradient whose roundings are
# amplified, 2.2e-5 at the most that was seen. Later steps: Adam divides by the root of tiny moments, and lion takes
# signs.
FLOAT32 = Tolerance(2e-5, 6e-5, 2e-4, 1e-3, 1e-5)
# bfloat16 keeps 8 bits of each activation, and other cuts round others; small leaves hold little else.
BFLOAT16 = Tolerance(2e-3, 2e-2, 0.15, 1e-2, 0.05)


def check(run: config.Run, seed: int = 0, tolerance: Tolerance = FLOAT32) -> Compiled:
    """Compile the run's step and compare it with that of one device."""
    case = compiled(run)
    check_equal(case, seed, tolerance)
    return case


def check_equal(case: Compiled, seed: int = 0, tolerance: Tolerance = FLOAT32) -> None:
    """Compare losses, gradient norms and the optimizer's state with those of one device; no permute lacks a target."""
    assert not case.audit.broken_permutes
    params, expected, expected_state = one_device(on_one_device(case.made.run).model_dump_json(), seed)
    numbers, state = trained(case, params)
    np.testing.assert_allclose(numbers[0][0], expected[0][0], rtol=tolerance.loss, err_msg="loss")
    np.testing.assert_allclose(numbers[0][1], expected[0][1], rtol=tolerance.norm, err_msg="gradient norm")
    check_leaves(state, expected_state, tolerance)
    np.testing.assert_allclose(numbers[:, 0], expected[:, 0], rtol=tolerance.later_losses)


@functools.lru_cache(8)
def one_device(run: str, seed: int):
    """(parameters, [losses, gradient norms], optimizer's state) of a run on one device, given as JSON; the layouts of
    a run share it."""
    one = compiled(config.Run.model_validate_json(run))
    params = drawn_parameters(one.made, seed)
    return params, *trained(one, params)


def check_leaves(found, expected, tolerance: Tolerance = FLOAT32) -> None:
    """Compare two trees with the tolerance's `state` and `floor`."""
    scales = [np.abs(e).max(initial=0) for e in jax.tree.leaves(expected)]
    for (path, a), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        scale = max(np.abs(e).max(initial=0), tolerance.floor * max(scales))
        off = np.abs(a - e).max(initial=0)
        assert off <= tolerance.state * scale, f"{jax.tree_util.keystr(path)}: {off:.1e} of {scale:.1e}"


def assembled(run: config.Run) -> assembly.Assembly:
    return assembly.assemble(run, jax.devices()[:math.prod(getattr(run.mesh, axis) for axis in AXES)])


def compiled(run: config.Run) -> Compiled:
    made = assembled(run)
    with jax.default_matmul_precision("highest"):
        return Compiled(made, made.program.compile())


def on_one_device(run: config.Run) -> config.Run:
    """The plain computation: no mesh, one microbatch, nothing recomputed."""
    return run.model_copy(update=dict(
        mesh=config.Mesh(), sharding=config.Sharding(rules=str(RULES / "ddp.toml")), pipeline=config.Pipeline(),
        context=config.Context(), experts=run.experts.model_copy(update=dict(dispatch="auto")),
        training=run.training.model_copy(update=dict(microbatches=1, remat="none"))))


def drawn_parameters(made: assembly.Assembly, seed: int):
    """Not the model's own start: biases and norms that are no constants show a wrong gradient of what they scale."""
    rng = np.random.default_rng(seed)
    # Around what a norm scales by at the start: twice as much in every norm makes gradients that differ by their
    # rounding.
    mean = lambda info: (info.role == "norm") * (1 - made.run.model.norm_offset)
    return params_of.tree(made.model.parameters(), lambda info: (
        mean(info) + rng.standard_normal(info.shape) * (0.2 if "matrix" in info.role else 0.05)).astype(info.dtype))


def trained(case: Compiled, params, steps: int = STEPS):
    """([losses, gradient norms], the optimizer's state after the first step)."""
    spec = case.made.program.step.state
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
    state = jax.device_put(State(np.int32(0), params, opt_state), spec.sharding)
    numbers, first = [], None
    for n in range(steps):
        state, metrics = case.step(state, case.made.program.place(batch_of(case.made.run, n)))
        assert not metrics["skipped"]
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        first = first or jax.device_get(state.opt_state)
    return np.array(numbers), first


def evaluated(run: config.Run, seed: int = 0) -> np.ndarray:
    """The sums that an evaluation makes."""
    made = assembled(run)
    params = jax.device_put(drawn_parameters(made, seed), made.program.step.state.sharding.params)
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        return np.array(jax.device_get(made.program.evaluate(params, made.program.place(batch_of(run, 0)))))


def first_moment(opt_state):
    """Of AdamW's state: after a step (1 - b1) times the clipped gradient."""
    (found,) = [s.mu for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    return found


def batch_of(run: config.Run, step: int) -> dict:
    """Packed documents, some targets missing, some sequences with hardly any or padded at the end."""
    B, T, rng = run.data.global_batch, run.data.seq_len, np.random.default_rng(step)
    starts = rng.random((B, T)) < 0.15
    starts[:, 0] = True
    index = np.tile(np.arange(T), (B, 1))
    targets = rng.integers(0, run.model.vocab_size, (B, T))
    targets[rng.random((B, T)) < rng.random((B, 1))] = NO_TARGET
    batch = {"tokens": rng.integers(0, run.model.vocab_size, (B, T)), "targets": targets, "index": index,
             "segments": np.cumsum(starts, 1),
             "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1),
             "sequence": step * B + np.arange(B)}  # fmt: skip
    padding = index >= T - rng.integers(0, T, (B, 1)) * (rng.random((B, 1)) < 0.3)      # where no document is cut
    batch["segments"][padding], batch["targets"][padding] = 0, NO_TARGET
    return {name: x.astype(np.int32) for name, x in batch.items()}


def accepted(run: config.Run) -> None:
    """Raises: ConfigError, for what the program refuses."""
    spec = MeshSpec(config.mesh_sizes(run, math.prod(getattr(run.mesh, axis) for axis in AXES)), run.mesh.placement)
    if faults := config.problems(run):
        raise config.ConfigError(*faults)
    assembly.design(run, spec, "cpu", None)


# ---- pairs of choices ------------------------------------------------------------------------------------------------

# What a cell chooses. Packed, padded and hardly supervised sequences are in each cell's batch.
CHOICES = {
    "rules": tuple(sorted(path.stem for path in RULES.glob("*.toml"))),
    "data": ("none", "data"),
    "fsdp": ("none", "fsdp"),
    "tensor": ("none", "tensor"),
    "schedule": ("none", *schedules.NAMES),
    "context": ("none", "ring", "gather", "ulysses"),
    "remat": ("none", "selective", "full", "offload"),
    "model": ("llama", "gpt2", "gemma", "olmo", "dropout"),
    "experts": ("none", "softmax", "sigmoid", "sent"),
    "window": ("none", "all", "period"),
    "lora": ("none", "lora"),
    "optimizer": ("adamw", "lion", "adafactor", "muon"),
    "dtype": ("float32", "bfloat16"),
    "microbatches": ("1", "2", "4"),
}
# Mesh axis: the choice that splits it in two.
AXIS_OF = {"data": "data", "fsdp": "fsdp", "tensor": "tensor", "stage": "schedule", "context": "context"}
T = 16
MODELS = {
    "llama": dict(z_loss=1e-2),
    "gpt2": dict(norm="layernorm", activation="gelu", position="learned", max_seq_len=T, attention_bias="all",
                 num_kv_heads=4, tie_embeddings=True),
    "gemma": dict(norm_placement="both", norm_offset=1.0, norm_eps=0.01, activation="geglu", multipliers=dict(embedding=32 ** 0.5),
                  tie_embeddings=True, logit_softcap=2.0, score_softcap=0.5),
    "olmo": dict(norm_placement="after", norm_eps=0.01, qk_norm="all_heads", attention_bias="qkv"),
    "dropout": dict(embedding_dropout=0.1, residual_dropout=0.2, qk_norm="head"),
}
EXPERTS = {
    "none": {},
    "softmax": dict(num_experts=4, experts_per_token=2),
    "sigmoid": dict(num_experts=4, router_score="sigmoid", router_groups=(2, 1), shared_expert_dim=16),
    "sent": dict(num_experts=8, experts_per_token=3, router_normalize=False),
}
WINDOWS = {"none": {}, "all": dict(window=5),
           "period": dict(window=5, mixers="WF", kinds=dict(W=dict(rope_theta=100.0)), multipliers=dict(score=0.25))}


def run_of(cell: dict[str, str]) -> config.Run:
    """The run of a cell: two devices on each axis that it names."""
    sizes = {axis: 1 + (cell[choice] != "none") for axis, choice in AXIS_OF.items()}
    interleaved, sends = cell["schedule"] in schedules.INTERLEAVED, cell["experts"] == "sent" and sent(cell)
    # Leading layers, each a program of its own: a whole period of them.
    dense = (1 + (cell["window"] == "period")) * (cell["experts"] == "sigmoid")
    layers = dense + (8 if interleaved else 2 if dense else 4)
    model = dict(vocab_size=259, embed_dim=32, num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48,
                 compute_dtype=cell["dtype"])
    model |= MODELS[cell["model"]] | EXPERTS[cell["experts"]] | WINDOWS[cell["window"]]
    model |= dict(mlps="d" * dense + "e*") if dense else {}
    model["mlp_bias"] = cell["model"] == "gpt2" and cell["experts"] == "none"       # experts have no biases
    training = dict(steps=9, microbatches=int(cell["microbatches"]), remat=cell["remat"], loss_chunk=24,
                    z_loss=model.pop("z_loss", 0.0))
    return config.Run(
        mesh=sizes, sharding=dict(rules=str(RULES / f"{cell['rules']}.toml")), model=model, training=training,
        data=dict(seq_len=T, global_batch=16), lora=dict(rank=2, alpha=3.0) if cell["lora"] != "none" else {},
        optimizer=dict(name=cell["optimizer"], learning_rate=1e-3, schedule="constant"),
        experts=dict(dispatch="all_to_all") if sends else {},
        pipeline=dict(schedule=cell["schedule"], chunks=1 + interleaved) if sizes["stage"] > 1 else {},
        context=dict(method=cell["context"]) if sizes["context"] > 1 else {},
    )  # fmt: skip


def sent(cell: dict[str, str]) -> bool:
    """Whether tokens can be sent to the experts of a cell: some axis splits them."""
    return cell["rules"] == "zero3_experts_fsdp" and cell["fsdp"] != "none"


def impossible(a: str, x: str, b: str, y: str) -> bool:
    """Whether no cell may have both choices: the program refuses them, or rounding changes which expert is chosen."""
    chosen = {"schedule": "none", "dtype": "float32"} | {a: x, b: y}
    interleaved = chosen["schedule"] in schedules.INTERLEAVED
    return (chosen["schedule"] != "none" and chosen.get("remat") == "offload"
            or interleaved and chosen.get("microbatches") == "1"
            or chosen["dtype"] == "bfloat16" and chosen.get("experts", "none") != "none")


# Beside the first choice the second counts only by whether it is made. A rule file splits arrays, however they are
# computed; a model, an optimizer and adapters know no schedule but that there are stages.
BY_WHETHER = {("rules", "schedule"), ("rules", "context"), ("rules", "experts"), ("schedule", "model"),
              ("schedule", "optimizer"), ("context", "optimizer"), ("schedule", "experts")}
APART = {("rules", "model"), ("rules", "remat"), ("rules", "window"), ("rules", "microbatches"), ("model", "optimizer"),
         ("window", "optimizer"), ("remat", "optimizer")}


def pair(a: str, x: str, b: str, y: str) -> tuple:
    """Two choices as the table counts them."""
    if (a, b) == ("rules", "optimizer"):
        y = str(y == "muon")        # which alone looks at whole matrices
    elif (a, b) in BY_WHETHER:
        x, y = (x, str(y != "none")) if a == "rules" else (str(x != "none"), y)
    return ((a, x), (b, y)) if (a, b) not in APART else ()


def pairs(cell: dict[str, str]) -> set[tuple]:
    return {pair(*one, *other) for one, other in itertools.combinations(cell.items(), 2)}


def every_pair() -> set[tuple]:
    """The pairs of choices that a table of cells must hold."""
    return {pair(a, x, b, y) for a, b in itertools.combinations(CHOICES, 2) for x in CHOICES[a] for y in CHOICES[b]
            if not impossible(a, x, b, y)}


def possible(cell: dict[str, str]) -> bool:
    """Whether the program takes the cell, on one to three axes: on none it would be compared with itself."""
    together = itertools.combinations(cell.items(), 2)
    return 1 <= sum(cell[choice] != "none" for choice in AXIS_OF.values()) <= 3 and not any(
        impossible(*x, *y) for x, y in together)


# By how much a choice lengthens the compilation of its cell, as measured; microbatches: of a pipeline's unrolled ticks.
SLOWER = {("model", "llama"): 0.8, ("experts", "none"): 0.7, ("experts", "sigmoid"): 1.35, ("window", "none"): 0.8,
          ("window", "period"): 1.3, ("optimizer", "lion"): 0.7, ("optimizer", "adafactor"): 1.15,
          ("optimizer", "muon"): 1.2, ("dtype", "bfloat16"): 1.3, ("microbatches", "4"): 1.5}


def cost(cell: dict[str, str]) -> float:
    """Relative to a plain cell."""
    staged = cell["schedule"] != "none"
    leading = cell["experts"] == "sigmoid" and cell["window"] == "period"       # twice as many layers apart
    return (1 + 0.4 * staged) * (1 + 0.4 * leading) * math.prod(
        factor for (name, value), factor in SLOWER.items()
        if cell[name] == value and (staged or name != "microbatches"))


def cover(seed: int) -> list[dict[str, str]]:
    """Cells that hold every pair of choices, found greedily: many pairs, and cheap."""
    rng, cells, missing = random.Random(seed), [], every_pair()
    gain = lambda cell: len(pairs(cell) & missing) / cost(cell) ** 0.5 if possible(cell) else -1
    while missing:
        best = {}
        for _ in range(12):     # climbs from random cells, a choice at a time
            cell = {name: rng.choice(values) for name, values in CHOICES.items()}
            for name in rng.sample(list(CHOICES), len(CHOICES)) * 2:
                cell = max(({**cell, name: value} for value in CHOICES[name]), key=gain)
            best = max(best, cell, key=lambda cell: gain(cell) if cell else -1)
        cells.append(best)
        missing -= pairs(best)
    return cells


if __name__ == "__main__":      # the cheapest table of so many
    for found in min((cover(seed) for seed in range(int(sys.argv[1]))), key=lambda cells: sum(map(cost, cells))):
        print(" ".join(found.values()))
