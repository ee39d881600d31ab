"""Loss spikes: which loss is one, and that a run tells it, leaves the step out, or goes back and leaves the batches
out."""
import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshtrain import run_files
from meshtrain.commands import train
from meshtrain.journal import trackers
from meshtrain.journal.spikes import FEWEST, LAG, WINDOW, Spikes
from meshtrain.run import loop
from meshtrain.trainer import Trainer
from meshtrain.training.step import Program
from checkpoints import assert_same_bits, names
from test_commands import call, home, in_a_directory_of_its_own, lasting, refused, rows, tiny  # noqa: F401
from test_local_checkpoints import crashing, state_of  # noqa: F401


def spikes(*words, losses=(), saved=None):
    made = Spikes(run_files.load(list(words)), saved)
    for number, loss in enumerate(losses, 1):
        made.columns(number, loss)
    return made


def test_the_limit_is_the_median_and_so_many_spreads():
    losses = np.random.default_rng(0).normal(3.0, 0.1, 4000)
    seen = spikes(losses=losses)
    assert seen.limit(4002) == pytest.approx(3.0 + 10 * 0.1, abs=0.3)
    assert spikes("--training.spike_threshold", "4", losses=losses).limit(4002) == pytest.approx(3.4, abs=0.15)
    assert sum(loss > seen.limit(4002) for loss in losses) == 0
    outliers = spikes(losses=[*losses[:100], *[50.0] * 20])
    assert outliers.limit(122) < 6.0, "spikes of before do not lift it"
    still = spikes(losses=[2.0] * 50)
    assert still.limit(52) == pytest.approx(2.2), "a loss that rests has the least spread"


def test_no_loss_is_a_spike_before_there_are_enough_or_where_it_is_off():
    assert spikes(losses=[3.0] * (FEWEST - 1)).limit(FEWEST + LAG) == math.inf
    assert spikes(losses=[3.0] * FEWEST).limit(FEWEST + LAG) < 4
    assert spikes("--training.loss_spike", "off", losses=[3.0] * 99).limit(101) == math.inf


def test_the_limit_is_the_same_whether_the_loss_before_is_known_or_not_and_after_a_resume():
    losses = [*np.random.default_rng(1).normal(3.0, 0.1, 3 * WINDOW), math.nan, 3.5]
    for last in (20, WINDOW + 1, len(losses)):
        one, other = spikes(losses=losses[:last]), spikes(losses=losses[:last - 1])
        assert one.limit(last + 1) == other.limit(last + 1)
        resumed = spikes(saved=json.loads(json.dumps(one.as_saved())))
        assert [resumed.limit(last + more) for more in (1, 2)] == [one.limit(last + more) for more in (1, 2)]


# ---- in a run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch):
    """The batch of the first run's step 20 is poison, in every run: nobody has ever seen its targets."""
    real, seen, poison = Program.place, [], []
    def place(self, given):
        key = given["tokens"].tobytes()
        seen.append(key)
        if len(seen) == 20 and not poison:
            poison.append(key)
        if key in poison:
            given = given | {"targets": np.where(given["targets"] >= 0, 7, given["targets"])}
        return real(self, given)
    monkeypatch.setattr(Program, "place", place)


@pytest.fixture
def command(tiny, poisoned):  # noqa: F811
    return (*tiny, "--training.steps", 24, "--checkpoint.every", 8, "--checkpoint.keep", 9, "--run.sample_tokens", 0,
            "--optimizer.schedule", "constant", "--training.spike_threshold", 2, "--optimizer.learning_rate", 1e-2)


