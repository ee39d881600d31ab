"""Published runs of 2026 (tests/goldens/published_2026.csv), priced by the formulas of `plan`.

A row states a model, a GPU, a dtype and a layout of another framework. `priced` maps it to what the formulas read, or
raises NotPriced with the reason. The shapes of the models are in published_2026.toml. No constant belongs to a row: nine
assumptions and RELEASES are fitted to all of them (FITTED), and `held_out` fits them without the rows it tries.
"""
from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import math
import re
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.other_frameworks import TABLE, Habits, OtherAssumptions, OtherPlaced, OtherPricing, OtherRates
from meshtrain import hardware, run_files
from meshtrain.config.sections import Model
from meshtrain.cost.formulas import attention_pairs, flops
from meshtrain.cost.formulas.options import Attended, Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.price import Price
from meshtrain.model import transformer
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout

FILE = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "published_2026.csv"
SHAPES = tomllib.loads(FILE.with_suffix(".toml").read_text())
DTYPES = (("nvfp4", "nvfp4"), ("mx", "mxfp8"), ("fp8", "float8"), ("bf16", "bfloat16"))
FRAMEWORKS = {"automodel": "automodel", "torchtitan": "torchtitan", "marin": "marin", "maxtext": "maxtext",
              "primus": "primus"}       # all others: Megatron, also with NeMo or Megatron-Bridge
# Recomputed fractions of a layer's products, attention and elementwise work. Single modules: only elementwise work.
FULL = (1, 1, 1)
RECOMPUTED = {"": (0, 0, 0), "none": (0, 0, 0), "full": FULL, "per-op selective": (.5, 0, 1), "core_attn": (0, 1, 0)}
SINGLE = (0, 0, .6)
# For one layout in a narrow dtype, throughput grows by this share per year with the releases of Megatron-Bridge. The
# assumptions are those of MIDDLE.
RELEASES, MIDDLE = .12, 2026.25
HIDDEN_EXCHANGE = .80       # see overlap.exchange
FAR = 1.15                  # throughputs that differ by less are not ordered
SPLIT = 'layers = "stage"\nheads = "tensor"\nkv_heads = "tensor"\nmlp = "tensor"\nvocab = "tensor"\n'
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


class NotPriced(ValueError):
    """Why a row has no price."""


# ---- the contents of a row -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One published run: the columns of a row of the file."""
    columns: Mapping[str, str]

    def count(self, name: str) -> int:
        """Return a column's number; 1 if it is empty."""
        return int(self.columns[name] or 1)

    @property
    def source(self) -> str:
        return self.columns["source"]

    @property
    def gpu(self) -> str:
        return self.columns["gpu"]

    @functools.cached_property
    def shape(self) -> str:
        """Return the name of the row's model in the table of shapes, or of a preset."""
        name = re.sub(r"\(.*?\)|\bsft\b|\blora\b|\bpretrain\b", "", self.columns["model"].lower())
        name = re.sub(r"[^a-z0-9.]+", "-", name).strip("-")
        name = re.sub(r"llama-?3\.[13]", "llama3", name)
        name = SHAPES["names"].get(name, name)
        return "deepseek-v3" if name == "deepseek-v3-mtp" and "w/o" in self.columns["model"] else name

    @property
    def lora(self) -> bool:
        return "lora" in self.columns["model"].lower()

    @property
    def dtype(self) -> str:
        """Return the dtype of the products of layers and experts."""
        text = self.columns["dtype"].lower()
        return text if "expert" in text else next((dtype for mark, dtype in DTYPES if mark in text), text)

    @property
    def framework(self) -> str:
        text = self.source.lower()
        return next((name for mark, name in FRAMEWORKS.items() if mark in text), "megatron")

    @property
    def moe(self) -> bool:
        return bool(model(self.shape)[0].num_experts)

    @property
    def kind(self) -> str:
        """Return the row's class: dense or MoE, the dtype, the generation."""
        made = {"h": "Hopper", "b": "Blackwell", "g": "Blackwell", "a": "Ampere"}.get(self.gpu[0], "AMD")
        dtype = {"bfloat16": "bf16", "float8": "fp8"}.get(self.dtype, self.dtype)
        return f"{'MoE' if self.moe else 'dense'} {dtype} {made}"

    @property
    def layout(self) -> tuple:
        """Return all that the price depends on, except the release."""
        names = [name for name in self.columns if name not in ("metric", "value", "source")]
        return tuple(self.columns[name] for name in names) + (self.microbatch,)

    @property
    def tokens_per_s(self) -> float:
        """Return published tokens per second and GPU."""
        metric, value = self.columns["metric"], self.columns["value"]
        if metric == "tokens/s/GPU":
            return float(value)
        if metric == "step seconds":
            return self.count("global_batch") * self.count("seq_len") / float(value) / self.count("gpus")
        cfg, table = model(self.shape)
        each = flops.model_flops_per_token(table, cfg, self.count("seq_len"))
        if metric == "MFU":
            return float(value.rstrip("%")) / 100 * hardware.get(self.gpu).peak(self.dtype) / each
        if metric == "TFLOP/s/GPU":
            return float(value) * 1e12 / each
        raise NotPriced(f"metric {metric}")

    @property
    def stated_microbatch(self) -> int:
        """Return the sequences of a microbatch; 0 if the source does not state them."""
        found = re.search(r"(?:mbs[ =]|local batch |batch a GPU |\(b |; b )(\d+)", self.source)
        return int(found[1]) if found else 0

    @property
    def microbatch(self) -> int:
        """assumption: 1 if the source states none. torchtitan's pipelines cut the local batch into sequences."""
        alone = self.framework == "torchtitan" and self.count("pp") > 1
        return 1 if alone else self.stated_microbatch or 1

    @property
    def year(self) -> float:
        """Return the release date of the software as a year; MIDDLE if the source does not state it."""
        found = re.search(r"NeMo (\d\d)\.(\d\d)|support/(\d\d)\.(\d\d)", self.source)
        if not found:
            return MIDDLE
        year, month = (int(each) for each in found.groups() if each)
        return 2000 + year + month / 12


