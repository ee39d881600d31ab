"""The house keeps its floors: rooms import downward only, and what a reader must hold in mind is counted."""
import ast
import collections
import re
from collections.abc import Mapping
from pathlib import Path

import rooms
from meshtrain import config, units
from meshtrain.config import messages
from meshtrain.training import objective
from sources import nodes_of

ROOT = Path(__file__).resolve().parent.parent.parent

# Which rooms each room may import, besides itself; the doors (files of meshtrain/ itself) and UNBOUND may import
# everything; names, units and jax_private belong to all.
OPEN_TO = {
    "sharding": set(), "storage": set(), "huggingface": {"storage"}, "kernels": set(), "pages": set(),
    "config": {"storage"},
    "cluster": {"config"},
    "data/documents": {"storage"},
    "data/files": {"data/documents"},
    "data/cache": {"data", "data/documents", "data/files"},
    "data": {"data/cache", "data/documents", "data/files", "storage"},
    "data/batches": {"data", "data/documents"},
    "parallel/context": {"kernels", "sharding"},
    "parallel/experts": {"kernels", "sharding"},
    "parallel/pipeline": {"sharding"},
    "model": {"kernels", "sharding"},
    # what a run leaves open: above the layers that it chooses, below the prices that depend on it
    "choices": {"kernels", "model", "parallel/context", "parallel/experts", "parallel/pipeline", "sharding"},
    "cost/formulas": {"choices", "kernels", "model", "parallel/context", "parallel/experts", "parallel/pipeline",
                      "sharding"},
    "cost/program": {"cost/formulas", "kernels", "parallel/pipeline", "sharding"},
    "cost/planner": {"cost/formulas", "parallel/pipeline", "sharding"},
    "training": {"kernels", "model", "parallel/context", "parallel/experts", "parallel/pipeline", "sharding"},
    "inference": {"kernels", "model", "parallel/context", "sharding"},
    # rows, progress and history of a run: the loop writes them, reports and a resume read them
    "journal": {"cluster", "config", "storage", "training"},
    "run": {"cluster", "config", "data", "data/batches", "data/documents", "data/files", "journal", "storage",
            "training"},
    "inspection": {"assembly", "config", "cost/formulas", "cost/planner", "cost/program", "design", "devices",
                   "journal", "parallel/pipeline", "run", "sharding", "training"},
    "parity": {"assembly", "choices", "config", "cost/program", "design", "inspection", "model", "parallel/pipeline",
               "run", "sharding", "training"},
    "checkpoint": {"cluster", "config", "data", "data/documents", "journal", "model", "run", "sharding", "storage",
                   "training"},
    # Model folders on devices: what is in such a folder is known without jax, by `huggingface` itself.
    "huggingface/weights": {"checkpoint", "cluster", "config", "data", "data/documents", "huggingface", "model", "run",
                            "storage"},
    # What others build on: beside the interface, above the trainer and the accountant.
    "library": {"checkpoint", "choices", "cluster", "config", "cost/formulas", "cost/program", "given", "inspection",
                "journal", "kernels", "model", "parallel/context", "parallel/pipeline", "parity", "run", "sharding",
                "shown", "storage", "training"},
    # Training on sampled answers comes after pretraining: the command hands the trainer what it needs of this room.
    "rl/rewards": set(),
    "rl": {"assembly", "checkpoint", "choices", "cluster", "config", "cost/formulas", "data", "data/batches",
           "data/documents", "devices", "huggingface/weights", "inference", "journal", "model", "rl/rewards", "run",
           "run_files", "sharding", "starts", "storage", "trained", "training"},
}
UNBOUND = {"commands", "launch"}
# The sections of a run file are data, and what a process says, which signals it gets and what its directory contains
# are known to every room, whatever else their rooms do. So is the dtype of accumulators, which the accountant counts.
EVERYONE = {"config/sections", "run/contents", "run/phases", "run/say", "run/stops", "names", "scopes", "pattern",
            "shipped", "jax_private", "custom", "units", "files", "panics", "hardware", "flags", "environment",
            "lazy", "training/accumulators"}


def room(name: str) -> str:
    """The room of a module, the longest that begins its path, or the file at the top: `meshtrain.data.sources.open` ->
    data."""
    parts = name.split(".")[1:]
    return next((there for i in (2, 1) if (there := "/".join(parts[:i])) in {*OPEN_TO, *UNBOUND, *EVERYONE}), parts[0])


