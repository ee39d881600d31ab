"""Stacks that are known to be bad: told with the remedy where they are, and nothing is looked up where they cannot
be."""
import re
from pathlib import Path

import pytest

from meshtrain import config, devices, known_bad, run_files
from meshtrain.config import ConfigError
from meshtrain.known_bad import GPUS, MOSAIC, PROCESSES

ROOT = Path(__file__).resolve().parent.parent.parent
GRACE = {GPUS, PROCESSES, "aarch64"}


def versions(**found):
    return lambda component: found.get(component, "")


@pytest.mark.parametrize("version, bad, is_bad", [
    ("2.28.9", "<2.29.3", True), ("2.29.3", "<2.29.3", False), ("2.29.10", "<2.29.3", False), ("", "<2.29.3", False),
    ("0.10.2", ">=0.11.0,<0.11.2", False), ("0.11.0", ">=0.11.0,<0.11.2", True),
    ("0.11.1.dev3", ">=0.11.0,<0.11.2", True),
    ("0.11.2", ">=0.11.0,<0.11.2", False), ("12.9.41", "<12.9.86", True), ("13.0.48", "<12.9.86", False)])
def test_versions_are_compared_as_numbers(version, bad, is_bad):
    assert known_bad._is(version, bad) == is_bad


@pytest.mark.parametrize("facts, found, said", [
    ({GPUS}, {"jax": "0.11.0"}, ["jax 0.11.0", "wrong results", "jax#40633", "0.11.2 or newer"]),
    ({GPUS, MOSAIC}, {"ptxas": "12.9.41"}, ["ptxas 12.9.41", "miscompiled", ">=12.9.86"])])
def test_wrong_numbers_are_refused_with_the_remedy(facts, found, said):
    with pytest.raises(ConfigError) as raised:
        known_bad.check(facts, versions(**found))
    assert [part for part in said if part not in str(raised.value)] == []


def test_a_hang_is_told_with_the_remedy():
    (line,) = known_bad.check(GRACE, versions(jax="0.12.0", NCCL="2.28.9"))
    for part in ("NCCL 2.28.9", "hangs with all GPUs busy", "marin#7344", "after torch", ">=2.29.3"):
        assert part in line
    assert known_bad.check(GRACE, versions(jax="0.12.0", NCCL="2.30.7")) == []


def test_packed_documents_may_mean_mosaics_kernels(monkeypatch):
    monkeypatch.setattr(known_bad.mosaic, "AUTO_SINCE", (0, 0))
    of = lambda *words: MOSAIC in known_bad.facts_of(run_files.load(list(words)), 1)
    assert of() and of("--model.attention", "mosaic", "--data.document_mask", "false")
    assert not of("--model.attention", "pallas") and not of("--data.document_mask", "false")
    monkeypatch.setattr(known_bad.mosaic, "AUTO_SINCE", (9, 9))
    assert not of() and of("--model.attention", "mosaic") and of("--model.mlp", "mosaic")


@pytest.mark.parametrize("facts", [set(), {"aarch64", PROCESSES}, {GPUS, PROCESSES, "x86_64"}, {GPUS, "aarch64"}])
def test_what_does_not_apply_is_not_even_looked_up(facts):
    looked = []
    assert known_bad.check(facts, lambda component: looked.append(component) or "") == []
    assert looked == ["jax"] * (GPUS in facts)


def test_every_row_can_be_looked_up_here():
    for row in known_bad.TABLE:
        assert re.fullmatch(r"(\d+(\.\d+)*)?", known_bad.read_version(row.component)), row


def test_the_library_and_the_compiler_that_are_found_first_count(tmp_path):
    (tmp_path / "libnccl.so.2.27.5").touch()
    (tmp_path / "libnccl.so.2").symlink_to("libnccl.so.2.27.5")
    assert known_bad._nccl({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}) == "2.27.5"
    (tmp_path / "ptxas").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    (tmp_path / "ptxas").chmod(0o755)
    assert known_bad._ptxas({"PATH": str(tmp_path)}) == "12.9.41"


def test_a_run_on_gpus_is_told_before_they_are_started(monkeypatch, capsys):
    monkeypatch.setattr(devices, "gpus_expected", lambda: True)
    monkeypatch.setattr(known_bad.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(known_bad, "read_version", versions(jax="0.12.0", NCCL="2.28.9"))
    monkeypatch.setattr(devices, "prepare_gpus", lambda environ: (_ for _ in ()).throw(ConfigError("no further")))
    run = run_files.load([]).model_copy(update={"mesh": config.Run().mesh.model_copy(update={"simulated_devices": 0})})
    with pytest.raises(ConfigError, match="no further"):
        devices.start(run, devices.find.Cluster("a:1", 2, 0))
    assert capsys.readouterr().err.startswith("warning: NCCL 2.28.9: ")
    monkeypatch.setattr(known_bad, "read_version", versions(jax="0.11.1"))
    with pytest.raises(ConfigError, match="jax 0.11.1: single operations give wrong results"):
        devices.start(run)


def test_the_page_has_the_table():
    text = (ROOT / "docs" / "gpus.md").read_text()
    for row in known_bad.TABLE:
        assert f"| {row.component} `{row.bad}` |" in text and row.source in text, row
    assert len(re.findall(r"^\| \w+ `[<>]", text, re.MULTILINE)) == len(known_bad.TABLE)
