"""What is installed is what is in the checkout: an installed wheel finds its run files, model shapes and rule files."""
import email.parser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import test_house

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = sorted(str(path.relative_to(ROOT)) for folder in ("chat_templates", "configs", "sharding_rules")
                 for path in (ROOT / folder).rglob("*.*") if path.suffix in (".toml", ".jinja"))
PACKAGES = ("meshtrain", "launch", "chat_templates", "configs", "sharding_rules")

FROM_AN_EMPTY_DIRECTORY = """
import json, pathlib
import meshtrain.launch.local
from meshtrain import config, run_files, shipped
CHATS = ["--data.source", "chat", "--data.paths", '["a.jsonl"]', "--data.chat_template", "qwen3"]
runs = [run_files.load([])] + [run_files.load(["configs/" + path.name]) for path in config.locate_shipped("configs").glob("*.toml")]
print(json.dumps({"home": meshtrain.__path__[0], "runs": sorted(run.run.name for run in runs),
                  "rules": [run.sharding.rules for run in runs], "presets": sorted(run_files.presets()),
                  "template": str(shipped.find_file(run_files.load(CHATS).data.chat_template)),
                  "layers": run_files.load(["--model.preset", "llama3-8b"]).model.num_layers}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: setuptools leaves a build/ behind, and what lay in an old one would be in the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    # By the build backend itself: an environment that uv made has no pip.
    subprocess.run([sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('dist')"],
                   cwd=source, check=True, timeout=300, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


def call(wheel, tmp_path, *words) -> str:
    """What python says with the wheel installed, in an empty directory."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")       # all that an installer does but for scripts
    (tmp_path / "empty").mkdir()
    done = subprocess.run([sys.executable, *words], cwd=tmp_path / "empty", text=True, capture_output=True, timeout=600,
                          env=os.environ | {"PYTHONPATH": str(tmp_path / "site")})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_an_installed_wheel_trains_the_quickstart_from_an_empty_directory(wheel, tmp_path):
    call(wheel, tmp_path, "-m", "meshtrain.train", "--training.steps", "6", "--validation.batches", "1")
    rows = (tmp_path / "empty" / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 6


def test_an_installed_wheel_loads_every_shipped_file_from_an_empty_directory(wheel, tmp_path):
    told, site = json.loads(call(wheel, tmp_path, "-c", FROM_AN_EMPTY_DIRECTORY)), str(tmp_path / "site")
    assert told["home"].startswith(site)
    names = [Path(path).stem for path in SHIPPED if Path(path).parent == Path("configs")]
    assert told["runs"] == sorted([*names, "quickstart"])
    assert all(rules.startswith(site) and Path(rules).is_file() for rules in told["rules"])
    assert told["presets"] == sorted(Path(path).stem for path in SHIPPED if path.startswith("configs/models/"))
    assert told["template"].startswith(site) and Path(told["template"]).is_file()
    assert told["layers"] == 32


def test_the_wheel_holds_every_module_and_every_shipped_file(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "meshtrain").rglob("*.py")}
    beside = {*SHIPPED, "launch/slurm.sbatch", "launch/kubernetes.yaml",
              *(str(path.relative_to(ROOT)) for path in (ROOT / "launch").rglob("*.py"))}
    assert modules | {f"meshtrain/{path}" for path in beside} <= held
    assert {f"meshtrain/pages/{name}" for name in ("drawing.css", "skin.css", "skin.js")} | {"meshtrain/py.typed"} <= held
    assert {name.split("/")[0] for name in held if ".dist-info" not in name} == {"meshtrain"}


def test_the_wheel_says_what_it_is_and_who_may_use_it(wheel):
    import meshtrain
    with zipfile.ZipFile(wheel) as held:
        (path,) = (name for name in held.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(held.read(path).decode())
        licenses = {name.rpartition("/")[2] for name in held.namelist() if "/licenses/" in name}
    assert (metadata["Name"], metadata["Version"]) == ("meshtrain-jax", meshtrain.__version__)
    assert metadata["License-Expression"] == "Apache-2.0" and licenses == {"LICENSE", "NOTICE"}
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_payload().startswith("# ")


def test_the_license_is_the_whole_of_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n") and "Copyright 2026 The meshtrain authors" in text
    # the text of apache.org, whatever its line breaks, up to the notice that each work fills in
    words = " ".join(text.partition("   Copyright 2026")[0].split())
    assert hashlib.sha256(words.encode()).hexdigest() == "1766f246c4c2e198e4fa4b7e3bcd6f8c8cba6d5f978b8242fa23d2e1bde8aa1d"


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    called = {"orbax": "orbax-checkpoint", "ml_dtypes": "ml-dtypes", "lm_eval": "lm-eval", "yaml": "pyyaml", "IPython": "ipykernel",
              "mlflow": "mlflow-skinny", "pydantic_core": "pydantic", "xdist": "pytest-xdist"}
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    declared = {re.match(r"[\w-]+", line)[0].replace("_", "-") for line in [*project["dependencies"], *extras]}
    ours = {"meshtrain", "launch", "benchmarks", "tests", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
    imported = {name.partition(".")[0] for folder in ("meshtrain", "launch", "benchmarks", "tests")
                for path in (ROOT / folder).rglob("*.py") for name in test_house.imported_modules(path)}
    # what no test runs: conversations.py, policy_goldens.py and peft_goldens.py say how their files were made
    makes_goldens = {"transformers", "torch", "trl", "safetensors", "peft"}
    compared = {"liger_kernel", "maxtext", "torchtitan"}    # by benchmarks.peers, where they are installed
    foreign = imported - set(sys.stdlib_module_names) - ours - makes_goldens - compared
    assert {called.get(name, name) for name in foreign} - declared == set()


def test_nobody_is_told_to_install_a_package_of_this_name_from_an_index():
    """The name on the package index is a stranger's."""
    rooms = [path for path in ROOT.iterdir() if path.is_dir() and path.name != "build"
             and not path.name.startswith(".") and not (path / "pyvenv.cfg").exists()]
    told = [str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.*"), *(one for room in rooms for one in room.rglob("*"))]
            if path.suffix in (".py", ".md", ".toml", ".ipynb", ".sbatch")
            and re.search(r"install\s+(-\S+\s+)*['\"\\]*meshtrain", path.read_text())]
    assert told == []
