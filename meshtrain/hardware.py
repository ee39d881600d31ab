"""The table of hardware numbers: peak FLOP/s, memory and links of GPUs, each number with its source.

Peaks are dense (vendors often give the number with 2:4 sparsity, which is twice as high). Bandwidths are in bytes per
second; links count one direction. None means unknown (MFU is null on a CPU). NVIDIA's memory sizes and bandwidths and
all fields of `Chip` are those of the driver, from XLA's target specs (openxla/xla,
xla/backends/gpu/target_config/specs). Other numbers are from datasheets. The inter-host numbers are those of the
vendor's reference host, see Gpu.inter_host_source.
"""
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class Chip:
    """Properties of a GPU that the compiler and the kernels need. XLA can compile for a chip if no field is None."""

    num_sms: int  # multiprocessors (compute units), which process the tiles of a matmul in waves
    compute_capability: int | None = None  # NVIDIA's major number; `kernels.tiles` has tile sizes for each
    fpus_per_core: int | None = None
    clock_ghz: float | None = None
    l2_bytes: int | None = None
    shared_bytes_per_core: int | None = None
    shared_bytes_per_block: int | None = None  # opt-in maximum


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in its usual host."""

    name: str
    peak_flops: Mapping[str, float | None] = field(hash=False)  # dtype → dense FLOP/s; float32 on tensor cores is tf32
    hbm_bytes: int | None
    hbm_bytes_per_s: float | None
    # per GPU and direction, to its peers over NVLink or Infinity Fabric in a link domain
    intra_host_bytes_per_s: float | None
    inter_host_bytes_per_s: float | None  # per GPU and direction, out of the link domain
    gpus_per_host: int  # GPUs of one process host
    gpus_per_link_domain: int  # GPUs that reach one another at intra_host_bytes_per_s: the host's, or a rack's
    chip: Chip | None
    source: str  # datasheet of peaks, memory and intra-host link
    inter_host_source: str | None = None
    product: str = ""  # the driver's product name, if it is not "NVIDIA " + name.upper()

    @property
    def num_sms(self) -> int | None:
        return self.chip.num_sms if self.chip else None

    @property
    def device_kind(self) -> str:
        """The driver's product name, which jax gives as `device_kind`."""
        return self.product or f"NVIDIA {self.name.upper()}"

    @property
    def can_be_compiled_for(self) -> bool:
        """Whether XLA can compile for this GPU on a machine without one (`inspect --topology`)."""
        return self.chip is not None and None not in vars(self.chip).values()

    def peak(self, dtype: str) -> float | None:
        """Return the dense FLOP/s of matmuls with operands of this dtype; None if unknown. dtype: any usual spelling
        (bfloat16 or bf16)."""
        return self.peak_flops.get(dtype_name(dtype))

    def domain_gpus(self, num_gpus: int) -> int:
        """Return how many consecutive GPUs of the mesh share a link domain, in a job of `num_gpus`.

        assumption: a job uses the same number of GPUs of each domain, e.g. 64 of a rack's 72 for 128 GPUs. If that
        number would be less than half of a domain, the job fills one domain after the other.
        """
        most = self.gpus_per_link_domain
        even = next(n for n in range(min(num_gpus, most), 0, -1) if num_gpus % n == 0)
        return even if 2 * even >= min(num_gpus, most) else most


def runs_kernels(gpu: Gpu | None) -> bool:
    """Return whether Triton kernels that have no key in a run file (`Execution.by_kernels`) are used on this GPU: an
    NVIDIA GPU in the table with compute capability 8.0 or later, for which they were compiled."""
    return gpu is not None and gpu.chip is not None and (gpu.chip.compute_capability or 0) >= 8


def lacks_float8(gpu: Gpu | None, compute_capability: str | None = None) -> bool:
    """Return whether a GPU has no matmuls of e4m3fn and e5m2: NVIDIA before compute capability 8.9, and AMD's MI300,
    which has other formats (fnuz).

    gpu: None if the table has no row; then compute_capability ('8.0') decides.
    """
    if gpu is not None:
        return gpu.peak("float8") is None or gpu.name.startswith("mi3")
    return compute_capability is not None and tuple(map(int, compute_capability.split("."))) < (8, 9)


# The share of a GPU's memory that a process allocates. JAX's default is 0.75. The driver's context, cuBLAS and NCCL
# need a few GB of the rest.
MEMORY_SHARE = 0.92
# the older name is last; jax refuses both at the same time
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def memory_share(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of a GPU's memory that a process allocates. Raises: ValueError if the environment variable is
    not a number above 0 and at most 1."""
    for name in MEMORY_VARIABLES:
        if given := environ.get(name):
            try:
                share = float(given)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ValueError(f"{name}={given} is not a share of a GPU's memory; use e.g. {MEMORY_SHARE}, or unset "
                                 f"it")
            return share
    return MEMORY_SHARE


def usable_bytes(gpu: Gpu, environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a GPU's memory that a run may use. gpu: its memory is known. Raises: as `memory_share`."""
    assert gpu.hbm_bytes is not None
    return int(memory_share(environ) * gpu.hbm_bytes)


# JAX's and HLO's names of dtypes → names in the table. float32 means full precision, not TF32, which `kernels.products`
# forbids.
_DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp8": "float8", "mxfp8": "float8",
    "float8_e4m3fn": "float8", "float8_e5m2": "float8", "f8e4m3fn": "float8", "f8e5m2": "float8",
}  # fmt: skip


