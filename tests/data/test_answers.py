"""Answers as batches: advantages by hand, and packing that loses, changes and moves nothing."""
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshtrain.names import NO_TARGET
from meshtrain.rl.answers import LEFT_OUT, DrawnAnswer, advantages, count_needed_rows, pack

NAN = np.nan


def by_answer(scores_BT: np.ndarray, answers, places: np.ndarray) -> list[np.ndarray | None]:
    """Return the scores of each answer's tokens; None for an answer that was left out. places: as `pack` returns it."""
    return [None if row == LEFT_OUT else scores_BT[row, place:place + len(answer.tokens)]
            for answer, (row, place) in zip(answers, places.tolist(), strict=True)]


RL = SimpleNamespace(aggregate="token", max_tokens=8, kl=0.0, entropy=0.0)


def drawn(prompt: int, tokens: int, advantage: float = 1.0, number: int = 0, **more) -> DrawnAnswer:
    """With ids and log-probabilities that tell which answer and token they are of."""
    return DrawnAnswer(100 * number + np.arange(prompt), 100 * number + 50 + np.arange(tokens),
                       -(number + np.arange(tokens) / 100), advantage, **more)


# ---- advantages ------------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    """Of the rewards 0, 1, 1, 2: mean 1, unbiased deviation sqrt(2/3). Of 3 and 5: mean 4, deviation sqrt(2)."""
    rewards = np.array([[0.0, 1, 1, 2], [3, NAN, 5, NAN]])
    first, second = np.array([-1.0, 0, 0, 1]), np.array([-1.0, 0, 1, 0])
    deviation = np.std([0, 1, 1, 2, 3, 5], ddof=1)
    for how, a, b in (("group", 1, 1), ("group_std", 1 / (np.sqrt(2 / 3) + 1e-4), 1 / (np.sqrt(2) + 1e-4)),
                      ("loo", 4 / 3, 2), ("batch_std", 1 / (deviation + 1e-4), 1 / (deviation + 1e-4))):
        np.testing.assert_allclose(advantages(rewards, how), [a * first, b * second], rtol=1e-15)


def test_the_others_mean_is_that_of_the_others():
    rewards = np.array([[0.3, 1.7, NAN, -2.0, 0.1]])
    for i in (0, 1, 3, 4):
        others = [r for j, r in enumerate(rewards[0]) if j != i and not np.isnan(r)]
        assert advantages(rewards, "loo")[0, i] == pytest.approx(rewards[0, i] - np.mean(others), rel=1e-14)


@pytest.mark.parametrize("how", ["group", "group_std", "loo", "batch_std"])
def test_equal_single_and_missing_rewards_have_advantage_0_to_the_bit(how):
    rewards = np.array([[0.1, 0.1, 0.1], [NAN, 0.7, NAN], [NAN, NAN, NAN], [0.1, NAN, 0.1]])
    assert np.all(advantages(rewards, how) == 0)
    assert np.all(advantages(rewards[1:2], how) == 0), "a batch with one reward"


