"""Faults at random moments, mid-save, mid-restore and mid-compile included: a few of those of `python -m
benchmarks.soak`. Each run takes some minutes."""

import sys

import pytest

from tests import soak

# 20 faults, in three kinds of run.
FEW = [(1, 7, 2), (2, 5, 2), (4, 3, 1)]
KILLS = ["kill", "kill all", "kill", "kill launcher", "kill", "terminate", "kill"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.long
@pytest.mark.parametrize("processes, kills, pauses", FEW)
def test_a_run_that_is_hit_again_and_again_equals_the_undisturbed_one(tmp_path, processes, kills, pauses):
    faults = [KILLS[i % len(KILLS)] for i in range(kills)] + ["hang"] + ["pause"] * (pauses - 1)
    met, _ = soak.torment(tmp_path, soak.Setting(processes), faults, seed=kills)
    assert sorted(one.fault for one in met) == sorted(faults)
    assert sum(one.half_saved for one in met) >= len(faults) // 8
    assert all(one.named for one in met if one.fault == "hang" and one.after_s)