def dtype_name(dtype: str) -> str:
    """Return the table's name of a dtype: bf16 → bfloat16. Unknown dtypes keep their names."""
    return _DTYPES.get(dtype, dtype)


_A100 = {"float32": 19.5 * _T, "bfloat16": 312 * _T, "float16": 312 * _T}
_H100 = {"float32": 66.9 * _T, "bfloat16": 989.4 * _T, "float16": 989.4 * _T, "float8": 1978.9 * _T}
_H100_PCIE = {"float32": 51.2 * _T, "bfloat16": 756 * _T, "float16": 756 * _T, "float8": 1513 * _T}
_B200 = {"float32": 75 * _T, "bfloat16": 2250 * _T, "float16": 2250 * _T, "float8": 4500 * _T}
_GB200 = {"float32": 80 * _T, "bfloat16": 2500 * _T, "float16": 2500 * _T, "float8": 5000 * _T}
_B300 = {"float32": 75 * _T, "bfloat16": 2250 * _T, "float16": 2250 * _T, "float8": 4500 * _T}
_MI300X = {"float32": 163.4 * _T, "bfloat16": 1307.4 * _T, "float16": 1307.4 * _T, "float8": 2614.9 * _T}

_A100_SXM = Chip(108, 8, 64, 1.41, 41_943_040, 167_936, 166_912)
_H100_SXM = Chip(132, 9, 128, 1.98, 52_428_800, 233_472, 232_448)

_DGX_A100 = "NVIDIA DGX A100 datasheet: 8 × 200 Gb/s InfiniBand for 8 GPUs"
_DGX_H100 = "NVIDIA DGX H100/H200 datasheet: 8 × 400 Gb/s InfiniBand for 8 GPUs"
_DGX_B200 = "NVIDIA DGX B200 datasheet: 8 × 400 Gb/s InfiniBand for 8 GPUs"
_DGX_B300 = "NVIDIA DGX B300 datasheet: 8 × 800 Gb/s InfiniBand for 8 GPUs"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, tables 1-3"

