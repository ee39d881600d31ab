"""The table of training steps that tests compile for GPUs, and what they read of one.

A row's name says what is compiled: a model of MODELS, a rule file, sizes of mesh axes, and words that change the
settings (WORDS). A step is compiled once a process, and its text kept for the next (kept_programs.gpu_programs_in).
"""
import contextlib
import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import sampling

from meshtrain import assembly, config, scratch
from meshtrain.choices import experts as choices
from meshtrain.choices.setting import Choice, Setting
from meshtrain.cost.program import audit, compile, hlo, roofline
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import formula_vs_compiled, memory
from meshtrain.kernels import mosaic, pallas
from meshtrain.model import parts
from meshtrain.parallel.pipeline import schedules

needs_compiler = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
AXES = ("data", "fsdp", "tensor", "stage", "context")
ATTENTION = (pallas.NAME, mosaic.NAME)
EXACT_COUNTS = jax.__version__.startswith("0.10.")      # XLA groups and splits operands otherwise in each version


@dataclasses.dataclass(frozen=True)
class Model:
    """rows: sequences of a microbatch on each replica; 0: `batch` are all of a step. small: bytes of an array below which
    `traffic` does not look: norm scales and their gradients, ids, statistics of the loss and its scalars."""
    model: dict
    seq_len: int
    microbatches: int
    batch: int = 0
    rows: int = 0
    small: int = 0
    training: dict = dataclasses.field(default_factory=dict)
    more: dict = dataclasses.field(default_factory=dict)

    def but(self, **model) -> "Model":
        return dataclasses.replace(self, model=self.model | model)


DENSE = Model(dict(vocab_size=8192, embed_dim=1024, num_layers=4, num_heads=16, num_kv_heads=8, head_dim=64, mlp_dim=2048),
              512, 4, batch=256, small=2**20, training=dict(remat="full", loss_chunk=1024))
# Weights have no dims in common with activations; the smallest array that is claimed has 32 KiB, all norms of a stage 25.5.
STAGED = Model(dict(vocab_size=1280, embed_dim=384, num_layers=16, num_heads=8, num_kv_heads=4, head_dim=48, mlp_dim=640),
               256, 8, batch=128, small=26 * 2**10, training=dict(remat="full", loss_chunk=1024))
# Qwen3-30B-A3B's layers, experts over the 8 GPUs of a host and ZeRO-3 over all 64.
ROUTED = Model(dict(vocab_size=1024, embed_dim=2048, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64,
                    num_experts=128, experts_per_token=8, expert_mlp_dim=768),
               4096, 2, batch=128, training=dict(remat="full"), more=dict(experts=dict(dispatch="gather")))
# All roles of a parameter but a projection's: norms, learned positions and biases; of heads and the router; adapters.
ROLES = Model(dict(vocab_size=1024, embed_dim=256, num_layers=2, num_heads=8, mlp_dim=512), 128, 4, batch=64,
              training=dict(remat="full"))
KERNELS = Model(dict(vocab_size=512, embed_dim=256, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=64, mlp_dim=256,
                     attention="pallas"), 512, 2, batch=16, training=dict(remat="selective", loss_chunk=256))
SHARED_HEADS = Model(dict(vocab_size=1024, embed_dim=512, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=64,
                          mlp_dim=512), 512, 4, batch=32, training=dict(remat="full"))
SMALL = Model(dict(vocab_size=512, embed_dim=128, num_layers=1, num_heads=2, head_dim=64, mlp_dim=256), 256, 1, batch=2)
# Few layers, as wide as bytes need to be to outweigh norms, statistics of the loss and XLA's workspaces.
WIDE = Model(dict(vocab_size=32768, embed_dim=2048, num_layers=8, num_heads=16, num_kv_heads=8, head_dim=128, mlp_dim=5632,
                  compute_dtype="bfloat16"), 4096, 4, rows=2)
