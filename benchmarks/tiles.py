"""python -m benchmarks.tiles [--write] [--minutes 5] [HEAD_DIM ...]: times tiles of the Pallas kernels on this
machine's GPU.

Times forward, dq and dkv separately on packed rows: 8,192 tokens, documents of 2,000 tokens on average, Llama 3 8B's
heads. The tiles in use come first. Candidates that the compiler rejects or whose numbers differ are left out. --write
puts the fastest tiles of each head_dim (64, 128 and 256 by default) as a line into TIMED of meshtrain/kernels/tiles.py,
where the next run finds them.
"""
from __future__ import annotations

import itertools
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import words
from meshtrain import hardware
from meshtrain.kernels import pallas, tiles
from meshtrain.kernels.engine import CAUSAL
from meshtrain.kernels.tiles import Blocks, Tiles

TABLE = ROOT / "meshtrain" / "kernels" / "tiles.py"
ROUNDS, CALLS = 5, 10
AGREE = 2e-2            # share of the largest number: bfloat16, sums in another order


class Shape(NamedTuple):
    rows: int
    length: int
    heads: int
    kv_heads: int
    document: int       # tokens on average


PACKED = Shape(2, 8192, 32, 8, 2000)


def candidates(kernel: str) -> list[Blocks]:
    """Return the candidate tiles, the most likely first."""
    sizes = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32), (32, 64)) if kernel == "forward" else (
        (64, 64), (128, 64), (64, 128), (64, 32), (128, 32), (32, 64), (128, 128))
    return [Blocks(*size, warps, stages) for warps, stages, size in itertools.product((4, 8), (2, 3, 1), sizes)]


def kernels(head_dim: int, shape: Shape, full: int = tiles.FULL, interpret: bool = False):
    """Return {kernel: function of its Blocks}. Each function calls its kernel on the same packed rows and returns the
    result."""
    rng = np.random.default_rng(0)
    B, T, N, K, document = shape

    def array(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((B, T, heads, head_dim)), jnp.bfloat16)
    q, k, v, do = array(N), array(K), array(K), array(N)
    segments = jnp.asarray(1 + np.cumsum(rng.random((B, T)) < 1 / document, 1), jnp.int32)
    base = tiles.COMPILED[9][(min(width for width in tiles.WIDTHS if head_dim <= width),) * 2]
    o, lse = jax.jit(partial(pallas.engine(base, interpret=interpret).forward, mask=CAUSAL))(
        q, k, v, segments, segments)
    delta = (do * o).sum(-1)
    rest = dict(mask=CAUSAL, scale=head_dim ** -0.5, interpret=interpret)
    backward = q, k, v, segments, segments, do, lse.swapaxes(1, 2), delta.swapaxes(1, 2)

    def forward(blocks):
        engine = pallas.engine(base._replace(forward=blocks), interpret=interpret)
        return jax.jit(partial(engine.forward, mask=CAUSAL)), (q, k, v, segments, segments)

    return {"forward": forward, "dq": lambda blocks: (jax.jit(partial(pallas.dq_of, blocks=blocks, **rest)), backward),
            "dkv": lambda blocks: (jax.jit(partial(pallas.dkv_of, blocks=blocks, full=full, **rest)), backward)}


def seconds(function, args, rounds: int = ROUNDS, calls: int = CALLS) -> float:
    """Return the seconds of one call: the median of some rounds of some calls, without the first round."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            made = function(*args)
        jax.block_until_ready(made)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def fastest(make, first: Blocks, others: list[Blocks], until: float, clock=seconds) -> list[tuple[float, Blocks]]:
    """Return [(seconds, tile)], the fastest first, of the tiles that compile and agree with `first`. None starts after
    `until`."""
    function, args = make(first)
    expected = jax.tree.leaves(jax.device_get(function(*args)))
    found = [(clock(function, args), first)]
    for blocks in others:
        if time.monotonic() > until:
            break
        if blocks == first:
            continue
        function, args = make(blocks)
        try:
            made = jax.tree.leaves(jax.device_get(function(*args)))
        except jax.errors.JaxRuntimeError as error:         # not enough registers, shared memory or tensor memory
            print(f"  {tuple(blocks)}: {str(error).splitlines()[0][:100]}")
            continue
        if all(np.abs(np.float32(a) - np.float32(b)).max() <= AGREE * max(1, np.abs(np.float32(b)).max())
               for a, b in zip(made, expected)):
            found.append((clock(function, args), blocks))
        else:
            print(f"  {tuple(blocks)}: other numbers than {tuple(first)}")
    return sorted(found)


def timed(head_dim: int, gpu: str, minutes: float, shape: Shape = PACKED) -> tuple[Tiles, str]:
    """Return the fastest tiles of a head_dim on this GPU, and a text with their times. minutes: for all three
    kernels."""
    width = min(width for width in tiles.WIDTHS if head_dim <= width)
    used, best, said, started = tiles.of(head_dim, gpu) or tiles.COMPILED[9][width, width], {}, [], time.monotonic()
    for n, (kernel, make) in enumerate(kernels(width, shape).items(), 1):
        found = fastest(make, getattr(used, kernel), candidates(kernel),
                        started + 60 * minutes * n / len(Tiles._fields))
        now = next(time_s for time_s, blocks in found if blocks == getattr(used, kernel))
        best[kernel] = found[0][1]
        said.append(f"{1e3 * found[0][0]:.3g}")
        print(f"{gpu}, head_dim {width}, {kernel}: {tuple(found[0][1])} {1e3 * found[0][0]:.3g} ms of {len(found)} "
              f"tried, in use {tuple(getattr(used, kernel))} {1e3 * now:.3g} ms", flush=True)
    return Tiles(**best), f"{' + '.join(said)} ms"


def written(text: str, gpu: str, width: int, chosen: Tiles, said: str) -> str:
    """Return the text of tiles.py with this line in TIMED. It replaces an older line."""
    key = f'    ("{gpu}", {width}, {width}): '
    line = f"{key}Tiles({', '.join(f'Blocks{tuple(blocks)}' for blocks in chosen)}),  # {said}\n"
    head, start, rest = text.partition("TIMED: dict[tuple[str, int, int], Tiles] = {\n")
    rows, end, tail = rest.partition("}\n")
    kept = [row for row in rows.splitlines(keepends=True) if not row.startswith(key)]
    return head + start + "".join(sorted([*kept, line])) + end + tail


def main(argv) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("head_dims", nargs="*", type=int, default=tiles.WIDTHS)
    parser.add_argument("--write", action="store_true", help=f"put the fastest into {TABLE.relative_to(ROOT)}")
    parser.add_argument("--minutes", type=float, default=5, help="for each head_dim")
    asked = parser.parse_args(argv)
    device = jax.devices()[0]
    gpu = hardware.from_device_kind(device.device_kind)
    if device.platform == "cpu" or gpu is None or max(asked.head_dims) > max(tiles.WIDTHS):
        print(f"error: tiles are timed on a GPU of the hardware table, for a head_dim of at most {max(tiles.WIDTHS)}; "
              f"here is {device.device_kind!r}", file=sys.stderr)
        return 2
    for head_dim in asked.head_dims:
        chosen, said = timed(head_dim, gpu.name, asked.minutes)
        width = min(width for width in tiles.WIDTHS if head_dim <= width)
        if asked.write:
            TABLE.write_text(written(TABLE.read_text(), gpu.name, width, chosen, said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