def imported(path: Path) -> set[str]:
    """The rooms that a file imports: `from meshtrain.sharding import mesh` -> sharding."""
    return {room(name) for name in imported_modules(path) if name.startswith("meshtrain.")}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the module in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_downward():
    homes = {path: path.parent.relative_to(ROOT / "meshtrain").as_posix()
             for path in (ROOT / "meshtrain").glob("*/**/*.py")}
    assert set(homes.values()) - {"cost", "parallel"} == {*OPEN_TO, *UNBOUND}, "a new room needs its line in OPEN_TO"
    wrong = {str(path.relative_to(ROOT)): extra for path, here in sorted(homes.items())
             if here not in UNBOUND and (extra := imported(path) - OPEN_TO.get(here, set()) - {here} - EVERYONE)}
    assert wrong == {}


def test_rooms_that_need_no_jax_import_none():
    wrong = [str(path.relative_to(ROOT)) for here in ("data", "config", "huggingface", "rl/rewards", "storage")
             for path in (ROOT / "meshtrain" / here).rglob("*.py") if path.parent.name != "weights"
             if any(name.split(".")[0] in ("jax", "flax", "optax", "orbax") for name in imported_modules(path))]
    assert wrong == []


def test_the_import_test_sees_an_import(tmp_path):
    (tmp_path / "a.py").write_text("from meshtrain import cost\ndef f():\n    import meshtrain.training.step\n")
    assert imported(tmp_path / "a.py") == {"cost", "training"}


# The two lines. The trainer imports, also inside functions and by way of other files, neither what accounts for a run nor
# what comes after pretraining: a command hands it what it needs of them. No import is excepted.
TRAINER = {"checkpoint", "choices", "cluster", "config", "data", "journal", "kernels", "model", "parallel", "run", "sharding",
           "storage", "training"}
ACCOUNTANT = {"cost", "inspection", "pages", "parity"}
AFTER_PRETRAINING = {"huggingface", "inference", "rl"}
OVER_BOTH = {"library"}


def folder(module: str) -> str:
    """The folder of a module in the package, or the name of a file at the top: meshtrain.data.files.jsonl -> data."""
    return module.split(".")[1] if "." in module else ""


def across_the_lines(modules: Mapping[str, set[str]]) -> list[str]:
    """The ways from a module of the trainer over a line, each as modules that import one another."""
    ways = []
    for module in sorted(module for module in modules if folder(module) in TRAINER):
        waiting, seen = [(module,)], {module}
        while waiting:
            way = waiting.pop()
            if folder(way[-1]) in ACCOUNTANT | AFTER_PRETRAINING | OVER_BOTH:
                ways.append(" -> ".join(way))
                continue
            waiting += [(*way, name) for name in sorted(modules[way[-1]] - seen)]
            seen |= modules[way[-1]]
    return ways


def test_the_trainer_imports_neither_the_accountant_nor_what_comes_after_pretraining():
    assert {name.partition("/")[0] for name in OPEN_TO} == TRAINER | ACCOUNTANT | AFTER_PRETRAINING | OVER_BOTH
    assert across_the_lines(rooms.read_modules()) == []


def test_the_test_of_the_lines_sees_an_import_in_a_function_and_by_way_of_a_file_at_the_top(tmp_path):
    texts = {"run/loop": "def f():\n    from meshtrain import shown\n", "shown": "import meshtrain.pages.skin\n",
             "pages/skin": "", "__init__": "", "cost/price": "import meshtrain.run.loop\n"}
    for name, text in texts.items():
        path = tmp_path / "meshtrain" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert across_the_lines(rooms.read_modules(tmp_path)) == ["meshtrain.run.loop -> meshtrain.shown -> meshtrain.pages.skin"]


def asked_names(text: str) -> list[int]:
    """Lines of conditions that ask for an objective by its name."""
    return [word.lineno for node in nodes_of(text) if isinstance(node, (ast.If, ast.IfExp, ast.Compare))
            for word in ast.walk(node.test if not isinstance(node, ast.Compare) else node)
            if isinstance(word, ast.Constant) and word.value in ("rl", "dpo")]


def test_only_rl_and_config_ask_for_an_objective_by_its_name():
    """All others ask `training.objective` for what they want to know, where each name has one row."""
    files = [path for here in ("meshtrain", "launch") for path in sorted((ROOT / here).rglob("*.py"))
             if path.parent.relative_to(ROOT).as_posix() not in ("meshtrain/rl", "meshtrain/config")]
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := asked_names(path.read_text()))} == {}
    assert set(asked_names("if a == 'rl': pass\nb = 1 if c in ('x', 'dpo') else 2\nd = {'rl': 1}\ne = f != 'rl'\n")
               ) == {1, 2, 4}


def test_every_objective_that_a_run_file_names_has_its_row():
    assert set(objective.OBJECTIVES) == set(messages.choices(config.sections.Training.model_fields["objective"]))


# ---- state of the process --------------------------------------------------------------------------------------------

# Variables that functions of their module replace. Each belongs to the process as a whole: its watchdog, its signals,
# and the files at addresses as its run has seen them.
REPLACED = {"meshtrain/cluster/watch.py": ["_watchdog"], "meshtrain/run/stops.py": ["_listener"],
            "meshtrain/storage/copies.py": ["_seen"]}


