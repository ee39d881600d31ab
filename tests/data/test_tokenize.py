"""python -m meshtrain.tokenize leaves a cache that training finds whole, alone or in shares, and stops when it is told
to."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import Opened, bpe, section, write  # noqa: F401 (bpe is a fixture)

from meshtrain.commands import tokenize
from meshtrain.run import stops

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """(exit code, stdout, stderr) of a call in this process, whose signals stay as they are."""
    monkeypatch.setattr(tokenize, "_listen", lambda: [])

    def call(*argv):
        code = tokenize.main([*argv, "--run.dir", str(tmp_path / "run")])
        return code, *capsys.readouterr()

    return call


def jsonl(root: Path, files: int) -> list[str]:
    for i in range(files):
        write(root / f"{i}.jsonl", [f"text {i}"])
    return ["--data.source", "jsonl", "--data.paths", f'["{root}/*.jsonl"]']


def test_a_run_finds_everything_built(call, tmp_path):
    flags = jsonl(tmp_path, 3)
    code, out, err = call(*flags)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "data: 18 tokens, 3 documents, 3 parts; all built"
    opened = Opened(section([tmp_path / "*.jsonl"]), tmp_path / "run")
    assert opened.built == [] and opened.texts() == ["text 0", "text 1", "text 2"]
    assert call() == (0, "data: the tokens are bytes, so there is nothing to tokenize\n", "")
    assert not (tmp_path / "run").exists()


def test_shares_are_done_apart_and_are_whole_together(call, tmp_path, monkeypatch):
    flags = jsonl(tmp_path, 5)
    code, out, _ = call(*flags, "--processes", "1/2")
    assert (code, len(list(tmp_path.glob(".meshtrain/*/*.json")))) == (0, 2)
    assert "this process's share is done" in out
    for name, value in {"SIZE": "2", "RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # which two processes could not share
    code, out, _ = call(*flags)
    assert (code, len(list(tmp_path.glob(".meshtrain/*/*.json")))) == (0, 5)
    assert "5 parts; all built" in out


def test_verify_builds_again_what_is_damaged(call, tmp_path):
    flags = jsonl(tmp_path, 2)
    call(*flags)
    (path,) = tmp_path.glob(".meshtrain/*/1.jsonl-*.tokens.npy")
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "damaged" not in call(*flags)[1]
    code, out, _ = call(*flags, "--verify")
    assert code == 0 and "1.jsonl: the cache is damaged (wrong checksum); tokenizing again" in out
    assert "damaged" not in call(*flags, "--verify")[1]


SLOW = """
import sys, time
from meshtrain.data.documents import tokenizer
encode = tokenizer.Bytes.encode
tokenizer.Bytes.encode = lambda self, texts: time.sleep(0.2) or encode(self, texts)
from meshtrain.commands import tokenize
code = tokenize.main(sys.argv[1:])
assert "jax" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize("number", stops.SIGNALS)
def test_a_signal_stops_it_with_75_keeps_what_is_finished_and_leaves_nothing_half(number, tmp_path):
    command = [sys.executable, "-c", SLOW, *jsonl(tmp_path, 50), "--run.dir", str(tmp_path / "run")]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    end = time.monotonic() + 60
    while not list(tmp_path.glob(".meshtrain/*/0.jsonl-*.json")):
        assert time.monotonic() < end
        time.sleep(0.01)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 75 and "run the same command again to resume" in err and "Traceback" not in err
    names = [path.name for path in tmp_path.glob(".meshtrain/*/*")]
    finished = {name.split("-")[0] for name in names if name.endswith(".json")}
    assert 0 < len(finished) < 50
    assert not [name for name in names if name.endswith(".tmp")]
    assert {name.split("-")[0] for name in names if name.endswith(".npy")} == finished


def test_neither_jax_nor_a_backend_is_imported(tmp_path):
    code = subprocess.run([sys.executable, "-c", SLOW, *jsonl(tmp_path, 1)],
                          env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode
    assert code == 0
