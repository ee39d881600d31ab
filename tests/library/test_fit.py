"""`mt.fit`: any dialect on any layout trains like one device, resumes, and refuses what it cannot train."""
import functools
import json
import os
import signal
import tomllib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from meshtrain import config
from meshtrain.inspection import measured
from meshtrain.journal.guards import TooManySkippedSteps
from meshtrain.library.fit import fit
from meshtrain.library.layouts import Layout

MESHES = {"ddp": {"data": 8}, "zero1": {"data": 4, "fsdp": 2}, "zero3": {"fsdp": 8}, "zero3 with tensor": {"fsdp": 4, "tensor": 2}}
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def layout_of(name: str) -> Layout:
    return Layout(name.split()[0], MESHES[name])


def train(dialect: str, layout: Layout, steps: int = 5, **options):
    parts, loss = toys.BUILD[dialect](layout)
    return fit(loss, parts.params, parts.axes, layout=layout, optimizer=TX, data=toys.rows, steps=steps, **options)


@functools.cache
def on_one_device(dialect: str):
    return train("dict" if dialect == "stack" else dialect, Layout("ddp"))


def losses(*runs) -> list[float]:
    return [row["loss"] for run in runs for row in run.history]


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("dialect", toys.BUILD)
def test_five_steps_have_the_losses_of_one_device(dialect, name):
    run = train(dialect, layout_of(name), microbatches=2)
    # float32 sums in another order, through five updates
    np.testing.assert_allclose(losses(run), losses(on_one_device(dialect)), rtol=2e-6)
    assert losses(run)[4] < losses(run)[0] - 0.3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), run.params, on_one_device(dialect).params)


def test_a_run_resumes_bit_for_bit_on_its_layout_and_up_to_sums_on_another(tmp_path, capsys):
    whole = train("dict", layout_of("zero1"), keys=False)
    first = train("dict", layout_of("zero1"), 3, dir=tmp_path, every=2)
    again = train("dict", layout_of("zero1"), 4, dir=tmp_path, every=2)
    assert losses(first, again) == losses(whole)[:4] and int(again.state.step) == 4
    other = train("dict", layout_of("zero3 with tensor"), 5, dir=tmp_path, microbatches=2)
    np.testing.assert_allclose(losses(other), losses(whole)[4:], rtol=1e-6)
    assert other.params["head"].sharding.spec == jax.P("fsdp", "tensor")
    assert losses(train("dict", layout_of("zero1"), 5, dir=tmp_path)) == [], "it is finished"
    told = capsys.readouterr().out
    assert 'from step 5 on: mesh="fsdp 4 × tensor 2" (was "data 4 × fsdp 2")' in told and "microbatches=2 (was 1)" in told

    report = measured.of(tmp_path)
    assert (report["step"], report["steps"], report["tokens"], report["state"]) == (5, 5, 5 * 32 * 8, "finished")
    assert report["rows"]["loss"] == losses(first, again, other) and len(report["starts"]) == 3
    assert {change["key"] for change in report["changes"]} == {"mesh", "rules", "microbatches"}
    assert tomllib.loads((tmp_path / "config.toml").read_text())["fit"]["rows"] == "x int32[32, 8], y int32[32, 8]"


def test_another_loss_is_told_and_other_arrays_are_refused(tmp_path, capsys):
    layout = Layout("ddp", {"data": 2})

    def one(p, rows):
        return jnp.sum((rows * p["w"]) ** 2), rows.size

    def other(p, rows):
        return jnp.sum((rows * p["w"]) ** 4), rows.size
    run = functools.partial(fit, layout=layout, optimizer=optax.sgd(0.1), data=lambda n: np.ones(4, np.float32), dir=tmp_path)
    run(one, {"w": np.ones(1)}, {}, steps=1)
    run(other, {"w": np.ones(1)}, {}, steps=2)
    assert "from step 2 on: loss=" in capsys.readouterr().out
    assert [json.loads(line)["key"] for line in (tmp_path / "changes.jsonl").read_text().splitlines()] == ["loss"]
    assert len(run(other, {"w": np.ones(1)}, {}, steps=2).history) == 0
    assert "has taken 2 steps already, and steps=2, so no step is taken" in capsys.readouterr().out
    with pytest.raises(config.ConfigError, match="params/w: float32.1. in the checkpoint, float32.2. in this run"):
        run(other, {"w": np.ones(2)}, {}, steps=3)


