"""Which process tests which file, under pytest-xdist: the plugin of conftest.py.

A file goes to one worker, and so do files that read the same compiled programs: a worker compiles each program once.
"""
from pathlib import PurePath

import pytest

# The steps of tests/gpu/gpu_programs.py.
TOGETHER = {"test_gpu_formulas.py": "gpu_programs", "test_gpu_programs.py": "gpu_programs"}


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
