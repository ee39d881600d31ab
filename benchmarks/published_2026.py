"""Published runs of 2026 (tests/goldens/published_2026.csv), priced by the formulas of `plan`.

A row of the file states a model, a GPU and a layout of another framework; `case` maps it to what `price` reads, or says
why it cannot. Shapes of models are in published_2026.toml, by the names that the sources use. Nothing is fitted to a
row: what the runs set are a few assumptions, and `held_out` sets them without the rows they are tried on.
"""
from __future__ import annotations

import csv
import dataclasses
import functools
import math
import re
import tomllib
from pathlib import Path

from meshtrain import hardware
from meshtrain.config import run_file
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import flops
from meshtrain.cost.formulas.assumptions import TABLE, Assumptions
from meshtrain.cost.formulas.placed import Attended, Framework, Options, place
from meshtrain.cost.formulas.price import price
from meshtrain.cost.formulas.rates import Rates
from meshtrain.model import transformer
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "goldens" / "published_2026.csv"
SHAPES = tomllib.loads((FILE.with_suffix(".toml")).read_text())
RECOMPUTED = {"none": (0, 0, 0), "full": (1, 1, 1), "per-op selective": (.5, 0, 1), "core_attn": (0, 1, 0)}
RULES = """
[params]
layers = "stage"
heads = "tensor"
kv_heads = "tensor"
mlp = "tensor"
vocab = "tensor"
expert = {expert}
{inner}
{params}
[optimizer]
layers = "stage"
heads = "tensor"
kv_heads = "tensor"
mlp = "tensor"
vocab = "tensor"
expert = {expert}
{inner}
embed = ["data", "fsdp", "context"]
expert_embed = {replicas}
[activations]
batch = ["data", "fsdp"]
seq = "context"
residual_seq = ["context", "tensor"]
heads = "tensor"
kv_heads = "tensor"
mlp = "tensor"
vocab = "tensor"
"""


class NotPriced(ValueError):
    """Why a row has no price."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One published run. traits: what its source says beside the columns."""
    columns: dict

    def number(self, name: str, default: int = 1) -> int:
        return int(self.columns[name] or default)

    @property
    def source(self) -> str:
        return self.columns["source"]

    @property
    def family(self) -> str:
        """The name of its model without what varies in spelling."""
        name = re.sub(r"\(.*?\)|\bsft\b|\blora\b", "", self.columns["model"].lower())
        return re.sub(r"[^a-z0-9.]+", "-", name).strip("-").replace("llama3.1", "llama3")

    @property
    def shape(self) -> str:
        """The name of its model in the table of shapes."""
        names = SHAPES["names"]
        name = self.family
        return names.get(name, name)

    @property
    def gpu(self) -> str:
        return self.columns["gpu"]

    @property
    def dtype(self) -> str:
        """bfloat16, float8, mxfp8, nvfp4."""
        text = self.columns["dtype"].lower()
        if "experts" in text:
            return text
        for name, dtype in (("nvfp4", "nvfp4"), ("mx", "mxfp8"), ("fp8", "float8"), ("bf16", "bfloat16")):
            if name in text:
                return dtype
        return text

    @property
    def framework(self) -> str:
        for name, mark in (("automodel", "automodel"), ("torchtitan", "torchtitan"), ("marin", "marin"),
                           ("maxtext", "maxtext"), ("primus", "primus"), ("nemo", "nemo")):
            if mark in self.source.lower():
                return name
        return "nemo"

    @property
    def moe(self) -> bool:
        return bool(_model(self.shape)[0].num_experts)

    @property
    def part(self) -> str:
        generation = "Blackwell" if self.gpu.startswith(("b", "gb")) else "Hopper" if self.gpu.startswith(
            "h") else "other"
        return f"{'MoE' if self.moe else 'dense'} {self.dtype} {generation}"

    @property
    def tokens_per_s(self) -> float:
        """Published tokens per second and GPU."""
        metric, value = self.columns["metric"], self.columns["value"]
        if metric == "tokens/s/GPU":
            return float(value)
        if metric == "step seconds":
            return self.number("global_batch") * self.number("seq_len") / float(value) / self.number("gpus")
        cfg, rows = _model(self.shape)
        each = flops.model_flops_per_token(rows, cfg, self.number("seq_len"))
        if metric == "MFU":
            return float(value.rstrip("%")) / 100 * hardware.get(self.gpu).peak(self.dtype) / each
        return float(value) * 1e12 / each

    @property
    def microbatch(self) -> int:
        """Sequences of a microbatch; 1 where the source does not say."""
        if self.framework == "torchtitan" and self.number("pp") > 1:
            return 1        # its pipelines cut the local batch into single sequences
        found = re.search(r"(?:mbs[ =]|local batch |batch a GPU |\(b |; b )(\d+)", self.source)
        return int(found[1]) if found else 1