# Experts no power of two, and as wide as they are for products to be most of it.
EXPERTS = WIDE.but(num_layers=4, num_experts=24, experts_per_token=3, expert_mlp_dim=768)
LATENTS = EXPERTS.but(num_kv_heads=16, head_dim=192, mlps="de*", shared_expert_dim=768, latent=dict(
    kv_dim=512, query_dim=768, rope_dim=64, value_dim=128))
# What multiplies the input of a mixer or an MLP: matrices that tensor splits, whole ones, or both.
INWARD = Model(dict(vocab_size=2048, embed_dim=1024, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=64, mlp_dim=2048),
               2048, 1, rows=1, training=dict(remat="selective", loss_chunk=1024))
RECURRENT = INWARD.but(linear=dict(key_heads=8, value_heads=8, key_dim=64, value_dim=64))
SHARED = INWARD.but(num_experts=8, experts_per_token=2, expert_mlp_dim=512, shared_expert_dim=1024)
MODELS = {
    "gates": INWARD.but(attention_gate=True), "normed": INWARD.but(qk_norm="head"),
    "gated_delta": RECURRENT.but(mixers="G"), "kda": RECURRENT.but(mixers="K"),
    "mamba": RECURRENT.but(mixers="M"), "shared": SHARED, "shared_gated": SHARED.but(shared_expert_gate=True),
    "whole_latents": INWARD.but(latent=dict(kv_dim=256, query_dim=256, rope_dim=32, value_dim=64)),
    "latents_of_keys": INWARD.but(latent=dict(kv_dim=256, rope_dim=32, value_dim=64)),
    "adapted": dataclasses.replace(INWARD, more=dict(lora=dict(rank=32))),
    "adapted_kda": dataclasses.replace(RECURRENT.but(mixers="K"), more=dict(lora=dict(rank=32))),
    "dense": DENSE, "deeper": DENSE.but(num_layers=8), "staged": STAGED, "routed": ROUTED,
    "two_heads": dataclasses.replace(DENSE.but(num_heads=2, num_kv_heads=2), microbatches=1, batch=16),
    # of two smaller matmuls than of this width XLA makes one, and copies its halves
    "wide_mlp": dataclasses.replace(DENSE.but(num_layers=3, mlp_dim=8192), seq_len=2048, microbatches=2, batch=32,
                                    training=dict()),
    "biases": ROLES.but(norm="layernorm", activation="gelu", position="learned", attention_bias="all", mlp_bias=True),
    "router": ROLES.but(num_experts=8, experts_per_token=2, expert_mlp_dim=128, qk_norm="head"),
    "adapted_experts": dataclasses.replace(EXPERTS, more=dict(lora=dict(rank=32, targets=[
        "query", "value", "expert_gate", "expert_up", "expert_down"]))),
    "adapters": dataclasses.replace(ROLES.but(qk_norm="all_heads"), more=dict(lora=dict(rank=8))),
    "pallas": KERNELS, "mosaic": KERNELS.but(attention="mosaic", head_dim=128),
    "windows_of_100": KERNELS.but(window=100, mixers="WF"),
    **{f"{name}_latents": KERNELS.but(head_dim=192, num_kv_heads=8, attention=name, latent=dict(
        kv_dim=64, query_dim=96, rope_dim=64, value_dim=128)) for name in ("pallas", "mosaic")},
    "ringed": dataclasses.replace(KERNELS.but(num_heads=8, head_dim=32, mlp_dim=512, attention="auto"), seq_len=1024, batch=8,
                                  training=dict(loss_chunk=128)),
    "small": SMALL, "small_experts": SMALL.but(num_experts=4, experts_per_token=2, expert_mlp_dim=128, shared_expert_dim=128),
    "shared_heads": SHARED_HEADS, "own_heads": SHARED_HEADS.but(num_kv_heads=8),
    "wide_mtp": WIDE.but(mtp_layers=1),
    "wide": WIDE, "wide_heads": WIDE.but(num_heads=32, qk_norm="head"), "wide_norms": WIDE.but(norm_placement="both"),
    "wide_norms_after": WIDE.but(norm_placement="after"),
    "gpt": WIDE.but(vocab_size=50304, embed_dim=1600, num_layers=12, num_heads=25, num_kv_heads=25, head_dim=64,
                    mlp_dim=6400, norm="layernorm", activation="gelu", position="learned", attention_bias="all",
                    mlp_bias=True, tie_embeddings=True),
    "window_1024": WIDE.but(window=1024, mixers="WF"), "window_2048": WIDE.but(window=2048, mixers="WF"),
    "window_3000": WIDE.but(window=3000), "window_5000": WIDE.but(window=5000),
    "windows": WIDE.but(mixers="WWWF", window=1024),
    "hybrid": WIDE.but(mixers="GGGF", qk_norm="head", attention_gate=True, linear=dict(key_heads=8, value_heads=16)),
    "experts": EXPERTS, "experts_mtp": EXPERTS.but(mtp_layers=1), "experts_12": EXPERTS.but(num_layers=12, num_heads=32, qk_norm="head"),
    "one_choice": EXPERTS.but(experts_per_token=1, shared_expert_dim=1024),
    "behind_dense": EXPERTS.but(num_layers=6, mlps="dde*"),
    "behind_wide": EXPERTS.but(num_layers=5, mlps="de*", mlp_dim=24576),
    "behind_three": EXPERTS.but(num_layers=7, mlps="ddde*"),
    "behind_experts": EXPERTS.but(num_layers=5, mixers="WF*", window=1024),
    "latents": LATENTS, "latents_5": LATENTS.but(num_layers=5),
    "sinks": EXPERTS.but(mixers="WF", window=1024, attention_sinks=True, attention_bias="all", mlp_bias=True,
                         router_bias="logits", activation="swiglu_clamped", num_heads=32, head_dim=64),
}
CORE = ("dense zero3 data2 fsdp8 tensor4",)