def test_a_run_goes_back_before_a_spike_and_leaves_its_batches_out(command, crashing, monkeypatch):  # noqa: F811
    asked, real = [], trackers.open_trackers
    monkeypatch.setattr(trackers, "open_trackers", lambda *given: (asked.append(given[2:]), real(*given))[1])
    ran = call(train.main, *command, "--run.dir", "back", "--training.loss_spike", "rollback")
    assert ran.code == 0 and "back to step 16, without the 4 batches up to the spike" in ran.out, ran
    assert asked == [(0, False), (16, True)], "trackers forget the steps that the run has left"
    crashing(17)
    with pytest.raises(RuntimeError, match="as if killed"):
        call(train.main, *command, "--run.dir", "by hand")
    crashing(0)
    assert call(train.main, *command, "--run.dir", "by hand", "--checkpoint.step", 16,
                "--data.skip_batches", 4).code == 0
    assert_same_bits(state_of("back", 24), state_of("by hand", 24))
    more = {"rollbacks": 1, "skipped_batches": 4}
    written = lasting(Path("back"))
    assert written == [row | more if row["step"] == 17 else row for row in lasting(Path("by hand"))]
    (aside,) = [json.loads(line) for line in Path("back/metrics.aside.jsonl").read_text().splitlines()
                if "spike_limit" in line]
    assert aside["step"] == 20 and aside["loss"] > aside["spike_limit"]
    recorded = [json.loads(line) for line in Path("back/changes.jsonl").read_text().splitlines()]
    assert ("data.skip_batches", 16, 4) in [(row["key"], row["step"], row["to"]) for row in recorded]


def test_a_stop_in_the_step_of_a_spike_saves_what_only_the_fast_tier_had(command, tmp_path, monkeypatch):
    real, calls = loop.Stop.must_stop, []
    def stopped_in_step_20(self, *late):
        calls.append(late)
        self.agreed = len(calls) >= 20
        return real(self, *late)
    monkeypatch.setattr(loop.Stop, "must_stop", stopped_in_step_20)
    ran = call(train.main, *command, "--run.dir", "back", "--training.loss_spike", "rollback",
               "--checkpoint.every", 1000,
               "--checkpoint.local_dir", tmp_path / "near", "--checkpoint.local_every", 6)
    assert ran.code == 75 and "back to step 18" in ran.out and "stopped after step 18, saved in back" in ran.out, ran
    assert names(Path("back/checkpoints")) == ["18"] and names(tmp_path / "near") == []
    saved = json.loads(Path("back/checkpoints/18/metadata.json").read_text())
    assert saved["spikes"]["rollbacks"] == 1


@pytest.mark.long
def test_a_run_that_is_killed_after_it_went_back_ends_as_the_undisturbed_one(command, crashing):  # noqa: F811
    back = (*command, "--training.loss_spike", "rollback")
    assert call(train.main, *back, "--run.dir", "plain").code == 0
    real = Trainer._rewind
    def armed(*args):
        crashing(at)
        return real(*args)
    for at in (18, 22):         # before, and with --training.steps 24 after, the spike's number
        Trainer._rewind = armed
        try:
            with pytest.raises(RuntimeError, match="as if killed"):
                call(train.main, *back, "--run.dir", f"killed{at}")
        finally:
            Trainer._rewind = real
            crashing(0)
        assert call(train.main, *back, "--run.dir", f"killed{at}").code == 0
        assert_same_bits(state_of(f"killed{at}", 24), state_of("plain", 24))
        assert lasting(Path(f"killed{at}")) == lasting(Path("plain"))


def test_a_spike_is_told_or_its_step_is_not_applied(command):
    ran = call(train.main, *command, "--run.dir", "tell")
    assert ran.code == 0 and ran.out.count("a loss spike") == 1 and "step 20: a loss spike, " in ran.out, ran
    ran = call(train.main, *command, "--run.dir", "skip", "--training.loss_spike", "skip", "--metrics.every", 5)
    assert ran.code == 0 and "step 20: loss " in ran.out and "skipped (1 in a row" in ran.out, ran
    told, left = ({row["step"]: row for row in rows(Path(name))} for name in ("tell", "skip"))
    assert [step for step, row in told.items() if "spike_limit" in row] == [20] == [
        step for step, row in left.items() if row["skipped"]]
    assert left[20]["loss"] == told[20]["loss"] > left[20]["spike_limit"] == told[20]["spike_limit"]
    assert not any(row["skipped"] for row in told.values()) and names(Path("skip/checkpoints")) == ["16", "24", "8"]
    assert left[24]["loss"] < told[24]["loss"], "what the poison does to the weights"


def test_pairs_cannot_be_left_out(tiny):  # noqa: F811
    refused(call(train.main, *tiny, "--training.loss_spike", "rollback", "--training.objective",
                 "dpo", "--data.source", "preferences"),
            "skips batches")
