"""Where a run goes on from, and what may have changed since: content counts, not spelling; nothing is lost on the way
back."""
import errno
import json
import os
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import config, files, run_files
from meshtrain.checkpoint import checkpoint, resume
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.saved import Saved
from meshtrain.config import ConfigError
from meshtrain.data.documents import tokenizer
from meshtrain.journal import rows
from meshtrain.journal.rows import MetricRows
from meshtrain.run import rundir
from checkpoints import flip
import documents
from corpora import open_source

ROOT = Path(__file__).resolve().parent.parent.parent
TEXTS = {"a.txt": b"the cat sat on the mat. " * 60, "b.txt": bytes(range(97, 123)) * 50}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run_in(directory, *more):
    return run_files.load(["--run.dir", str(directory), "--data.seq_len", "32", "--data.global_batch",
                        "16", *map(str, more)])


DATA = {"fingerprint": "f", "tokenizer": ["bytes", 256], "position": {}}


def saved(directory, run, *steps, data=DATA):
    """Checkpoints as a run would leave them."""
    with checkpoint.Checkpoints(DirectoryStore(directory / "checkpoints")) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"w": jnp.ones(3)}, rundir.metadata(run, "# rules", data))
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, max(steps) + 3))
    (directory / "metrics.jsonl").write_text(rows)


def found(directory, *more) -> resume.Start:
    return resume.find(run_in(directory, *more), checkpoint.Checkpoints(DirectoryStore(directory / "checkpoints")))


@pytest.fixture
def two(tmp_path) -> Path:
    """run.dir with checkpoints of steps 2 and 4 and rows up to 6."""
    saved(tmp_path, run_in(tmp_path), 2, 4)
    return tmp_path


# ---- what may change -------------------------------------------------------------------------------------------------


def test_every_pattern_of_the_table_is_met_by_a_key_and_by_the_first_that_fits():
    keys = [f"{name}.{key}" for name, section in config.SECTIONS.items() for key in section.model_fields]
    for i, (pattern, meaning) in enumerate(resume.CHANGES):
        fits = [key for key in keys if next(j for j, (other, _) in enumerate(resume.CHANGES)
                                            if resume.fnmatch.fnmatchcase(key, other)) == i]
        assert fits, pattern
        assert {resume.rule(key) for key in fits} <= {meaning}


@pytest.mark.parametrize("key, value", [
    ("model.embed_dim", 512), ("model.tie_embeddings", "true"), ("model.norm_eps", 1e-3),
    ("model.param_dtype", "bfloat16"),
    ("optimizer.name", "lion"), ("optimizer.moments_dtype", "bfloat16"), ("run.seed", 7), ("data.validation_fraction", 0.5)])
def test_another_model_optimizer_seed_or_hold_out_is_refused(two, key, value):
    with pytest.raises(ConfigError,
                       match=f"{key}=.*{value}.*, but the run in .* has .*; on resume the .* must stay.*run.name"):
        found(two, f"--{key}", value)


def test_a_key_that_a_checkpoint_of_an_earlier_version_lacks_had_its_default(tmp_path):
    run = run_in(tmp_path, "--model.num_heads", 4, "--model.num_kv_heads", 4)
    for key, default, new in [
            ("model.tie_embeddings", False, True), ("model.num_kv_heads", 4, 2), ("lora.rank", 0, 2),
            ("optimizer.moments_dtype", "float32", "bfloat16"), ("training.grad_clip", 1.0, 0.5)]:
        section, name = key.split(".")
        sections = rundir.settings(run)
        sections[section] = {key: value for key, value in sections[section].items() if key != name} | {"since_removed": 1}
        then, changed = Saved(None, 2, {"run": sections}), run.replace(**{section: {name: new}})
        assert resume.changes_of(run, then, None) == ()
        if resume.rule(key) == resume.RECORDED:
            assert resume.changes_of(changed, then, None) == ((key, default, new),)
        else:
            with pytest.raises(ConfigError, match=f"{key}=.*, but the run in .* has {json.dumps(default)};"):
                resume.changes_of(changed, then, None)