# The rows that more than one file asks for.
ZERO3_TENSOR, DDP_TENSOR = "dense zero3 data2 fsdp8 tensor4", "dense ddp data16 tensor4"
DENSE_STEPS = ("dense ddp fsdp64", "dense zero1 fsdp64", "dense zero2 fsdp64", "dense zero3 fsdp64",
               "dense hsdp_zero1 data8 fsdp8", ZERO3_TENSOR)
# What these promise the others promise apart.
DENSE_CELLS = ("dense hsdp data8 fsdp8", DDP_TENSOR)
SELECTIVE, OFFLOAD = "dense zero3 fsdp64 selective", "dense zero3 fsdp64 offload"
STAGED_STEPS = ("staged zero3 stage4 fsdp4 tensor4 interleaved_zero_bubble2",
                "staged zero3 data2 fsdp2 tensor4 stage2 context2 1f1b", "staged zero1 stage4 fsdp16 1f1b")
STAGED_CELLS = (
    "staged zero3 stage4 fsdp16 1f1b", "staged ddp stage4 fsdp16 1f1b", "staged zero1 stage4 fsdp16 zero_bubble",
    "staged zero3 stage4 fsdp4 tensor4 1f1b", "staged zero3 stage4 fsdp16 interleaved_zero_bubble2",
    "staged zero3 data2 fsdp2 tensor4 stage2 context2 interleaved_zero_bubble2")
ROUTED_STEP = "routed zero3_experts_fsdp data8 fsdp8"
RINGED_STEP = "ringed zero3 fsdp2 context4 full"


def without_spare(setting: Setting, choose=choices.choose) -> Choice:
    """Choose experts whose buffers have no rows to spare."""
    chosen = choose(setting)
    return dataclasses.replace(chosen, value=dataclasses.replace(chosen.value, capacity_factor=1.0))


