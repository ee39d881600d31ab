"""python benchmarks/weights.py: export and import of a Hugging Face model folder, compared with the speed of the disk.

A Llama with 0.27 billion random weights, 1.1 GB in float32, is written by `run.export` and read by `run.pretrained`. It
is on one device, or on eight simulated devices split as with ZeRO-3. Both are compared with plain files of the same
size: one write until the bytes are safe (fsync), and one read. The read comes from memory, as that of the folder does,
because the file was just written. Writes benchmarks/weights.md.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODEL = dict(vocab_size=32000, embed_dim=1024, num_layers=16, num_heads=16, num_kv_heads=8, head_dim=64, mlp_dim=2816)
CASES = [("float32", 1), ("float32", 8), ("bfloat16", 8)]
FILE_BYTES = 300 * 10**6


def timed(call) -> tuple[float, object]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def disk(place: Path, size: int) -> tuple[float, float]:
    """Return the seconds to write and to read this many bytes in one file."""
    data, path = os.urandom(2**24), place / "bytes"

    def write():
        with open(path, "wb") as file:
            for start in range(0, size, len(data)):
                file.write(data[:min(len(data), size - start)])
            file.flush()
            os.fsync(file.fileno())

    def read():
        with open(path, "rb", buffering=0) as file:
            into = bytearray(2**24)
            while file.readinto(into):
                pass
    found = timed(write)[0], timed(read)[0]
    path.unlink()
    return found


def measure(dtype: str, count: int, place: Path) -> str:
    """Return a row of the table. This process simulates the devices."""
    import jax

    from meshtrain import config, devices
    from meshtrain.sharding import rules
    from meshtrain.sharding.mesh import MeshSpec
    from meshtrain.model import params, transformer
    from meshtrain.huggingface.weights import export, pretrained
    from meshtrain.huggingface.weights.ends import Ends
    from meshtrain.run import trees
    from meshtrain.huggingface import folder

    run = config.Run(model=MODEL, mesh=dict(simulated_devices=count), run=dict(compilation_cache=""))
    spec, model = MeshSpec({"fsdp": count}), transformer.build(run.model)
    mesh = spec.build(devices.start(run))
    layout = rules.Layout(rules.load(str(ROOT / "sharding_rules/zero3.toml")), spec.sizes)
    placed = params.tree(model.parameters(),
                         lambda info: jax.sharding.NamedSharding(mesh, layout.spec("params", info.axes)))
    out = place / "out"
    with jax.set_mesh(mesh):
        weights = jax.jit(model.init, out_shardings=placed)(jax.random.key(0))
        leaves = trees.leaves_of(weights)

        def write():
            return export.write(out, model, leaves.__getitem__, dtype=dtype, shard_bytes=FILE_BYTES, source=None,
                                ends=Ends((2,), bos=1), data={"seq_len": 1024, "eos": "", "tokenizer": "bytes"})
        write_s, size = timed(write)
        found = folder.open_folder(out)
        rows = folder.match(found, run.model, pretrained.parameter_paths(model))
        zeros = jax.block_until_ready(jax.jit(lambda: jax.tree.map(jax.numpy.zeros_like, weights),
                                              out_shardings=placed)())
        read_s, again = timed(lambda: pretrained.load(found, rows, model.places(), zeros))
        if dtype == "float32":
            assert all(map(bool,
                           jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(),
                                                        weights, again)))), "other weights came back"
    shutil.rmtree(out)
    disk_write_s, disk_read_s = disk(place, size)
    return (f"| {dtype} | {count} | {size / 1e9:.2f} | {write_s:.1f} | {disk_write_s:.1f} | {read_s:.1f} | "
            f"{disk_read_s:.2f} |")


def main(argv) -> int:
    from benchmarks import machine, words

    parser = words.Parser(__doc__)
    parser.add_alone("DTYPE", "COUNT", "PLACE")
    if alone := parser.parse_args(argv).alone:
        print(measure(alone[0], int(alone[1]), Path(alone[2])))
        return 0
    table = []
    with tempfile.TemporaryDirectory(prefix="meshtrain-weights-", dir=ROOT) as place:
        for dtype, count in CASES:
            done = subprocess.run([sys.executable, __file__, "--alone", dtype, str(count), place],
                                  check=True, stdout=subprocess.PIPE, text=True)
            table.append(done.stdout.strip().splitlines()[-1])
            print(table[-1], flush=True)
    lines = ["# Model folders in and out", "",
             "Written by `python benchmarks/weights.py`. The first lines of this script say what is measured and how.", "",
             machine.line("", "jax", "jaxlib"), "",
             "Seconds for the whole folder, including the compilation of a program for each kind of tensor.", "",
             "| written as | devices | GB | export, s | plain write to disk, s | load, s | plain read, s |",
             "|" + "---|" * 7, *table, ""]
    (ROOT / "benchmarks" / "weights.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