@pytest.mark.parametrize("key, old, new", [
    ("optimizer.learning_rate", 3e-4, 1e-4), ("optimizer.b2", 0.95, 0.99), ("optimizer.schedule", "cosine", "linear"),
    ("optimizer.warmup_steps", 0, 5), ("data.seq_len", 32, 64), ("data.global_batch", 16, 32),
    ("training.steps", 100, 200),
    ("training.microbatches", 1, 2), ("training.remat", "none", "full"), ("training.z_loss", 0.0, 1e-4),
    ("mesh.fsdp", 1, 2),
    ("training.grad_clip", 1.0, 0.5), ("model.compute_dtype", "float32", "bfloat16"), ("pipeline.chunks", 1, 2),
    ("model.matmul_dtype", "auto", "float8"), ("data.document_mask", True, "false"), ("data.eos", "", "<|end|>")])
def test_what_changes_numbers_may_change_and_is_recorded(tmp_path, key, old, new):
    saved(tmp_path, run_in(tmp_path, f"--{key}", json.dumps(old).strip('"')), 2)
    start = found(tmp_path, f"--{key}", new)
    want = new if new != "false" else False
    assert (start.step, start.changes) == (2, ((key, old, want),))


def test_of_groups_rates_and_order_may_change_and_rules_may_not(tmp_path):
    rows = {"role:head": {"rate": 2.0}, "head/*": {"rate": 3.0}}
    words = lambda rows: "{" + ", ".join(f'"{name}" = {{{key} = {json.dumps(value)}}}' for name, row in rows.items()
                                         for key, value in row.items()) + "}"
    saved(tmp_path, run_in(tmp_path, "--optimizer.groups", words(rows)), 2)
    assert found(tmp_path, "--optimizer.groups", words(rows)).changes == ()
    for new in (rows | {"role:head": {"rate": 4.0}}, dict(reversed(rows.items()))):
        (change,) = found(tmp_path, "--optimizer.groups", words(new)).changes
        assert change == ("optimizer.groups", rows, new) and list(change[2]) == list(new)
    with pytest.raises(ConfigError, match="optimizer.groups=.*muon.*on resume the .* must stay"):
        found(tmp_path, "--optimizer.groups", words(rows | {"role:matrix": {"rule": "muon"}}))


@pytest.mark.parametrize("more", [
    ("--run.name", "moved"), ("--metrics.every", 5), ("--checkpoint.every", 7), ("--validation.every", 1),
    ("--data.source", "text", "--data.paths", '["README.md"]'), ("--data.tokenizer", "elsewhere/tokenizer.json"),
    ("--distributed.timeout_s", 900), ("--data.cache", "elsewhere")])
def test_spelling_and_what_changes_no_number_may_change_unsaid(two, more):
    assert found(two, *more).changes == ()


RULES = '[params]\nembed = ["data", "fsdp"]\n'


@pytest.mark.parametrize(("key", "name", "before", "after", "told"), [
    ("sharding.rules", "sharding_rules/ddp.toml", RULES, RULES + '[grads]\nmlp = "tensor"\n', True),
    ("sharding.rules", "sharding_rules/ddp.toml", RULES, "# why\n\n" + RULES, False),
    ("rl.rules", "own.toml", RULES, RULES.replace(', "fsdp"', ""), True),
    ("rl.reward", "rewards.py:score", "1f4a score", "77b2 score", True),
    ("rl.reward", "rewards.py:score", "1f4a score", "1f4a other", True),
    ("rl.reward", "rewards.py:score", "1f4a score", "1f4a score", False)])
