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

MEDIAN_ERROR = 0.04     # median relative error of a predicted step time, see the module's docstring

_MAMF = ("largest matmul rate found by search over shapes, share of the dense bf16 peak (stas00/ml-engineering, MAMF "
         "table)")
_HOT = ("a step is hot: power and clocks; from published runs, Blackwell's from the dense ones of 2026 (.64 to .72 fit "
        "about as well). H200: measured on one by itself for some twenty seconds; in a full host it may be less")
_GROUPED = ("share of the dense bf16 peak that rows × experts' matrices reach in Triton, before matmul.sustained. "
            "Measured on an H200 in steps of Qwen3-30B-A3B: 461 to 575 TFLOP/s, 528 in the mean")
_ORDERED = ("share of the dense bf16 peak that rows stored in order × experts' matrices reach by the Mosaic kernel, "
            "before matmul.sustained. Measured alike: 667 and 672 TFLOP/s, where Triton's reached 511 and 426")
_OUTER = ("share of the dense bf16 peak that the gradients of experts' matrices reach in Triton, before "
          "matmul.sustained. Measured alike: 430 TFLOP/s")
_NARROW = ("share of its peak that products in float8 (a scale a tensor) or mxfp8 (a scale for 32 elements) reach, "
           "over bfloat16's of its own; from dense runs of 2026. B300 has 1.4 times the power of B200, and its peaks")
_GAP = ("microseconds, forward and backward, in which kernels of other frameworks wait for each other and for the "
        "host; from the runs of 2026: ")
_NCCL = "microseconds in NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc, protocol LL128): "
_FLASH = ("share of the dense bf16 peak, the causal half counted; FlashAttention-3's paper: H100, head_dim 128, 4,096 "
          "tokens, cuDNN 609 TFLOP/s forward; SimuMax on B200: .44 to .58 forward, .37 to .44 backward")
_ELSEWHERE = "share of the dense bf16 peak, the causal half counted; for runs of other frameworks: "
_TRITON = ("share of the dense bf16 peak, the visited pairs counted, before attention.ramp. Measured on an H200 in "
           "packed rows of 8,192 tokens, whole rows 5 to 10% above; assumptions: A100 between FlashAttention-2 (.58, "
           ".50) and Triton's kernels of 2023 (.36, .32), Blackwell about FlashAttention-2 on H100 (.37, .33)")
_MOSAIC = ("the same, measured alike: packed .49 and .56, whole rows .60 and .64. Products are those that are "
           "computed, seven backward")
