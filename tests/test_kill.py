"""kill -9 at random moments, mid-save included: what `python -m tests.kill` does, with 10 kills of each kind of run."""

import importlib.util
import sys

import pytest

from tests import kill


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_killed_again_and_again_equals_the_undisturbed_one(tmp_path, processes):
    if processes > 1 and importlib.util.find_spec("launch") is None:
        pytest.skip("no launcher yet")
    stats = kill.torment(tmp_path, kills=10, processes=processes, seed=processes)
    assert stats.kills == 10 and stats.mid_save >= 2