def test_a_file_that_changes_under_its_name_is_recorded(tmp_path, key, name, before, after, told):
    section, field = key.split(".")
    run = run_in(tmp_path).replace(**{section: {field: name}})
    with checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints")) as checkpoints:
        checkpoints.save(2, {"w": jnp.ones(3)}, rundir.metadata(run, before, DATA, {key: before}))
    start = resume.find(run, checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints")), named={key: after})
    assert [change[0] for change in start.changes] == [key] * told
    assert all(value.startswith(f"{name} (") for change in start.changes for value in change[1:])
    assert len({*start.changes[0][1:]}) == 2 if told else True


def test_a_file_of_another_name_with_the_same_content_is_no_change(tmp_path):
    saved(tmp_path, run_in(tmp_path), 2)
    here = checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints"))
    other = run_in(tmp_path, "--sharding.rules", "sharding_rules/ddp.toml")
    assert resume.find(other, here, named={"sharding.rules": "# rules of another spelling"}).changes == ()
    assert resume.find(other, here, named={"sharding.rules": RULES}).changes == (
        ("sharding.rules", "sharding_rules/zero3.toml", "sharding_rules/ddp.toml"),)


def test_code_of_ones_own_is_compared_by_its_content(tmp_path):
    here, there, home = tmp_path / "mine.py", tmp_path / "moved.py", tmp_path / "run"
    here.write_text("def f(up): return up\n")
    saved(home, run_in(home, "--model.activation", f"{here}:f"), 2)
    here.rename(there)
    assert found(home, "--model.activation", f"{there}:f").changes == ()
    there.write_text("def f(up): return 2 * up\n")
    with pytest.raises(ConfigError, match="model.activation="):     # another file of another name
        found(home, "--model.activation", f"{there}:f")
    there.rename(here)
    changes = found(home, "--model.activation", f"{here}:f").changes
    assert [key for key, *_ in changes] == ["run.code"] and all(len(lines) == 1 for lines in changes[0][1:])
    assert changes[0][1] != changes[0][2]


@pytest.mark.parametrize("line", ["", "no JSON", "[]", "{}", '{"step": 3, "key": "a"}', '{"step": "3", "key": "a", '
                                  '"from": 1, "to": 2}', "null", '{"torn'])
def test_a_line_of_the_changes_that_is_none_is_told_and_stays_and_forbids_nothing(two, line, capfd):
    path, change = two / "changes.jsonl", '{"step": 4, "key": "mesh.fsdp", "from": 1, "to": 2, "time": ""}\n'
    path.write_text(change + line + "\n" * (line != '{"torn'))
    for _ in range(2):
        run = run_in(two, "--optimizer.learning_rate", 1e-4)
        with checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")) as checkpoints:
            resume.begin(run, resume.find(run, checkpoints), checkpoints, None, "# rules")
    assert (f"{path}: this version cannot read 1 of its lines" in capfd.readouterr().err) == bool(line)
    lines = path.read_text().split("\n")
    assert lines[:2] == [change[:-1], line] and len(lines) == 4
    assert [row["key"] for row in rows.Log(path, rows.is_change)] == ["mesh.fsdp", "optimizer.learning_rate"]


@pytest.mark.parametrize(("was", "given", "stays"), [("<|end|>", "", "<|end|>"), ("", "", ""), ("<a>", "<b>", "<b>")])
def test_what_ended_documents_ends_them_where_the_run_file_names_nothing(tmp_path, was, given, stays):
    """Also of a run that began before data.eos followed the model folder."""
    run = run_in(tmp_path, f"--data.eos={given}")
    saved(tmp_path, run_in(tmp_path, f"--data.eos={was}"), 2)
    start = resume.find(run, checkpoint.Checkpoints(DirectoryStore(tmp_path / "checkpoints")))
    assert resume.in_force(run, start).data.eos == stays
    assert start.changes == ((("data.eos", was, given),) if given else ())


EXPERTS, LEARNED = "--model.num_experts=4", "--model.position=learned"


@pytest.mark.parametrize(("was", "now", "key", "remedy"), [
    ([EXPERTS, "--experts.bias_rate=0.1"], [EXPERTS], 'model.router_bias="none" (with experts.bias_rate=0), but the run',
     'set model.router_bias="choice"'),
    ([EXPERTS], [EXPERTS, "--experts.bias_rate=0.1"], "(with experts.bias_rate=0.1)", "use experts.bias_rate=0"),
    ([LEARNED], [LEARNED, "--data.seq_len=16"], "model.max_seq_len=16 (with data.seq_len=16)", "set model.max_seq_len=32"),
    ([LEARNED], [LEARNED, "--data.seq_len=48"], "(with data.seq_len=48)", "use at most data.seq_len=32"),
    ([LEARNED], [LEARNED, "--model.max_seq_len=48"], "model.max_seq_len=48, but", "change it back"),
])
def test_a_fixed_key_that_follows_from_another_is_told_with_that_key(tmp_path, was, now, key, remedy):
    saved(tmp_path, run_in(tmp_path, *was), 2)
    with pytest.raises(ConfigError) as refused:
        found(tmp_path, *now)
    (message,) = refused.value.messages
    assert key in message and remedy in message
    if remedy.startswith("set "):
        word = "--" + remedy.removeprefix("set ").replace('"', "")
        assert [name for name, *_ in found(tmp_path, *now, word).changes] in (["experts.bias_rate"], ["data.seq_len"])


def test_the_weights_of_a_mixture_may_change_and_its_paths_are_content(tmp_path):
    mixture = '[{{source="text", paths=["{}"], weight={}}}, {{source="stdlib", weight=1.0}}]'
    one = ("--data.source", "mixture", "--data.mixture", mixture.format("README.md", 2.0))
    saved(tmp_path, run_in(tmp_path, *one), 2)
    assert found(tmp_path, *one[:3], mixture.format("./README.md", 2.0)).changes == ()
    assert found(tmp_path, *one[:3], mixture.format("README.md", 3.0)).changes == (
        ("data.mixture", [2.0, 1.0], [3.0, 1.0]),)


def test_all_that_had_to_stay_is_told_together(two):
    with pytest.raises(ConfigError) as error:
        found(two, "--run.seed", 3, "--model.num_layers", 7, "--optimizer.b1", 0.5)
    assert len(error.value.messages) == 2 and "run.seed=3" in str(error.value) and "model.num_layers=7" in str(
        error.value)


# ---- content ---------------------------------------------------------------------------------------------------------


def test_the_tokenizer_and_the_documents_are_compared_by_their_content(two):
    run, start = run_in(two), found(two)
    resume.check_tokenizer(run, start, tokenizer.Bytes())
    with pytest.raises(ConfigError, match="data.tokenizer=.* has another content than the tokenizer of the run in"):
        resume.check_tokenizer(run, start, tokenizer.Ids(500, 3))
    resume.check_data(run, start, "f")
    with pytest.raises(ConfigError, match="the data differ from those that the run in .* read up to step 4"):
        resume.check_data(run, start, "another")
    for check, value in ((resume.check_tokenizer, tokenizer.Ids(500, 3)), (resume.check_data, "another")):
        check(run, resume.Start(), value)


def packed(tmp_path, **more):
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text)
    opened = open_source("text", [str(tmp_path / "*.txt")])
    settings = {"bos": 256, "seq_len": 16, "global_batch": 4, "seed": 3} | more
    return lambda position: documents.pack([opened], [1.0], position=position, **settings)


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def at(step, data, **more):
    return resume.Start(Saved(None, step,
                                         {"data": {"position": json.loads(json.dumps(data.position(step)))}}), **more)


