"""Any legal rule file computes what one device computes, or is refused: files drawn line by line (`drawn_rules`).

Six in every run of the suite, others with every commit, and 400 of tier long. `python tests/drawn_rules.py 0 400` runs
those and tells what is refused, by reason.
"""
import random
from collections import Counter

import drawn_rules
import parity
import pytest
import sampling
from drawn_rules import MODELS, draw, outcome

from meshtrain import config, design
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.shipped import locate_shipped, names

SLOW = 400


def taken(rng: random.Random, count: int, directory) -> list[int]:
    """Numbers of draws that the program takes, of different models."""
    found: dict[str, int] = {}
    while len(found) < count:
        name, run = draw(number := rng.randrange(10**6), directory)
        try:
            parity.check_accepted(run)
            found.setdefault(name, number)
        except config.ConfigError:
            pass
    return list(found.values())


@pytest.mark.parametrize("number", range(6))
def test_a_drawn_rule_file_computes_what_one_device_does(number, tmp_path):
    number, = taken(sampling.generator(f"rules {number}"), 1, tmp_path)
    assert outcome(number, tmp_path) == ("equal", [])


@pytest.mark.long
@pytest.mark.parametrize("number", range(SLOW))
def test_a_drawn_rule_file_computes_what_one_device_does_or_is_refused(number, tmp_path):
    found, told = outcome(number, tmp_path)
    assert found in ("equal", "refused"), told


def test_at_least_half_of_the_drawn_files_run_and_every_refusal_names_value_and_remedy(tmp_path):
    found = Counter()
    for number in range(100):
        try:
            parity.check_accepted(draw(number, tmp_path)[1])
            found["taken"] += 1
        except config.ConfigError as error:
            found["refused"] += 1
            assert all(": " in message or ";" in message for message in error.messages), error.messages
    assert found["taken"] >= 50, found


def test_drawn_files_are_no_shipped_ones_and_use_every_line(tmp_path):
    shipped_files = [rules.load(locate_shipped(f"sharding_rules/{name}.toml")).tables for name in names("sharding_rules")]
    lines, alike = Counter(), 0
    for number in range(SLOW):
        text = drawn_rules.rule_file(random.Random(number), dict.fromkeys(AXES, 2))
        try:
            tables = rules.parse(text, str(locate_shipped("sharding_rules/drawn.toml"))).tables
        except ValueError:
            continue
        alike += tables in shipped_files
        lines.update((table, logical, axis) for table, entries in tables.items() for logical, axes in entries.items()
                     for axis in axes)
    assert alike < SLOW / 10
    usual = {(table, logical, axis) for table, logical, axis in lines if axis not in ("stage", "context")}
    assert len(usual) >= 100, len(usual)


SEQUENCES = {"batch over data": 'extends = "ddp"\n[activations]\nbatch = "data"\nseq = "fsdp"\n',
             "with the residual stream": 'extends = "ddp"\n[activations]\nbatch = "data"\nseq = "fsdp"\nresidual_seq = "fsdp"\n',
             "beside context": 'extends = "ddp"\n[activations]\nbatch = "data"\nseq = ["context", "fsdp"]\n',
             "over tensor": '[activations]\nbatch = ["data", "fsdp"]\nseq = "tensor"\n'}


@pytest.mark.parametrize("text", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("mesh", [dict(fsdp=2, tensor=2), dict(fsdp=2, tensor=2, stage=2), dict(fsdp=2, tensor=2, context=2)],
                         ids=["plain", "stages", "context"])
def test_only_context_splits_sequences(text, mesh, tmp_path):
    (tmp_path / "rules.toml").write_text(text)
    run = config.Run(mesh=mesh, sharding=dict(rules=str(tmp_path / "rules.toml")), model=MODELS["dense"]["model"],
                     data=dict(seq_len=24, global_batch=24), training=dict(microbatches=2))
    with pytest.raises(config.ConfigError) as refused:
        design.make(run, _spec(mesh), "cpu", None)
    (message,) = [message for message in refused.value.messages if "only context splits sequences" in message]
    assert 'write seq = "context" and give mesh.context these devices' in message


def _spec(mesh: dict):
    from meshtrain.sharding.mesh import MeshSpec
    return MeshSpec(mesh)
