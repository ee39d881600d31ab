"""Scopes that the model writes into a program are read again from its compiled text."""
import re

import jax
import jax.numpy as jnp
import pytest

from meshtrain import scopes


@pytest.mark.parametrize("scope", scopes.SCOPES, ids=lambda scope: scope.form)
def test_a_scope_is_parsed_as_it_was_written(scope):
    numbers = tuple(range(7, 7 + scope.form.count("{}")))
    name = scope.write(*numbers)
    assert scope.parse(f"jit(f)/transpose(jvp({name}))/while/body/mul") == numbers
    assert scope.parse_loop(f"jit(f)/{name}/while") == numbers and scope.parse_loop(f"jit(f)/{name}/while/body") is None
    assert scope.parse("jit(f)/while/body/mul") is None and scope.parse_loop("jit(f)/while") is None
    assert scopes.is_scope(name) and not scopes.is_scope(f"{name}_more")
    assert not any(other.parse(name) for other in scopes.SCOPES if other is not scope)


def test_the_innermost_scope_counts():
    assert scopes.TAKEN.parse("jit(f)/taken_1_of_4/while/body/taken_2_of_6/cond") == (2, 6)


def test_a_compiled_loop_has_the_scope_in_which_it_was_traced():
    def f(n, x):
        with jax.named_scope(scopes.AT_MOST.write(5)):
            return jax.lax.fori_loop(0, n, lambda _, x: x * x, x)
    text = jax.jit(f).lower(3, jnp.float32(2)).compile().as_text()
    names = re.findall(r" while\(.*op_name=\"([^\"]*)\"", text)
    assert [scopes.AT_MOST.parse_loop(name) for name in names] == [(5,)]
