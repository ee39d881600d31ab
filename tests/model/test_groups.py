"""Groups of weights: each has the rate, the decay and the rule of the first row that matches it, on every layout."""
import copy
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import reference
import test_moments
from commands import call
from test_reference import Case, batch_of, moved

from meshtrain import assembly, config, design, run_files
from meshtrain.checkpoint import resume
from meshtrain.commands import check
from meshtrain.config import messages
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.training.state import State

GROUPS = {"role:head": {"rate": 0.2, "decay": 0.0}, "layers/mlp/*": {"rate": 2.0, "rule": "muon"},
          "*/query/*": {"rate": 0.5, "decay": 0.7}, "role:matrix": {"rate": 3.0}, "*norm*": {"decay": 0.4}}


def by_hand(path: tuple[str, ...]) -> tuple[float, float, str]:
    """(rate, decay, rule) that GROUPS give a weight, with a decay of 0.3 otherwise."""
    if path[0] == "head":
        return 0.2, 0.0, "adamw"
    if "mlp" in path:
        return 2.0, 0.3, "muon"
    if "query" in path:
        return 0.5, 0.7, "adamw"
    if path[-1] == "kernel":
        return 3.0, 0.3, "adamw"
    return 1.0, 0.4 if path[-1] == "scale" else 0.3, "adamw"


class GroupedReference(reference.Training):
    def _update(self, o, path, p, g, rate):
        factor, decay, rule = by_hand(path)
        rows = {"adamw": lambda: reference.adam(o, self.state[path], g, self.count),
                "muon": lambda: reference.muon(o, self.state[path], g, self.count, path)}
        exact = np.asarray(p, np.float64)
        return (exact - rate * factor * (rows[rule]() + decay * exact)).astype(p.dtype)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_updates_are_those_of_the_plain_formulas_with_a_rate_and_a_rule_for_each_weight(name):
    """With optimizer.name = "muon" a row that says "adamw" takes matrices away from it."""
    rows = GROUPS if name == "adamw" else {pattern: row | ({"rule": "adamw"} if pattern in (
        "*/query/*", "role:matrix") else {}) for pattern, row in GROUPS.items()}
    one = Case({}, dict(grad_clip=0.5), dict(name=name, weight_decay=0.3, schedule="linear", groups=rows))
    batches, params = [batch_of(step) for step in range(4)], one.params()
    got, rows = one.train(copy.deepcopy(params), batches)
    plain = GroupedReference(one.settings, params)
    plain.gradients = one.gradients
    with jax.default_matmul_precision("highest"):
        expected = [plain.step(batch) for batch in batches]
    rates = sum(row["learning_rate"] for row in expected)
    assert [row["learning_rate"] for row in rows] == pytest.approx([row["learning_rate"] for row in expected], rel=1e-6)
    # as `test_reference`: gradients agree to 1e-5, which small roots and Newton–Schulz magnify; rates are up to 3
    chex.assert_trees_all_close(moved(got, params), moved(plain.params, params), atol=3e-3 * rates)


def run_of(mesh: dict, groups: dict, rules: str = "zero3", optimizer: dict = {}, **sections) -> config.Run:
    given = dict(learning_rate=1e-2, moments_dtype="float32", groups=groups)
    return test_moments.run_of(mesh, rules, given | optimizer, **sections)


