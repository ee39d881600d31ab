"""kill -9 at random moments, mid-save included: what `python -m tests.kill` does, with 3 and 10 kills of each kind of run."""

import sys

import pytest

from tests import kill


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.first), 10])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_killed_again_and_again_equals_the_undisturbed_one(tmp_path, processes, kills):
    stats = kill.torment(tmp_path, kills=kills, processes=processes, seed=processes)
    assert stats.kills == kills and stats.mid_save >= kills // 5