def rows(path: Path = FILE) -> list[Row]:
    with open(path, newline="") as file:
        return [Row(columns) for columns in csv.DictReader(file)]


@functools.cache
def _model(name: str):
    """(the [model] section, its parameter table). Raises: NotPriced."""
    keys = dict(SHAPES["models"].get(name) or {"preset": name})
    if reason := keys.pop("not_priced", ""):
        raise NotPriced(reason)
    keys.pop("heads", None)
    if preset := keys.pop("preset", None):
        if preset not in run_file.presets():
            raise NotPriced(f"shape of {preset} not known")
        keys = tomllib.loads(run_file.presets()[preset].read_text())["model"] | keys
    cfg = Model(**keys)
    return cfg, transformer.build(cfg).parameters()


def copies(k: int, group, distinct=lambda n, k: n * (1 - (1 - 1 / n) ** k)) -> float:
    """How often a token is sent: once to each device of a link domain, or to each host."""
    size, per_domain = group
    return distinct(size // per_domain, k) if size > per_domain else distinct(size, k)


def laid_out(row: Row):
    """(mesh, rules, copies of a token). Raises: NotPriced."""
    gpus, t, p, c, e = (row.number(name, 0) for name in ("gpus", "tp", "pp", "cp", "ep"))
    if not gpus or not t * p:
        raise NotPriced("layout not published")
    c, e = c or 1, e or 1
    if row.moe and not row.columns["ep"] and "DeepEP" in row.source:      # the dispatcher needs it: over all, as its page's others
        e = math.gcd(gpus, _model(row.shape)[0].num_experts)
    if gpus % (t * p * c):
        raise NotPriced("GPUs are no multiple of tensor x stage x context")
    replicas = gpus // (t * p * c)
    sharded = "fsdp" in row.columns["dp_or_fsdp"]
    whole = re.search(r"ETP (\d+)", row.source)
    inner = int(whole[1]) if whole else 1
    axes, ways = [], e
    if row.moe and e > 1:
        if inner == 1 and t > 1 and ways % t == 0 and ways >= t:
            axes, ways = ["tensor"], ways // t
        if ways > replicas:
            if c > 1 and ways % replicas == 0 and ways // replicas == c:
                axes, ways = ["context", *axes], replicas
            else:
                raise NotPriced("experts over more devices than replicas")
        if replicas % ways:
            raise NotPriced("experts over no whole part of the replicas")
        axes = ["fsdp", *axes] if ways > 1 else axes
    else:
        ways = replicas if sharded else 1
    hybrid = re.search(r"fsdp(\d+) x dp(\d+)", row.columns["dp_or_fsdp"])
    if hybrid and not axes:
        ways = int(hybrid[1])
    mesh = MeshSpec(dict(stage=p, data=replicas // ways, fsdp=ways, context=c, tensor=t))
    others = [a for a in ("data", "fsdp", "context") if a not in axes]
    over = [a for a in ("data", "fsdp") if a not in axes]
    weights = ""
    if sharded:
        weights = f"embed = {['fsdp'] if hybrid and not axes else ['data', 'fsdp']}\nexpert_embed = {over}"
    text = RULES.format(expert=axes, replicas=others, params=weights,
                        inner='expert_mlp = "tensor"' if inner > 1 or t > 1 and row.moe and not axes.count(
                            "tensor") else "").replace("'", '"')
    domain = hardware.get(row.gpu).domain_gpus(gpus)
    cfg = _model(row.shape)[0]
    sent = copies(cfg.experts_per_token, mesh.in_domain(tuple(axes), domain)) if axes else 0
    return mesh, text, 0 if "alltoall" in row.source else sent


def priced(row: Row, given: dict | None = None):
    """The price of a row. Raises: NotPriced."""
    if row.dtype not in ("bfloat16", "float8", "mxfp8"):
        raise NotPriced(f"products in {row.dtype}")
    if row.gpu not in hardware.GPUS:
        raise NotPriced(f"{row.gpu} not in the hardware table")
    placed, chunks, microbatches = _placed(row)
    given = dict(given or {})
    again = row.columns["recompute"]
    dense = not row.moe
    if row.framework == "nemo" and dense and "overlap.tensor" not in given:
        given["overlap.tensor"] = TABLE["overlap.user_buffers"].of(row.gpu)
    if re.search(r"EP overlap (on|,)|EP overlap, TE|, EP overlap\)|EP overlap \+", row.source):
        given["overlap.exchange"] = .8
    if found := re.search(r"([\d.]+) Tb/s a host", row.source):
        per_gpu = float(found[1]) * 1e12 / 8 / 8
        given["nic.share"] = per_gpu / hardware.get(row.gpu).inter_host_bytes_per_s * TABLE["nic.share"].of(row.gpu)
    engine = "flash2" if row.gpu == "h100-96gb" else "cudnn"
    options = Options(row.number("seq_len"), row.number("global_batch", 0), microbatches, "none",
                      "interleaved" if chunks > 1 else "1f1b", chunks, attended=_attended(row, engine),
                      recurrence="pallas")
    return price(placed, Rates(hardware.get(row.gpu), Assumptions(row.gpu, given)), options)


def _attended(row: Row, engine: str) -> Attended:
    cfg = _model(row.shape)[0]
    visited = {letter: flops.attended(cfg, letter, row.number("seq_len")) for letter in "FWNV" if letter in cfg.mixers}
    return Attended(visited, engine)


@functools.cache
def _placed_as(shape: str, mesh: tuple, text: str, framework: Framework, frozen: bool):
    cfg, table = _model(shape)
    if frozen:
        table = [dataclasses.replace(info, trainable=False) for info in table]
    spec = MeshSpec(dict(mesh))
    try:
        layout = Layout(rules.parse(text), spec.sizes)
        placed = dataclasses.replace(place(table, cfg, layout, spec), framework=framework)
    except ValueError as wrong:
        raise NotPriced(f"layout: {wrong}") from None
    if placed.leading:
        placed = dataclasses.replace(placed, leading=dataclasses.replace(placed.leading, framework=framework))
    heads = SHAPES["models"].get(shape, {}).get("heads", 1)
    return dataclasses.replace(placed, head=dataclasses.replace(placed.head, n=placed.head.n * heads))


def _placed(row: Row):
    """(the row's model under its layout, chunks, microbatches). Raises: NotPriced."""
    mesh, text, sent = laid_out(row)
    again = row.columns["recompute"]
    narrow = "" if row.dtype == "bfloat16" else row.dtype
    recomputed = RECOMPUTED.get(again, (.5, .5, .5) if again == "block" else (0, 0, .6) if again else (0, 0, 0))
    if row.framework == "torchtitan" and not again:
        recomputed = (0, 0, 0)
    cfg, stages = _model(row.shape)[0], row.number("pp")
    # Layers that do not divide among the chunks leave room for the head and the embedding.
    spreads = stages > 1 and cfg.num_layers % (stages * row.number("vpp", 1)) != 0
    framework = Framework(recomputed, eager=row.framework == "automodel", narrow=narrow, copies=sent, spreads_head=spreads)
    placed = _placed_as(row.shape, tuple(mesh.sizes.items()), text, framework, "lora" in row.columns["model"].lower())
    replicas, b = mesh.sizes["data"] * mesh.sizes["fsdp"], row.microbatch
    batch = row.number("global_batch", 0)
    if not batch:
        raise NotPriced("batch not published")
    if batch % replicas:
        raise NotPriced("batch is no multiple of the replicas")
    microbatches = max(1, batch // (replicas * b))
    return placed, row.number("vpp", 1), microbatches


def errors(given=None, path: Path = FILE):
    """([(row, priced tokens/s over published - 1)], [(row, why not)])."""
    found, left = [], []
    for row in rows(path):
        try:
            found.append((row, priced(row, given).tokens_per_s_per_gpu / row.tokens_per_s - 1))
        except NotPriced as why:
            left.append((row, str(why)))
    return found, left
