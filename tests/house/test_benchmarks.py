"""What every benchmark answers before it measures anything."""
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# of benchmarks, none themselves
LIBRARIES = ("gpu_attention", "gpu_flags", "gpu_kernels", "gpu_record", "gpu_sampling", "gpu_speed", "gpu_steps", "grouped_tiles",
             "machine", "other_frameworks", "peers_compiled", "published_2026", "words")
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in LIBRARIES)


def answer(path: Path, word: str, monkeypatch, capsys) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of `python benchmarks/….py WORD`."""
    monkeypatch.setattr(sys, "argv", [str(path), word])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_says_what_it_is_and_refuses_a_word_that_it_does_not_know(path, monkeypatch, capsys):
    code, out, err = answer(path, "--help", monkeypatch, capsys)
    docstring = path.read_text().split('"""')[1]
    assert code in (0, None) and docstring.strip() in out and not err
    code, out, err = answer(path, "nonsense", monkeypatch, capsys)
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1 and "nonsense" in err


def test_libraries_of_benchmarks_are_files_that_are_there():
    assert [name for name in LIBRARIES if not (ROOT / "benchmarks" / f"{name}.py").exists()] == []
