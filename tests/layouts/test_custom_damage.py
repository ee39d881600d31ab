"""A run's own code that is absent, damaged or changed later: every command that needs it ends with one message and exit code 2,
and every other command works."""
import itertools
import random
import shutil
from pathlib import Path

import pytest
from commands import Ran, call, in_a_directory_of_its_own  # noqa: F401
from test_custom import EXAMPLES, SHARED, run_of

from meshtrain import config
from meshtrain.commands import check, convert, evaluate, generate, report, train

OWN = {"mine.py", "focal.py", "shared.py", "archives.py"}
WORDS = ("--mesh.simulated_devices", 8, "--mesh.data", 8)
COMMANDS = {
    "generate": (generate.main, "run", "--prompt", "1 + 1", "--max-tokens", 2, *WORDS),
    "evaluate": (evaluate.main, "run", *WORDS), "convert": (convert.main, "run", "out"), "report": (report.main, "run"),
    "check": (check.main, "RUN.toml"), "resume": (train.main, "RUN.toml", "--training.steps", 3)}
# the files that a command needs; those of the first three are the copies in run.dir
NEEDED = {"generate": {"mine.py", "shared.py"}, "evaluate": {"mine.py", "shared.py", "archives.py"},
          "convert": {"mine.py", "shared.py"}, "report": set(), "check": OWN, "resume": OWN}
COPIES = ("generate", "evaluate", "convert")


def append(text: str):
    return lambda path: path.write_text(path.read_text() + text)


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "absent": Path.unlink, "a folder": put_folder, "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1].rpartition(b"(")[0] + b"("),
    "zeros": lambda path: path.write_bytes(bytes(64)), "noise": lambda path: path.write_bytes(random.Random(0).randbytes(64)),
    "raises": append("\nraise OSError('no')\n"), "ends": append("\nraise SystemExit(0)\n"),
    "imports": append("\nimport none_such\n"), "others": lambda path: path.write_text("".join(
        f"{name} = 3\n" for name in ("reglu", "build", "rate", "Focal", "Shared", "add")))}
CASES = random.Random(1).sample([
    (command, file, damage) for command, file, damage in itertools.product(COMMANDS, sorted(OWN), DAMAGES)
    if file in NEEDED[command] and (command, damage) != ("check", "others")], 24)
CASES += [("generate", "focal.py", "absent"), ("report", "shared.py", "cut")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A directory with a run of two steps whose parts are its own."""
    home = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name in OWN:
            Path(name).write_text(EXAMPLES[name].replace("20_000", "400"))
        Path("RUN.toml").write_text(config.dump(
            run_of({"simulated_devices": 8, "data": 8}, "ddp", model=SHARED | dict(num_layers=2, mixers="FX"))
            .replace(data={"source": "archives.py:add"}, training={"steps": 2}, metrics={"tensorboard": False},
                     run={"dir": "run", "sample_tokens": 0, "compilation_cache": str(home / "cache")})))
        done = call(train.main, "RUN.toml")
        assert done.code == 0, done.err
    return home


def damage_and_run(trained: Path, here: Path, command: str, file: str, damage: str) -> Ran:
    """Copy the run here, damage the file, and run the command, which is also where it needs other files."""
    shutil.copytree(trained, here, dirs_exist_ok=True)
    main, *words = COMMANDS[command]
    places = Path("run/code").glob(f"*/{file}") if command in (*COPIES, "report") else [Path(file)]
    for path in places:
        DAMAGES[damage](path)
    return call(main, *words)


@pytest.mark.full
@pytest.mark.parametrize("command, file, damage", CASES)
def test_code_that_is_damaged_is_one_message_where_it_is_needed_and_nothing_elsewhere(
        trained, tmp_path, command, file, damage):
    done = damage_and_run(trained, tmp_path, command, file, damage)
    said = done.out + done.err
    if file not in NEEDED[command]:
        assert done.code == 0, said
        return
    assert done.code == 2 and "Traceback" not in said and said.count(file) >= 1, said
    messages = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(messages) == (command != "check"), said
    if command in COPIES:
        assert "put back the file with which the run was trained" in messages[0], said


@pytest.mark.full
def test_a_mixer_that_raises_for_one_token_alone_is_one_message_of_generate(trained, tmp_path):
    """Training never calls it so, and the message has the line."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    text = Path("shared.py").read_text()
    Path("shared.py").write_text(text.replace(
        "        q, v = (", "        if x_BTD.shape[1] == 1:\n            raise KeyError('one token')\n        q, v = ("))
    assert call(train.main, "RUN.toml", "--training.steps", 3).code == 0
    done = call(*COMMANDS["generate"])
    assert done.code == 2 and done.err.count("error:") == 1 and "KeyError in line" in done.err and "shared.py" in done.err
