"""Programs that the suite keeps are those that it would compile."""
import os
import types

import kept_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.cost.program import compile


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


# ---- programs for GPUs -----------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Stands for XLA: what it was given, in order. Its records are in tmp_path."""
    if compile.missing_wheels():
        pytest.skip(f"install the extra gpu-compile: no {compile.missing_wheels()}")
    given = []

    def compiled(lowered, options=None):
        given.append(lowered.as_text())
        number = len(given)
        return types.SimpleNamespace(
            number=number, as_text=lambda: f"HloModule number {number}", input_shardings=((ARGUMENTS["x"].sharding,), {}),
            memory_analysis=lambda: types.SimpleNamespace(temp_size_in_bytes=number))
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)
    with kept_programs.gpu_programs_in(tmp_path):
        yield given


def read_for_gpus(factor: float = 2.0, gpus: str = "h100:2", scope: str = "sums", options: dict | None = None,
                  what: str = "") -> int:
    """The number of the compilation whose text and sizes are read. what: something else that is read."""
    mesh = jax.sharding.Mesh(compile.topology(gpus), ("data",))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))

    def scaled(x):
        with jax.named_scope(scope):
            return jax.lax.fori_loop(0, 3, lambda i, x: x.at[i].add(factor), x)
    ARGUMENTS["x"] = x
    kept = jax.jit(scaled).lower(x).compile(options)
    if what:
        return getattr(kept, what)
    number = kept.memory_analysis().temp_size_in_bytes
    assert kept.as_text() == f"HloModule number {number}"
    assert kept.input_shardings[0][0].shard_shape(x.shape) == x.sharding.shard_shape(x.shape)
    return number


ARGUMENTS = {}      # what is compiled now


def test_a_program_for_gpus_is_compiled_once_and_read_from_another_line(compiler):
    assert read_for_gpus() == 1

    def by_another():
        return read_for_gpus()
    assert by_another() == 1 and len(compiler) == 1


def test_what_a_record_has_not_is_asked_of_the_compiled_program(compiler):
    read_for_gpus()
    assert read_for_gpus(what="number") == 2 == len(compiler)


def test_a_program_for_gpus_that_differs_is_never_read_from_a_record(compiler, monkeypatch):
    differing = [{}, dict(factor=3.0), dict(gpus="h100:4"), dict(gpus="a100-80gb:2"), dict(gpus="h200:2"),
                 dict(scope="products"), dict(options={"xla_gpu_autotune_level": 0})]
    numbers = [read_for_gpus(**one) for one in differing]
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_gpu_autotune_level=1")
    numbers.append(read_for_gpus())
    monkeypatch.setattr(kept_programs, "versions", lambda: {"jaxlib": "0.10.99"})
    numbers.append(read_for_gpus())
    assert numbers == list(range(1, len(differing) + 3))


@pytest.mark.parametrize("damage", [
    lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1]), lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(bytes(len(path.read_bytes())))], ids=["missing", "cut", "empty", "zeros"])
def test_a_record_that_is_missing_or_damaged_is_written_anew(compiler, tmp_path, damage):
    assert read_for_gpus() == 1
    (path,) = tmp_path.glob("*-cache")
    damage(path)
    assert read_for_gpus() == 2 and read_for_gpus() == 2 and list(tmp_path.iterdir()) == [path]