def test_a_step_that_is_not_finite_changes_only_the_count_and_ten_in_a_row_end_the_run():
    def train_with(bad, steps):
        return fit(lambda p, rows: (jnp.sum((rows * p["w"] - 1) ** 2), rows.size), {"w": np.zeros(1)}, {},
                   layout=Layout("ddp", {"data": 2}), optimizer=optax.adam(0.1), steps=steps,
                   data=lambda n: np.full(4, np.nan if n in bad else 1, np.float32))
    run = train_with({1, 2}, 4)
    assert [row["skipped"] for row in run.history] == [False, True, True, False] and int(run.state.step) == 4
    assert run.params["w"] == train_with({}, 2).params["w"]
    with pytest.raises(TooManySkippedSteps, match="Lower the learning rate, clip gradients"):
        train_with(set(range(20)), 20)


def test_a_last_step_that_is_not_finite_returns_its_run():
    run = fit(lambda p, rows: (jnp.sum(rows * p["w"]), rows.size), {"w": np.ones(1)}, {}, layout=Layout("ddp", {"data": 2}),
              optimizer=optax.sgd(0.1), steps=2, data=lambda n: np.full(4, (1, np.nan)[n], np.float32))
    assert [row["skipped"] for row in run.history] == [False, True] and "loss nan" in str(run.history)


OPTIMIZERS = {"adafactor": optax.adafactor(1e-2), "factored": optax.adafactor(1e-2, min_dim_size_to_factor=3),
              "plateau": optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
              "steps": optax.MultiSteps(optax.chain(optax.sgd(1e-2), optax.contrib.reduce_on_plateau()), 2),
              "adam": optax.adam(1e-2), "momentum": optax.sgd(1e-2, momentum=0.9)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_optax_update_shards_as_one_device(name, dtype):
    """Also those whose state depends on sizes, those that read the value, and weights narrower than their gradients."""
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((6, 10)), "h": rng.standard_normal((6, 10, 5)), "b": np.ones(5)}
    params = jax.tree.map(lambda w: (0.1 * w).astype(dtype), params)
    axes = {"w": ("embed", "mlp"), "h": ("heads", "embed", None), "b": (None,)}

    def loss(p, rows):
        return jnp.sum((jnp.einsum("bd,hde->be", rows @ p["w"], p["h"]) + p["b"]) ** 2), rows.shape[0]
    sharded, alone = (fit(loss, params, axes, layout=layout, optimizer=OPTIMIZERS[name], steps=3, data=lambda n: np.random
                          .default_rng(n).standard_normal((4, 6), np.float32)) for layout in (
        Layout("zero3", {"fsdp": 2}), Layout("ddp")))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(sharded.params)} == {dtype}
    # bfloat16: one rounding of the weights or moments
    off = 1e-5 if dtype == "float32" else 2e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=off, atol=off), sharded.params,
                 alone.params)


def test_a_stop_request_saves_the_step_and_ends_the_process_by_its_code(tmp_path):
    def train_to(steps, stopping):
        def data(n):
            if stopping and n == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return np.ones(4, np.float32)
        return fit(lambda p, rows: (jnp.sum((rows * p["w"] - 1) ** 2), rows.size), {"w": np.zeros(1)}, {}, data=data,
                   layout=Layout("ddp", {"data": 2}), optimizer=optax.sgd(0.1), steps=steps, dir=tmp_path)
    with pytest.raises(SystemExit) as ended:
        train_to(500, True)
    assert ended.value.code == 75
    step = measured.of(tmp_path)["step"]
    assert 3 <= step < 500 and train_to(step + 1, False).history[0]["step"] == step + 1


def test_dropout_has_the_same_keys_on_every_layout_and_others_in_every_step():
    def drop(p, rows, keys):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(keys)
        return jnp.sum(kept * rows * p["w"]), rows.shape[0]

    def run(layout, seed=0):
        return losses(fit(drop, {"w": np.ones(1)}, {}, layout=layout, optimizer=optax.sgd(0.0), steps=3, keys=True,
                          data=lambda n: np.ones((16, 8), np.float32), seed=seed))
    one = run(Layout("ddp"))
    assert run(Layout("ddp", {"data": 4, "fsdp": 2})) == pytest.approx(one, rel=1e-6)
    assert len({*one, *run(Layout("ddp"), seed=1)}) >= 5


TABLE = "F0 F1 · B0 B1\n· F0 F1+B0 B1"