# What a step is traced with, by word: (module, name, value).
PATCHES = {
    "in_parts": (parts, "MIN_TOKENS", DENSE.seq_len),
    "even": (choices, "choose", without_spare),
}
# word -> (section, key, how its value is read from the groups of the match)
WORDS: dict[str, Callable[..., dict]] = {
    r"(data|fsdp|tensor|context|stage)(\d+)": lambda axis, count: {"mesh": {axis: int(count)}},
    "(none|selective|full|offload)": lambda remat: {"training": {"remat": remat}},
    "(ring|gather|ulysses)": lambda method: {"context": {"method": method}},
    r"(gpipe|1f1b|interleaved|zero_bubble|interleaved_zero_bubble)(\d?)": lambda schedule, chunks: {"pipeline": {
        "schedule": schedule, "chunks": int(chunks or 1)}},
    "float8": lambda: {"model": {"matmul_dtype": "float8"}}, "float32": lambda: {"model": {"compute_dtype": "float32"}},
    r"(\d+)x(\d+)": lambda microbatches, rows: {"shape": {"microbatches": int(microbatches), "rows": int(rows)}},
    r"T(\d+)": lambda length: {"shape": {"seq_len": int(length)}},
    "narrow": lambda: {"sharding": {"reduce": "bfloat16"}},
    "|".join(PATCHES): lambda: {},
}


def run_of(name: str) -> config.Run:
    """The settings of a row."""
    model_name, rule, *words = name.split()
    model = MODELS[model_name]
    sections = defaultdict(dict, model=dict(model.model), training=dict(model.training),
                           shape=dict(microbatches=model.microbatches, rows=model.rows, seq_len=model.seq_len))
    for word in words:
        ((found, read),) = ((found, read) for pattern, read in WORDS.items() if (found := re.fullmatch(pattern, word)))
        for section, keys in read(*found.groups()).items():
            sections[section] |= keys
    shape = sections.pop("shape")
    replicas = sections["mesh"].get("data", 1) * sections["mesh"].get("fsdp", 1)
    sections["training"]["microbatches"] = shape["microbatches"]
    grads = sections.pop("sharding", None)
    rules = scratch.rule_file({"extends": rule, "grads": grads}) if grads else str(RULES / f"{rule}.toml")
    return config.Run(**model.more, **sections, sharding=dict(rules=rules), data=dict(
        seq_len=shape["seq_len"],
        global_batch=model.batch or shape["microbatches"] * shape["rows"] * replicas))


