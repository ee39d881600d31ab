"""Rule files drawn line by line, on meshes of up to eight devices: not variations of the shipped ones.

A draw is a function of its number alone. Each mesh axis gets something to do at random (split the batch, the sequence,
heads, an MLP, the vocabulary, experts), in [activations], [params] or both; then lines of any table are added, emptied
or replaced by any mesh axes, and some files extend a shipped one. Each is drawn for one of MODELS, so that layouts
share their reference on one device.

`python tests/drawn_rules.py FIRST COUNT` compares the draws with one device, in a process of its own for every few, and
tells what was refused, by reason; `python tests/drawn_rules.py NUMBER` prints a draw.
"""
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from meshtrain import config
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.logical import LOGICAL
from meshtrain.sharding.rules import TABLES
from meshtrain.shipped import names

T, SEQUENCES, DEVICES = 24, 24, 8
EVALUATED = 5       # of so many draws one is evaluated, too: another program
BASE = dict(vocab_size=259, embed_dim=24, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
            compute_dtype="float32")
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_mlp_dim=8)
LINEAR = dict(key_heads=2, value_heads=4, key_dim=4, value_dim=4, norm_eps=1e-2, conv_width=3)
BALANCE = dict(aux_loss=0.05, z_loss=0.02, bias_rate=1e-3)
# name: sections of the run
MODELS = {
    "dense": dict(model=BASE),
    "tied": dict(model=BASE | dict(tie_embeddings=True, position="learned", max_seq_len=T, attention_bias="all", mlp_bias=True,
                                   num_kv_heads=4, activation="gelu", norm="layernorm", residual_dropout=0.1)),
    "window": dict(model=BASE | dict(mixers="WF", window=5, attention_sinks=True, qk_norm="head", attention_gate=True)),
    "experts": dict(model=BASE | EXPERTS, experts=BALANCE),
    "shared expert": dict(model=BASE | EXPERTS | dict(shared_expert_dim=8, router_score="sigmoid", mlp_bias=True,
                                                      activation="swiglu_clamped"),
                          experts=BALANCE),
    "leading experts": dict(model=BASE | EXPERTS | dict(num_layers=5, mixers="WF*", window=3), experts=BALANCE),
    "experts before dense": dict(model=BASE | EXPERTS | dict(num_layers=5, mlps="ed*"), experts=BALANCE),
    "delta": dict(model=BASE | EXPERTS | dict(mixers="GF", linear=LINEAR, norm_eps=1e-2), experts=BALANCE),
    "kda": dict(model=BASE | dict(mixers="KN", norm_eps=1e-2, num_kv_heads=4, head_dim=6, linear=LINEAR | dict(key_heads=4),
                                  latent=dict(kv_dim=8, query_dim=12, rope_dim=2, value_dim=4))),
    "mamba": dict(model=BASE | dict(mixers="MF", linear=LINEAR | dict(conv_bias=True), norm_eps=1e-2)),
    "latents": dict(model=BASE | dict(num_kv_heads=4, head_dim=6, latent=dict(kv_dim=8, rope_dim=2, value_dim=4))),
    "adapters": dict(model=BASE, lora=dict(rank=2, alpha=4)),
    "preferences": dict(model=BASE, training=dict(objective="dpo")),
    "rewards": dict(model=BASE | EXPERTS, experts=BALANCE, training=dict(objective="rl"),
                    rl=dict(prompts=12, samples=2, max_tokens=T // 2, reward="exact")),
}  # fmt: skip


def draw(number: int, directory: Path) -> tuple[str, config.Run]:
    """(name of the model, run). directory: for the rule file."""
    rng = random.Random(number)
    name = sorted(MODELS)[rng.randrange(len(MODELS))]
    sections = {section: dict(values) for section, values in MODELS[name].items()}
    sizes = _mesh(rng, pipelined=sections.get("training", {}).get("objective") is None)
    path = directory / f"rules-{number}.toml"
    path.write_text(rule_file(rng, sizes))
    stages = sizes["stage"]
    schedule = rng.choice(("auto", *schedules.NAMES)) if stages > 1 else "auto"
    chunks = 2 if schedule in schedules.INTERLEAVED else 1
    microbatches = rng.choice([n for n in (1, 2, 4) if stages == 1 or chunks == 1 or n % stages == 0] or [stages])
    if chunks > 1 and "num_layers" in sections["model"]:
        sections["model"]["num_layers"] += 4
    training = dict(steps=9, microbatches=microbatches, loss_chunk=rng.choice((24, 1024)),
                    remat=rng.choice(("none", "selective", "full", "offload") if stages == 1 else ("none", "selective", "full")))
    sections["training"] = sections.get("training", {}) | training
    sections.setdefault("experts", {})
    if "num_experts" in sections["model"]:
        sections["experts"] = sections["experts"] | dict(dispatch=rng.choice(("auto",) * 4 + ("gather",) * 3 + ("all_to_all",)))
    return name, config.Run(
        mesh=sizes | dict(placement=rng.sample(AXES, len(AXES))), sharding=dict(rules=str(path)),
        data=dict(seq_len=T, global_batch=SEQUENCES, **_objective_data(sections["training"])),
        optimizer=dict(learning_rate=1e-3, schedule="constant"),
        pipeline=dict(schedule=schedule, chunks=chunks) if stages > 1 else {},
        context=dict(method=rng.choice(("ring", "gather", "ulysses"))) if sizes["context"] > 1 else {}, **sections)


def _objective_data(training: dict) -> dict:
    source = {"dpo": "preferences", "rl": "prompts"}.get(training.get("objective"))
    return dict(source=source, paths=["unread.jsonl"]) if source else {}


def _mesh(rng: random.Random, pipelined: bool) -> dict[str, int]:
    sizes = dict.fromkeys(AXES, 1)
    axes = [axis for axis in AXES if axis != "stage" or pipelined]
    weights = [3 if axis == "stage" else 2 for axis in axes]
    for axis in dict.fromkeys(rng.choices(axes, weights, k=rng.randint(1, 4))):
        left = DEVICES // math.prod(sizes.values())
        if left > 1:
            sizes[axis] = rng.choice([n for n in (2, 2, 2, 2, 4, 4, 8, 3) if n <= left])
    return sizes


def rule_file(rng: random.Random, sizes: dict[str, int]) -> str:
    """The text of a rule file; most give each axis of the mesh something to do."""
    tables: dict[str, dict[str, list[str]]] = {table: {} for table in TABLES}

    def give(table: str, logical: str, axis: str) -> None:
        tables[table].setdefault(logical, []).append(axis)

    base = rng.choice(sorted(names("sharding_rules"))) if rng.random() < 0.3 else None
    for axis in rng.sample(AXES, len(AXES)) if base is None else ():
        if sizes[axis] > 1 or rng.random() < 0.5:
            _task(rng, axis, give)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        table = rng.choice(TABLES)
        logical = rng.choice([name for name in LOGICAL if table == "activations" or LOGICAL[name] != "activation"])
        count = rng.choice((0, 1, 1, 1, 2, 3))
        tables[table][logical] = rng.sample([a for a in AXES if a != "stage" or rng.random() < 0.1], min(4, count))
    lines = [f"extends = {json.dumps(base)}"] if base else []
    for table, entries in tables.items():
        lines += [f"[{table}]", *(f"{logical} = {json.dumps(axes[0] if len(axes) == 1 else axes)}"
                                  for logical, axes in entries.items())] if entries else []
    return "\n".join(lines) + "\n"


def _task(rng: random.Random, axis: str, give) -> None:
    """Lines that let an axis split work: of the usual kind for context and stage, of any kind for the others."""
    if axis == "stage" and rng.random() < 0.95:
        give("params", "layers", axis)
        if rng.random() < 0.5:
            give("params", "vocab", axis)
            give("activations", "vocab", axis)
        return
    if axis == "context" and rng.random() < 0.9:
        give("activations", "seq", axis)
        give("activations", "residual_seq", axis)
    elif (task := rng.random()) < 0.5:
        give("activations", "batch", axis)
    elif task < 0.55:
        give("activations", "seq", axis)
        give("activations", "residual_seq", axis)
    else:
        split = [name for name in ("heads", "mlp", "vocab") if rng.random() < 0.7]
        for name in [*split, *["kv_heads"] * ("heads" in split)]:
            give("activations", name, axis)
            if rng.random() < 0.9:
                give("params", name, axis)
        if rng.random() < 0.5:
            give("activations", "residual_seq", axis)
        return _experts(rng, axis, give)
    for table in ("params", "grads", "optimizer"):
        if rng.random() < 0.3:
            give(table, rng.choice(("embed", "embed", "embed", "head_dim", "expert_embed")), axis)
    _experts(rng, axis, give)


def _experts(rng: random.Random, axis: str, give) -> None:
    if rng.random() < 0.25:
        give("params", rng.choice(("expert", "expert", "expert_mlp", "expert_embed")), axis)


# ---- many draws ------------------------------------------------------------------------------------------------------


def outcome(number: int, directory: Path) -> tuple[str, list[str]]:
    """("refused", messages), ("equal", []) or ("DIFFERS", what)."""
    import jax
    import parity
    name, run = draw(number, directory)
    try:
        parity.check_accepted(run)
    except config.ConfigError as error:
        return "refused", list(error.messages)
    case = parity.compile_run(run, jax.devices())
    wrong = parity.differences(case).beyond(parity.FLOAT32)
    if wrong and run.model.num_experts:     # a tie of two experts that rounding decides is in one draw
        wrong = parity.differences(case, seed=1).beyond(parity.FLOAT32) and wrong
    if number % EVALUATED == 0 and run.training.objective == "next_token":
        np.testing.assert_allclose(parity.evaluate(run), parity.evaluate(parity.on_one_device(run)), rtol=2e-5)
    return ("DIFFERS" if wrong else "equal"), wrong


def reason(message: str) -> str:
    """A refusal without its values."""
    message = re.sub(r"\S*rules-\d+\.toml", "RULES", message)
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d+", "…", message)[:100]


def _some(numbers: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for number in numbers:
            print("BEGUN", number, flush=True)
            try:
                found = outcome(number, Path(directory))
            except Exception as error:
                found = "RAISED", [f"{type(error).__name__}: {str(error)[:300]}"]
            print("OUTCOME", json.dumps([number, *found]), flush=True)


def _many(first: int, count: int, each: int = 40) -> int:
    kinds, reasons, wrong = Counter(), Counter(), []
    # Draws of a model together, which share its reference.
    model_of = {n: random.Random(n).randrange(len(MODELS)) for n in range(first, first + count)}
    left = sorted(model_of, key=lambda n: (model_of[n], n))
    while left:
        numbers, left = left[:each], left[each:]
        ran = subprocess.run([sys.executable, __file__, "some", *map(str, numbers)], capture_output=True, text=True)
        found = [json.loads(line[8:]) for line in ran.stdout.splitlines() if line.startswith("OUTCOME ")]
        done = [number for number, *_ in found]
        if len(done) < len(numbers):
            number = numbers[len(done)]
            found.append([number, "ENDED", [f"exit code {ran.returncode}: {ran.stderr[-300:]}"]])
            left = numbers[len(done) + 1:] + left
        for number, kind, told in found:
            kinds[kind] += 1
            if kind == "refused":
                reasons.update({reason(message) for message in told[:1]})
            elif kind != "equal":
                wrong.append(number)
                print(number, kind, sorted(MODELS)[model_of[number]], "; ".join(told[:4]), flush=True)
        print(dict(kinds), flush=True)
    print(*(f"{n:>4} × {text}" for text, n in reasons.most_common()), sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "some":
        import conftest  # noqa: F401    the devices and flags of tests
        _some([int(word) for word in words[1:]])
    elif len(words) == 2:
        sys.exit(_many(int(words[0]), int(words[1])))
    else:
        with tempfile.TemporaryDirectory() as directory:
            name, run = draw(int(words[0]), Path(directory))
            print(name, config.dump(run), Path(run.sharding.rules).read_text(), sep="\n")