ADAPTED = {"*lora/b": {"rate": 16.0}, "layers/attention/*": {"decay": 0.0}}
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_mlp_dim=16)
LAYOUTS = {
    "rules and rates": (dict(fsdp=2, tensor=2), GROUPS, "zero3", {}),
    "stages": (dict(stage=2, data=2), GROUPS, "zero1", dict(training=dict(microbatches=2))),
    "adapters": (dict(fsdp=2, tensor=2), ADAPTED, "zero3", dict(lora=dict(rank=2, alpha=4.0))),
    "experts whose biases move": (dict(fsdp=2, data=2), {"layers/moe/*": {"rate": 0.5}}, "zero3", dict(
        model=EXPERTS, experts=dict(bias_rate=0.001))),
    "muP": (dict(fsdp=4), {"preset": "mup", "base": dict(
        vocab_size=259, embed_dim=16, num_layers=4, num_heads=2, head_dim=8, mlp_dim=24)}, "zero3", dict(
            optimizer=dict(name="muon"))),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_compute_what_one_device_does(name):
    mesh, groups, rules, sections = LAYOUTS[name]
    run = run_of(mesh, groups, rules, **sections)
    assert config.problems(run) == []
    parity.check(run)


@pytest.mark.full
def test_groups_and_moments_in_bfloat16_go_together():
    case = parity.compile_run(run_of(dict(fsdp=4), GROUPS, optimizer=dict(moments_dtype="bfloat16")))
    numbers, _, state = parity.train(case, parity.draw_parameters(case.made, 0))
    _, expected, _, _ = parity.one_device(parity.on_one_device(case.made.run).model_dump_json(), 0)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.shape not in ((), (3,))} == {"bfloat16"}
    np.testing.assert_allclose(numbers[:, 0], expected[:, 0], rtol=1e-3)


# ---- what is told and what is refused --------------------------------------------------------------------------------


SHAPE = dict(embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=128, vocab_size=512)


def make(*words: str) -> design.Design:
    one = [word for axis in config.AXES for word in (f"--mesh.{axis}", "1")]
    run = run_files.load(["--model.num_layers", "2", *one, "--mesh.simulated_devices", "0",
                          *(f"--model.{key}={n}" for key, n in SHAPE.items()), *words])
    return design.make(run, MeshSpec(config.mesh_sizes(run, 1), run.mesh.placement), "cpu", None)


def test_each_group_is_told_with_its_weights():
    made = make('--optimizer.groups={"role:embedding" = {rate = 10.0, decay = 0.0}, "layers/attention/*" = {rate = 0.5}, '
                '"role:matrix" = {rule = "muon"}}', "--optimizer.name=adamw")
    assert [note for note in made.notes if "groups" in note] == [
        'optimizer.groups, "role:embedding": 1 weight (embedding/table) with 32,768 parameters: rate × 10, decay 0, adamw',
        'optimizer.groups, "layers/attention/*": 4 weights (layers/attention/key/kernel, layers/attention/out/kernel, …) '
        'with 32,768 parameters: rate × 0.5, decay 0.1, adamw',
        'optimizer.groups, "role:matrix": 3 weights (layers/mlp/down/kernel, layers/mlp/gate/kernel, …) with 49,152 '
        'parameters: rate × 1, decay 0.1, muon',
        'optimizer.groups, others: 3 weights (final_norm/scale, layers/attention_norm/scale, …) with 320 parameters: '
        'rate × 1, decay 0, adamw',
        'optimizer.groups, others: 1 weight (head/kernel) with 32,768 parameters: rate × 1, decay 0.1, adamw']
    assert not [note for note in make().notes if "groups" in note]


