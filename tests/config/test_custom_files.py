"""A file of a run's own code is checked without being executed, and executed once for each content."""
import sys
from pathlib import Path

import pytest

from meshtrain import custom, run_files
from meshtrain.config import ConfigError, dump, sections
from meshtrain.config.messages import kind_of
from meshtrain.config.sections import Run

MINE = """
import helper

RUNS = helper.RUNS

def gate(gate, up): return gate * up * helper.FACTOR
def any(*arguments): return arguments[0]
class Mixer:
    def __init__(self, cfg, rngs): pass
    def __call__(self, ex, x, inputs): return x
raise SystemExit("a check executes nothing")
"""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("helper.py").write_text("RUNS, FACTOR = [], 2\n")
    Path("torn.py").write_text("def f(:\n")


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as raised:
        run_files.load([*words, "--model.num_layers", "1"])
    return str(raised.value)


@pytest.mark.parametrize("key, value, told", [
    ("model.activation", "swiglo", 'model.activation="swiglo" is unknown; did you mean "swiglu"? There are "swiglu", '
     '"geglu", "swiglu_clamped", "gelu" and "relu2", or code of your own, "file.py:name"'),
    ("model.activation", "mine.py", 'model.activation="mine.py" is unknown; use "swiglu"'),
    ("model.activation", "mine.py:gat", "mine.py has no gat; did you mean gate?"),
    ("model.activation", "none.py:f", "none.py cannot be read: No such file or directory; give a Python file"),
    ("model.activation", "torn.py:f", "torn.py cannot be read: invalid syntax in line 1; give a Python file"),
    ("optimizer.name", "adamv", 'did you mean "adamw"?'),
    ("model.custom", '{X = "Mixer"}', 'model.custom.X="Mixer" does not name code of your own'),
    ("model.custom", '{X = "mine.py:Mixer"}', "model.custom has X, but no layer of model.mixers"),
    ("model.mixers", "XF", 'uses the mixer X, which has no class; give model.custom, e.g. {X = "mixers.py:Mixer"}'),
    ("run.code", "[]", "the program writes this key; leave it out")])
def test_a_mistake_is_told_before_the_file_is_executed(key, value, told):
    assert told in message(f"--{key}", value)


def test_any_number_of_arguments_is_enough_and_the_run_tells_the_content():
    run = run_files.load(["--model.activation", "mine.py:any", "--model.mixers", "FX",
                          "--model.custom", '{X = "mine.py:Mixer"}'])
    (line,) = run.run.code
    assert line == f"mine.py {custom.digest(Path('mine.py'))}" and line in dump(run)       # which all processes compare
    Path("helper.py").write_text("RUNS, FACTOR = [], 3\n")
    assert run_files.load(["--model.activation", "mine.py:any"]).run.code != (line,)


def test_names_and_arguments_are_read_wherever_a_file_defines_them():
    Path("forms.py").write_text("""
if True:
    def inner(gate, up): return up
try:
    import none_such
except ImportError:
    def fallback(up): return up
first, second = len, len
short = lambda gate, up: up
def default(up, beta=1.0): return beta * up
def optional(path=None): yield path
""")
    counts = {"inner": 2, "fallback": 1, "second": 1, "short": 2, "default": 1, "optional": 1}
    assert {name: custom.count_arguments(f"forms.py:{name}") for name in counts} == counts
    assert not [fault for name in counts for fault in custom.find_faults("model.activation", f"forms.py:{name}")]


def test_a_key_with_names_is_a_choice_in_every_place():
    field = Run.model_fields["optimizer"].annotation.model_fields["name"]
    assert kind_of(field) == "choice"
    assert "(adamw, lion, adafactor, muon, file.py:name)" in run_files.help_text(Run())


def test_a_file_is_executed_once_for_each_content_with_the_modules_of_its_folder(tmp_path):
    runs = tmp_path / "other"
    runs.mkdir()
    for folder, factor in ((Path(), 2), (runs, 5)):
        (folder / "mine.py").write_text(MINE.rpartition("raise")[0] + "RUNS.append(1)\n")
        (folder / "helper.py").write_text(f"RUNS, FACTOR = [], {factor}\n")
    gates = [custom.load(f"{folder / 'mine.py'}:gate") for folder in (Path(), runs, Path(), runs)]
    assert [gate(1, 1) for gate in gates] == [2, 5, 2, 5]
    assert custom.load("mine.py:RUNS") == [1] and "helper" not in sys.modules
    assert not list(tmp_path.rglob("*.pyc"))
    Path("helper.py").write_text("RUNS, FACTOR = [], 3\n")
    assert custom.load("mine.py:gate")(1, 1) == 3


@pytest.mark.parametrize("text, told", [
    ("1 / 0", "broken.py raised ZeroDivisionError in line 1 of broken.py: division by zero; it is executed before"),
    ("def g(): pass", "broken.py:f cannot be loaded: .*no attribute 'f'"),
    ("def f(): raise SystemExit(3)", "was called with .* and raised SystemExit in line 1 of broken.py: 3; give a function of"),
    ("def f(): raise KeyError('k')", "model.activation=\"broken.py:f\" was called with .* and raised KeyError in line 1 of broken.py: 'k'; give a function of")])
def test_errors_of_the_code_name_it(text, told):
    Path("broken.py").write_text(text + "\n")
    with pytest.raises(ValueError, match=told):
        custom.call("model.activation", "broken.py:f", sections.ACTIVATION)


def test_a_copy_has_all_that_the_file_imports_and_another_name_is_the_same_content(tmp_path):
    values, place = ["mine.py:gate", "mine.py:Mixer"], tmp_path / "code"
    lines = custom.describe(values)
    custom.keep(values, place)
    copied = custom.in_copy("mine.py:gate", lines, place)
    assert sorted(path.name for path in place.rglob("*.py")) == ["helper.py", "mine.py"] and copied.endswith("mine.py:gate")
    assert custom.identify(copied, custom.describe([copied])) == custom.identify("mine.py:gate", lines)
    assert custom.identify({"X": copied}, custom.describe([copied])) == custom.identify({"X": "mine.py:gate"}, lines)
    Path("helper.py").write_text("RUNS, FACTOR = [], 3\n")
    assert custom.identify("mine.py:gate", custom.describe(values)) != custom.identify("mine.py:gate", lines)
    assert custom.identify("swiglu", ()) == "swiglu"