def variables_of_others(text: str) -> list[int]:
    """Lines that set a variable of another of our modules."""
    nodes = list(nodes_of(text))
    ours = {alias.asname or alias.name for node in nodes if isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "meshtrain" for alias in node.names}
    targets = [target for node in nodes if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
               for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return [target.lineno for target in targets for part in ast.walk(target) if isinstance(part, ast.Attribute)
            and isinstance(part.value, ast.Name) and part.value.id in ours and isinstance(part.ctx, ast.Store)]


def test_no_module_sets_a_variable_of_another_and_what_belongs_to_the_process_has_one_place():
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for here in ("meshtrain", "launch")
             for path in sorted((ROOT / here).rglob("*.py"))}
    assert {name: lines for name, text in texts.items() if (lines := variables_of_others(text))} == {}
    assert {name: names for name, text in texts.items() if (names := sorted({
        name for node in nodes_of(text) if isinstance(node, ast.Global) for name in node.names}))} == REPLACED
    assert variables_of_others("from meshtrain import files\nfiles.tell = print\nx = files.tell\n"
                               "def f(a):\n    a.tell, files.b = print, 1\n") == [2, 5]


# ---- concepts --------------------------------------------------------------------------------------------------------

# The 177th key is data.split_at: corpora of one file have their documents' ends in the text, where no other key sees them.
# The 180th is run.log_format: whether lines are for a reader at a terminal or for a collector of logs no other key tells.
# The 181st is run.sample_prompt: a text of the user's own to continue is in no other key.
# The 182nd and 183rd are model.custom and run.code: which class a letter of model.mixers means, and what a run's own code was
# when the run began, no other key can tell.
# The 184th is training.ema: how long the average of the weights reaches back, no other key can tell.
# The 185th to 190th are [distill]: which teacher and in which layout, how many of its tokens, which divergence, temperature and
# weight; no other key names a second model.
# The 191st is optimizer.moments_dtype: half of the optimizer's memory, with another meaning on a resume than any key has.
# The 192nd is data.template_arguments: a template's own variables, of which no other key knows the names.
# The 193rd is data.faulty: whether a bad line of a million ends a run is the user's to say.
# The 194th and 195th are lora.init_from and lora.also: where adapters are that others made, and what is trained beside adapters.
# The 196th is optimizer.groups, a table: a rate for the embedding alone no key of all weights can give.
# The 197th is experts.balance: the weight of the balance loss does not say what is balanced.
# The 198th and 199th are model.mtp_layers and training.mtp_weight: what the model has, and what the step makes of it.
# The 200th is optimizer.offload: whether a step waits for copies instead of holding moments no other key can say.
MOST_PARAMETERS, MOST_FIELDS, MOST_KEYS, MOST_RULE_FILES = 8, 12, 200, 9