@pytest.mark.parametrize("rules, mesh, options", [
    ("ddp", dict(stage=2), dict(schedule="gpipe", microbatches=2)),
    *(pytest.param(*one, marks=pytest.mark.full) for one in (
        ("ddp", dict(stage=2, data=2), dict(schedule="1f1b", microbatches=4)),
        ("zero1", dict(stage=2, data=2, tensor=2), dict(schedule="zero_bubble", microbatches=4)),
        ("zero3", dict(stage=2, fsdp=2), dict(schedule=TABLE, microbatches=2)),
        ("ddp", dict(stage=2, context=2), dict(schedule="1f1b", microbatches=2)),
        ("hsdp_zero1", dict(stage=2, data=2, fsdp=2), dict(schedule="gpipe", microbatches=2))))])
def test_a_stack_trains_through_stages_like_one_device(rules, mesh, options):
    with warnings.catch_warnings(action="error", category=UserWarning):     # no work is repeated
        run = train("stack", Layout(rules, mesh), **options)
    np.testing.assert_allclose(losses(run), losses(on_one_device("stack")), rtol=2e-6)
    for found, wanted, stored in zip(*map(jax.tree.leaves, (run.params, on_one_device("stack").params, Layout(
            rules, mesh).shardings(run.params, toys.AXES))), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4)
        assert found.sharding.is_equivalent_to(stored, found.ndim)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", TABLE])
def test_a_run_through_stages_resumes_bit_for_bit_and_goes_on_without_them(schedule, tmp_path):
    staged, options = Layout("zero1", dict(stage=2, data=2)), dict(schedule=schedule, microbatches=2)
    whole = train("stack", staged, **options)
    first = train("stack", staged, 2, dir=tmp_path, **options)
    again = train("stack", staged, 4, dir=tmp_path, every=3, **options)
    assert losses(first, again) == losses(whole)[:4] and (tmp_path / "checkpoints" / "3").exists()
    told = tomllib.loads((tmp_path / "config.toml").read_text())["fit"]["schedule"]
    assert told.startswith("table ") if schedule == TABLE else told == schedule
    other = train("stack", Layout("zero3", dict(fsdp=4)), dir=tmp_path)
    np.testing.assert_allclose(losses(other), losses(whole)[4:], rtol=1e-6)
    report = measured.of(tmp_path)
    assert (report["step"], report["tokens"], report["rows"]["loss"]) == (5, 5 * 32 * 8, losses(first, again, other))
    assert {"mesh", "rules", "microbatches"} == {change["key"] for change in report["changes"]}


def test_stages_without_a_schedule_and_one_for_other_stages_or_microbatches_are_refused():
    for options, said in ((dict(), "mesh.stage=2 without a schedule; give schedule=, one of gpipe, 1f1b, "),
                          (dict(schedule=TABLE), "this schedule has microbatches=2, not 1"),
                          (dict(schedule="1f1b", microbatches=3), "32 rows do not divide over 3 microbatches"),
                          (dict(schedule="interleaved", chunks=2, microbatches=2), "2 layers do not divide over 2 stages × 2")):
        with pytest.raises(ValueError, match=said):
            train("stack", Layout("ddp", dict(stage=2)), **options)


def classify(layout: Layout, split_first: bool):
    """(params, axes, loss): tokens are averaged, so nothing but the first matmul can be split over context."""
    def loss(p, rows):
        h = p["table"][rows["x"]]
        h = h @ p["up"] if split_first else h.mean(1) @ p["up"]
        scores = (h.mean(1) if split_first else h) @ p["out"]
        return jnp.sum(scores ** 2), rows["x"].shape[0]
    axes = {"table": ("vocab", "embed"), "up": ("embed", "mlp"), "out": ("mlp", None)}
    return {"table": np.ones((64, 32), np.float32), "up": np.ones((32, 64), np.float32), "out": np.ones((64, 4), np.float32)}, axes, loss


def test_an_axis_that_divides_no_matmul_is_refused_and_one_that_divides_only_some_is_told():
    def run(split_first):
        layout = Layout("ddp", dict(data=2, context=2))
        params, axes, loss = classify(layout, split_first)
        return fit(loss, params, axes, layout=layout, optimizer=optax.sgd(1e-6), data=toys.rows, steps=1)
    with pytest.raises(config.ConfigError, match=r"test_fit.py:\d+ 2 times: context does not split them, and those of "
                                                 r"1 more line; constrain .*repeat every matmul"):
        run(False)
    with pytest.warns(UserWarning, match=r"fit on Layout.ddp, data 2 × context 2.: the devices compute the matmuls of "
                                         r".*test_fit.py:\d+ 2 times: context does not split them; constrain") as told:
        assert len(run(True).history) == 1
    assert ["fit on" in str(one.message) for one in told].count(True) == 1


