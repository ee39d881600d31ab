"""The tests that are named for a change: those that import it, or a helper that does, or that a planted fault names."""
import pytest
import touched


@pytest.mark.parametrize("path, named", [
    ("meshtrain/run/say.py", {"test_say.py"}),                           # imported
    ("meshtrain/cost/formulas/simulate.py", {"test_simulate.py"}),
    ("meshtrain/training/executor.py", {"test_cells.py"}),      # by a planted fault, or its room
    ("tests/tiny_run.py", {"test_stops.py"}),                            # a helper
    ("tests/experts.py", {"test_experts.py", "test_experts_drawn.py"}),
    ("tests/layouts/test_mesh.py", {"test_mesh.py"}), ("docs/layouts.md", set())])
def test_tests_are_named_for_a_change(path, named):
    found = touched.tests_of({path})
    assert found >= named | set(touched.ALWAYS) and len(found) < 100
    assert all(list(touched.TESTS.rglob(name)) for name in found)


def test_every_module_of_a_room_with_tests_has_some():
    modules = [str(path.relative_to(touched.ROOT)) for path in (touched.ROOT / "meshtrain").rglob("*.py")
               if path.stat().st_size > 500 and path.name != "__init__.py"]
    without = [path for path in modules if touched.tests_of({path}) == set(touched.ALWAYS)]
    assert without == []
