"""benchmarks/peers.py at a tiny size, and the gate on its ratios for GPUs that are absent."""
import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from test_benchmark_processes import free

from meshtrain.cost.program import compile as gpu_compile

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))       # benchmarks is installed nowhere

SHORT = dict(rounds=2, steps=1, falls=10)
needs_gpu_compiler = pytest.mark.skipif(gpu_compile.missing_wheels(),
                                        reason=f"pip install -e '.[gpu-compile]': no {gpu_compile.missing_wheels()}")


def test_meshtrain_and_plain_flax_take_turns(tmp_path, monkeypatch):
    from benchmarks import peers
    monkeypatch.setattr(peers.os, "environ", free())
    tiny = dataclasses.replace(peers.TINY, num_layers=1, seq_len=32)
    chosen = [one for one in peers.list_contenders() if one.module in ("plain_flax", "titan")]
    pairs, absent, failed = peers.run_part(chosen, tiny, peers.Sizes(**SHORT), tmp_path, on_gpu=False)
    assert failed == [] and [pair.contender.module for pair in pairs] == ["plain_flax"]
    assert [name for name, _ in absent if name == "torchtitan, packed rows"]
    assert all(min(turn) > 0 for side in (pairs[0].ours, pairs[0].theirs) for turn in side)
    table = peers.tell(pairs, tiny, flops=1e9, peak=1e12)
    assert len(table) == 4 and table[3].startswith("| plain flax | whole | ") and "%" in table[3]


def test_documents_that_are_not_apart_fail_the_check(tmp_path, monkeypatch):
    """meshtrain of packed rows passes, and of whole rows it fails."""
    from benchmarks import peers
    monkeypatch.setattr(peers.os, "environ", free())
    for packed in (True, False):
        tiny = dataclasses.replace(peers.TINY, num_layers=1, seq_len=32, packed=packed)
        peers.write_batches(dataclasses.replace(tiny, packed=True), tmp_path)
        with peers.start(peers.Child(peers.OURS[packed], tiny, tmp_path, on_gpu=False)) as child:
            if packed:
                peers.check(child, tiny, tmp_path, peers.Sizes(**SHORT))
            else:
                with pytest.raises(peers.CheckFailure, match="second document depends on the first"):
                    peers.check_apart(child, tmp_path)


def test_contenders_on_a_gpu_do_not_compute_on_the_cpu(monkeypatch):
    """The process that draws rows has its own jax on the CPU."""
    from benchmarks import peers
    from benchmarks.contenders import processes
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "/wheels", "XLA_FLAGS": "--a=1"})
    ours = peers.OURS[True]
    given = processes.environment_of(ours, on_gpu=True)
    assert (given["JAX_PLATFORMS"], given["XLA_FLAGS"]) == ("cuda", "--a=1")
    assert given["PYTHONPATH"].split(os.pathsep)[1] == "/wheels"
    assert processes.environment_of(ours._replace(flags="--b=2"), on_gpu=True)["XLA_FLAGS"] == "--b=2"
    assert processes.environment_of(ours, on_gpu=False)["JAX_PLATFORMS"] == "cpu"


class Told:
    """A contender that gives these answers."""

    def __init__(self, *losses: float, params: int = 0):
        self.started, self.losses = {"params": params}, list(losses)

    def ask(self, command: str) -> dict:
        return {"losses": [self.losses.pop(0)] * 2} if command.startswith("go") else {}


@pytest.mark.parametrize("wrong, said", [
    (dict(params=-1), "it has .* parameters"), (dict(losses=(9.0, 5.0)), "the loss of step 1 is 9.000"),
    (dict(losses=(6.3, 6.29)), "the loss on one batch goes from 6.300 to 6.290"), (dict(), None)])
def test_a_contender_that_computes_something_else_is_told(wrong, said, tmp_path):
    from benchmarks import peers
    child = Told(*wrong.get("losses", (6.3, 5.0)), params=wrong.get("params", peers.TINY.num_params))
    if said is None:
        return peers.check(child, peers.TINY, tmp_path, peers.Sizes())
    with pytest.raises(peers.CheckFailure, match=said):
        peers.check(child, peers.TINY, tmp_path, peers.Sizes())


def test_what_is_not_installed_is_told_before_a_process_starts():
    from benchmarks import peers
    one = peers.Contender("X", "no_module", 1, False, needs=("json", "no_such_module"))
    assert peers.missing(one, on_gpu=True) == "no_such_module not installed"
    assert "need a GPU" in peers.missing(one._replace(needs=(), gpu="its kernels"), on_gpu=False)


def test_two_batches_differ_in_the_first_document_alone():
    from benchmarks import peers
    one, other = peers.cases.halve(peers.TINY)
    half = peers.TINY.seq_len // 2
    assert (one["tokens"][:, :half] != other["tokens"][:, :half]).mean() > 0.9
    assert all(np.array_equal(one[name][:, half:], other[name][:, half:]) for name in peers.cases.ARRAYS)
    assert (one["targets"][:, :half] == peers.cases.IGNORED).all() and (one["targets"][:, half:] >= 0).all()
    assert (np.diff(one["segments"], axis=1) != 0).sum(1).tolist() == [1] * len(one["tokens"])


KEPT = {"meshtrain": {"matmul": 4.0, "attention": 1.0}, "plain flax": {"matmul": 4.8, "attention": 1.2}}


@pytest.mark.parametrize("program, part, by, said", [
    ("meshtrain", "attention", 0.2, "attention of meshtrain went from 1.000 to 1.200 s"),
    ("plain flax", "matmul", -0.3, "matmul of plain flax went from 4.800 to 4.500 s"),
    ("meshtrain", "attention", 0.05, None), ("meshtrain", "matmul", -1.0, None), ("plain flax", "matmul", 1.0, None)])
def test_a_ratio_that_falls_names_the_part_that_moved(program, part, by, said):
    from benchmarks import peers_compiled
    found = {name: dict(parts) for name, parts in KEPT.items()}
    found[program][part] += by
    lines = peers_compiled.compare(KEPT, found)
    assert bool(lines) == bool(said) and (not said or lines[0].endswith(said)), lines


@needs_gpu_compiler
def test_the_ratio_to_plain_flax_on_eight_gpus_has_not_fallen(capsys):
    from benchmarks import peers, peers_compiled
    if (key := peers_compiled.key_of("h100:8")) not in peers_compiled.read_kept():
        pytest.skip(f"peers.json keeps nothing of {key}: python benchmarks/peers.py --compiled --write")
    code = peers.run_compiled("h100:8", (peers_compiled.OURS, peers_compiled.PLAIN), write=False)
    assert code == 0, capsys.readouterr().err
