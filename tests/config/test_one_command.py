"""`meshtrain COMMAND` is `python -m meshtrain.COMMAND`, for every command and launcher, with completion."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain import __main__ as one
from meshtrain import __version__, closing, config
from meshtrain.commands import plan
from meshtrain.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def call(*words: str):
    return subprocess.run([sys.executable, "-m", "meshtrain", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("room, table", [("meshtrain", one.COMMANDS), ("launch", one.LAUNCHERS)])
def test_every_module_that_is_a_command_is_listed(room, table):
    found = {path.stem for path in (ROOT / room).glob("*.py") if "\nif __name__ == \"__main__\"" in path.read_text()}
    assert set(table) == found - {"__main__"} and all(line.split()[0] in one.usage() for line in table)


def test_a_command_by_its_name_is_its_module():
    said = call("report", "--help")
    assert said.returncode == 0 and said.stdout.startswith("usage: python -m meshtrain.report")
    assert one.choose(["launch", "local", "--processes", "2"]) == ("meshtrain.launch.local", ["--processes", "2"])
    assert one.choose(["train", "a.toml"]) == ("meshtrain.train", ["a.toml"])


@pytest.mark.parametrize("path", sorted(path for path in (ROOT / "meshtrain").glob("*.py") if "commands.start" in path.read_text()),
                         ids=lambda path: path.stem)
def test_a_command_started_by_its_path_says_how_to_start_it(path):
    said = subprocess.run([sys.executable, str(path), "--help"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (said.returncode, said.stdout, said.stderr) == (2, "", f"error: start it as python -m meshtrain.{path.stem}\n")


def test_a_mistake_of_a_command_keeps_its_exit_code():
    said = call("report", "/nowhere")
    assert said.returncode == 2 and said.stderr.startswith("error: /nowhere is not a directory")


def test_the_version_and_the_list_are_answers():
    assert call("--version").stdout == f"meshtrain {__version__}\n"
    assert call().stdout == call("--help").stdout == one.usage() + "\n"
    assert call("launch").stdout == one.usage_of_launchers() + "\n"


@pytest.mark.parametrize("words, told", [
    (["trian"], "trian is not a command; did you mean train?"),
    (["--verison"], "--verison is not a command; did you mean --version?"),
    (["lanch"], "lanch is not a command; did you mean launch?"),
    (["x"], "x is not a command; use one of train, plan"),
    (["launch"], "launch needs the name of a launcher"), (["launch", "locl"], "locl is not a launcher; did you mean local?"),
    (["launch", "train"], "train is not a launcher; use one of local")])
def test_a_word_that_names_no_command_is_one_message(words, told):
    with pytest.raises(ConfigError) as error:
        one.choose(words)
    assert told in str(error.value)


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "zsh"]])
def test_a_shell_that_is_not_known_is_refused(words):
    with pytest.raises(ConfigError, match="use one of bash, zsh"):
        one.completion(words)


@pytest.mark.parametrize("typed, at, words", [
    ("meshtrain ", 1, [*one.COMMANDS, "launch", "completion"]), ("meshtrain pl", 1, ["plan"]),
    ("meshtrain plan --", 2, [f"--{name}" for name in plan.COMMAND.options]),
    ("meshtrain train --optimizer.le", 2, ["--optimizer.learning_rate"]),
    ("meshtrain train a.toml --model.num_l", 3, ["--model.num_layers"]),
    ("meshtrain completion ", 2, list(one.SHELLS)),
    ("meshtrain launch ", 2, list(one.LAUNCHERS)), ("meshtrain launch local --proc", 3, ["--processes"])])
def test_bash_completes_commands_options_and_keys(typed, at, words, completes):
    assert set(completes(typed, at)) >= set(words)


def test_a_word_without_a_dash_is_a_file(completes, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completes("meshtrain plan ", 2) == completes("meshtrain train mi", 2) == ["mine.toml"]


def test_zsh_loads_the_script_and_completes_without_a_zshrc(tmp_path):
    if not shutil.which("zsh"):
        pytest.skip("zsh is not installed")
    (tmp_path / "meshtrain").write_text(one.completion(["zsh"]))
    code = f"source {tmp_path}/meshtrain && echo $_comps[meshtrain]"
    ran = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=60)
    assert "_meshtrain" in ran.stdout and not ran.stderr, ran


def test_a_run_ends_with_commands_that_the_shell_finds(tmp_path, monkeypatch):
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert closing._python() == ".venv/bin/python"
    (tmp_path / "python").touch(0o755)      # of another environment
    monkeypatch.setenv("PATH", str(tmp_path))
    assert closing._python() == ".venv/bin/python"
    monkeypatch.chdir(own.parent.parent.parent.parent)
    assert closing._python() == f"{tmp_path.name}/.venv/bin/python"
    monkeypatch.chdir("/usr")
    assert closing._python() == str(own)
    monkeypatch.setenv("PATH", str(own.parent))
    assert closing._python() == "python"


@pytest.fixture(scope="module")
def completes(tmp_path_factory):
    script = tmp_path_factory.mktemp("completion") / "meshtrain"
    script.write_text(one.completion(["bash"]))
    assert one.completion(["zsh"]).endswith(script.read_text())

    def ask(typed: str, at: int) -> list[str]:
        line = " ".join(f"'{word}'" for word in typed.split(" "))
        code = (f"source {script}; COMP_WORDS=({line}); COMP_CWORD={at}; _meshtrain; "
                "printf '%s\\n' \"${COMPREPLY[@]}\"")
        return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return ask


def test_keys_that_are_completed_are_those_of_a_run_file():
    assert {word for word in one._words_of("meshtrain.train")} == {
        f"--{section}.{name}" for section, cls in config.SECTIONS.items() for name in cls.model_fields}
