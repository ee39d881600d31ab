"""Faults planted in a copy of the package that `meshtrain.prove` must find, where they change a number.

Those with a name of tests/faults.toml are its entries, the others stand here. `settings` is the run whose layouts show
the fault; `seen` says by what: a cell, the GPU program, or nothing, with the reason.

    python tests/planted.py [--only NAME] [--smallest]      plants them one after another and prints a table
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import faults

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800
CELL, PROGRAM = "cell", "GPU program"
EXPERTS = ("configs/quickstart-experts.toml",)
LEADING = (*EXPERTS, "--model.mlps", "de*")
WINDOW_FIRST = (*EXPERTS, "--model.mixers", "WF*", "--model.window", "64")
DROPOUT = ("--model.residual_dropout", "0.2")
WINDOW = ("--model.window", "64")
RECURRENT = ("--model.mixers", "GF", "--model.num_layers", "4", "--model.linear",
             "{key_heads = 2, value_heads = 4, key_dim = 16, value_dim = 16}")
LATENT = ("--model.num_kv_heads", "4", "--model.latent", "{kv_dim = 64, rope_dim = 16, value_dim = 32}")
RL = ("configs/quickstart-rl.toml",)
MICROBATCHES = ("--training.microbatches", "2", "--model.compute_dtype", "bfloat16")


SEQUENCE_OVER_FSDP = ROOT / "tests/goldens/rules/sequence_over_fsdp.toml"


class Planted(NamedTuple):
    """kind: mask, scale, reduction, schedule or rule. seen: CELL, PROGRAM, or why it is not found."""
    name: str
    kind: str
    settings: tuple[str, ...] = ()
    seen: str = CELL
    place: str = ""
    old: str = ""
    new: str = ""

    @property
    def fault(self) -> faults.Fault:
        if not self.place:
            return next(fault for fault in faults.load() if fault.name == self.name)
        return faults.Fault(self.name, self.place, self.old, self.new, "")


CONTEXT, PIPELINE = "meshtrain/parallel/context", "meshtrain/parallel/pipeline"
TABLE = [
    # ---- masks
    Planted("ring_takes_the_wrong_half", "mask", (), CELL, f"{CONTEXT}/ring.py::forward.visit",
            "earlier = (i - t) % cp < i", "earlier = (i + t) % cp < i"),
    Planted("gather_takes_the_late_chunks_of_others", "mask"),
    Planted("early_chunks_see_those_at_the_end", "mask", WINDOW),
    Planted("a_chunk_too_few_is_within_the_window", "mask", WINDOW),
    Planted("the_last_run_has_no_predecessor", "mask", RECURRENT, CELL, f"{CONTEXT}/recurrence.py",
            "before.append(jnp.where(i == cp - 1, early, sent))", "before.append(sent)"),
    Planted("a_shard_of_rows_takes_its_neighbours_first", "mask", (), CELL, "meshtrain/model/layers.py::_own_rows",
            "ids_BT < table.shape[0]", "ids_BT <= table.shape[0]"),
    Planted("padding_of_the_vocabulary_by_shard", "mask", (), CELL, "meshtrain/model/loss.py::Chunks.__init__",
            "self.real_V = self.first + jnp.arange(V)", "self.real_V = jnp.arange(V)"),
    Planted("documents_see_those_before_them", "mask", (), "one device computes the same"),
    Planted("a_window_of_one_token_more", "mask", WINDOW, "one device computes the same"),
    # ---- scales
    Planted("mean_of_the_microbatches_means", "scale"),
    Planted("replicas_are_averaged", "scale", (), CELL, "meshtrain/training/reduction.py::reduce_deferred",
            "return place(add(g, (0,)))", "return place(add(g, (0,)) / g.shape[0])"),
    Planted("stages_divide_by_one_token_more", "scale", (), CELL, "meshtrain/training/pipelined.py::_functions.head",
            "total / normalizers.targets", "total / (normalizers.targets + 1)"),
    Planted("stages_weigh_the_balance_by_no_tokens", "scale", EXPERTS, CELL,
            "meshtrain/training/pipelined.py::_functions.layer", "with_balance_loss(y, stats, given.tokens)",
            "with_balance_loss(y, stats, 1)"),
    Planted("copies_of_keys_are_averaged", "scale", (), CELL, f"{CONTEXT}/ulysses.py::backward",
            ".sum(3)", ".mean(3)"),
    Planted("blocks_before_are_not_rescaled", "scale", (), "sequences of 16 tokens have one block"),
    # ---- reductions
    Planted("ring_gradients_do_not_come_home", "reduction"),
    Planted("ring_sends_gradients_of_the_late_chunk_to_the_early", "reduction"),
    Planted("two_partial_attentions_merged_by_the_larger", "reduction"),
    Planted("ulysses_deals_kv_heads_to_other_groups", "reduction"),
    Planted("sums_of_a_windowed_ring_stop_a_hop_from_home", "reduction", WINDOW),
    Planted("targets_of_other_shards_are_lost", "reduction", (), CELL, "meshtrain/model/loss.py::Chunks.take",
            "jax.lax.psum((jnp.exp(own - top) * total, hit), self.manual)",
            "(jax.lax.psum(jnp.exp(own - top) * total, self.manual), hit)"),
    Planted("gradients_of_latents_of_own_heads_alone", "reduction", LATENT, CELL,
            f"{CONTEXT}/latents.py::LatentMethod.backward.local",
            "tuple(psum(d, split_heads) for d in latents) if split_heads else latents", "latents"),
    Planted("convolutions_learn_from_own_tokens_alone", "reduction", RECURRENT, CELL,
            f"{CONTEXT}/recurrence.py::_convolve_backward.local", "tuple(psum(dw, over) for dw in dws) if over else dws",
            "dws"),
    Planted("stages_sum_no_shards_of_sequences", "reduction", (), CELL, "meshtrain/training/pipelined.py::build",
            'summed = step.deferred_axes + layout.mesh_axes("activations", "seq")', "summed = step.deferred_axes"),
    Planted("tokens_get_their_own_experts_alone", "reduction", EXPERTS, CELL,
            "meshtrain/parallel/experts/region.py::ManualRegion.combine", "psum(a, self.summed) if self.summed else a",
            "a"),
    Planted("expert_gradient_left_out_of_the_sum_over_other_tokens", "reduction", EXPERTS),
    Planted("expert_numbers_of_the_first_device_everywhere", "reduction", EXPERTS),
    Planted("expert_counts_of_one_device", "reduction", EXPERTS),
    Planted("expert_balance_of_a_shard_of_the_sequence", "reduction", EXPERTS),
    Planted("expert_rounds_forgotten_by_all_to_all", "reduction", EXPERTS),
    Planted("expert_rows_sent_back_in_every_round", "reduction", EXPERTS),
    Planted("gradients_are_reduced_in_bfloat16", "reduction", ("--sharding.rules", "sharding_rules/zero1.toml"), CELL,
            "meshtrain/training/reduction.py::reduce_deferred",
            "return place(add(g, (0,)))", "return place(add(g.astype(jnp.bfloat16), (0,)))"),
    # ---- schedules
    Planted("masked_backwards_add_their_gradients", "schedule"),
    Planted("the_first_stages_weight_gradient_takes_an_old_cotangent", "schedule"),
    Planted("a_masked_loss_overwrites_what_has_arrived", "schedule"),
    Planted("layers_of_a_stage_are_numbered_from_zero", "schedule", DROPOUT),
    Planted("backward_begins_a_tick_early", "schedule"),
    Planted("chunks_go_back_in_their_order", "schedule", (), CELL, f"{PIPELINE}/schedules.py::_ops",
            "(i, v - 1 - chunk) for i, chunk in forward", "(i, chunk) for i, chunk in forward"),
    Planted("leading_layers_of_the_last_round_count_twice", "schedule", LEADING),
    Planted("the_cotangent_of_another_stages_microbatch_for_leading_layers", "schedule", LEADING),
    Planted("leading_layers_have_no_balance_loss", "schedule", WINDOW_FIRST),
    Planted("layers_of_stages_are_numbered_without_those_before_them", "schedule", (*LEADING, *DROPOUT)),
    Planted("what_layers_kept_before_is_left_in_place", "schedule"),
    # ---- rules
    Planted("whole_accumulators", "rule", ("--sharding.rules", "sharding_rules/zero2.toml", *MICROBATCHES), PROGRAM,
            "meshtrain/training/reduction.py::accumulate.constrain", 'layout.constrain("grads", g, axes)',
            "jax.lax.with_sharding_constraint(g, P())"),
    Planted("optimizer_states_lie_like_parameters", "rule", (), "no number changes: the states need more memory"),
    Planted("placement_is_read_backwards", "rule", (), "no number changes: other devices are neighbours"),
    # Without the refusal each device of a stage takes its shard for a whole sequence.
    Planted("any_axis_splits_sequences", "rule", ("--sharding.rules", str(SEQUENCE_OVER_FSDP), "--mesh.tensor", "1")),
    Planted("the_last_microbatch_with_a_target_is_not_computed", "scale", RL),
]

# Shrunk to the smallest run file.
SHRUNK = ("early_chunks_see_those_at_the_end", "replicas_are_averaged", "stages_weigh_the_balance_by_no_tokens",
          "ring_gradients_do_not_come_home", "layers_of_a_stage_are_numbered_from_zero",
          "leading_layers_have_no_balance_loss", "any_axis_splits_sequences")

# Runs in the copy: the layouts in their order up to the first that differs, and what else is found.
PROVE = """
import json, sys
from meshtrain import devices, parity, run_files
from meshtrain.parity import program, proof, shrink, smallest
words, reads, smaller = json.loads(sys.argv[1]), sys.argv[2] == "reads", sys.argv[3] == "smaller"
run = run_files.load(words)
found = devices.start(run.replace(mesh={"simulated_devices": 8}), cheaply=True)
small, _ = shrink.shrunk(run, 8)
cells, wrong, keys = proof.layouts(small, (), 8), None, None
for number, cell in enumerate([] if reads else cells, 1):
    result = proof.compare_cell(cell, found)
    if result.differs:
        wrong = {"number": number, "of": len(cells), "title": result.title, "wrong": result.wrong[:3]}
        break
