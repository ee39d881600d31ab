"""Which tests run: each is in one tier, parts cover a tier without overlap, and a command chooses what it names."""
import argparse
import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import workers
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=25)
@given(st.sets(st.text(max_size=3)), st.integers(1, 20))
def test_parts_hold_each_test_once_and_differ_by_one_test_at_most(names, count):
    parts = [tiers.take_part(sorted(names), number, count) for number in range(count)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["4/4", "1/0", "-1/4", "1", "a/b", "0/4/2", ""])
def test_a_part_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not I/N"):
        tiers.read_part(text)


@pytest.mark.parametrize("args, full, long, chosen", [
    (["tests"], False, False, {"core"}), (["tests"], True, False, {"full"}), (["tests"], False, True, {"long"}),
    (["tests"], True, True, {"full", "long"}), (["tests/test_a.py"], False, False, {"core", "full"}),
    (["tests/test_a.py"], False, True, {"long"}), (["tests/test_a.py::test_b"], False, False, set(tiers.TIERS))])
def test_a_command_chooses_tiers(args, full, long, chosen):
    assert tiers.choose_tiers(args, full, long) == chosen


CONFTEST = """
import tiers

def pytest_addoption(parser):
    tiers.add_options(parser)

def pytest_configure(config):
    tiers.read_table = lambda: tiers.Table({"test_a": {"test_b", "test_c[1]"}, "test_g": set()}, {"test_d": {"test_e"}})
    config.pluginmanager.register(tiers.Selection(config))
"""
TESTS = """
import pytest

@pytest.mark.skip("it needs a GPU")
def test_b(): pass

@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_c(number): pass
"""


def run_tests(folder, *options: str, conftest: str = CONFTEST) -> str:
    (folder / "conftest.py").write_text(conftest)
    quick = {} if "-n" in options else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}      # what is installed takes a second
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options], cwd=folder,
                          env=os.environ | quick | {"PYTHONPATH": str(Path(tiers.__file__).parent)}, capture_output=True,
                          text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("options, told", [
    ([], ["2 passed, 1 skipped, 3 deselected", "skipped: 1 (it needs a GPU)",
          "not run: 2 tests and 1 files of full, run by `pytest --full`", "not run: 1 tests of long, run by `pytest --long`"]),
    (["--full", "--long", "--part", "1/2"], ["1 passed, 5 deselected", "not run: 2 tests of other parts",
                                             "not run: 3 tests of core, run by `pytest`"]),
    (["test_a.py::test_c"], ["3 passed"])])
def test_a_table_chooses_the_core_of_a_file_and_the_end_says_what_did_not_run(tmp_path, options, told):
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_d.py").write_text("def test_e(): pass\n\ndef test_f(): pass\n")
    if not options:
        (tmp_path / "test_g.py").write_text("1 / 0      # the core does not read a file that has no test of it\n")
    said = run_tests(tmp_path, *options)
    assert [line for line in told if line not in said] == [], said


@pytest.mark.parametrize("sizes", [{"full": 9, "cell": 40, "long": 130}, {"full": 3, "cell": 0, "long": 1}])
def test_landings_run_each_test_as_often_as_their_count_says(sizes):
    groups = {f"{group} {number}": group for group, count in sizes.items() for number in range(count)}
    runs = collections.Counter(name for number in range(7, 247) for name in tiers.take_landing(groups, number))
    assert runs == {name: 240 // tiers.LANDINGS[group] for name, group in groups.items()}


def test_a_test_that_comes_changes_the_turns_of_no_other_file():
    groups = {f"{file}.py::{number}": "full" for file in "ac" for number in range(40)}
    for number in range(16):
        before, after = (tiers.take_landing(more | groups, number) for more in ({}, {"b.py::0": "full"}))
        assert after - {"b.py::0"} == before


@given(st.sets(st.tuples(st.sampled_from("abc"), st.integers(0, 99))), st.integers(1, 9))
def test_blocks_hold_each_test_once_and_neighbours_of_one_file(tests, size):
    names = [f"{file}.py::{number}" for file, number in tests]
    blocks = tiers.cut_blocks(names, size)
    assert [name for block in blocks for name in block] == sorted(names)
    assert all(len(block) <= size and len({name[0] for name in block}) == 1 for block in blocks)
    assert len(blocks) == sum(-(-sum(name[0] == file for name in names) // size) for file in "abc")


def test_a_landing_takes_its_parts_and_says_so(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_d.py").write_text("def test_e(): pass\n\ndef test_f(): pass\n")
    for number, line in ((38, "1 passed"), (202, "1 passed"), (202, "landing 202: full 10/48, cell 10/48, long 202/240"),
                         (202, "not run: 2 tests of other parts")):
        assert line in (said := run_tests(tmp_path, "--landing", str(number))), said
    assert "--landing chooses the tiers" in run_tests(tmp_path, "--landing", "1", "--full")


def test_a_test_of_the_table_that_is_not_there_is_told(tmp_path):
    (tmp_path / "test_a.py").write_text(TESTS.replace("test_b", "test_d"))
    assert "names tests that are not there: test_a: test_b" in run_tests(tmp_path)


@pytest.mark.full
def test_files_that_read_the_same_programs_go_to_one_worker(tmp_path):
    """More workers than files would take a file each."""
    files = (*workers.TOGETHER, "test_other.py", "test_another.py")
    for name in files:
        (tmp_path / name).write_text("import os, pathlib\n"
                                     "def test_a(): pathlib.Path(__file__ + '.pid').write_text(str(os.getpid()))\n")
    done = run_tests(tmp_path, "-n", "4", "--dist", "loadfile", conftest="pytest_plugins = ['workers']\n")
    process = {name: (tmp_path / f"{name}.pid").read_text() for name in files}
    groups = {group: {process[name] for name in workers.TOGETHER if workers.TOGETHER[name] == group}
              for group in workers.TOGETHER.values()}
    assert f"{len(files)} passed" in done and all(len(one) == 1 for one in groups.values())
    assert len(set(process.values())) == len(groups) + 2
