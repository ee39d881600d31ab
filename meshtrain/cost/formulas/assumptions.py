"""The table of assumed GPU speeds: the fractions of its peaks, memory and links that a training step reaches.

The rates of this project's kernels, and an H200's rates of matmuls, were measured on one H200 (benchmarks/gpu.md). The
others are from published runs and papers. Each value has a reason; `inspect --assume NAME=VALUE` replaces it. The
specifications of GPUs are in `hardware`.

With these values the closed formulas predicted 51 published runs with a median error of 3.9%; 90% of the errors were
below 10.8%. For 166 runs of 2026 the median error was 4.1% (dense models) and 10.7% (experts). No run used this
project's kernels. `matmul.sustained`, `link.contend` and the attention rates change a predicted step most.
"""
from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import ClassVar

MEDIAN_ERROR = 0.04     # median relative error of a predicted step time, see the module's docstring

_MAMF = ("fraction of the dense bf16 peak: the highest matmul rate that a search over shapes found "
         "(stas00/ml-engineering, MAMF table)")
_HOT = ("fraction of the best matmul rate that a GPU sustains: power and heat lower the clocks. From published runs; "
        "Blackwell's value is from the dense runs of 2026; .64 to .72 fit them about as well. H200: measured on one "
        "GPU alone for some twenty seconds; in a full host it may be lower")
_GROUPED = ("fraction of the dense bf16 peak that Triton's product of rows and experts' matrices reaches, before "
            "matmul.sustained. Measured on an H200 in steps of Qwen3-30B-A3B: 461 to 575 TFLOP/s, mean 528")
_ORDERED = ("fraction of the dense bf16 peak that the Mosaic kernel reaches when it multiplies rows stored in order by "
            "experts' matrices, before matmul.sustained. Measured on an H200 in steps of Qwen3-30B-A3B: 667 and 672 "
            "TFLOP/s; Triton reached 511 and 426")
_OUTER = ("fraction of the dense bf16 peak that Triton reaches for the gradients of experts' matrices, before "
          "matmul.sustained. Measured on an H200 in steps of Qwen3-30B-A3B: 430 TFLOP/s")
NARROW = ("fraction of its own peak that float8 (one scale per tensor) or mxfp8 (one scale per 32 elements) reaches, "
          "divided by the fraction that bfloat16 reaches of its peak; from dense runs of 2026. B300 has 1.4 times the "
          "power of B200 and the same peaks")
_NCCL = "microseconds in NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc, protocol LL128): "
_FLASH = ("fraction of the dense bf16 peak, counting the causal half. FlashAttention-3's paper: H100, head_dim 128, "
          "4,096 tokens, cuDNN 609 TFLOP/s forward. SimuMax on B200: .44 to .58 forward, .37 to .44 backward")
_TRITON = ("fraction of the dense bf16 peak, counting the visited pairs, before attention.ramp. Measured on an H200 in "
           "packed rows of 8,192 tokens; rows of one document were 5 to 10% faster. Assumed: A100 between "
           "FlashAttention-2 (.58, .50) and Triton's kernels of 2023 (.36, .32); Blackwell near "
           "FlashAttention-2 on H100 (.37, .33)")
_MOSAIC = ("fraction of the dense bf16 peak, counting the visited pairs, before attention.ramp. Measured on an H200 in "
           "packed rows of 8,192 tokens: .49 forward, .56 backward; in rows of one document .60 and .64. Counts the "
           "computed products, seven in the backward")
_BLOCKWISE = ("fraction of the dense bf16 peak, counting the causal half, of blocks that XLA compiles and whose scores "
              "go through memory. By the roofline of programs compiled for H100: .029 forward and .047 backward in "
              "bfloat16, .026 and .032 in float32. Other GPUs: in proportion to memory bandwidth")


@dataclasses.dataclass(frozen=True)
class Assumption:
    """One assumed number.

    values: by prefix of the GPU's name; the longest matching prefix counts, and "" matches all GPUs. low, high: the
    allowed range.
    """
    name: str
    values: Mapping[str, float]
    reason: str
    low: float = 0.01      # above zero: a rate of zero would give an infinite time
    high: float = 1.0
    formula: bool = False  # used only by the closed formulas of `price`; a compiled program shows the value itself

    def of(self, gpu_name: str) -> float:
        return self.values[max((key for key in self.values if gpu_name.startswith(key)), key=len)]


