"""Programs that the suite keeps are those that it would compile."""
import os

import kept_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def place(tmp_path):
    with kept_programs.programs_in(str(tmp_path), jax_persistent_cache_min_compile_time_secs=0):
        yield tmp_path


def computed(*factors: float) -> list[np.ndarray]:
    """One call after another from one line: callers are in an entry's name."""
    return [np.asarray(jax.jit(lambda x: factor * x + jnp.sin(x))(np.ones(3, np.float32))) for factor in factors]


def entries(place) -> set[str]:
    return {path.name for path in place.glob("*-cache")}


def test_another_constant_is_another_entry_and_the_same_program_is_read(place):
    first, again = computed(2.0, 2.0)
    np.testing.assert_array_equal(again, first)
    assert len(entries(place)) == 1
    first, other = computed(2.0, 3.0)
    assert other[0] == pytest.approx(first[0] + 1) and len(entries(place)) == 3


@pytest.mark.parametrize("damage", [
    lambda whole: whole[:len(whole) // 2], lambda whole: b"", lambda whole: b"x" * len(whole)],
    ids=["half", "empty", "others"])
def test_a_damaged_entry_is_compiled_again(place, damage):
    """As a process leaves it that is killed while it writes, or another reads while it is written."""
    results = []
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        for _ in range(2):
            results += computed(2.0)
            for path in place.glob("*-cache"):
                path.write_bytes(damage(path.read_bytes()))
    np.testing.assert_array_equal(*results)


def test_the_oldest_entries_go_first(tmp_path):
    for age, name in enumerate("abc"):
        (tmp_path / f"{name}-cache").write_bytes(bytes(10))
        os.utime(tmp_path / f"{name}-cache", (age, age))
    kept_programs.trim(tmp_path, 20)
    assert entries(tmp_path) == {"b-cache", "c-cache"}