_BLOCKWISE = ("share of the dense bf16 peak, the causal half counted, of blocks compiled by XLA, whose scores go "
              "through memory: by the roofline of compiled programs on H100 .029 and .047 in bfloat16, .026 and .032 "
              "in float32; elsewhere in proportion to the memory's bandwidth")


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
    Assumption("matmul.clock", {"": 1.0, "h100-96gb": .80}, "500 W instead of 700 W; from that part's runs"),
    Assumption("matmul.wave", {"": .35},
               "share of a wave of 128 × 256 tiles that the last, partly filled one costs", 0, 10),
    Assumption("matmul.k0", {"": 128},
               "prologue and epilogue of a tile, in elements of the contracted dimension", 0, 1e4),
    Assumption("matmul.float8", {"": 1.0, "b2": 1.1, "gb2": 1.1, "b3": 1.5, "gb3": 1.5}, _NARROW, high=2),
    Assumption("matmul.mxfp8", {"": 1.0, "b3": 1.4, "gb3": 1.4}, _NARROW, high=2, formula=True),
    Assumption("grouped.rows", {"": .60}, _GROUPED),
    Assumption("grouped.mosaic", {"": .80}, _ORDERED),
    Assumption("grouped.outer", {"": .51}, _OUTER),
    Assumption("mlp.exposed", {"": .5},
               "share of the time to move an activation's bytes that shows when it is fused into a matmul "
               "(model.mlp=mosaic); not measured", 0),
    Assumption("experts.rounds", {"": 0},
               "further rounds of a layer's experts, in the mean of layers and devices: none where they are equally "
               "busy, one where a device has up to twice its buffer", 0, 64),
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
               "tokens: the rate of S tokens is that of long ones times S / (S + ramp)", 0, 1e5),
    Assumption("attention.narrow", {"": .75},
               "rate at head_dim 64 over that at 128: half the products for each exponential"),
    Assumption("attention.flash2_forward", {"": .37, "a100": .58}, _ELSEWHERE + "FlashAttention-2", formula=True),
    Assumption("attention.flash2_backward", {"": .33, "a100": .50}, _ELSEWHERE + "FlashAttention-2", formula=True),
    Assumption("attention.triton_forward", {"": .21, "a100": .36}, _ELSEWHERE + "Triton of 2023, MPT at 65,536",
               formula=True),
    Assumption("attention.triton_backward", {"": .17, "a100": .32}, _ELSEWHERE + "Triton of 2023, MPT at 65,536",
               formula=True),
    Assumption("attention.scores_forward", {"": .15}, _ELSEWHERE + "scores in memory", formula=True),
    Assumption("attention.scores_backward", {"": .15}, _ELSEWHERE + "scores in memory", formula=True),
    Assumption("documents.mean", {"": 2000},
               "tokens of a packed document, where pairs across documents are skipped", 1, 1e9),
    Assumption("documents.sigma", {"": 1.5}, "of the logarithm of their length (log-normal)", 0.01, 4),
    Assumption("hbm.share", {"": .80}, "streaming kernels reach this share of the memory's bandwidth"),
    Assumption("link.share", {"": .80},
               "of one direction of NVLink; rings measured: H100 and H200 .80 to .82, A100 .78"),
    Assumption("nic.share", {"": .80},
               "of a NIC's rate in the hardware table; measured: 32 H200 over 8 × 400 Gb/s .91. A slower network is "
               "set here: 100 Gb/s a GPU where the table has 400 is 0.2"),
    Assumption("link.start_us", {"": 14}, _NCCL + "base latency of a ring", 0, 1e4),
    Assumption("link.hop_us", {"": 1.9}, _NCCL + "a ring's step inside a link domain", 0, 1e4),
    Assumption("link.host_hop_us", {"": 4.0}, _NCCL + "a ring's step between hosts", 0, 1e4),
    Assumption("link.contend", {"": .40},
               "a hidden collective slows what runs beside it by this share of its own time: NCCL takes "
               "multiprocessors and memory bandwidth; from published runs", 0),
    Assumption("overlap.fsdp", {"": .90},
               "share of a layer's compute behind which its weights' gathers and its gradients' reductions hide, and "
               "keys and values of a ring behind attention", 0, formula=True),
    Assumption("overlap.experts", {"": .30},
               "the same of experts' weights: they are gathered and reduced between the kernels that need and make "
               "them; read off programs of Qwen3-30B-A3B and Mixtral on 64 H100 in four microbatches, experts over 8: "
               "links cost .42 and .59 s by the roofline, .49 and .55 s by the formulas", 0, formula=True),
    Assumption("overlap.data", {"": .80},
               "the same of what frameworks with buckets reduce and gather once a step, behind one microbatch", 0,
               formula=True),
    Assumption("overlap.once", {"": .25},
               "share of their own time that reductions and gathers once a step hide in our programs, behind each "
               "other's updates; all-reduces behind nothing. Read off programs of 1B and 8B on 8 and 64 H100: .26 to "
               ".33", 0, formula=True),
    Assumption("overlap.reduced", {"": .72},
               "share of a layer's reductions that hides at most in our programs: the last of a loop's body stand "
               "behind nothing. Read off the same programs: .64 to .75", 0, formula=True),
    Assumption("overlap.tensor", {"": 0},
               "share of tensor parallelism's collectives that hides: they stand between the products", 0,
               formula=True),
    Assumption("overlap.user_buffers", {"": .60},
               "the same where a framework cuts them into chunks beside their products (Transformer Engine's user "
               "buffers)", 0, formula=True),
    Assumption("overlap.exchange", {"": 0},
               "share of the exchange of tokens with experts that hides, in other frameworks. Megatron's overlap of "
               "two microbatches: .80, from 24.7 s to 21.0 s a step (Megatron-Bridge, Qwen3-30B on 16 H100)", 0,
               formula=True),
    Assumption("gap.layer_us", {"": 600}, _GAP + "of a layer", 0, 1e5, formula=True),
    Assumption("gap.expert_us", {"": 250}, _GAP + "of each expert of a device and layer", 0, 1e5, formula=True),
    Assumption("gap.narrow_us", {"": 40}, _GAP + "more where experts multiply in a narrow dtype", 0, 1e5,
               formula=True),
    Assumption("experts.rate", {"": 1.0, "b": .7, "gb": .7},
               "rate of a product of many experts in other frameworks over that of one product as large; Blackwell's "
               "from published runs of 2026", 0, 2, formula=True),
    Assumption("elementwise.eager", {"": 1.8},
               "bytes of elementwise work without a fusing compiler over those with one", 1, 10, formula=True),
    Assumption("offload.gb_per_s", {"": 50, "a100": 25, "gb": 200, "mi": 50},
               "GB/s of one direction between a GPU and its host's memory: PCIe 5 × 16 has 64, PCIe 4 32, NVLink-C2C "
               "450 for two GPUs", 1, 1e3, formula=True),
    Assumption("decode.gap_us", {"": 70},
               "microseconds per layer and token of every slot between kernels that wait for each other: the 17 of a "
               "dense layer at 3.7 us. Not measured: 54 took 3.7 us each on an H200 (64 slots of Llama 3.2 1B: 4.57 ms "
               "a token, 1.4 by bytes)", 0, 1e5),
    Assumption("decode.loop_us", {"": 160},
               "microseconds more per layer whose cache is read by a loop: latents, and all on GPUs without "
               "`kernels.decode`; from the same measurement", 0, 1e5),
    Assumption("kernel.launch_us", {"": 3}, "gap between two kernels that wait for each other", 0, 1e3),
    Assumption("step.overhead", {"": .02}, "host, data and logging, share of a step", 0),
)}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The assumed values for one GPU, by name. given: the values that the user set."""
    gpu_name: str
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        """Check the given values. Raises: ValueError for a name that is not in the table or a value out of its
        range."""
        for name, value in self.given.items():
            if name not in TABLE:
                near = difflib.get_close_matches(name, TABLE, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ValueError(f"--assume {name}={value:g}: there is no such assumption; {hint}names: "
                                 f"{', '.join(TABLE)}")
            row = TABLE[name]
            if not row.low <= value <= row.high:
                raise ValueError(f"--assume {name}={value:g} must lie between {row.low:g} and {row.high:g}: "
                                 f"{row.reason}")

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    @functools.cached_property
    def _values(self) -> dict[str, float]:
        return {name: self.given.get(name, row.of(self.gpu_name)) for name, row in TABLE.items()}

    def reasons(self, formula: bool = False) -> dict[str, str]:
        """Return {name: the reason for its value} for the names of `as_dict`."""
        return {name: TABLE[name].reason for name in self.as_dict(formula)}

    def as_dict(self, formula: bool = False) -> dict[str, float]:
        """Return {name: value}. formula: include the values that only the closed formulas use."""
        return {name: self[name] for name, row in TABLE.items() if formula or not row.formula}


def parse(text: str) -> tuple[str, float]:
    """Parse 'matmul.sustained=0.8' into (name, number). Raises: ValueError if the text is not NAME=NUMBER."""
    name, equals, value = text.partition("=")
    try:
        return name.strip(), float(value) if equals else float("")
    except ValueError:
        raise ValueError(f"is not NAME=NUMBER; use e.g. matmul.sustained=0.8; names: {', '.join(TABLE)}") from None
