"""Random runs: a model, mesh, rule file, pipeline schedule, context method and optimizer, all from one number.

A draw is a function of its number alone, so a failing one can be drawn again: `python tests/draws.py NUMBER` prints it.
What the program refuses is drawn again; it must be refused by a ConfigError, never by anything else.
"""
import math
import random
import sys
import tomllib
from pathlib import Path

from meshtrain import config, design
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec

RULES = Path(__file__).resolve().parent.parent / "sharding_rules"
DEVICES = 8
TRIES = 400


def run(number: int, directory: Path) -> tuple[config.Run, list[str]]:
    """(the run of this number, the messages of those that were refused before it). directory: for rule files of its
    own."""
    rng, refused = random.Random(number), []
    for _ in range(TRIES):
        try:
            drawn = _draw(rng, directory / f"rules-{number}.toml")
            spec = MeshSpec(config.mesh_sizes(drawn, math.prod(getattr(drawn.mesh, axis) for axis in AXES)),
                            drawn.mesh.placement)
            if faults := config.problems(drawn):
                raise config.ConfigError(*faults)
            design.make(drawn, spec, "cpu", None)
            return drawn, refused
        except config.ConfigError as error:
            refused += error.messages
    raise AssertionError(f"number {number}: {TRIES} draws refused, the last by {refused[-1]}")


def _draw(rng: random.Random, own_rules: Path) -> config.Run:
    rule = rng.choice(sorted(RULES.glob("*.toml")))
    text = rules.load(rule).text
    sizes = _mesh(rng, text)
    if rng.random() < 0.4:
        own_rules.write_text(_varied(rng, text))
        rule = own_rules
    stages = sizes["stage"]
    schedule = rng.choice(("auto", *schedules.NAMES))
    chunks = rng.choice((1, 2, 3)) if stages > 1 and schedule in ("auto", *schedules.INTERLEAVED) else 1
    batch_shards = sizes["data"] * sizes["fsdp"]
    microbatches = rng.choice((1, 2, 3)) * (stages if chunks > 1 else 1) if stages > 1 else rng.choice((1, 2, 3))
    T = rng.randint(5,
                    40) if sizes["context"] * sizes["tensor"] == 1 else 2 * sizes["context"] * sizes["tensor"] * rng.randint(1, 4)
    return config.Run(
        mesh=sizes | dict(placement=rng.sample(AXES, len(AXES))), sharding=dict(rules=str(rule)),
        model=_model(rng, sizes, T),
        data=dict(seq_len=T, global_batch=batch_shards * microbatches * rng.randint(1, 3)),
        training=dict(steps=9, microbatches=microbatches, remat=rng.choice(("none", "selective", "full", "offload")),
                      grad_clip=rng.choice((0.0, 1.0, 0.3)), z_loss=rng.choice((0.0, 1e-2)),
                      loss_chunk=rng.choice((7, 32, 1024))),
        optimizer=dict(name=rng.choice(("adamw", "lion", "adafactor", "muon")), learning_rate=1e-3,
                       schedule=rng.choice(("cosine", "linear", "constant")), warmup_steps=rng.choice((0, 2, 20))),
        pipeline=dict(schedule=schedule, chunks=chunks) if stages > 1 else {},
        context=dict(method=rng.choice(("ring", "gather", "ulysses"))) if sizes["context"] > 1 else {},
    )  # fmt: skip


def _mesh(rng: random.Random, rules_text: str) -> dict[str, int]:
    """Sizes of up to three of the axes that the rule file names, up to 8 devices."""
    named = {axis for table in tomllib.loads(rules_text).values() for axes in table.values()
             for axis in ([axes] if isinstance(axes, str) else axes)}
    sizes = dict.fromkeys(AXES, 1)
    for axis in rng.sample(sorted(named), rng.randint(1, min(3, len(named)))):
        left = DEVICES // math.prod(sizes.values())
        sizes[axis] = rng.choice([n for n in (1, 2, 2, 2, 3, 4, 5, 8) if n <= left])
    return sizes


def _varied(rng: random.Random, text: str) -> str:
    """The rule file with one of its lines another: an axis less, or its axes in another order, or a line less."""
    tables = {name: dict(table) for name, table in tomllib.loads(text).items()}
    name = rng.choice(sorted(tables))
    if tables[name]:
        logical = rng.choice(sorted(tables[name]))
        axes = tables[name][logical]
        axes = [axes] if isinstance(axes, str) else axes
        tables[name][logical] = rng.sample(axes, rng.randint(max(0, len(axes) - 1), len(axes)))
    if rng.random() < 0.5:      # a rule table of its own, where there was an inherited one
        to = rng.choice(("grads", "optimizer"))
        tables.setdefault(to, dict(tables.get("params", {})))
        if rng.random() < 0.5:
            tables[to].setdefault("embed", rng.choice((["data"], ["fsdp"], ["data", "fsdp"])))
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{logical} = {list(axes) if not isinstance(axes, str) else [axes]}".replace("'", '"')
                                 for logical, axes in table.items())]
    return "\n".join(lines) + "\n"


def _model(rng: random.Random, sizes: dict[str, int], T: int) -> dict:
    tensor, context = sizes["tensor"], sizes["context"]
    kv_heads = tensor * rng.choice((1, 1, 2, 3)) if tensor > 1 else rng.choice((1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, context))
    num_shards = sizes["data"] * sizes["fsdp"] * context
    position = rng.choice(("rope", "rope", "learned"))
    chosen = dict(
        vocab_size=rng.choice((257, 300, 509, 512)), embed_dim=num_shards * rng.choice((4, 6, 8)),
        num_layers=rng.randint(1, 5),
        num_heads=heads, num_kv_heads=kv_heads, head_dim=rng.choice((4, 6, 8)), mlp_dim=tensor * rng.randint(5, 17),
        norm=rng.choice(("rmsnorm", "layernorm")), activation=rng.choice(("swiglu", "geglu", "gelu")),
        position=position,
        norm_placement=rng.choice(("before", "before", "after", "both")), norm_offset=rng.choice((0.0, 0.0, 1.0)),
        multipliers=rng.choice(({}, {}, {}, {"embedding": 5.0}, {"residual": 0.5, "logits": 0.25})), qk_norm=rng.choice(("off", "off", "head", "all_heads")),
        attention_bias=rng.choice(("none", "none", "none", "qkv", "all")), mlp_bias=rng.random() < 0.3,
        tie_embeddings=rng.random() < 0.4, residual_dropout=rng.choice((0.0, 0.0, 0.2)),
        embedding_dropout=rng.choice((0.0, 0.0, 0.1)), compute_dtype="float32",
    )  # fmt: skip
    if position == "learned":
        chosen["max_seq_len"] = T + rng.randint(0, 5)
    elif rng.random() < 0.3:
        chosen |= dict(rope_scaling=rng.choice(({"rope_type": "linear", "factor": 8.0}, *(
            {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 16}
            for kind in ("llama3", "yarn")))))
    if chosen["norm_placement"] != "before":
        chosen["norm_eps"] = 0.01       # a norm of numbers as small as a first layer's would magnify their rounding
    return chosen


if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as temporary:
        drawn, _ = run(int(sys.argv[1]), Path(temporary))
        print(config.dump(drawn), Path(drawn.sharding.rules).read_text(), sep="\n")
