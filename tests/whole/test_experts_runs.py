"""Runs with experts, by the commands: balanced, grown from a dense one, gone on with on another layout, refused."""
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import call, home, in_a_directory_of_its_own, tiny  # noqa: F401
from test_lora_runs import paths, ran, saved

from meshtrain import assembly, config, run_files
from meshtrain.commands import train
from meshtrain.checkpoint import adapters, init_from
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.run import bias_warmup, feeds

RULES = Path(__file__).resolve().parent.parent.parent / "sharding_rules"
EXPERTS = ("--model.num_experts", "4", "--experts.bias_rate", "0.01")


def rows(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(home, tiny, tmp_path_factory):
    """A dense run, and one with experts grown from it."""
    place = tmp_path_factory.mktemp("runs")
    of = lambda name: ("--run.dir", str(place / name))
    ran(*tiny, *of("dense"), "--training.steps", "2")
    ran(*tiny, *of("experts"), *EXPERTS, "--training.steps", "2", "--checkpoint.init_from", str(place / "dense"))
    return place


def test_experts_grown_from_a_dense_run_begin_where_it_ended(runs, tiny):
    dense, first = rows(runs / "dense"), rows(runs / "experts")
    assert first[0]["loss"] < dense[0]["loss"] and first[0]["skipped"] is False
    # The second step of the dense run was made with the weights before its last update, the first here with those
    # after.
    ran(*tiny, "--run.dir", "again", "--training.steps", "1", "--checkpoint.init_from", str(runs / "dense"))
    again = rows(Path("again"))[0]
    # weights of the chosen sum to 1: rounding alone
    assert first[0]["loss"] == pytest.approx(again["loss"], rel=1e-6)
    assert {"aux_loss", "expert_load_max", "expert_load_entropy"} <= set(first[0]) and "aux_loss" not in again
    for row in first:       # one layer
        assert row["expert_load_max_by_layer"] == pytest.approx([row["expert_load_max"]])
        assert row["expert_load_entropy_by_layer"] == pytest.approx([row["expert_load_entropy"]])
        assert 0 <= row["expert_load_min_by_layer"][0] <= 1 <= row["expert_load_max"]


def test_biases_move_by_their_rate_and_no_optimizer_touches_them(runs):
    biases = paths(saved(runs / "experts", 2)["params"])["layers/moe/bias"]
    assert np.isin(np.round(biases / 0.01, 3), (-2, -1, 0, 1, 2)).all() and biases.any()


def test_the_norm_of_the_gradient_has_no_counts(runs):
    tokens = 8 * 2      # sequences of a step, at least; every expert's count would be of that order
    assert all(row["grad_norm"] < tokens for row in rows(runs / "experts"))


def test_before_the_first_step_batches_move_the_biases_and_nothing_else(tiny, tmp_path):
    """By rate × error, as steps would; weights, optimizer, count of steps and data are those of a run without."""
    made = assembly.assemble(run_files.load([*tiny, *EXPERTS, "--experts.bias_rule", "error",
                                          "--optimizer.weight_decay", "0.5"]), jax.devices())
    corpus = sources.open_corpus(made.run.data, vocab_size=made.run.model.vocab_size, cache_dir=tmp_path)
    batches = packing.open_batches(made.run.data, corpus, made.run.run.seed)
    with jax.set_mesh(made.mesh):
        fresh, step = assembly.initialize(made), made.program.compile()
        load = lambda state: float(step(state, made.program.place(batches.batch(0)))[1]["expert_load_max"])
        feed = feeds.BatchFeed(made.run, made.program, batches, 0)
        once, often = (bias_warmup.balance(feed, step, assembly.initialize(made), passes,
                                           lambda: assembly.initialize(made)) for passes in (1, 30))
        feed.close()
        assert once.step == 0 and jax.tree.structure(once) == jax.tree.structure(fresh)
        same = lambda a, b: jax.tree.map(lambda a, b: bool((a == b).all()), a, b)
        assert [path for path, kept in paths(same(once.params, fresh.params)).items() if not kept] == [
            "layers/moe/bias"]
        assert all(jax.tree.leaves(same(once.opt_state, fresh.opt_state)))
        assert abs(np.asarray(once.params["layers"]["moe"]["bias"])).max() <= 0.01 * 3
        assert load(often) < min(load(fresh), 1.5)


def test_the_shares_of_a_balance_over_the_batch_are_saved_and_start_equal_where_there_are_none(tiny):
    def to(steps, directory, *words):
        return ran(*tiny, *EXPERTS, "--run.dir", directory, "--training.steps", str(steps), "--checkpoint.every", "1",
                   "--checkpoint.keep", "9", "--validation.batches", "1", *words).out
    batch = "--experts.balance=batch"
    to(3, "whole", batch)
    to(2, "stopped", batch)
    assert "shares of the experts" not in to(3, "stopped", batch)
    whole, stopped = paths(saved(Path("whole"), 3)), paths(saved(Path("stopped"), 3))
    assert whole["shares"].shape == (1, 4) and whole["shares"].sum() == pytest.approx(1, rel=1e-6)
    assert whole["shares"].std() > 0 and {name: leaf.tobytes() for name, leaf in whole.items()} == {
        name: leaf.tobytes() for name, leaf in stopped.items()}
    to(1, "changed")
    said = to(2, "changed", batch)
    assert "has no shares of the experts, so they start equal, and step 2 has no balance loss" in said
    assert 'from step 2 on: experts.balance="batch" (was "sequence")' in said
    assert "shares" not in paths(saved(Path("changed"), 1)) and "shares" in paths(saved(Path("changed"), 2))
    to(3, "changed")
    assert "shares" not in paths(saved(Path("changed"), 3))


@pytest.mark.long
def test_a_run_goes_on_with_its_experts_on_another_layout(runs, tiny, tmp_path):
    import shutil
    shutil.copytree(runs / "experts", tmp_path / "there")
    done = ran(*tiny, "--run.dir", str(tmp_path / "there"), *EXPERTS, "--training.steps",
               "3", "--mesh.data", "2", "--mesh.fsdp", "4",
               "--sharding.rules", str(RULES / "zero3_experts_fsdp.toml"))
    assert "resuming after step 2" in done.out and rows(tmp_path / "there")[-1]["step"] == 3


@pytest.mark.parametrize("words, said", [
    ("--model.experts_per_token 2", "the model has no experts (model.num_experts=0)"),
    ("--experts.bias_rate 0.1", "experts.bias_rate=0.1: the model has no experts"),
    ("--model.num_experts 4 --experts.bias_warmup 3", "experts.bias_warmup=3 needs experts.bias_rate > 0"),
    ("--model.num_experts 4 --experts.bias_rule error",
     'experts.bias_rule="error" needs experts.bias_rate > 0'),
    ("--model.num_experts 4 --model.router_groups [2]",
     "model.router_groups=[2] is not [number of groups, groups that a token may use]"),
    ("--model.num_experts 4 --experts.bias_warmup 3 --experts.bias_rate 0.1 --lora.rank 2",
     "lora.rank=2 freezes the routers' biases"),
    ("--model.num_experts 4 --experts.bias_warmup 3 --experts.bias_rate 0.1 --checkpoint.init_from x "
     "--checkpoint.init_optimizer true",
     "experts.bias_warmup=3 starts with a new optimizer state"),
    ("--model.num_experts 4 --model.experts_per_token 5",
     "model.experts_per_token=5 is more than model.num_experts=4; use at most 4"),
    ("--model.num_experts 4 --model.mlps d", "model.num_experts=4 has no effect, because no layer of model.mlps=\"d\" has experts"),
    ("--model.num_experts 6 --model.router_groups [4,2]",
     "model.router_groups=[4, 2]: 4 groups do not divide model.num_experts=6; use a divisor, e.g. 3"),
    ("--model.num_experts 8 --model.experts_per_token 6 --model.router_groups [4,2]", "raise the second number to at least 3")])
def test_contradictions_are_told_with_a_remedy(words, said):
    with pytest.raises(config.ConfigError, match=re.escape(said)):
        run_files.load(["configs/quickstart.toml", *words.split()])


@pytest.mark.parametrize("source, words, said", [
    ("dense", "--model.expert_mlp_dim 48", "model.expert_mlp_dim=48: experts start as copies of the dense MLPs"),
    ("dense", "--model.activation gelu", 'model.activation="gelu": experts start as copies of the dense MLPs')])
def test_runs_whose_mlps_cannot_become_experts_are_refused(runs, tiny, source, words, said):
    done = call(train.main, *tiny, "--run.dir", "wrong", *EXPERTS, *words.split(), "--checkpoint.init_from",
                str(runs / source),
                "--training.steps", "1")
    assert done.code == 2 and said in done.err


def test_a_dense_run_with_biases_in_its_mlps_is_refused(runs):
    """Experts have none, and would not compute what the MLPs did."""
    source = Checkpoints(DirectoryStore(runs / "dense" / "checkpoints"), read_only=True)
    saved = source.open(2)
    saved.metadata["run"]["model"]["mlp_bias"] = True
    with pytest.raises(ValueError, match="the MLPs of the dense run have biases"):
        init_from.upcycle(run_files.load(["configs/quickstart.toml", "--model.num_experts",
                                        "4", "--model.expert_mlp_dim", "64"]),
                           None, None, saved, {})


def test_parameters_of_another_run_that_this_one_lacks_are_named(runs, capsys):
    saved = Checkpoints(DirectoryStore(runs / "experts" / "checkpoints"), read_only=True).open(2)
    params = saved.param_shapes()
    adapters.warn_left_out(saved, params)
    assert not capsys.readouterr().out
    del params["layers"]["moe"]["bias"]
    adapters.warn_left_out(saved, params)
    assert "parameters that this model lacks; they are not loaded: layers/moe/bias" in capsys.readouterr().out
