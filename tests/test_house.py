"""The house keeps its floors: rooms import downward only, and no file or function outgrows its reader."""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Which rooms each room may import, besides itself; the doors (files of meshtrain/ itself) may import everything, names,
# units and jax_private belong to all.
OPEN_TO = {
    "weights": set(), "layout": set(), "data": set(), "kernels": set(), "pages": set(),
    "config": {"weights"},
    "cluster": {"config"},
    "parallel": {"layout", "kernels"},
    "model": {"layout", "kernels"},
    "cost": {"layout", "kernels", "model", "parallel"},
    "training": {"kernels", "layout", "model", "parallel"},
    "inference": {"kernels", "layout", "model"},
    "run": {"cluster", "config", "data", "model", "training", "weights"},
}
EVERYONE = {"names", "shipped", "jax_private", "units", "files"}


def imported(path: Path) -> set[str]:
    """The parts of meshtrain that a file imports: `from meshtrain.layout import mesh` -> layout."""
    names = imported_modules(path)
    return {name.split(".")[1] for name in names if name.startswith("meshtrain.")}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the module in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_downward():
    files = sorted((ROOT / "meshtrain").glob("*/*.py"))
    assert {path.parent.name for path in files} == set(OPEN_TO), "a new room needs its line in OPEN_TO"
    wrong = {str(path.relative_to(ROOT)): extra for path in files
             if (extra := imported(path) - OPEN_TO[path.parent.name] - {path.parent.name} - EVERYONE)}
    assert wrong == {}


def test_rooms_that_need_no_jax_import_none():
    wrong = [str(path.relative_to(ROOT)) for room in ("data", "config", "weights") for path in (ROOT / "meshtrain" / room).glob("*.py")
             if any(name.split(".")[0] in ("jax", "flax", "optax", "orbax") for name in imported_modules(path))]
    assert wrong == []


def test_the_import_test_sees_an_import(tmp_path):
    (tmp_path / "a.py").write_text("from meshtrain import cost\ndef f():\n    import meshtrain.training.step\n")
    assert imported(tmp_path / "a.py") == {"cost", "training"}


# From the command to the scores of queries and keys: in each file a call, and in the next what it calls. `made.program` is the
# Program of the step; the layer calls its attention as a function, whose engine by default is the one in blocks.
CHAIN = [
    ("train.py", "made.program", "class Program"),
    ("training/step.py", "accumulate.scanned(", "def scanned("),
    ("training/accumulate.py", "group.apply(", "def apply("),
    ("model/transformer.py", "Layer(", "class Layer("),
    ("model/layers.py", "ex.attend(", "def engine("),
    ("kernels/blockwise.py", 'einsum("BTKGH,BSKH->BKGTS", q_i, k_j', None),
]


def test_train_reaches_the_scores_within_six_files():
    assert len(CHAIN) <= 6
    texts = [(ROOT / "meshtrain" / path).read_text() for path, _, _ in CHAIN]
    for (path, call, definition), text, following in zip(CHAIN, texts, [*texts[1:], ""]):
        assert call in text, path
        assert definition is None or definition in following, definition


LONGEST_FILE, LONGEST_FUNCTION = 700, 100        # lines


def outgrown(root: Path) -> list[str]:
    """Files and functions under `root` that are too long."""
    found = []
    for path in sorted(file for room in ("meshtrain", "launch", "benchmarks", "tests") for file in (root / room).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(root)
        if (length := len(text.splitlines())) > LONGEST_FILE:
            found.append(f"{name}: {length} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found.append(f"{name}: {node.name} has {length} lines")
    return found


def test_no_file_and_no_function_outgrows_its_reader():
    assert outgrown(ROOT) == []


def test_the_length_test_sees_a_long_file_and_a_long_function(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("def f():\n" + "    pass\n" * 100 + "\n" * 600)
    assert outgrown(tmp_path) == ["tests/a.py: 701 lines", "tests/a.py: f has 101 lines"]


def without_encoding(text: str) -> list[int]:
    """Lines that read or write text in the encoding of the locale."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and "encoding" not in {word.arg for word in node.keywords}:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            mode = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
            if name in ("read_text", "write_text") or isinstance(node.func, ast.Name) and name == "open" and not (mode and "b" in str(mode[0])):
                found.append(node.lineno)
    return found


def test_no_file_is_read_or_written_in_the_encoding_of_a_locale():
    files = [path for room in ("meshtrain", "launch") for path in sorted((ROOT / room).rglob("*.py"))]
    assert {str(path.relative_to(ROOT)): lines for path in files if (lines := without_encoding(path.read_text()))} == {}
    assert without_encoding("p.read_text()\nopen(p)\nopen(p, 'rb')\nopen(p, 'w', encoding='utf-8')\np.write_text('x')") == [1, 2, 5]