def rows(path: Path = FILE) -> list[Row]:
    with open(path, newline="") as file:
        return [Row(columns) for columns in csv.DictReader(file)]


@functools.cache
def model(name: str):
    """Return (the [model] section, its parameter table). Raises: NotPriced."""
    keys = dict(SHAPES["models"].get(name) or {"preset": name})
    if reason := keys.pop("not_priced", ""):
        raise NotPriced(reason)
    keys.pop("heads", None)
    if preset := keys.pop("preset", None):
        if preset not in run_files.presets():
            raise NotPriced("the model's shape is not published")
        keys = tomllib.loads(run_files.presets()[preset].read_text())["model"] | keys
    cfg = Model(**keys)
    return cfg, transformer.build(cfg).parameters()


# ---- its layout ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ways:
    """A row's layout on our mesh. experts: mesh axes that shard the experts; inner: whether tensor shards their width.
    sharded: mesh axes that shard the weights too (FSDP)."""
    mesh: tuple[tuple[str, int], ...]
    experts: tuple[str, ...] = ()
    inner: bool = False
    sharded: tuple[str, ...] = ()

    def rules(self) -> str:
        """Return the rule file. Optimizer state is sharded over all replicas."""
        def toml(axes: Iterable[str]) -> str:
            return str(list(axes)).replace("'", '"')

        def free(axes: Iterable[str]) -> tuple[str, ...]:
            return tuple(axis for axis in axes if axis not in self.experts)
        split = SPLIT + f"expert = {toml(self.experts)}\n" + 'expert_mlp = "tensor"\n' * self.inner
        weights = f"embed = {toml(self.sharded)}\nexpert_embed = {toml(free(self.sharded))}\n" * bool(self.sharded)
        replicas = ("data", "fsdp", "context")
        return (f"[params]\n{split}{weights}[optimizer]\n{split}embed = {toml(replicas)}\n"
                f"expert_embed = {toml(free(replicas))}\n{ACTIVATIONS}")