ROWS = np.ones(4, np.float32)
MISTAKES = {
    "an option": (dict(microbatch=2), "fit has no option 'microbatch' .did you mean 'microbatches'"),
    "no layout": (dict(layout="zero3"), "layout='zero3' is no layout; give e.g. mt.Layout"),
    "no optimizer": (dict(optimizer=optax.adam), "optimizer=.* has no init and update"),
    "no loss": (dict(loss=None), "loss=None is not a function"),
    "a dtype": (dict(compute="bf16"), "compute='bf16' is not a floating dtype"),
    "a seed": (dict(seed=1.5), "seed=1.5 is not a whole number of at least 0"),
    "a large seed": (dict(seed=2**32), "seed=4294967296 is not below 2..32"),
    "an empty dir": (dict(dir=""), "dir='' is not a path"),
    "zero rows": (dict(data=lambda n: np.ones(0, np.float32)), "data.0. has no rows"),
    "an array that no checkpoint holds": (dict(dir="never", params={"w": np.ones(1), "z": np.ones(0)}, optimizer=optax.noisy_sgd(
        0.1, key=0)), "params/z, which has no elements .*\n.*rng_key, which has the dtype key<fry> and cannot be saved"),
    "no microbatches": (dict(microbatches=0), "microbatches=0 is not a whole number of at least 1"),
    "every without dir": (dict(every=5), "every=5: without dir nothing is saved"),
    "a list of rows": (dict(data=[ROWS]), "is not a function; give data.n."),
    "rows of other forms": (dict(data=lambda n: np.ones(4 + n, np.float32)), r"data.1. has .*float32.5., and data.0. had .*float32.4."),
    "no rows": (dict(data=lambda n: {}), "data.0. has no arrays"),
    "rows that do not divide": (dict(data=lambda n: np.ones(5, np.float32)), "batch=5 does not divide over data 2"),
    "rows and microbatches": (dict(microbatches=4), "4 rows do not divide over 4 microbatches × data 2"),
    "a mean": (dict(loss=lambda p, rows: jnp.mean(rows * p["w"])), "return two scalars .sum, count."),
    "integers": (dict(params={"w": np.ones(1, np.int32)}), "params: w has dtype int32 and cannot be trained"),
    "stages": (dict(layout=Layout("ddp", {"stage": 2, "data": 2}), params={"w": np.ones((2, 2))}, axes={"w": ("layers", "mlp")}),
               "mesh.stage=2: a loss as one function has no layers .* give an mt.Stack, or use mesh.stage=1"),
    "a schedule without stages": (dict(schedule="1f1b"), "schedule='1f1b', but mesh.stage=1: .*leave schedule out"),
    "chunks without stages": (dict(chunks=2), "chunks=2, but mesh.stage=1"),
    "no chunks": (dict(chunks=-1), "chunks=-1 is not a whole number of at least 1"),
    "a bucket": (dict(dir="s3://bucket/run"), "dir=s3://bucket/run is not a directory of this host"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(mistake):
    changed, said = MISTAKES[mistake]
    given = dict(loss=lambda p, rows: (jnp.sum(rows * p["w"]), rows.size), params={"w": np.ones(1)}, axes={},
                 layout=Layout("ddp", {"data": 2}), optimizer=optax.sgd(0.1), data=lambda n: ROWS, steps=2) | changed
    with pytest.raises(ValueError, match=said):
        fit(given.pop("loss"), given.pop("params"), given.pop("axes"), **given)


def test_the_directory_of_another_run_is_refused(tmp_path):
    (tmp_path / "config.toml").write_text("[run]\nname = 'a'\n")
    with pytest.raises(config.ConfigError, match="holds a run of python -m meshtrain.train"):
        train("dict", Layout("ddp"), dir=tmp_path)
    (tmp_path / "config.toml").write_bytes(b"\xff")
    with pytest.raises(config.ConfigError, match="config.toml cannot be read: .*; remove the file: it is written again"):
        train("dict", Layout("ddp"), dir=tmp_path)
    (tmp_path / "config.toml").rename(tmp_path / "notes.txt")
    with pytest.raises(config.ConfigError, match="^dir=.* has files but is not the directory of a run .*or another dir$"):
        train("dict", Layout("ddp"), dir=tmp_path)