@pytest.mark.parametrize("groups, told", [
    ('{"role:heads" = {rate = 2.0}}', 'optimizer.groups."role:heads": there is no role "heads"; use one of role:matrix'),
    ('{"layers/nope/*" = {rate = 2.0}}', '"layers/nope/*" matches no trained weight; the names are as in'),
    ('{"role:matrix" = {rate = 2.0}, "layers/mlp/*" = {}}', '"layers/mlp/*" matches no trained weight outside '
     "the earlier groups: layers/mlp/down/kernel is in one"),
    ('{"*" = {rule = "muon"}}', '"*".rule="muon" orthogonalizes matrices of layers, but embedding/table is of the role'),
    ('{"role:head" = {rate = 0}}', '"role:head".rate=0 freezes nothing: gradients, moments and weight decay remain'),
    ('{"role:head" = {rates = 2.0}}', 'did you mean optimizer.groups."role:head".rate?'),
    ('{"role:head" = {rate = -1.0}}', 'optimizer.groups."role:head".rate=-1.0 is out of range; use at least 0'),
    ('{"role:head" = 3}', 'optimizer.groups."role:head"=3 is not a table; write it as TOML, e.g. {rate = 0.5}'),
    ('{"role:head" = {rule = "lion"}}', '"role:head".rule="lion" is unknown; use "adamw" or "muon"'),
    ('{"role:head" = {decay = "x"}}', '"role:head".decay="x" is not a finite number'),
    ("5", 'optimizer.groups=5 is not a table; write it as TOML, e.g. {"role:head" = {rate = 0.2'),
    ('{"role:balance" = {rate = 2.0}}', "no optimizer moves the biases that balance experts; experts.bias_rate"),
    ('{preset = "mup"}', 'preset="mup" divides the learning rate by the width over that of a base model'),
    ('{base = "llama3-8b"}', "base has no effect without a preset"),
    ('{preset = "mup", base = "none.toml"}', 'optimizer.groups.base="none.toml": none.toml: there is no such run file'),
    ('{preset = "mup", base = 3}', "optimizer.groups.base=3 is not a model; use a preset"),
    ('{preset = "mup", base = {embed_dm = 3}}', "did you mean optimizer.groups.base.embed_dim?"),
    ('{preset = "mup", base = {embed_dim = 7, num_heads = 2}}', "optimizer.groups.base: model.embed_dim=7 cannot be split"),
    ('{preset = "mup", base = {mixers = "FX"}}', 'optimizer.groups.base: model.mixers="FX" uses the mixer X, which has no class'),
    ('{preset = "mup", base = {embed_dim = 32, num_heads = 2, head_dim = 16, mlps = "e", num_experts = 4}}',
     "the base has no layers/mlp/down/kernel; use a base with the same kinds of layers"),
    ('{preset = "mup", base = "llama3-8b"}', "model.head_dim=16 is not the base's 128, and scores have to fall with 1 / "
     "head_dim; use model.multipliers.score=0.707107"),
    ('{preset = "mup", base = {multipliers = {logits = 0.5}, head_dim = 16}}', "would lower its logits again; use the base's value")])
def test_a_mistake_is_one_message(groups, told):
    with pytest.raises(config.ConfigError) as error:
        make("--optimizer.name", "adamw", f"--optimizer.groups={groups}")
    assert len(error.value.messages) == 1 and told in str(error.value), error.value


@pytest.mark.parametrize("words, told", [
    (("--optimizer.name", "lion", '--optimizer.groups={"role:matrix" = {rule = "muon"}}'),
     'chooses between "adamw" and "muon", but optimizer.name="lion"'),
    (("--optimizer.name", "lion", '--optimizer.groups={preset = "mup", base = {}, "role:head" = {}}'), "preset"),
    (("--model.tie_embeddings", "true", '--optimizer.groups={preset = "mup", base = {num_layers = 2}}'),
     "one table is embedding and head"),
    (("--lora.rank", "2", '--optimizer.groups={preset = "mup", base = {num_layers = 2}}'), "lora.rank=2"),
    (("--lora.rank", "2", '--optimizer.groups={"role:head" = {rate = 2.0}}'), "matches no trained weight")])
def test_what_other_keys_exclude_is_refused(words, told):
    with pytest.raises(config.ConfigError) as error:
        make("--optimizer.name", "adamw", *words)
    assert told in str(error.value)


def test_check_ends_with_2_for_a_pattern_that_matches_nothing():
    ran = call(check.main, '--optimizer.groups={"layer/*" = {rate = 2.0}}', "--offline")
    assert ran.code == 2 and "matches no trained weight" in ran.out


def test_a_base_is_written_into_the_settings_and_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text("[model]\nembed_dim = 32\nnum_heads = 4\nhead_dim = 16\n")
    groups = '{preset = "mup", base = "small.toml", "role:embedding" = {rate = 2.0}}'
    run = run_files.load([f"--optimizer.groups={groups}"])
    assert run.optimizer.groups.base["embed_dim"] == 32 and "preset" not in run.optimizer.groups.base
    (tmp_path / "again.toml").write_text(config.dump(run))
    (tmp_path / "small.toml").unlink()
    assert run_files.load(["again.toml"]).optimizer == run.optimizer
    assert config.Run.model_validate_json(run.model_dump_json()).optimizer == run.optimizer
    assert messages.toml(run.optimizer.groups).endswith('"role:embedding" = {rate = 2.0}}')


