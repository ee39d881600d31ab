"""Generated run files and rule files: valid ones make a sound design, all others one message, and none a traceback or a
hang.

300 in every run of the suite, others with every commit, and 10,000 of tier long.
"""
import math
import random
import tomllib
from pathlib import Path

import draws
import pytest
import sampling
from commands import limited

from meshtrain import config, design, run_files
from meshtrain.config.messages import toml
from meshtrain.sharding.mesh import MeshSpec

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
RULES = sorted((ROOT / "sharding_rules").glob("*.toml"))
LIMIT_S = 20        # a design takes milliseconds, that of a large pipeline a second or two

ODD = (0, -1, 1, 2, 3, 7, 8, 10**4, 2**31, 2**63, 10**30, -10**18, 0.5, 1e-300, 1e300,
       math.inf, math.nan, True, False, "", " ", "8",
       "none", "auto", "\x00", "\u202e", "é" * 3000, "../../../etc/passwd", "/dev/zero",
       "/dev/null", "/", ".", "~", "hdfs://node/run",
       # fmt: skip
       "a\nb", '"', "[", "{}", [], [1], [[]], ["data", "data"], ["stage", "data", "fsdp", "context", "tensor"],
       {}, {"a": {}}, [{"source": "text"}])
HOSTILE = ("\x00", "[[", "]", "=", '"""', "'''", "#", "\r", "\ufeff", "[a.b.c]\n", "a = " + "[" * 3000 + "\n",
           "a = " + "9" * 5000 + "\n",
           "[model]\n", "mesh = 3\n", "run.name.x = 1\n", "é = 1\n", "'' = 1\n", "[\"\"]\n",
           "model = []\n", "a = 1979-05-27T07:32:00Z\n",
           "x = " + "{a = " * 300 + "1" + "}" * 300 + "\n")  # fmt: skip


def written(tables) -> str:
    """Nested tables as TOML; what is no table of tables stays as it is."""
    lines = [f"{name} = {toml(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def a_file(rng: random.Random, directory: Path) -> Path:
    """A run file: a shipped or drawn one with a few keys changed, in ways that may be sound, or with its text
    broken."""
    if rng.random() < 0.5:
        tables = tomllib.loads(rng.choice(SHIPPED).read_text())
        if rng.random() < 0.7:      # fewer devices than the pods that they are for
            tables["mesh"] = {"simulated_devices": rng.choice((1, 4, 8, 64)),
                              rng.choice(("data", "fsdp", "tensor", "stage", "context")): -1}
    else:
        tables = {name: dict(section) for name, section in draws._draw(rng, directory / "drawn.toml")}
        tables["mesh"]["simulated_devices"] = math.prod(tables["mesh"][axis] for axis in config.AXES)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 5))):
        change(rng, tables)
    if rng.random() < 0.25:
        tables["sharding"] = {"rules": str(a_rule_file(rng, directory))}
    text = written(tables)
    if rng.random() < 0.15:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(HOSTILE) + text[at + rng.randint(0, 5):]
    path = directory / "run.toml"
    data = text.encode(errors="surrogatepass")
    path.write_bytes(data if rng.random() < 0.97 else data[:rng.randrange(len(data))] + rng.randbytes(20))
    return path