def test_the_same_settings_find_the_same_batches(tmp_path):
    pack = packed(tmp_path)
    plain = pack(None)
    data = resume.position(at(5, plain), pack)
    assert all(same(data.batch(n), plain.batch(n)) for n in range(5, 20))


@pytest.mark.parametrize("before", [0, 5])
def test_skipped_batches_are_left_out_once_and_never_come_again(tmp_path, before):
    """From a fresh start and from a checkpoint; then a resume behind it, which keeps the offset."""
    pack = packed(tmp_path)
    plain = pack(None)
    start = at(before, plain, skip_batches=3) if before else resume.Start(skip_batches=3)
    data = resume.position(start, pack)
    tokens = lambda batch: {name: x for name, x in batch.items() if name != "sequence"}
    assert all(same(tokens(data.batch(n)), tokens(plain.batch(n + 3))) for n in range(before, 20))
    again = resume.position(at(before + 4, data), pack)
    assert all(same(again.batch(n), data.batch(n)) for n in range(before + 4, 20))


def test_another_batch_and_sequence_length_go_on_behind_the_last_token(tmp_path):
    plain = packed(tmp_path)(None)
    data = resume.position(at(5, plain), packed(tmp_path, seq_len=8, global_batch=2))
    assert data.position(5)["sources"][0]["tokens"] == plain.position(5)["sources"][0]["tokens"] == 5 * 64
    assert data.batch(5)["tokens"].shape == (2, 8) and data.position(6)["sources"][0]["tokens"] == 5 * 64 + 16