def test_on_resume_rates_may_change_and_rules_may_not():
    rules = {"a*": {"rate": 2.0}, "b*": {"rule": "muon"}}
    assert resume._rules_of(rules) == resume._rules_of(json.loads(json.dumps(rules | {"a*": {"rate": 3.0}})))
    assert resume._rules_of(rules) != resume._rules_of({"b*": {"rule": "muon"}, "a*": {}})
    assert resume._rules_of({"a*": {}}) == resume._rules_of({"c*": {"rate": 2.0}}) == []


# ---- muP -------------------------------------------------------------------------------------------------------------


def change(width: int, name: str, groups: dict) -> tuple[float, float]:
    """How far four steps move the residual stream and the logits (root mean squares)."""
    run = run_of({}, groups, "ddp", dict(name=name, learning_rate=2e-2, schedule="constant", weight_decay=0.0, eps=1e-12),
                 model=dict(vocab_size=256, embed_dim=width, num_heads=width // 8, mlp_dim=4 * width, num_layers=3,
                            embedding_std=1.0, norm_eps=1e-6))
    made = assembly.assemble(run, jax.devices()[:1])
    state, batch = made.program.initialize(), parity.batch_of(run, 0)
    rows, ex = {key: jnp.asarray(x) for key, x in batch.items()}, made.program.step.ex

    @jax.jit
    def outputs(p):
        x_BTD = made.model.through_layers(ex, p, rows)
        y = x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD ** 2, -1, keepdims=True) + 1e-6)
        return x_BTD, y @ p["head"]["kernel"]
    before, step, placed = outputs(state.params), made.program.compile(), made.program.place(batch)
    for _ in range(4):
        state, _ = step(State(state.step, state.params, state.opt_state), placed)
    return tuple(float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in zip(outputs(state.params), before))


@pytest.mark.full
@pytest.mark.parametrize("name, apart", [("adamw", 2.5), ("muon", 1.5)])
def test_mup_moves_a_wide_model_as_far_as_a_narrow_one(name, apart):
    """The coordinate check of arXiv:2203.03466. apart: how much farther one rate moves the stream of four times the
    width."""
    base = dict(vocab_size=256, embed_dim=32, num_heads=4, head_dim=8, mlp_dim=128, num_layers=3)
    narrow = change(32, name, {})
    wide, scaled = (change(128, name, groups) for groups in ({}, {"preset": "mup", "base": base}))
    assert wide[0] > apart * narrow[0]
    assert scaled[0] == pytest.approx(narrow[0], rel=0.35) and scaled[1] == pytest.approx(narrow[1], rel=0.5)


def test_mup_divides_by_each_matrix_own_width():
    """An MLP whose ratio changes, too: m of its second matrix is that of its width, not that of the stream."""
    base = dict(vocab_size=259, embed_dim=16, num_layers=4, num_heads=4, head_dim=8, mlp_dim=12)
    run = run_of({}, {"preset": "mup", "base": base, "*/mlp/up/*": {"rate": 3.0}}, optimizer=dict(name="muon"))
    made = design.make(run, MeshSpec({}), "cpu", None)
    told = {note.split("(")[1].split(")")[0]: note.rpartition("rate × ")[2] for note in made.notes if "groups" in note}
    assert told["layers/mlp/down/kernel"].startswith("0.5, decay")          # 48 / 12, of muon: its root
    assert told["layers/mlp/up/kernel"].startswith("2.12132, decay")        # 3 · (32 / 16) ** -0.5
    assert told["head/kernel"].startswith("0.5, eps × 0.5, decay")
    assert told["embedding/table"].startswith("1, decay") and "0.707107" in "".join(told.values())
    assert told["layers/attention/out/kernel"].startswith("1, decay")       # 4 heads of 8 in both