def test_advantages_are_those_of_trl():
    golden = json.loads((Path(__file__).parent.parent / "goldens" / "policy_losses.json").read_text())
    rewards = np.array(golden["tensors"]["rewards"])
    for how, case in (("group_std", "grpo"), ("group", "dr_grpo")):
        np.testing.assert_allclose(advantages(rewards, how).ravel(), golden["cases"][case]["advantages"], atol=1e-14)


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_a_batch_by_hand():
    """Longest first, each in the first row with room; a prompt's last place is the first target's."""
    answers = [drawn(2, 2, 0.5, 0), drawn(1, 5, -1.0, 1), drawn(2, 3, 2.0, 2, old=np.array([-7.0, -8, -9]))]
    batch, places = pack(answers, RL, 2, 8, first=3)
    assert places.tolist() == [[0, 6], [0, 0], [1, 1]]
    assert batch["tokens"].tolist() == [[100, 150, 151, 152, 153, 0, 1, 50], [200, 201, 250, 251, 0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[150, 151, 152, 153, 154, -1, 50, 51], [-1, 250, 251, 252, -1, -1, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["index"].tolist() == [list(range(8))] * 2 and batch["sequence"].tolist() == [3, 4]
    np.testing.assert_allclose(batch["advantage"], [[-1] * 5 + [0, 0.5, 0.5], [0, 2, 2, 2, 0, 0, 0, 0]])
    np.testing.assert_allclose(batch["old"], [[0] * 8, [0, -7, -8, -9, 0, 0, 0, 0]])
    np.testing.assert_allclose(batch["sampled"][0], [-1, -1.01, -1.02, -1.03, -1.04, 0, 0, -0.01], rtol=1e-6)
    assert np.all((batch["targets"] != NO_TARGET) == (batch["weight"] == 1))


@pytest.mark.parametrize("aggregate, divisors", [
    ("token", [9, 9, 9, 9]), ("sequence", [4 * 2, 4 * 3, 4 * 1, 4 * 3]), ("constant", [4 * 8, 4 * 8, 4 * 8, 4 * 8])])
def test_divisors_count_answers_of_which_nothing_is_learned_but_not_those_that_are_masked(aggregate, divisors):
    """Weights hold the targets that are computed; the step divides by them."""
    answers = [drawn(1, 2, 1.0), drawn(2, 3, 0.0), drawn(1, 1, -1.0), drawn(1, 3, 2.0), drawn(1, 4, 1.0, learned=False)]
    settings = SimpleNamespace(**vars(RL) | {"aggregate": aggregate})
    batch, places = pack(answers, settings, 3, 8, 0)
    assert [row < 0 for row, _ in places.tolist()] == [False, True, False, False, True]
    targets = np.sum(batch["targets"] != NO_TARGET)
    assert targets == 6
    for weight, divisor in zip(by_answer(batch["weight"], answers, places), divisors):
        assert weight is None or np.allclose(weight / targets, 1 / divisor, rtol=1e-6)
    for more in ({"kl": 0.1}, {"entropy": 0.1}):
        _, places = pack(answers, SimpleNamespace(**vars(settings) | more), 3, 8, 0)
        assert [row < 0 for row, _ in places.tolist()] == [False] * 4 + [True], "all that something is learned of"


def test_an_empty_answer_counts_among_answers_and_is_in_no_row():
    settings = SimpleNamespace(**vars(RL) | {"aggregate": "sequence"})
    answers = [drawn(3, 0), drawn(1, 2)]
    batch, places = pack(answers, settings, 1, 8, 0)
    assert places.tolist() == [[-1, -1], [0, 0]]
    np.testing.assert_allclose(batch["weight"][0, :2], 2 / (2 * 2))
    nothing, _ = pack([], RL, 1, 8, 0)
    assert np.all(nothing["targets"] == NO_TARGET) and not nothing["segments"].any()


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"3 answers of 15 tokens, the longest of 5, do not fit in 2 rows of "
                                         r"data\.seq_len=8"):
        pack([drawn(1, 5)] * 3, RL, 2, 8, 0)
    with pytest.raises(ValueError, match="data.seq_len=8 does not hold a prompt with its answer, up to 9 tokens"):
        count_needed_rows(3, 9, 8)


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), max_size=40)


@given(LENGTHS, st.integers(12, 40))
def test_rows_that_are_needed_always_suffice_and_answers_come_back(lengths, seq_len):
    answers = [drawn(prompt, tokens, number=i) for i, (prompt, tokens) in enumerate(lengths)]
    rows = count_needed_rows(len(answers), 12, seq_len)
    batch, places = pack(answers, RL, rows, seq_len, 0)
    for name in ("targets", "sampled"):
        wanted = [answer.tokens if name == "targets" else answer.sampled for answer in answers]
        for answer, value, found in zip(answers, wanted, by_answer(batch[name], answers, places)):
            assert (found is None) == (len(answer.tokens) == 0)
            assert found is None or np.array_equal(found, value.astype(found.dtype))
    real = batch["targets"] != NO_TARGET
    assert real.sum() == sum(len(answer.tokens) for answer in answers), "and nothing else is a target"
    used = batch["segments"].any(1)
    assert np.all(used[:used.sum()]), "used rows come first"
    again, _ = pack([dataclasses.replace(answer) for answer in answers], RL, rows, seq_len, 0)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)
