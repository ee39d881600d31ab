"""What the GPU's compiler makes of a kernel."""
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from meshtrain import hardware
from meshtrain.cost.program import compile

ROOT = Path(__file__).resolve().parent.parent.parent


class Resources(NamedTuple):
    """Of a thread, of a block, of a thread."""
    spilled_bytes: int
    shared_bytes: int
    registers: int


def compile_dumped(lowered, folder: Path):
    """The executable; its PTX is in the folder. Optimized as in a run; the other programs of the tests are not."""
    return lowered.compile(compiler_options={
        "xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": 3})


def used(kernel: str, gpu: str, folder: Path) -> dict[str, Resources]:
    """Those of each kernel whose name begins with `kernel`, of what `compile_dumped` has written."""
    roots = [root for name in ("nvidia.cuda_nvcc", "nvidia.cu13") for root in compile._find(name)]
    ptxas = next(path for root in roots if (path := root / "bin" / "ptxas").is_file())       # as XLA itself takes
    launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    shared = {name: int(size) for name, size in re.findall(rf"({kernel}\w*) grid:.*shared_memory: (\d+) bytes", launches)}
    architecture = {8: "sm_80", 9: "sm_90a", 10: "sm_100a"}[hardware.get(gpu).chip.compute_capability]
    found = {}
    for path in folder.glob("*.ptx"):
        for name in re.findall(rf"\.entry ({kernel}\w*)", path.read_text()):
            said = subprocess.run([ptxas, "-v", f"-arch={architecture}", path, "-o", "/dev/null"],
                                  capture_output=True, text=True)
            assert said.returncode == 0, said.stderr[:300]
            number = lambda pattern: int(re.search(pattern, said.stderr).group(1))
            found[name] = Resources(number(r"(\d+) bytes spill stores"), shared[name], number(r"Used (\d+) registers"))
            assert 0 < shared[name] <= hardware.get(gpu).chip.shared_bytes_per_block, (name, found)
    return found


def check_mosaic(folder: Path, *arguments: str | Path, most_spilled: int = 0) -> set[str]:
    """Run Python with these arguments, and look at each Mosaic kernel that it compiles for Hopper; their names. In a process
    of its own: jax reads where to write the compiler's report when it is imported."""
    environ = os.environ | {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1", "PYTHONPATH": str(ROOT)}
    environ.pop("XLA_FLAGS", None)
    ran = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = {path.name: path.read_text() for path in folder.glob("*.ptxas")}
    for name, text in said.items():
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", text)]
        assert spilled and max(spilled) <= most_spilled and "serialized" not in text, (name, text)
        assert re.findall(r"Used (\d+) registers", text) == ["168"], name      # of 65,536 for 384 threads, before setmaxnreg
    return set(said)