_TABLE = (
    Gpu("a100-40gb", _A100, 42_331_013_120, 1555.2 * _G, 300 * _G, 25 * _G, 8, 8, _A100_SXM,
        "NVIDIA A100 datasheet (SXM 40GB): NVLink 600 GB/s both ways", _DGX_A100, "NVIDIA A100-SXM4-40GB"),
    Gpu("a100-80gb", _A100, 85_100_068_864, 2039.04 * _G, 300 * _G, 25 * _G, 8, 8, _A100_SXM,
        "NVIDIA A100 datasheet (SXM 80GB): NVLink 600 GB/s both ways", _DGX_A100, "NVIDIA A100-SXM4-80GB"),
    Gpu("h100", _H100, 84_942_979_072, 3352.32 * _G, 450 * _G, 50 * _G, 8, 8, _H100_SXM,
        _HOPPER + " (SXM5): NVLink 900 GB/s both ways", _DGX_H100, "NVIDIA H100 80GB HBM3"),
    # The bridge joins two GPUs; among eight, PCIe 5.0 x16 is what every pair has: 64 GB/s a direction.
    Gpu("h100-pcie", _H100_PCIE, 84_942_979_072, 2039.04 * _G, 64 * _G, 25 * _G, 8, 8,
        Chip(114, 9, 128, 1.755, 52_428_800, 233_472, 232_448),
        _HOPPER + " (PCIe): PCIe Gen5 128 GB/s both ways",
        "assumption: one 400 Gb/s NIC for two GPUs, as in NVIDIA-certified 2-8-5 PCIe servers",
        "NVIDIA H100 PCIe"),
    # Not a catalogue part: Meta's Grand Teton, limited to 500 W. MFU is published against the SXM5 peak,
    # which the part cannot reach at 500 W.
    Gpu("h100-96gb", _H100, int(95.04 * 2**30), 2400 * _G, 450 * _G, 50 * _G, 8, 8, _H100_SXM,
        "torchtitan benchmarks (pytorch/torchtitan): 96GB HBM2e at 2.4 TB/s, 8 GPUs on NVLink; assumption: 95.04 GiB "
        "usable, peaks of SXM5",
        "torchtitan benchmarks: RDMA network with 400 Gb/s per GPU", "NVIDIA H100"),
    Gpu("h200", _H100, 151_397_597_184, 4800 * _G, 450 * _G, 50 * _G, 8, 8, _H100_SXM,
        "NVIDIA H200 datasheet (SXM): NVLink 900 GB/s both ways; peaks of H100 SXM5", _DGX_H100),
    Gpu("b200", _B200, 191_514_411_008, 7672.32 * _G, 900 * _G, 50 * _G, 8, 8,
        Chip(148, 10, 128, 1.965, 132_644_864, 233_472, 232_448),
        "NVIDIA Blackwell architecture brief (HGX B200): 4.5 PFLOP/s dense FP8, NVLink 1.8 TB/s both ways", _DGX_B200),
    Gpu("gb200", _GB200, 197_897_748_480, 7928.06 * _G, 900 * _G, 50 * _G, 4, 72,
        Chip(152, 10, 128, 2.062, 135_528_448, 233_472, 232_448),
        "NVIDIA GB200 NVL72 datasheet, per GPU: 2.5 PFLOP/s dense BF16, NVLink 1.8 TB/s both ways among 72; 4 GPUs a "
        "compute tray", "NVIDIA GB200 NVL72: one ConnectX-7 400 Gb/s per GPU"),
    # Blackwell Ultra: the peaks of Blackwell but for FP4. The driver's memory size and bandwidth are not in XLA's
    # specs; assumption: as many multiprocessors as Blackwell.
    Gpu("b300", _B300, 288_000_000_000, 8000 * _G, 900 * _G, 100 * _G, 8, 8, Chip(148, 10),
        "NVIDIA HGX B300 datasheet, per GPU of 8: 4.5 PFLOP/s dense FP8, 288 GB HBM3e at 8 TB/s, NVLink 1.8 TB/s both "
        "ways",
        _DGX_B300),
    Gpu("gb300", _GB200, 288_000_000_000, 8000 * _G, 900 * _G, 100 * _G, 4, 72, Chip(152, 10),
        "NVIDIA GB300 NVL72 datasheet, per GPU of 72: 5 PFLOP/s dense FP8, 288 GB HBM3e at 8 TB/s, NVLink 1.8 TB/s "
        "both ways among 72; 4 GPUs a compute tray", "NVIDIA GB300 NVL72: one ConnectX-8 800 Gb/s per GPU"),
    Gpu("mi300x", _MI300X, 206_158_430_208, 5300 * _G, 448 * _G, 50 * _G, 8, 8, Chip(304),
        "AMD Instinct MI300X datasheet: 192 GB HBM3 at 5.3 TB/s, 7 Infinity Fabric links of 128 GB/s both ways",
        "AMD Instinct MI300X platform reference: one 400 Gb/s NIC per GPU", "AMD Instinct MI300X"),
    Gpu("mi325x", _MI300X, 256_000_000_000, 6000 * _G, 448 * _G, 50 * _G, 8, 8, Chip(304),
        "AMD Instinct MI325X datasheet: 256 GB HBM3E at 6 TB/s, peaks and links of MI300X",
        "AMD Instinct MI325X platform reference: one 400 Gb/s NIC per GPU", "AMD Instinct MI325X"),
    Gpu("cpu", {}, None, None, None, None, 8, 8, None, "a machine without accelerators: peak and links unknown",
        product="cpu"),
)  # fmt: skip

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _TABLE}


def get(name: str) -> Gpu:
    """Return the GPU with this name. Raises: ValueError that suggests a similar name."""
    if name in GPUS:
        return GPUS[name]
    near = difflib.get_close_matches(name.lower(), list_priced(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown GPU {name!r}; {hint}known GPUs: {', '.join(list_priced())}")


def list_priced() -> tuple[str, ...]:
    """Return the names of GPUs whose speed is known."""
    return tuple(name for name, gpu in GPUS.items() if gpu.hbm_bytes)


# jax's device_kind is the driver's product name, which usually contains the GPU's name in the table. These patterns are
# the exceptions. The first match wins, so special patterns come before general ones.
_DEVICE_KINDS = (
    (r"\bA100\b.*\b80GB", "a100-80gb"),
    (r"\bA100\b", "a100-40gb"),  # 'NVIDIA A100-SXM4-40GB', 'A100-PCIE-40GB'
    (r"\bH100\b.*\bPCIe", "h100-pcie"),
    (r"\bH100\b.*\bNVL", None),  # 94 GB, 600 GB/s bridge: not in the table
    (r"\bH100$", "h100-96gb"),  # 'NVIDIA H100' has 95 GiB; the SXM5 is 'NVIDIA H100 80GB HBM3'
    (r"\bH100\b", "h100"),
)


def from_device_kind(device_kind: str) -> Gpu | None:
    """Return the row of the table for `jax.devices()[0].device_kind`; None without a row (MFU is then null).

    'NVIDIA H100 80GB HBM3' → h100, 'NVIDIA A100-SXM4-80GB' → a100-80gb.
    """
    for pattern, name in (*_DEVICE_KINDS, *((rf"\b{re.escape(name)}\b", name) for name in GPUS)):
        if re.search(pattern, device_kind, re.IGNORECASE):
            return GPUS[name] if name else None
    return None