if wrong and smaller:
    least = smallest.of(result, found)
    keys = {"keys": len(least.keys), "text": least.text, "compared": least.compared}
print(json.dumps({"cell": wrong, "program": program.of_run(run)[0] if reads else [], "cells": len(cells),
                  "smallest": keys}))
"""


def plant(one: Planted, smaller: bool = False) -> dict:
    """What `PROVE` prints in a copy of the tree with the fault, and seconds."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-planted-") as place:
        copy = Path(place)
        for name in ("meshtrain", "configs", "sharding_rules"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / one.fault.file
        text, count = one.fault.planted(target.read_text())
        assert count == 1, f"{one.name}: the old text stands {count} times at its place"
        target.write_text(text)
        start = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
            "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
        done = subprocess.run(
            [sys.executable, "-c", PROVE, json.dumps(one.settings), "reads" if one.seen == PROGRAM else "",
             "smaller" if smaller else ""],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            return {"error": done.stderr[-600:], "seconds": time.monotonic() - start}
        return json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.monotonic() - start}


def found(one: Planted, said: dict) -> bool:
    return bool(said.get("program") if one.seen == PROGRAM else said.get("cell"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="name of an entry; may be given again")
    parser.add_argument("--smallest", action="store_true", help="shrink what is found to the smallest run file")
    args = parser.parse_args()
    for one in TABLE:
        if args.only and one.name not in args.only:
            continue
        said = plant(one, args.smallest)
        print(json.dumps({"name": one.name, "kind": one.kind, "expected": one.seen, "found": found(one, said)} | said),
              flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
