"""Scripts of benchmarks that start processes or run commands, at a tiny size."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny_run

from meshtrain import __main__
from meshtrain.commands import train

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))       # benchmarks is installed nowhere


def free() -> dict[str, str]:
    """The environment without the simulated devices of the tests."""
    return {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "NPROC")} | {
        "PYTHONPATH": str(ROOT)}


def tiny_file(directory: Path) -> Path:
    (directory / "corpus.txt").write_text("a line of text\n" * 400)
    (directory / "run.toml").write_text(tiny_run.text(
        mesh__simulated_devices=1, mesh__data=1, run__compilation_cache=str(directory / "cache"),
        data__paths=[str(directory / "corpus.txt")]))
    return directory / "run.toml"


@pytest.mark.long
def test_the_phases_of_a_restart_are_measured(tmp_path, monkeypatch):
    """Two kills of a process under the launcher."""
    from benchmarks import restart
    monkeypatch.setattr(restart.os, "environ", free())
    (taken,) = restart.measure(1, 1, [str(tiny_file(tmp_path))])
    assert len(taken) == len(restart.PHASES) and min(taken) >= 0 < sum(taken)


@pytest.mark.long
def test_words_are_learned_and_sums_written(tmp_path, monkeypatch):
    """The commands run in this process, with a narrow model and two steps; no sums are learned."""
    from benchmarks import rl
    tiny = ("--model.embed_dim=16 --model.num_layers=1 --model.num_heads=2 --model.mlp_dim=16 --data.global_batch=16 "
            "--validation.batches=1 --validation.every=2 --training.steps=2 --run.sample_tokens=0 "
            f"--data.cache={tmp_path}/cache").split()
    drawn = "--rl.prompts=4 --rl.samples=2 --training.microbatches=1".split()

    def command(argv: list[str], **options):
        name, keys = argv[3], argv[4:]
        simulated = () if any("simulated_devices" in key for key in keys) else ("--mesh.simulated_devices=8",)
        words = {key.partition("=")[0]: key for key in (
            *simulated, "--mesh.data=8", *tiny, *(() if "sft" in name else drawn), *keys)}
        assert train.main([name, *words.values()]) == 0
        return SimpleNamespace(returncode=0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rl.subprocess, "run", command)
    monkeypatch.setattr(rl, "REWARDS", ("reversals",))
    page = rl.of_words(str(tmp_path), 1)
    assert "| 0 | demonstrations |" in page and "| 0 | reversals | " in page
    monkeypatch.setattr(rl, "SUMS", 256)
    assert 0.3 < rl.write_sums(str(tmp_path)) < 0.7     # half of the demonstrations


def test_a_fault_is_met_and_told(tmp_path):
    """In a process of its own, because `calls` forks."""
    with mock.patch.dict(os.environ):
        from benchmarks import soak
    done = subprocess.run([sys.executable, soak.__file__, "--parts", "calls", "--faults", "1", "--json",
                           tmp_path / "found.json"], cwd=ROOT, env=free(), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    ((part, fault, line),) = json.loads((tmp_path / "found.json").read_text())
    assert part == "calls" and line["met"] == 1 and not line["wrong"] and f"| calls | {fault} | 1 | " in done.stdout


@pytest.mark.long
def test_the_time_to_the_first_step_is_measured(tmp_path, monkeypatch):
    from benchmarks import step
    monkeypatch.setattr(step.os, "environ", free())
    assert step.first_step_s(tmp_path / "run", tmp_path / "cache", tiny_file(tmp_path)) > 0


def test_the_parts_of_a_start_are_measured_beside_a_trainer_by_hand(tmp_path, monkeypatch):
    from benchmarks import start
    monkeypatch.setattr(start, "SHAPE", start.SHAPE | dict(vocab_size=264, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8,
                                                           mlp_dim=64, num_layers=1))
    monkeypatch.setattr(start, "SEQ_LEN", 32)
    monkeypatch.setattr(start.os, "environ", dict(os.environ))
    ours, plain = start.alone_ours(8), start.alone_plain(8, "")
    assert set(ours) == set(plain) == {"imports", "assembling", "data", "initialization", "trace and lower", "XLA", "first step"}
    assert min(ours.values()) >= 0 < min(plain["XLA"], ours["XLA"])
    head, _, row, other = start.table({"meshtrain": ours, "plain flax": plain})
    assert row.startswith("| meshtrain | ") and head.count("|") == row.count("|") == other.count("|")
    monkeypatch.setattr(__main__, "COMMANDS", {"tokenize": ""})
    assert 0 < start.answer_help()["tokenize"] < 60
    sign = tmp_path / "first"
    command = [sys.executable, "-c", f"import time; open({str(sign)!r}, 'w').write('7'); time.sleep(600)"]
    assert 0 <= start.until(command, sign) < 60
    with pytest.raises(SystemExit, match="no first step: .*ended"):
        start.until([sys.executable, "-c", "raise SystemExit('ended')"], tmp_path / "never")
