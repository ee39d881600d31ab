"""The project's table of choices of layouts, models and optimizers, on the comparison of `meshtrain.parity`."""
import itertools
import math
import random
import sys

from meshtrain import config
from meshtrain.parity.compare import (  # noqa: F401
    BFLOAT16, FLOAT32, Compiled, accepted, assembled, batch_of, check, check_equal, check_leaves, compiled,
    drawn_parameters, evaluated, first_moment, on_one_device, one_device, trained,
)  # fmt: skip
from meshtrain.parallel.pipeline import schedules
from meshtrain.shipped import shipped

RULES = shipped("sharding_rules")

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
