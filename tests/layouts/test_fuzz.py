"""Random compositions of model, mesh, rules, schedule and optimizer compute what one device computes.

5 draws in every run of the suite, others with every commit, and 200 of tier long.
"""
import math

import draws
import jax.numpy as jnp
import parity
import pytest
import sampling

from meshtrain.names import AXES

DRAWN = sampling.generator("fuzz").sample(range(10**6), 5)


@pytest.mark.parametrize("number", [*DRAWN, *(pytest.param(number, marks=pytest.mark.long) for number in range(200))])
def test_a_random_composition_equals_one_device(number, tmp_path):
    run, refused = draws.run(number, tmp_path)
    assert all(": " in message or ";" in message for message in refused), "a refusal names value, rule and remedy"
    parity.check(run, number)


def test_a_draw_is_the_same_again(tmp_path):
    assert draws.run(5, tmp_path)[0] == draws.run(5, tmp_path)[0]
    # In every process, too: it must not follow the order of a set.
    assert [getattr(draws.run(676739, tmp_path)[0].mesh, axis) for axis in AXES] == [4, 1, 2, 1, 1]


def test_the_comparison_sees_a_wrong_gradient(tmp_path, monkeypatch):
    from meshtrain.model import block
    right = block.rotate
    number = next(n for n in range(100) if (run := draws.run(n, tmp_path)[0]).model.position == "rope" and
                  run.model.qk_norm == "off" and math.prod(getattr(run.mesh, axis) for axis in AXES) == 2)
    run, _ = draws.run(number, tmp_path)
    plain = parity.compile_run(parity.on_one_device(run))
    monkeypatch.setattr(block, "rotate", lambda x, rope: right(x, rope) * jnp.float32(1 + 1e-3))
    wrong = parity.compile_run(run)
    params = parity.draw_parameters(plain.made, number)
    with pytest.raises(AssertionError):
        parity.check_leaves(*(parity.train(case, params, 1)[-1] for case in (wrong, plain)), parity.FLOAT32)
