"""What containers are made of: versions that fit pyproject.toml, files that exist, commands that are there."""
import json
import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

from meshtrain import run_files

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = ("gpu", "data", "storage")


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "launch/requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", line) for line in lines), "names and versions alone"
    return {_plain(name): version for name, version in (line.split("==") for line in lines)}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_container_to_develop_in_and_the_hooks_are_of_the_projects_environment():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    (command,) = re.findall(r"python3 -m venv \.venv && \S+ install -e '\.\[ci\]'", (ROOT / "CONTRIBUTING.md").read_text())
    assert container["postCreateCommand"].replace(" -q", "") == command
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(hook["additional_dependencies"]) <= set(extras["ci"]) and hook["entry"].startswith("ruff check")


def test_the_lock_fits_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    there, seen = locked(), 0
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate(default_environment() | {"python_version": "3.12"}):
            continue
        version = there[_plain(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version} is locked"
        seen += 1
    assert seen >= 15 and there["jax"] == there["jaxlib"] == there["jax-cuda13-plugin"]


def test_the_image_is_made_of_files_that_exist_and_nothing_else_is_sent():
    lines = re.sub(r"\\\n", "", (ROOT / "launch/Dockerfile").read_text()).splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name.split("/")[0] for name in copied} == sent
    # what an editable installation needs to run from there
    assert {"meshtrain", "launch", "configs", "sharding_rules", "pyproject.toml"} <= set(copied)
    assert any(line.startswith("USER ") and "root" not in line for line in lines)


def test_a_job_of_skypilot_is_a_run_that_can_be(tmp_path):
    job = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    python = tmp_path / ".venv" / "bin" / "python"       # the environment of the job's directory
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/words\n")
    python.chmod(0o755)
    subprocess.run(["bash", "-ec", job["run"]], check=True, cwd=tmp_path, env={
        **{name: str(value) for name, value in job["envs"].items()}, "PATH": "/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"})
    run = run_files.load((tmp_path / "words").read_text().partition("meshtrain.train ")[2].split())
    assert run.run.dir == "s3://BUCKET/runs/llama3-8b" and run.distributed.process_id == 1
    assert run.distributed.coordinator_address == "10.0.0.1:29400" and run.mesh.fsdp == -1
