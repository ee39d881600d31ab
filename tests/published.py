"""Published runs of other frameworks (goldens/published_runs.toml), priced by our formulas: nothing is fitted to a
run."""
import functools
import itertools
import math
import tomllib
from pathlib import Path

from benchmarks.other_frameworks import TABLE, Habits, OtherAssumptions, OtherPlaced, OtherPricing, OtherRates
from meshtrain import hardware, run_files
from meshtrain.config.sections import Model
from meshtrain.cost.formulas.options import Attended, Options
from meshtrain.cost.formulas.place import place
from meshtrain.model import transformer
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout

FILE = tomllib.loads((Path(__file__).parent / "goldens" / "published_runs.toml").read_text())
RECOMPUTED = {"none": (0, 0, 0), "elementwise": (0, 0, .6), "attention": (0, 1, 0), "per_op": (.5, 0, 1)}
ACTIVATIONS = """
[activations]
batch = ["data", "fsdp"]
seq = "context"
residual_seq = ["context", "tensor"]
heads = "tensor"
kv_heads = "tensor"
mlp = "tensor"
vocab = "tensor"
"""
SPLIT = 'layers = "stage"\nheads = "tensor"\nkv_heads = "tensor"\nmlp = "tensor"\nvocab = "tensor"\n'
# Optimizer state over all replicas beside whole weights; weights over fsdp as well; the latter in a host, replicas
# beyond.
ZERO1 = f'[params]\n{SPLIT}[optimizer]\n{SPLIT}embed = ["data", "context"]\n{ACTIVATIONS}'
ZERO3 = f'[params]\n{SPLIT}embed = ["data", "fsdp"]\n{ACTIVATIONS}'
HSDP = f'[params]\n{SPLIT}embed = "fsdp"\n{ACTIVATIONS}'


def cases(table: str = "sources") -> list[dict]:
    """The runs of a table with what their source says of all of them."""
    return [{k: v for k, v in source.items() if k != "runs"} | run for source in FILE[table] for run in source["runs"]]


