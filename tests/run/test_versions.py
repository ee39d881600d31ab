"""Each minor version of jax that pyproject.toml allows compiles a program with stages and one without for absent GPUs.

An environment per version is made once, in the user's cache directory; where none can be made (no package index, no
Python that the version takes), the test is skipped with the reason.
"""
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JAX = next(line for line in PROJECT["dependencies"] if line.startswith("jax>="))
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "meshtrain-tests"
TINY = ("configs/quickstart.toml", "--model.num_layers", "2", "--model.compute_dtype", "bfloat16", "--mesh.data", "1",
        "--mesh.fsdp", "1", "--mesh.tensor", "1", "--topology", "h100:2", "--json")
LAYOUTS = {"stages": ("--mesh.stage", "2", "--training.microbatches", "2"), "no stages": ("--mesh.fsdp", "2")}
# The first Python of a minor version of jax, if not that of pyproject.toml.
PYTHONS = {"0.10": "python3.11"}
PYTHON = "python3.12"


def minors() -> list[str]:
    lowest, end = re.search(r">=0\.(\d+)", JAX)[1], re.search(r"<0\.(\d+)", JAX)[1]
    return [f"0.{minor}" for minor in range(int(lowest), int(end))]


def python_named(name: str) -> str | None:
    """A Python that starts, of the PATH or of pyenv, whose shims of other versions only say that they are none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *map(str, sorted(pyenv.glob(f"{name.removeprefix('python')}.*/bin/{name}")))]
    starts = lambda path: subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
    return next((path for path in candidates if path and starts(path)), None)


def interpreter(minor: str) -> Path:
    """The Python of an environment with this jax and what compiles for GPUs, made at the first call."""
    name = PYTHONS.get(minor, PYTHON)
    base = python_named(name)
    if base is None:
        pytest.skip(f"no {name} on the PATH, nor among pyenv's, for jax {minor}")
    home = CACHE / f"{name}-jax-{minor}"
    python, done = home / "bin/python", home / "complete"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        lines = [line for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gpu-compile"]
                 if not line.startswith(("jax>=", "jax-cuda"))]
        cuda = "12" if name == "python3.11" else "13"
        exact = [f"{JAX},==0.{minor.partition('.')[2]}.*", f"jax-cuda{cuda}-plugin=={minor}.*"]
        for command in ([base, "-m", "venv", str(home)], [str(python), "-m", "pip", "install", "-q", *lines, *exact]):
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no environment for jax {minor}: {(made.stderr or made.stdout).strip()[-300:]}")
        done.touch()
    return python


def test_every_minor_version_is_tried():
    assert minors()[0] == "0.10" and len(minors()) >= 3


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("minor", minors())
def test_a_minor_version_compiles_for_absent_gpus(minor, layout, tmp_path):
    python = interpreter(minor)
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("XLA_FLAGS", "JAX_PLATFORMS", "VIRTUAL_ENV")} | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([str(python), "-m", "meshtrain.inspect", *TINY, *LAYOUTS[layout],
                          "--run.compilation_cache", ""], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-1500:]
    told = json.loads(ran.stdout)
    assert told["memory_bytes"]["compiled"]["params"] == told["memory_bytes"]["formula"]["params"] > 0
    kinds = {(row["kind"], *row["axes"]) for row in told["collectives"]["compiled"]}
    assert (("collective-permute", "stage") in kinds) == (layout == "stages"), kinds
    version = subprocess.run([str(python), "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True)
    assert version.stdout.startswith(f"{minor}."), version