TABLE = {row.name: row for row in (
    Assumption("matmul.best", {"": .803, "a100": .869, "b200": .776, "b300": .776, "gb": .729, "mi": .514}, _MAMF),
    Assumption("matmul.sustained", {"": .84, "a100": .92, "h200": .95, "b200": .68, "b300": .68, "gb": .68, "mi": .84},
               _HOT),
    Assumption("matmul.clock", {"": 1.0, "h100-96gb": .80},
               "clock relative to the full part: 500 W instead of 700 W; from published runs of this part"),
    Assumption("matmul.wave", {"": .35},
               "cost of the last, partly filled wave of 128 × 256 tiles, as a fraction of a full wave", 0, 10),
    Assumption("matmul.k0", {"": 128},
               "cost of a tile's prologue and epilogue, in elements of the contracted dimension", 0, 1e4),
    Assumption("matmul.float8", {"": 1.0, "b2": 1.1, "gb2": 1.1, "b3": 1.5, "gb3": 1.5}, NARROW, high=2),
    Assumption("grouped.rows", {"": .60}, _GROUPED),
    Assumption("grouped.mosaic", {"": .80}, _ORDERED),
    Assumption("grouped.outer", {"": .51}, _OUTER),
    Assumption("mlp.exposed", {"": .5},
               "fraction of the time to move an activation's bytes that is not hidden when the activation is fused "
               "into a matmul (model.mlp=mosaic); not measured", 0),
    Assumption("experts.rounds", {"": 0},
               "further rounds of a layer's experts, mean over layers and devices: none if experts are "
               "balanced, one if a device receives up to twice its buffer", 0, 64),
    Assumption("attention.cudnn_forward", {"": .58, "b": .60, "gb": .60}, _FLASH),
    Assumption("attention.cudnn_backward", {"": .50, "b": .48, "gb": .48}, _FLASH),
    Assumption("attention.pallas_forward", {"": .35, "a100": .50, "b": .38, "gb": .38}, _TRITON),
    Assumption("attention.pallas_backward", {"": .46, "a100": .40, "b": .28, "gb": .28}, _TRITON),
    Assumption("attention.mosaic_forward", {"": .49}, _MOSAIC),
    Assumption("attention.mosaic_backward", {"": .56}, _MOSAIC),
    Assumption("attention.blockwise_forward", {"": .030, "a100-40gb": .044, "a100-80gb": .058, "h200": .043},
               _BLOCKWISE, formula=True),
    Assumption("attention.blockwise_backward", {"": .042, "a100-40gb": .062, "a100-80gb": .081, "h200": .060},
               _BLOCKWISE, formula=True),
    Assumption("attention.ramp", {"": 400},
               "tokens: the rate at S tokens is the rate of long sequences times S / (S + ramp)", 0, 1e5),
    Assumption("attention.narrow", {"": .75},
               "rate at head_dim 64 divided by the rate at 128: at 64 each exponential has half the products"),
    Assumption("documents.mean", {"": 2000},
               "mean tokens of a packed document, where pairs across documents are skipped", 1, 1e9),
    Assumption("documents.sigma", {"": 1.5},
               "standard deviation of the logarithm of a document's length (log-normal)", 0.01, 4),
    Assumption("hbm.share", {"": .80},
               "fraction of the memory bandwidth that streaming kernels reach"),
    Assumption("link.share", {"": .80},
               "fraction of one direction of NVLink that rings reach; measured: H100 and H200 .80 to .82, A100 .78"),
    Assumption("nic.share", {"": .80},
               "fraction of a NIC's rate in the hardware table that rings reach; measured: 32 H200 over 8 × 400 Gb/s "
               ".91. Lower it for a slower network: 0.2 for 100 Gb/s per GPU where the table has 400"),
    Assumption("link.start_us", {"": 14}, _NCCL + "base latency of a ring", 0, 1e4),
    Assumption("link.hop_us", {"": 1.9}, _NCCL + "a ring's step inside a link domain", 0, 1e4),
    Assumption("link.host_hop_us", {"": 4.0}, _NCCL + "a ring's step between hosts", 0, 1e4),
    Assumption("link.contend", {"": .40},
               "slowdown of compute by a collective that it hides, as a fraction of the collective's time: NCCL "
               "takes multiprocessors and memory bandwidth; from published runs", 0),
    Assumption("overlap.fsdp", {"": .90},
               "fraction of a layer's compute that can hide the gathers of its weights and the "
               "reductions of its gradients; also the fraction of attention that can hide a ring's "
               "keys and values", 0, formula=True),
    Assumption("overlap.experts", {"": .30},
               "fraction of a layer's compute that can hide the gathers and reductions of experts' "
               "weights, which run between the kernels that use them. Read off programs of "
               "Qwen3-30B-A3B and Mixtral on 64 H100 in four microbatches, experts over 8: links "
               "cost .42 and .59 s by the roofline, .49 and .55 s by the formulas", 0, formula=True),
    Assumption("overlap.data", {"": .80},
               "fraction of one microbatch's compute that can hide once-per-step reductions and gathers, in frameworks "
               "with buckets", 0,
               formula=True),
    Assumption("overlap.once", {"": .25},
               "fraction of once-per-step reductions and gathers that the updates of other arrays hide in meshtrain's "
               "programs; all-reduces are not hidden. Read off programs of 1B and 8B on 8 and 64 H100: .26 to .33",
               0, formula=True),
    Assumption("overlap.reduced", {"": .72},
               "largest fraction of a layer's reductions that is hidden in meshtrain's programs: the "
               "last reductions of a loop's body overlap no compute. Read off programs of 1B and 8B "
               "on 8 and 64 H100: .64 to .75", 0, formula=True),
    Assumption("overlap.tensor", {"": 0},
               "fraction of tensor parallelism's collectives that is hidden: they run between the products", 0,
               formula=True),
    Assumption("overlap.exchange", {"": 0},
               "fraction of the exchange of tokens with experts that is hidden in other frameworks. Megatron's "
               "overlap of two microbatches: .80, from 24.7 s to 21.0 s a step (Megatron-Bridge, Qwen3-30B on 16 "
               "H100)", 0,
               formula=True),
    Assumption("offload.gb_per_s", {"": 50, "a100": 25, "gb": 200, "mi": 50},
               "GB/s of one direction between a GPU and its host's memory: PCIe 5 × 16 has 64, "
               "PCIe 4 × 16 has 32, NVLink-C2C has 450 for two GPUs", 1, 1e3, formula=True),
    Assumption("decode.gap_us", {"": 70},
               "microseconds of gaps between dependent kernels, per layer and decoding step: a dense layer "
               "has 17 gaps of 3.7 us. Assumed; measured: 54 gaps of 3.7 us each on an H200 (64 "
               "slots of Llama 3.2 1B: 4.57 ms a token, 1.4 by bytes)", 0, 1e5),
    Assumption("decode.loop_us", {"": 160},
               "additional microseconds for a layer whose cache is read by a loop: latents, and all caches on GPUs "
               "without `kernels.decode`; from the measurement of decode.gap_us", 0, 1e5),
    Assumption("kernel.launch_us", {"": 3}, "gap between two kernels that wait for each other", 0, 1e3),
    Assumption("step.overhead", {"": .02},
               "fraction of a step that host, data and logging take", 0),
)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The assumed values for one GPU, by name. given: the values that the user set. table: all assumptions by name."""
    table: ClassVar[Mapping[str, Assumption]] = TABLE
    gpu_name: str
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Check the given values. Raises: ValueError for a name that is not in the table or a value out of its
        range."""
        for name, value in self.given.items():
            if name not in self.table:
                near = difflib.get_close_matches(name, self.table, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"--assume {name}={value:g}: no assumption has this name; {hint}names: "
                                 f"{', '.join(self.table)}")
            row = self.table[name]
            if not row.low <= value <= row.high:
                raise ValueError(f"--assume {name}={value:g} must lie between {row.low:g} and {row.high:g}: "
                                 f"{row.reason}")

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    @functools.cached_property
    def _values(self) -> dict[str, float]:
        return {name: self.given.get(name, row.of(self.gpu_name)) for name, row in self.table.items()}

    def reasons(self, formula: bool = False) -> dict[str, str]:
        """Return {name: the reason for its value} for the names of `as_dict`."""
        return {name: self.table[name].reason for name in self.as_dict(formula)}

    def as_dict(self, formula: bool = False) -> dict[str, float]:
        """Return {name: value}. formula: whether to include the values that only the closed formulas use."""
        return {name: self[name] for name, row in self.table.items() if formula or not row.formula}


def parse(text: str) -> tuple[str, float]:
    """Parse 'matmul.sustained=0.8' into (name, number). Raises: ValueError if the text is not NAME=NUMBER."""
    name, equals, value = text.partition("=")
    try:
        return name.strip(), float(value) if equals else float("")
    except ValueError:
        raise ValueError(f"is not NAME=NUMBER; use e.g. matmul.sustained=0.8; names: {', '.join(TABLE)}") from None