def ways(row: Row) -> Ways:
    """Return the row's layout. fsdp is the part of the replicas that shards experts or weights; data is the rest.

    Megatron shards experts over tensor, context and data together, neighbours first. With expert tensor parallelism
    (ETP) it shards them over data alone. Raises: NotPriced.
    """
    if not row.columns["gpus"] or not row.columns["tp"]:
        raise NotPriced("the layout is not published")
    gpus, t, p, c = (row.count(name) for name in ("gpus", "tp", "pp", "cp"))
    replicas, left = divmod(gpus, t * p * c)
    if left:
        raise NotPriced("the GPUs are no multiple of tensor × pipeline × context")
    cfg, found = model(row.shape)[0], re.search(r"fsdp(\d+) x dp\d+", row.columns["dp_or_fsdp"])
    fsdp = "fsdp" in row.columns["dp_or_fsdp"]

    def make(n: int, **more) -> Ways:
        return Ways((("stage", p), ("data", replicas // n), ("fsdp", n), ("context", c), ("tensor", t)), **more)
    e = row.count("ep")
    if cfg.num_experts and not row.columns["ep"] and "DeepEP" in row.source:    # DeepEP sends tokens to other devices
        e = math.gcd(gpus, cfg.num_experts)
    if not cfg.num_experts or e == 1:
        n = int(found[1]) if found else replicas if fsdp else 1
        return make(n, sharded=("fsdp",) * fsdp, inner=bool(cfg.num_experts) and t > 1)
    inner, axes = t > 1 and ("ETP" in row.source or e % t > 0), ()
    if t > 1 and not inner:
        axes, e = ("tensor",), e // t
    if e > replicas and e == replicas * c:
        axes, e = ("context", *axes), replicas
    if e > replicas or replicas % e:
        raise NotPriced("experts over more devices than one stage has")
    return make(e, experts=("fsdp",) * (e > 1) + axes, inner=inner, sharded=("data", "fsdp") * fsdp)


def copies(row: Row, laid: Ways) -> float:
    """Return how often a token is sent to its experts, which are chosen evenly: once to each device of a link domain
    (HybridEP, DeepEP), or once to each host if they are on several hosts. 0: once to each expert."""
    if not laid.experts or "alltoall" in row.source:
        return 0.0
    domain = hardware.get(row.gpu).domain_gpus(row.count("gpus"))
    size, per_domain = MeshSpec(dict(laid.mesh)).in_domain(laid.experts, domain)
    n = size // per_domain if size > per_domain else size
    return n * (1 - (1 - 1 / n) ** model(row.shape)[0].experts_per_token)


# ---- its price -------------------------------------------------------------------------------------------------------


@functools.cache
def placed_as(shape: str, laid: Ways, habits: Habits, frozen: bool) -> OtherPlaced:
    """Return the model under the layout. frozen: matrices have no gradients (LoRA; its adapters are left out)."""
    cfg, table = model(shape)
    if frozen:
        table = [dataclasses.replace(info, trainable=False) for info in table]
    spec = MeshSpec(dict(laid.mesh))
    try:
        placed = place(table, cfg, Layout(rules.parse(laid.rules()), spec.sizes), spec)
    except ValueError as wrong:
        raise NotPriced(f"the layout: {wrong}") from None
    heads = SHAPES["models"].get(shape, {}).get("heads", 1)
    head = dataclasses.replace(placed.head, n=placed.head.n * heads)
    return OtherPlaced.of(dataclasses.replace(placed, head=head), habits)


def priced(row: Row, given: Mapping[str, float] | None = None) -> Price:
    """Price a row. Raises: NotPriced."""
    if row.dtype not in ("bfloat16", "float8", "mxfp8"):
        raise NotPriced(f"products in {row.dtype}")
    if row.gpu not in hardware.GPUS:
        raise NotPriced(f"{row.gpu} is not in the hardware table")
    laid, gpu, (cfg, _) = ways(row), hardware.get(row.gpu), model(row.shape)
    sizes, chunks, stages = dict(laid.mesh), row.count("vpp"), row.count("pp")
    replicas = sizes["data"] * sizes["fsdp"]
    batch = row.count("global_batch") if row.columns["global_batch"] else row.stated_microbatch * replicas
    if not batch or not row.columns["seq_len"]:
        raise NotPriced("the batch is not published")
    if batch % replicas:
        raise NotPriced("the batch is no multiple of the replicas")
    habits = Habits(
        RECOMPUTED.get(row.columns["recompute"], SINGLE), eager=row.framework == "automodel",
        narrow="" if row.dtype == "bfloat16" else row.dtype, copies=copies(row, laid),
        # If the chunks have unequal layers, embedding and head take the place of layers.
        spreads_head=stages > 1 and cfg.num_layers % (stages * chunks) > 0)
    placed = placed_as(row.shape, laid, habits, row.lora)
    length = row.count("seq_len")
    engine = "flash2" if row.gpu == "h100-96gb" else "triton" if "FlexAttention" in row.source else "cudnn"
    visited = {mixer: attention_pairs.causal_share(cfg, mixer, length) for mixer in "FWNV" if mixer in cfg.mixers}
    # Mamba-2's Triton kernels pass states through memory, as XLA's do.
    options = Options(length, batch, max(1, batch // (replicas * row.microbatch)), "none",
                      "interleaved" if chunks > 1 else "1f1b", chunks, attended=Attended(visited, engine),
                      recurrence="xla")
    rated = OtherRates(gpu, OtherAssumptions(row.gpu, _said(row, gpu) | dict(given or {})))
    one = OtherPricing(placed, rated, options).price()
    if row.framework == "automodel" and sum(one.memory_bytes.values()) > gpu.hbm_bytes:
        # assumption: a run recomputes all if it would not fit otherwise. The source does not state it.
        again = dataclasses.replace(habits, recompute=FULL)
        one = OtherPricing(placed_as(row.shape, laid, again, row.lora), rated, options).price()
    return one


def _said(row: Row, gpu: hardware.Gpu) -> dict[str, float]:
    """Return the assumptions that the source replaces."""
    found = {}
    if row.framework == "megatron" and not row.moe:
        found["overlap.tensor"] = TABLE["overlap.user_buffers"].of(row.gpu)
    if re.search(r"EP overlap(?! off)", row.source) and "no EP overlap" not in row.source:
        found["overlap.exchange"] = HIDDEN_EXCHANGE
    if network := re.search(r"([\d.]+) Tb/s a host", row.source):
        per_gpu = float(network[1]) * 1e12 / 8 / gpu.gpus_per_host
        found["nic.share"] = TABLE["nic.share"].of(row.gpu) * per_gpu / gpu.inter_host_bytes_per_s
    return found


def tokens_per_s(row: Row, given: Mapping[str, float] | None = None, releases: float = RELEASES) -> float:
    """Return priced tokens per second and GPU for the row's release. Raises: NotPriced."""
    matures = row.framework == "megatron" and row.dtype != "bfloat16"
    return priced(row, given).tokens_per_s_per_gpu * math.exp(releases * matures * (row.year - MIDDLE))


Errors = list[tuple[Row, float]]


def errors(path: Path = FILE) -> tuple[Errors, list[tuple[Row, str]]]:
    """Return ([(row, priced throughput / published − 1)], [(row, why it has no price)])."""
    found, left = [], []
    for row in rows(path):
        try:
            found.append((row, tokens_per_s(row) / row.tokens_per_s - 1))
        except NotPriced as why:
            left.append((row, str(why)))
    return found, left


def pairs(found: Errors) -> tuple[int, int, int]:
    """Return the number of pairs with one model and the same number and kind of GPU whose throughputs differ by more
    than FAR; how many of them have the published order; how many have one layout."""
    count = right = same = 0
    for (a, x), (b, y) in itertools.combinations(found, 2):
        ratio = a.tokens_per_s / b.tokens_per_s
        if (a.shape, a.gpu, a.count("gpus")) == (b.shape, b.gpu, b.count("gpus")) and max(ratio, 1 / ratio) > FAR:
            ours = ratio * (1 + x) / (1 + y)
            count, same = count + 1, same + (a.layout == b.layout)
            right += (ours - 1) * (ratio - 1) > 0 and abs(ours - 1) > 1e-9
    return count, right, same


# ---- rows that no constant was fitted to -----------------------------------------------------------------------------

B2, B3 = ("b2", "gb2"), ("b3", "gb3")
# ((assumption, GPUs), start of the fit, values that it tries), first for dense rows, then for experts.
FITTED = {
    False: ((("matmul.sustained", B2 + B3), .64, (.56, .60, .64, .68, .72, .76)),
            (("matmul.float8", B2), 1, (.9, 1, 1.1, 1.2, 1.3)),
            (("matmul.float8", B3), 1, (1, 1.1, 1.2, 1.3, 1.4, 1.5)),
            (("matmul.mxfp8", B2), 1, (.9, 1, 1.1, 1.2)),
            (("matmul.mxfp8", B3), 1, (1, 1.1, 1.2, 1.3, 1.4, 1.5)),
            (("gap.layer_us", ("",)), 0, (0, 200, 400, 600, 800))),
    True: ((("experts.rate", B2 + B3), 1, (.6, .7, .8, .9, 1)),
           (("gap.expert_us", ("",)), 0, (0, 100, 150, 200, 250, 300, 350)),
           (("gap.narrow_us", ("",)), 0, (0, 40, 80, 120)),
           (("releases", ("",)), 0, (0, .06, .12, .18)))}
ROUNDS, FAR_OFF = 2, .5         # larger errors count as FAR_OFF


class Fit:
    """Fit FITTED to rows, one constant after the other."""

    def __init__(self, all_rows: Iterable[Row]):
        self.rows, self.known = list(all_rows), {}

    def error(self, row: Row, values: Mapping[tuple, float]) -> float:
        """Return the logarithm of the priced throughput divided by the published one."""
        mine = tuple((name, value) for (name, gpus), value in values.items() if row.gpu.startswith(gpus)
                     and (name not in ("matmul.float8", "matmul.mxfp8") or name.endswith(row.dtype)))
        if (row, mine) not in self.known:
            given = dict(mine)
            releases = given.pop("releases")
            self.known[row, mine] = math.log(tokens_per_s(row, given, releases) / row.tokens_per_s)
        return self.known[row, mine]

    def without(self, left_out: Callable[[Row], bool]) -> dict[tuple, float]:
        """Fit the constants to the other rows."""
        values = {key: start for table in FITTED.values() for key, start, _ in table}
        for moe, table in FITTED.items():
            seen = [row for row in self.rows if row.moe == moe and not left_out(row)]

            def off(values, seen=seen) -> float:
                return sum(min(abs(self.error(row, values)), FAR_OFF) for row in seen)
            for key, _, tried in (*table,) * ROUNDS:
                values[key] = min(tried, key=lambda value, key=key: off(values | {key: value}))
        return values


def held_out(found: Errors, group: Callable[[Row], str]) -> Errors:
    """Return [(row, its error)], with constants that were fitted to the rows of the other groups."""
    fit, made = Fit(row for row, _ in found), []
    for name in dict.fromkeys(group(row) for row, _ in found):
        values = fit.without(lambda row, name=name: group(row) == name)
        made += [(row, math.expm1(fit.error(row, values))) for row, _ in found if group(row) == name]
    return made


# ---- the table -------------------------------------------------------------------------------------------------------


def source(row: Row) -> str:
    """Return the page or repository of a row. All its releases count as one."""
    return re.split(r"[@ ]", row.source)[0] + (" skills" if "skills/" in row.source else "")


def by_kind(found: Errors) -> dict[str, list[float]]:
    """Return the absolute errors of all rows, of dense and MoE rows by generation, and of each class."""
    kinds = defaultdict(list)
    for row, error in found:
        first, dtype, generation = row.kind.split()
        for name in (f"all {first}", f"{first} {generation}", f"{first} {dtype} {generation}"):
            kinds[name].append(abs(error))
    return dict(sorted(kinds.items(), key=lambda item: (len(item[0].split()), item[0].startswith("MoE"), item[0])))


def ninth(errors: list[float]) -> float:
    return sorted(errors)[math.ceil(.9 * len(errors)) - 1]


def table(path: Path = FILE) -> list[str]:
    """Return the comparison as Markdown."""
    found, left = errors(path)
    unseen = [by_kind(held_out(found, group)) for group in (lambda row: row.shape, source)] if path == FILE else []
    head = "| class | rows | median | 90th percentile |" + " median, its model left out | its source left out |" * bool(
        unseen)
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for name, each in by_kind(found).items():
        cells = [name, str(len(each)), f"{statistics.median(each):.1%}", f"{ninth(each):.1%}",
                 *(f"{statistics.median(kinds[name]):.1%}" for kinds in unseen)]
        lines.append("| " + " | ".join(cells) + " |")
    count, right, same = pairs(found)
    share = f" ({right / count:.0%})" if count else ""
    lines += ["", f"Order: {right} of {count} pairs{share} are in the right order. A pair is two runs of one model on the same number "
              f"of GPUs of one kind whose throughputs differ by more than 15%; {same} of the pairs are the same layout in two releases.", "",
              f"{len(left)} of {len(found) + len(left)} rows cannot be predicted:", "", "| model | rows | reason |",
              "|---|---|---|"]
    reasons = Counter((row.columns["model"], why) for row, why in left)
    return lines + [f"| {name} | {number} | {why} |" for (name, why), number in reasons.items()]
