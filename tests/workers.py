"""Which process tests which file, under pytest-xdist: the plugin of conftest.py.

A file goes to one worker, and so do files that read the same compiled programs: a worker compiles each program once.
"""
import contextlib
import importlib
from pathlib import Path, PurePath

import pytest
import tiers

# The steps of tests/gpu/gpu_programs.py; files that read the syntax of all files (sources.py).
TOGETHER = {"test_gpu_formulas.py": "gpu_programs", "test_gpu_programs.py": "gpu_programs"} | {
    f"test_{name}.py": "sources" for name in ("house", "docs", "docs_tables", "packaging", "rooms", "touched", "faults")}


def group_of(nodeid: str) -> str:
    """The name of what goes to one worker: `tests/data/test_data.py::test_a[1]` -> tests/data/test_data.py."""
    file = nodeid.partition("::")[0]
    return TOGETHER.get(PurePath(file).name, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler


def pytest_sessionstart(session):
    """Each worker imports a different share of the core's files. pytest rewrites the assertions of a file at its first
    import, which is most of the cost of collecting, and the other workers read the result from the disk. An import that
    fails is reported when its file is collected."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != session.config.getini("testpaths"):
        return
    table, number = tiers.read_table(), int(worker["workerid"].removeprefix("gw"))
    names = sorted(path.stem for path in Path(__file__).parent.glob("*/test_*.py")
                   if table.full.get(path.stem) != set())
    for name in names[number::worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)
