"""Plugin of pytest (`-p reach`): which test reaches which function of the program, in its children, too.

Each function of meshtrain/ that runs for the first time in a test adds a line "test<TAB>file<TAB>function" to $REACHED; a
process that a test starts does so by the hook that `sitecustomize.py` calls. Needs Python 3.12 (sys.monitoring).
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parent.parent / "meshtrain") + os.sep
CHILD = '''import os, sys
sys.path.insert(0, {folder!r})
try:
    import reach
    reach.begin()
except BaseException:
    pass
'''


def begin() -> None:
    """Record from here on what this process runs. PYTEST_CURRENT_TEST, which children inherit, names the test."""
    monitoring, events = sys.monitoring, sys.monitoring.events
    target, root = os.open(os.environ["REACHED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT), ROOT

    def note(code, _offset):
        try:
            if code.co_filename.startswith(root):
                test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
                name = code.co_qualname.replace(".<locals>", "")
                file = os.path.join("meshtrain", code.co_filename[len(root):])
                if test and "<" not in name:
                    os.write(target, f"{test}\t{file}\t{name}\n".encode())
        except Exception:       # a process that may write no file, or that ends, goes on without notes
            pass
        return monitoring.DISABLE

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "reach")
    monitoring.register_callback(monitoring.COVERAGE_ID, events.PY_START, note)
    monitoring.set_events(monitoring.COVERAGE_ID, events.PY_START)


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    hook = Path(os.environ["REACHED"] + ".child")
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(CHILD.format(folder=str(Path(__file__).parent)))
    put_in_children(str(hook))
    begin()


def put_in_children(hook: str) -> None:
    """Every process that is started from here gets `hook` in its PYTHONPATH, with an environment of its own, too."""
    start = subprocess.Popen.__init__

    def begin_child(self, args, *more, env=None, **options):
        env = dict(os.environ if env is None else env)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [hook, env.get("PYTHONPATH")]))
        env |= {name: os.environ[name] for name in ("REACHED", "PYTEST_CURRENT_TEST") if name in os.environ}
        start(self, args, *more, env=env, **options)

    subprocess.Popen.__init__ = begin_child


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    sys.monitoring.restart_events()