@functools.cache
def shape(model: str | None, gpt: tuple, tied: bool):
    """(the [model] section, its parameter table)."""
    if gpt:
        layers, width, vocab, *heads = gpt
        keys = FILE["models"]["gpt"] | {"num_layers": layers, "embed_dim": width, "vocab_size": vocab,
                                        "mlp_dim": 4 * width,
                                        "num_heads": heads[0] if heads else width // 128, "tie_embeddings": tied}
        keys["head_dim"] = width // keys["num_heads"]
    else:
        keys = dict(FILE["models"].get(model) or {"preset": model})
        if preset := keys.pop("preset", None):
            keys = tomllib.loads(run_files.presets()[preset].read_text())["model"] | keys
    cfg = Model(**keys)
    return cfg, transformer.build(cfg).parameters()


def priced(case: dict, given: dict | None = None):
    cfg, rows = shape(case.get("model"), tuple(case.get("gpt", ())), case.get("tied", False))
    mesh = MeshSpec(case["mesh"])
    text = HSDP if case.get("hsdp") else ZERO3 if mesh.sizes["fsdp"] > 1 else ZERO1
    given = dict(given or {})
    if network := case.get("network"):
        given["nic.share"] = network * given.get("nic.share", TABLE["nic.share"].of(case["gpu"]))
    again = case.get("recomputed", "none")
    if case.get("user_buffers"):
        given["overlap.tensor"] = TABLE["overlap.user_buffers"].of(case["gpu"])
    traits = {key: case[key] for key in ("eager", "grad_bytes") if key in case}
    habits = Habits(RECOMPUTED.get(again) or (again,) * 3, **traits)
    rated = OtherRates(hardware.get(case["gpu"]), OtherAssumptions(case["gpu"], given))
    placed = OtherPlaced.of(place(rows, cfg, Layout(rules.parse(text), mesh.sizes), mesh), habits)
    replicas = mesh.sizes["data"] * mesh.sizes["fsdp"]
    found = []
    for b in case.get("best_b") or [case["b"]]:
        batch = case.get("batch") or b * replicas * case.get("k", 1)
        schedule = "interleaved" if case.get("chunks", 1) > 1 else "1f1b"
        options = Options(case["seq_len"], batch, batch // (b * replicas), "none", schedule,
                          case.get("chunks", 1), attended=Attended({}, case["engine"]))
        found.append(OtherPricing(placed, rated, options).price())
    return min(found, key=lambda one: one.step_s)


def stated(case: dict) -> float:
    """Tokens per second and GPU, as published."""
    if "tflops" in case:
        (layers, width, vocab), s = case["gpt"], case["seq_len"]
        return case["tflops"] * 1e12 / (72 * layers * width**2 * (1 + s / 6 / width + vocab / 12 / width / layers))
    if "tokens" in case:
        return case["tokens"]
    return case["batch"] * case["seq_len"] / case["seconds"] / math.prod(case["mesh"].values())


def errors(given: dict | None = None) -> list[tuple[dict, float]]:
    """[(run, priced tokens/s over published − 1)]."""
    found = []
    for case in cases():
        one = priced(case, given)
        found.append((case, one.tokens_per_s_per_gpu / stated(case) - 1))
    return found


def pairs(far: float = 1.05) -> list[tuple[float, float]]:
    """[(published ratio, priced ratio)] of the times of two layouts of one model that are further apart than `far`."""
    found = []
    for _, layouts in itertools.groupby(cases("orders"), key=lambda case: case["name"]):
        timed = [(case["seconds"], priced(case).step_s) for case in layouts]
        found += [(b / a, y / x) for (a, x), (b, y) in itertools.combinations(timed, 2) if b / a > far]
    return found


def regrets() -> list[float]:
    """Of each set of layouts: the published time of the one that is priced lowest over that of the fastest, − 1."""
    sets = [list(layouts) for _, layouts in itertools.groupby(cases("orders"), key=lambda case: case["name"])]
    return [min(layouts, key=lambda case: priced(case).step_s)["seconds"] / min(case["seconds"] for case in layouts) - 1
            for layouts in sets]


# ---- one source left out ---------------------------------------------------------------------------------------------

# What the runs themselves set: the share of its best rate that a generation sustains, and what a hidden collective
# costs the compute beside it. The clock of the 96 GB part rests on one source alone: without that it is 1, and no other
# is fitted to it.
SUSTAINED, CONTEND = [.49 + .03 * k for k in range(17)], [0, .2, .3, .4, .5, .6]
GENERATIONS = {"a100": ("a100-40gb", "a100-80gb"), "hopper": ("h100",), "blackwell": ("b200", "gb200")}


def held_out() -> list[tuple[dict, float]]:
    """[(run, its error)], each by constants that were fitted to the runs of the other sources."""
    tried = {(s, c): errors({"matmul.sustained": s, "link.contend": c, "matmul.clock": 1})
             for s in SUSTAINED for c in CONTEND}
    runs, found = cases(), []

    def far(name: str, gpus: tuple[str, ...], s: float, c: float) -> float:
        return sum(abs(math.log1p(error)) for case, error in tried[s, c] if case["gpu"] in gpus
                   and case["name"] != name)

    for name in dict.fromkeys(case["name"] for case in runs):
        fit = {c: {gpus: min(SUSTAINED, key=lambda s: far(name, gpus, s, c)) for gpus in GENERATIONS.values()}
               for c in CONTEND}
        c = min(CONTEND, key=lambda c: sum(far(name, gpus, s, c) for gpus, s in fit[c].items()))
        for k, case in enumerate(runs):
            if case["name"] == name:
                gpus = next(gpus for gpus in GENERATIONS.values() if case["gpu"].startswith(gpus))
                found.append(tried[fit[c][gpus], c][k])
    return found