def change(rng: random.Random, tables: dict) -> None:
    section = rng.choice(sorted(config.SECTIONS))
    table = tables.setdefault(section, {})
    if not isinstance(table, dict):
        return
    key = rng.choice(sorted(config.SECTIONS[section].model_fields))
    kind = rng.random()
    if kind < 0.1:
        tables[rng.choice((section + "s", "", section.upper(), "x" * 300))] = rng.choice((dict(table), *ODD))
    elif kind < 0.25:
        table[rng.choice((key + "s", key[:-1], key.upper(), ""))] = rng.choice(ODD)
    elif kind < 0.6 and isinstance(table.get(key), int) and not isinstance(table[key], bool):
        table[key] = rng.choice((table[key] + 1, table[key] * 2, table[key] // 2, table[key] * 3, -table[key]))
    else:
        table[key] = rng.choice(ODD)


def a_rule_file(rng: random.Random, directory: Path) -> Path:
    tables = tomllib.loads(rng.choice(RULES).read_text())
    if rng.random() < 0.1:
        tables["extends"] = rng.choice(("ddp", "zero3.toml", "rules", "none", "", *ODD))
    axes = (*config.AXES, "dta", "", "expert")
    for _ in range(rng.randint(0, 3)):
        table = tables.setdefault(rng.choice(("params", "grads", "optimizer", "activations", "parms", "")), {})
        if isinstance(table, dict) and rng.random() < 0.6:
            logical = rng.choice(("embed", "heads", "kv_heads", "mlp", "vocab", "layers",
                                  "batch", "seq", "residual_seq", "head_dim", "hds", ""))
            table[logical] = rng.choice((rng.choice(axes), rng.sample(axes, 2), [], rng.choice(ODD)))
    text = written(tables)
    if rng.random() < 0.15:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(HOSTILE) + text[at:]
    path = directory / "rules.toml"
    path.write_text(text, errors="surrogatepass", encoding="utf-8")
    return path


def judged(argv) -> str:
    """"sound", or the messages of the refusal: what the doors do before they start a device."""
    try:
        run = run_files.load(argv)
        count = run.mesh.simulated_devices or math.prod(max(1, getattr(run.mesh, axis)) for axis in config.AXES)
        if count > 4096:        # no machine has them: the doors refuse by the devices that there are
            config.mesh_sizes(run, 8)
        sizes = config.mesh_sizes(run, count)
        design.make(run, MeshSpec(sizes, run.mesh.placement), "cpu", None)
    except config.ConfigError as error:
        assert error.messages and all(message.strip() for message in error.messages)
        text = str(error)
        assert "Traceback" not in text and len(text) < 100_000
        return text
    return "sound"


def check(number: int, directory: Path) -> str:
    rng = random.Random(number)
    path = a_file(rng, directory)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    overrides = []
    for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
        section = rng.choice(sorted(config.SECTIONS))
        key = rng.choice(sorted(config.SECTIONS[section].model_fields))
        overrides += [f"--{section}.{key}{rng.choice(('', '', 's'))}", toml(rng.choice(ODD)).strip('"')]
    try:
        with limited(LIMIT_S):
            outcome = judged([str(path), *overrides])
    except BaseException as error:
        raise AssertionError(f"number {number}: {type(error).__name__}: "
                             f"{error}\n{overrides}\n{path.read_bytes()[:4000]!r}") from error
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    return outcome


def check_many(numbers, directory: Path):
    outcomes = [check(number, directory) for number in numbers]
    sound = sum(outcome == "sound" for outcome in outcomes)
    assert 0.05 * len(outcomes) < sound < 0.7 * len(outcomes), f"{sound} of {len(outcomes)} sound: the generator finds too little"


@pytest.mark.parametrize("key", ["run.extends", "sharding.rules", "extends of a rule file"])
def test_no_name_of_a_file_to_read_ends_in_a_traceback(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules, run = tmp_path / "own.toml", tmp_path / "run.toml"
    for odd in ODD:
        tables = {"data": {"source": "stdlib"}, "mesh": {"data": 8, "simulated_devices": 8}}
        if key == "run.extends":
            tables["run"] = {"extends": odd}
        else:
            tables["sharding"] = {"rules": odd if key == "sharding.rules" else "own.toml"}
            rules.write_text(f"extends = {toml(odd)}\n", encoding="utf-8")
        run.write_text(written(tables), encoding="utf-8")
        judged([str(run)])


def test_generated_run_files_are_sound_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    check_many(sampling.generator("run files").sample(range(10**6), 300), tmp_path / "files")


@pytest.mark.long
@pytest.mark.parametrize("thousand", range(10))
def test_ten_thousand_generated_run_files_are_sound_or_refused(thousand, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    check_many(range(1000 * thousand, 1000 * thousand + 1000), tmp_path / "files")