# ---- back to a step --------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_there_or_damaged_is_told_with_those_that_are(two):
    with pytest.raises(ConfigError,
                       match="checkpoint.step=3 is not saved: .* has steps 2, 4; give a saved step, or 0"):
        found(two, "--checkpoint.step", 3)
    (two / "checkpoints" / "2" / "metadata.json").write_text("{}")
    with pytest.raises(ConfigError,
                       match="checkpoint.step=2: .*/2 is damaged .metadata.json: 2 bytes, .*; name another"):
        found(two, "--checkpoint.step", 2)
    with pytest.raises(ConfigError, match="checkpoint.step=3 is not saved: .* has none"):
        found(two / "new", "--checkpoint.step", 3)
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["2", "4"], "looking changes nothing"


def test_the_same_command_goes_on_and_another_answer_goes_back_again(two):
    back = ("--checkpoint.step", 2, "--data.skip_batches", 3, "--optimizer.learning_rate", 1e-4)
    start = found(two, *back)
    assert (start.step, start.back, start.skip_batches) == (2, True, 3)
    with checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")) as checkpoints:
        resume.begin(run_in(two, *back), start, checkpoints, None, "# rules")
    start = found(two, *back)   # killed before its first checkpoint
    assert (start.step, start.back, start.skip_batches) == (2, False, 3)
    other = found(two, *back[:2], *back[4:5], 1e-5)
    assert not other.back and other.leaves_the_course, "what trackers have of the steps before is of another rate"
    assert not found(two, *back[:2]).leaves_the_course
    saved(two, run_in(two, *back), 3, 5)
    start = found(two, *back)
    assert (start.step, start.back, start.skip_batches, start.changes) == (5, False, 0, ())
    assert not start.leaves_the_course
    start = found(two, *back, "--training.steps", 300)
    assert (start.step, start.back) == (5, False), "a longer run is no other answer"
    start = found(two, *back[:4], "--optimizer.learning_rate", 5e-5)
    assert (start.step, start.back, start.skip_batches) == (2, True, 3)
    start = found(two, *back[:2], "--data.skip_batches", 9, *back[4:])
    assert (start.step, start.back, start.skip_batches) == (2, True, 9)
    settings = two / "config.toml"
    start = resume.find(run_files.load([str(settings)]), checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")))
    assert (start.step, start.skip_batches) == (5, 0), "the settings that were written are those in force"


@pytest.mark.parametrize("place, call", [(files, "replace"), (os, "truncate"), (rows, "set_aside_after")])
@pytest.mark.parametrize("code, raised", [(errno.ENOSPC, files.FileSystemError), (errno.ESTALE, files.FileSystemError),
                                          (errno.EACCES, ConfigError)])
def test_a_directory_that_cannot_be_written_before_the_first_step_is_one_message(
        two, monkeypatch, place, call, code, raised):
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    tries = []

    def refused(*_):
        tries.append(call)
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(place, call, refused)
    run = run_in(two, "--checkpoint.step", 2)
    with checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")) as checkpoints:
        with pytest.raises(raised, match=f"run.dir={two} cannot be written: {os.strerror(code)}; "):
            resume.begin(run, resume.find(run, checkpoints), checkpoints, None, "# rules")
    assert len(tries) == (2 if raised is files.FileSystemError else 1)
    assert [row["step"]
            for row in [*MetricRows(two / "metrics.jsonl")]] == list(range(1,
                                                                          7)), "nothing is dropped before all is written"


def test_the_way_back_loses_nothing_and_is_recorded_once(two, capfd):
    more = ("--checkpoint.step", 2, "--optimizer.learning_rate", 1e-4, "--data.skip_batches", 7)
    run = run_in(two, *more)
    for _ in range(2):      # the second: killed before its first checkpoint
        with checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")) as checkpoints:
            start = resume.find(run, checkpoints)
            resume.begin(run, start, checkpoints, None, "# rules")
    told = capfd.readouterr().out
    assert "back to step 2: later checkpoints are kept as 4.aside, later rows in metrics.aside.jsonl\n" in told
    assert "from step 3 on: optimizer.learning_rate=0.0001 (was 0.01)\n" in told
    assert "from step 3 on: data.skip_batches=7 (was 0)\n" in told
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["2", "4.aside"]
    assert [row["step"] for row in [*MetricRows(two / "metrics.aside.jsonl")]] == [3, 4, 5, 6]
    recorded = [json.loads(line) for line in (two / "changes.jsonl").read_text().splitlines()]
    assert [(row["step"], row["key"], row["from"], row["to"]) for row in recorded] == [
        (2, "optimizer.learning_rate", 0.01, 1e-4), (2, "data.skip_batches", 0, 7), (2, "checkpoint.step", None, 2)]
    settings = tomllib.loads((two / "config.toml").read_text())
    assert settings["optimizer"]["learning_rate"] == 1e-4 and settings["checkpoint"]["step"] == 0


def test_a_newest_checkpoint_that_cannot_be_read_is_no_obstacle_on_the_way_back(two, monkeypatch):
    monkeypatch.setattr(files, "PAUSES_S", (0.01,))
    real = checkpoint.files.checksums

    def stale(place, *args, **options):
        if place.name == "4":
            raise OSError(116, "Stale file handle")
        return real(place, *args, **options)
    monkeypatch.setattr(checkpoint.files, "checksums", stale)
    with pytest.raises(checkpoint.CheckpointError):
        found(two)
    assert found(two, "--checkpoint.step", 2).step == 2


@pytest.mark.parametrize("local_has, goes_on_from", [(3, 3), (1, 2)])
def test_behind_a_damaged_newest_one_the_fast_tier_is_asked_again(two, local_has, goes_on_from):
    class Local:
        def newest(self, after, wanted):
            return Saved(self, local_has, metadata) if local_has > after else None

    metadata = {"format": 3} | rundir.metadata(run_in(two), "# rules", DATA)
    flip(two / "checkpoints" / "4" / "metadata.json")
    local = Local()
    start = resume.find(run_in(two), checkpoint.Checkpoints(DirectoryStore(two / "checkpoints")), local)
    assert (start.step, start.is_of(local)) == (goes_on_from, goes_on_from == local_has)


# ---- from another run ------------------------------------------------------------------------------------------------


def test_a_new_run_takes_the_step_that_it_names_of_another(two, tmp_path):
    for step, want in ((0, 4), (2, 2)):
        run = run_in(tmp_path / "new", "--checkpoint.init_from", two, "--checkpoint.step", step)
        assert resume.source(two, step, "checkpoint.init_from").step == want
        assert resume.find(run, checkpoint.Checkpoints(DirectoryStore(tmp_path / "new" / "checkpoints"))).step == 0
    with pytest.raises(ConfigError, match="checkpoint.step=3 is not saved"):
        resume.source(two, 3, "checkpoint.init_from")
    saved(tmp_path / "new", run, 1)
    assert found(tmp_path / "new", "--checkpoint.init_from", two, "--checkpoint.step",
                 2).step == 1, "the new run goes on"
