"""metrics.jsonl: exact floats, null for what is not finite, and a resume that leaves no row twice."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.training import metrics


def test_rows_are_readable_while_the_run_goes_on(tmp_path):
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "loss": np.float32(0.1), "grad_norm": jnp.float32(2.5), "skipped": np.bool_(False), "mfu": None, "tokens": 2**40})
    assert metrics.read(writer.path) == [{"step": 1, "loss": float(np.float32(0.1)), "grad_norm": 2.5, "skipped": False, "mfu": None, "tokens": 2**40}]
    writer.write({"step": 2, "loss": float("nan"), "grad_norm": jnp.inf})
    assert metrics.read(writer.path)[1] == {"step": 2, "loss": None, "grad_norm": None}
    assert writer.path.read_text().count("\n") == 2
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_not_rounded(tmp_path_factory, value):
    writer = metrics.MetricsWriter(tmp_path_factory.mktemp("m") / "m.jsonl")
    writer.write({"step": 1, "loss": value})
    writer.truncate_after(1)
    assert metrics.read(writer.path) == [{"step": 1, "loss": value}]
    writer.close()


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo', '{"step": 5}', "\ufffd"])
def test_a_resume_drops_later_rows_and_a_torn_line(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (2, 4)) + torn)
    writer = metrics.MetricsWriter(path)
    writer.truncate_after(2)
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_fresh_start_empties_what_an_unsaved_run_left(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n')
    writer = metrics.MetricsWriter(tmp_path / "m.jsonl")
    writer.truncate_after(0)
    writer.close()
    assert metrics.read(writer.path) == []


def test_a_broken_line_inside_is_an_error(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        metrics.read(tmp_path / "m.jsonl")
