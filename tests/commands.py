"""A run of seconds, for tests of the commands: its overrides, and what a command said.

Almost everything calls `main` in the test's own process, whose eight simulated devices fit `mesh.simulated_devices=8`;
only what a process alone can show (imports, signals, the command line itself) starts another.
"""
import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kept_programs import programs_in

from meshtrain.commands import train

ROOT = Path(__file__).resolve().parent.parent
RULES = '# my own\n[activations]\nbatch = ["data", "fsdp"]\n'
SIX = ("--training.steps", "6")


@dataclasses.dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def call(main, *args) -> Ran:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(arg) for arg in args])
    return Ran(code, out.getvalue(), err.getvalue())


def ran(*words) -> Ran:
    """What `train` said, which ended well."""
    done = call(train.main, *words)
    assert done.code == 0, done.err
    return done


def rows(directory: Path) -> list[dict]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def answers(directory: Path, batch: int) -> list[dict]:
    """Of a batch in rollouts/."""
    text = (directory / "rollouts" / f"{batch}.jsonl").read_text()
    return [json.loads(line) for line in text.rstrip("\n").split("\n")]


def check_sums_of_answers(directory: Path, batches: int) -> None:
    """The columns of metrics.jsonl are those of the answers in rollouts/, of all processes; one update a batch."""
    for batch, row in zip(range(batches), rows(directory), strict=True):
        found = answers(directory, batch)
        rewards = [one["reward"] for one in found if one["reward"] is not None]
        mean = lambda values: sum(values) / len(values)
        expected = {
            "answer_tokens": mean([one["tokens"] for one in found]), "reward": mean(rewards),
            "answer_tokens_max": max(one["tokens"] for one in found),
            "truncated": mean([one["stopped"] == "length" for one in found]),
            "reward_std": mean([(one - mean(rewards)) ** 2 for one in rewards]) ** 0.5,
            "reward_failed": sum("failure" in one for one in found),
            "reward_timeouts": sum("timeout" in one.get("failure", "") for one in found)}
        assert len(rewards) == len(found) - expected["reward_failed"]
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)


def shared_folder(tmp_path_factory, name: str) -> Path:
    """A folder of this run of the suite, the same for all of its processes."""
    own = tmp_path_factory.getbasetemp()
    # below that of all workers; a suite that a test starts is none of them, though its environment says so
    folder = (own.parent if own.name.startswith("popen-") else own) / name
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with a text, a rule file and the compiled programs that the runs share."""
    home = tmp_path_factory.mktemp("commands")
    (home / "corpus.txt").write_text("".join(f"line {i}: {i * i} is the square of {i}\n" for i in range(600)))
    (home / "empty.txt").write_text("")
    (home / "my rules.toml").write_text(RULES)
    # All files share it; its path is part of the names of entries, source lines are not: the same run is trained from many
    # tests.
    (home / "cache").symlink_to(shared_folder(tmp_path_factory, "programs"))
    with programs_in(str((home / "cache").resolve()), jax_compilation_cache_include_metadata_in_key=False,
                     jax_persistent_cache_min_compile_time_secs=0):
        yield home


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tiny(home) -> tuple[str, ...]:
    """Overrides that turn the quickstart into a run of seconds."""
    values = {
        "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8,
        "sharding.rules": home / "my rules.toml",
        "model.vocab_size": 257, "model.embed_dim": 32, "model.num_layers": 1, "model.num_heads": 2,
        "model.num_kv_heads": 1, "model.mlp_dim": 64, "data.source": "text",
        "data.paths": json.dumps([str(home / "corpus.txt")]),
        "data.seq_len": 32, "data.global_batch": 8, "run.sample_tokens": 8, "run.compilation_cache": (home / "cache").resolve(),
        "run.name": "tiny", "optimizer.name": "adamw", "validation.batches": 2, "optimizer.warmup_steps": 2, "optimizer.learning_rate": 2e-3,
        "optimizer.schedule": "constant"}    # so that more training.steps only lengthen the run
    return tuple(word for key, value in values.items() for word in (f"--{key}", str(value)))


def refused(ran: Ran, *parts: str) -> None:
    """Exit 2 and one message on stderr (a line per fault), without a traceback, that names all the parts."""
    assert ran.code == 2, ran
    assert ran.err.startswith("error: ") and ran.err.count("error:") == 1, ran.err
    assert "Traceback" not in ran.err + ran.out
    assert [part for part in parts if part not in ran.err] == [], ran.err


@contextlib.contextmanager
def limited(seconds: int):
    def late(number, frame):
        raise AssertionError(f"no answer within {seconds} s")
    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def process(*words, **options) -> subprocess.Popen:
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen([sys.executable, *map(str, words)], env=env | {"PYTHONPATH": str(ROOT)}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