@dataclasses.dataclass(frozen=True)
class Step:
    """A row's step, as one of its GPUs runs it."""
    name: str
    made: assembly.Assembly
    executable: object

    @functools.cached_property
    def text(self) -> str:
        return self.executable.as_text()

    @functools.cached_property
    def program(self) -> audit.ProgramAudit:
        return audit.read(self.text, self.made.mesh)

    @functools.cached_property
    def module(self) -> hlo.HloModule:
        return hlo.parse(self.text)

    @functools.cached_property
    def priced(self) -> roofline.Roofline:
        return CompiledProgram.of_run(self.made, self.executable).roofline

    @functools.cached_property
    def memory_bytes(self) -> dict:
        """Bytes by kind."""
        return memory.measure(self.made, self.executable, self.text)

    @functools.cached_property
    def formulas(self):
        return formula_vs_compiled.of(self.made, memory.formula(self.made))

    @property
    def run(self) -> config.Run:
        return self.made.run

    @property
    def sizes(self) -> dict[str, int]:
        """Of mesh axes."""
        return self.made.mesh_spec.sizes

    @property
    def temp_bytes(self) -> int:
        return self.executable.memory_analysis().temp_size_in_bytes

    @functools.cached_property
    def schedule(self) -> schedules.Schedule:
        return schedules.make(self.run.pipeline.schedule, self.run.mesh.stage, self.run.training.microbatches,
                              self.run.pipeline.chunks)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that weights' gradients are summed over."""
        return tuple(axis for axis in ("data", "fsdp", "context") if self.sizes[axis] > 1)

    @property
    def tokens(self) -> int:
        """Of a microbatch, that a GPU has; a tensor group has them together."""
        run, sizes = self.run, self.sizes
        return (run.data.global_batch // run.training.microbatches * run.data.seq_len
                // (sizes["data"] * sizes["fsdp"] * sizes["context"]))

    def count(self, *roles: str) -> int:
        """Elements of a stage and tensor share of the parameters of these roles."""
        return sum(info.size for info in self.made.model.parameters() if info.role in roles
                   ) // self.sizes["stage"] // self.sizes["tensor"]

    def traffic(self) -> dict[tuple, tuple[int, int]]:
        """(kind, axes, dtype) -> (operands, payload bytes); a layer on its way to its stage: kind "relayout"."""
        cfg, small = self.run.model, MODELS[self.name.split()[0]].small
        norms = 4 * cfg.embed_dim * (2 * cfg.num_layers + 1) if self.sizes["stage"] > 1 else 0
        out = defaultdict(lambda: [0, 0])
        for c in self.program.collectives:
            if c.payload_bytes / (c.count if norms else 1) <= small or (        # norms: one array of them or several
                    c.kind, c.axes) == ("all-reduce", ("tensor",)) and c.payload_bytes <= norms:
                continue
            moved = c.axes[0].startswith("stage") and c.source.endswith("reshape")
            key = ("relayout", ("stage",), c.dtype) if moved else (c.kind, c.axes, c.dtype)
            out[key][0] += c.count
            out[key][1] += c.payload_bytes
        return {key: tuple(value) for key, value in out.items()}

    def kernels(self, engine=pallas) -> Counter:
        """{(kernel of this engine of attention, shape of its first result): calls}."""
        return kernels(self.text, engine)


def shapes_of(it: Step) -> tuple[int, int, int, int, int]:
    """(tokens that a GPU's experts see, choices of a token, experts of a GPU, embed_dim, expert_mlp_dim)"""
    cfg, gpus = it.run.model, it.sizes["fsdp"]
    return gpus * it.tokens, cfg.experts_per_token, cfg.num_experts // gpus, cfg.embed_dim, cfg.expert_mlp_dim


@functools.cache
def assembled(name: str) -> assembly.Assembly:
    run = run_of(name)
    return assembly.assemble(run, compile.topology(f"h100:{math.prod(getattr(run.mesh, axis) for axis in AXES)}"))


@functools.cache
def step(name: str) -> Step:
    """The compiled step of a row."""
    with contextlib.ExitStack() as patches:
        for module, attribute, value in (PATCHES[word] for word in name.split() if word in PATCHES):
            patches.enter_context(pytest.MonkeyPatch.context()).setattr(module, attribute, value)
        made = assembled(name)
        return Step(name, made, made.program.compile())


def rows(*names: str, **tiers: str) -> pytest.MarkDecorator:
    """Parametrize a test by rows. Those of CORE are core, what `cells` and `long` name is of those tiers, others are full."""
    marks = {name: pytest.mark.full for name in names if name not in CORE}
    marks |= {name: mark for tier, mark in (("cells", sampling.GRID), ("long", pytest.mark.long))
              for name in tiers.get(tier, ())}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks.get(name, ()), id=name)
                                            for name in dict.fromkeys((*names, *marks))])


def kernels(text: str, engine=pallas) -> Counter:
    """{(kernel of this engine of attention, shape of its first result): calls in a step}."""
    visits, unknown = hlo.walk(hlo.parse(text), lambda ins: ins.op == "custom-call" and engine.NAME in ins.attrs)
    assert not unknown
    found = Counter()
    for visit in visits:
        name = re.search(rf"{engine.NAME}_(\w+)", visit.instruction.attrs).group(1)
        found[name, hlo.shapes(visit.instruction.type_text)[0][1]] += visit.trips
    return found
