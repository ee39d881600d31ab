"""The frequencies of every rope type against those of transformers, what is rotated, and what the keys may say.

tests/goldens/ropes.json: by case [head_dim, rope_parameters, sequence length, inv_freq, attention factor] of
ROPE_INIT_FUNCTIONS in transformers 5.23.0, at rope_theta 10,000."""
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import config
from meshtrain.config import rope_scaling
from meshtrain.model import rope

CASES = json.loads((Path(__file__).parent.parent / "goldens" / "ropes.json").read_text())
POSITIONS = jnp.asarray([[0, 1, 2, 70, 200]])


def section(**keys) -> config.Model:
    return config.Model(**dict(embed_dim=64, num_heads=2, head_dim=16) | keys)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_factors_are_those_of_transformers(name):
    head_dim, scaling, length, freq, factor = CASES[name]
    cfg = section(head_dim=head_dim, rope_scaling=scaling, max_seq_len=length)
    made = rope.of(cfg, POSITIONS)["F"]
    angle = np.asarray(POSITIONS)[..., None] * np.asarray(freq)
    assert made.cos.shape == angle.shape and made.query_scale_BT is None
    # angles up to 200 in float32
    np.testing.assert_allclose(made.cos, factor * np.cos(angle), atol=3e-5)
    np.testing.assert_allclose(made.sin, factor * np.sin(angle), atol=3e-5)
    assert list(rope_scaling.problems(cfg)) == []


def test_the_first_dims_are_rotated_by_halves_and_the_rest_passes():
    made = rope.of(section(rope_scaling=dict(partial_rotary_factor=0.5)), POSITIONS)["F"]
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 16)).astype(np.float32)
    y = np.asarray(rope.rotate(jnp.asarray(x), made))
    cos, sin = (np.asarray(a)[:, :, None] for a in made[:2])
    assert cos.shape[-1] == 4
    first, second, rest = np.split(x, [4, 8], -1)
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert (y[..., 8:] == x[..., 8:]).all()


def test_queries_grow_with_the_length_before_them():
    made = rope.of(section(rope_scaling=dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=64)),
                   POSITIONS)["F"]
    expected = 1 + 0.1 * np.log(1 + np.asarray([0, 0, 0, 1, 3]))
    np.testing.assert_allclose(made.query_scale_BT[0], expected, rtol=1e-6)
    q = jnp.ones((1, 5, 2, 16), jnp.bfloat16)
    assert rope.scale_queries(q, made).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rope.scale_queries(q, made), np.float32)[0, :, 1, 7], expected, rtol=4e-3)


def test_mixers_have_a_rope_of_their_own_or_share_one():
    ropes = rope.of(section(mixers="WWF", window=8), POSITIONS)
    assert set(ropes) == {"W", "F"} and ropes["W"].cos is ropes["F"].cos
    ropes = rope.of(section(mixers="WFN", window=8, kinds=dict(W=dict(rope_theta=100.0, head_dim=8))), POSITIONS)
    assert set(ropes) == {"W", "F"} and ropes["W"].cos.shape[-1] == 4 and ropes["F"].cos.shape[-1] == 8
    np.testing.assert_allclose(ropes["W"].sin[0, 1], np.sin(100.0 ** (-np.arange(4) / 4)), rtol=1e-5)
    assert rope.of(section(mixers="NG"), POSITIONS) == {} == rope.of(section(position="learned"), POSITIONS)
    latent = section(latent=dict(kv_dim=8, rope_dim=6, value_dim=4))
    assert rope.of(latent, POSITIONS)["F"].cos.shape[-1] == 3


def test_a_run_longer_than_the_original_length_takes_the_long_factors():
    scaling = dict(rope_type="longrope", factor=4.0, original_max_position_embeddings=64, short_factor=[1.0] * 8,
                   long_factor=[2.0] * 8)
    sins = [rope.of(config.Run(model=dict(embed_dim=32, num_heads=2, rope_scaling=scaling),
                               data=dict(seq_len=length)).model, POSITIONS)["F"].sin[0, 1, 0] for length in (64, 65)]
    factor = np.sqrt(1 + np.log(4) / np.log(64))
    np.testing.assert_allclose(sins, [factor * np.sin(1), factor * np.sin(0.5)], rtol=1e-6)
    # A model folder is made for no length: each sequence's decides.
    of_folder = config.Model(embed_dim=32, num_heads=2, rope_scaling=scaling)
    lengths = jnp.asarray([[64] * 5, [65] * 5])
    made = rope.of(of_folder, jnp.tile(POSITIONS, (2, 1)), lengths)["F"].sin[:, 1, 0]
    np.testing.assert_allclose(made, sins, rtol=1e-6)
    assert rope.turns(of_folder) == (64,) and rope.turns(config.Run(model=of_folder.model_dump()).model) == ()
    with pytest.raises(AssertionError, match="lengths of sequences"):
        rope.of(of_folder, POSITIONS)


@pytest.mark.parametrize("given", [
    {}, dict(rope_type="linear", factor=2.0), dict(partial_rotary_factor=0.5),
    dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=64),
    dict(rope_type="yarn", factor=4.0, truncate=False, mscale=1.0, mscale_all_dim=1.0),
    dict(rope_type="longrope", factor=4.0, short_factor=(1.0, 1.5), long_factor=(1.0, 2.0), attention_factor=1.2),
    dict(rope_type="proportional", partial_rotary_factor=0.25)])
def test_written_keys_are_those_that_the_type_reads_and_are_read_back(given):
    scaling = config.Model(rope_scaling=given).rope_scaling
    written = dict(scaling)
    assert written.items() >= given.items() and set(written) <= {
        "rope_type", "factor", "beta_slow", "beta_fast", "original_max_position_embeddings", *given}
    assert config.Model(rope_scaling=written).rope_scaling == scaling == config.Model(
        **config.Model(rope_scaling=given).model_dump()).rope_scaling


@pytest.mark.parametrize(("keys", "said"), [
    (dict(rope_scaling=dict(rope_type="linear", factor=2.0, truncate=False)), 'truncate, which rope_type="linear" does '
     'not read; leave it out, or use rope_type="yarn"'),
    (dict(rope_scaling=dict(rope_type="yarn", long_factor=(1.0,))), 'use rope_type="longrope"'),
    (dict(rope_scaling=dict(high_freq_factor=8.0)), 'use rope_type="llama3"'),
    (dict(rope_scaling=dict(rope_type="yarn", beta_fast=1.0)), "beta_fast must be larger than beta_slow"),
    (dict(head_dim=15), "model.head_dim=15 (model.embed_dim=64, model.num_heads=2) is odd"),
    (dict(head_dim=20, rope_scaling=dict(partial_rotary_factor=0.25)), "partial_rotary_factor=0.25 is odd"),
    (dict(mixers="FW", window=8, kinds=dict(W=dict(head_dim=9))), "model.kinds.W.head_dim=9 ("),
    (dict(rope_scaling=dict(rope_type="longrope", short_factor=(1.0,) * 8, long_factor=(1.0,) * 7)),
     "long_factor has 7 numbers, but longrope divides 8 frequencies"),
    (dict(latent=dict(kv_dim=8, rope_dim=5)), "model.latent.rope_dim=5 is odd"),
    (dict(latent=dict(kv_dim=8, rope_dim=6), rope_scaling=dict(partial_rotary_factor=0.5)), "leave it out")])
def test_keys_that_cannot_be_are_named(keys, said):
    (fault,) = rope_scaling.problems(section(**keys))
    assert said in fault