def concepts(*packages: Path) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Functions with too many parameters (kernels and `self` apart), classes with too many fields, names of several
    classes."""
    parameters, fields, names = {}, {}, collections.Counter()
    for package, path in [(root, path) for root in packages for path in sorted(root.rglob("*.py"))]:
        here = path.relative_to(package).as_posix()
        for node in nodes_of(path.read_text()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not here.startswith("kernels/"):
                words = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len(words) - (words[:1] != [] and words[0].arg in ("self", "cls"))
                if count > MOST_PARAMETERS:
                    parameters[f"{here}:{node.name}"] = max(count, parameters.get(f"{here}:{node.name}", 0))
            elif isinstance(node, ast.ClassDef):
                names[node.name] += 1
                count = sum(isinstance(child, ast.AnnAssign) for child in node.body)
                if count > MOST_FIELDS and here != "config/sections.py":      # keys are counted together
                    fields[f"{here}:{node.name}"] = count
    return parameters, fields, {name: count for name, count in names.items() if count > 1}


def test_functions_have_few_parameters_classes_few_fields_and_names_of_their_own():
    # Of attention: three arrays, the documents, the layout, and each choice that the sections of a run have.
    assert concepts(ROOT / "meshtrain", ROOT / "launch") == ({"library/ring.py:ring_attention": 9}, {}, {})


# Names of what a function gives, such as a property `gathered`, are among them.
MOST_PARTICIPLES = 45
IRREGULAR = {"bound", "built", "chosen", "done", "drawn", "found", "given", "gone", "held", "kept", "known", "left", "lost",
             "made", "seen", "sent", "shown", "spent", "taken", "told", "written"}
VERBS = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}


def named_by_participles(text: str) -> list[str]:
    """Functions whose first word is a participle: `opened`, `saved_bytes`."""
    names = [(node.name, node.name.strip("_").partition("_")[0]) for node in nodes_of(text)
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("__")]
    return [name for name, word in names if word in IRREGULAR or word.endswith("ed") and word not in VERBS]


def test_few_functions_are_named_by_participles():
    assert named_by_participles("class A:\n    def _opened(self): pass\ndef open_made(): pass\ndef need(): pass\n"
                                "def sent_bytes(): pass\ndef __reversed__(): pass\n") == ["sent_bytes", "_opened"]
    named = {f"{path.relative_to(ROOT)}: {name}" for here in ("meshtrain", "launch")
             for path in (ROOT / here).rglob("*.py") for name in named_by_participles(path.read_text(encoding="utf-8"))}
    assert len(named) <= MOST_PARTICIPLES, f"functions are verbs: {sorted(named)}"


# Tables of keys and of model families; and what renders chat templates is a script, which imports nothing of meshtrain.
MOST_LINES, MOST_LONG_TESTS = 450, 16
LONG_FILES = {"meshtrain/config/sections.py", "meshtrain/data/documents/rendering.py", "meshtrain/huggingface/families.py",
              "meshtrain/huggingface/settings.py"}


def test_a_file_is_read_in_one_sitting():
    long = {path.relative_to(ROOT).as_posix() for here in ("meshtrain", "launch", "benchmarks", "tests")
            for path in (ROOT / here).rglob("*.py") if path.read_text(encoding="utf-8").count("\n") > MOST_LINES}
    tests = {name for name in long if name.startswith("tests/")}
    assert long - tests == LONG_FILES
    assert len(tests) <= MOST_LONG_TESTS, sorted(tests)


def test_lines_of_the_program_end_at_120_columns():
    wide = [f"{path.relative_to(ROOT)}:{number}" for here in ("meshtrain", "launch", "examples")
            for path in (ROOT / here).rglob("*.py")
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if len(line) > 120]
    assert wide == []


def test_keys_and_rule_files_are_few():
    keys = sum(len(section.model_fields) for section in config.SECTIONS.values())
    assert keys <= MOST_KEYS, "a new key replaces one, or MOST_KEYS is raised in a commit that says why both are needed"
    assert len(list((ROOT / "sharding_rules").glob("*.toml"))) <= MOST_RULE_FILES


def test_the_caps_see_parameters_fields_and_names(tmp_path):
    (tmp_path / "kernels").mkdir()
    wide = "def f(a, b, c, d, e, g, h, /, i, *, j): pass\n"
    (tmp_path / "a.py").write_text(wide + "class A:\n    def f(self, a, b, c, d, e, g, h, i): pass\n")
    (tmp_path / "kernels" / "b.py").write_text(wide + "class A:\n" + "".join(f"    x{n}: int\n" for n in range(13)))
    assert concepts(tmp_path) == ({"a.py:f": 9}, {"kernels/b.py:A": 13}, {"A": 2})


def without_encoding(text: str) -> list[int]:
    """Lines that read or write text in the encoding of the locale."""
    found = []
    for node in nodes_of(text):
        if isinstance(node, ast.Call) and "encoding" not in {word.arg for word in node.keywords}:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            mode = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
            if name in ("read_text", "write_text") or isinstance(node.func, ast.Name) and name == "open" and not (
                    mode and "b" in str(mode[0])):
                found.append(node.lineno)
    return found


def test_no_file_is_read_or_written_in_the_encoding_of_a_locale():
    files = [path for room in ("meshtrain", "launch") for path in sorted((ROOT / room).rglob("*.py"))]
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := without_encoding(path.read_text()))} == {}
    assert without_encoding("p.read_text()\nopen(p)\nopen(p, 'rb')\nopen(p, 'w', "
                            "encoding='utf-8')\np.write_text('x')") == [1, 2, 5]


def own_plurals(text: str) -> list[int]:
    """Lines of texts that end a noun in "(s)", or make its plural themselves."""
    found = []
    for node in nodes_of(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"[a-z]\((s|es)\)", node.value):
            found.append(node.lineno)
        ends = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [
            node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else []
        found += [node.lineno for end in ends if isinstance(end, ast.Constant) and end.value in ("s", "es")]
    return sorted(found)


def test_plurals_of_messages_are_made_by_one_function():
    files = [path for room in ("meshtrain", "launch") for path in sorted((ROOT / room).rglob("*.py"))
             if path.name != "units.py"]
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := own_plurals(path.read_text()))} == {}
    assert own_plurals("f'{n} step(s)'\nf'{n} file{\"s\" * (n > 1)}'\nf'{\"es\" if n > 1 else \"\"}'\n'a (s) b'") == [1, 2, 3]
    assert [units.amount(n, noun) for n, noun in ((0, "file"), (1, "microbatch"), (1200, "process"), (2, "batch"))] == [
        "0 files", "1 microbatch", "1,200 processes", "2 batches"]
