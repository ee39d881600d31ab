"""The command that times tiles of the attention kernels: what it keeps, and what it writes. On a GPU alone it times
anything."""
import sys
from pathlib import Path

import jax
import numpy as np

from meshtrain.kernels import tiles
from meshtrain.kernels.tiles import Blocks, Tiles

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))       # benchmarks is installed nowhere

from benchmarks import tiles as timing  # noqa: E402


def test_timed_tiles_are_written_as_a_line_that_the_next_run_reads():
    first, second = Tiles(*[Blocks(64, 32, 4, 2)] * 3), Tiles(*[Blocks(64, 64, 8, 1)] * 3)
    text = timing.written(timing.TABLE.read_text(), "h200", 128, first, "3 ms")
    text = timing.written(text, "a100-80gb", 64, first, "1 ms")
    text = timing.written(text, "h200", 128, second, "2 ms")
    table = {"__name__": "tiles"}
    exec(text, table)
    repr_of = lambda found: [tuple(blocks) for blocks in found]
    assert repr_of(table["of"](128, "h200")) == repr_of(table["of"](65, "h200")) == repr_of(second)
    assert repr_of(table["of"](64, "a100-80gb")) == repr_of(first) and repr_of(table["of"](64, "h200")) == repr_of(
        tiles.of(64, "h200"))
    assert len(text.splitlines()) == len(timing.TABLE.read_text().splitlines()) + 2 and len(max(text.splitlines(),
                                                                                                key=len)) <= 132


def test_the_fastest_tile_is_one_that_compiles_and_gives_the_same_numbers(capsys):
    used, slower, faster, wrong, refused = (Blocks(n, n, 4, 2) for n in (16, 32, 64, 128, 256))
    times = {used: 3.0, slower: 4.0, faster: 2.0, wrong: 1.0}

    def make(blocks):
        def call():
            if blocks == refused:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded")
            return np.ones(3) * (2 if blocks == wrong else 1)
        call.blocks = blocks
        return call, ()
    clock = lambda call, args: times[call.blocks]
    found = timing.fastest(make, used, [slower, used, refused, wrong, faster], float("inf"), clock)
    assert found == [(2.0, faster), (3.0, used), (4.0, slower)]
    assert "Shared memory" in (said := capsys.readouterr().out) and "other numbers" in said
    assert timing.fastest(make, used, [faster], 0.0, clock) == [(3.0, used)]       # the time is up
