"""Conversations in files: told apart by their keys, tokenized once with their masks, and learned as each would be by
itself."""
import json
import re

import conversations as drawn
import jax
import numpy as np
import pytest
from commands import ROOT, call
from corpora import Opened, fault, write_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain import assembly, config
from meshtrain.commands import train
from meshtrain.data import sources
from meshtrain.data.batches import packing
from meshtrain.data.documents import chat, conversations
from meshtrain.data.documents.chat import Conversation
from meshtrain.names import NO_TARGET

ASK, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "the cat sat"}


def lines(path, values) -> str:
    path.write_text("".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values))
    return str(path)


def chats(directory, values=None, name: str = "chatml", **keys) -> config.Data:
    """[data] of a file of conversations, with a tokenizer and the template `name` of conversations.py."""
    home = drawn.folder(directory, name)
    paths = [lines(directory / "chat.jsonl", values)] if values is not None else [str(directory / "chat.jsonl")]
    return config.Data(source="chat", paths=paths, tokenizer=str(home / "tokenizer.json"), bos_token="<s>",
                       **{"seq_len": 48, "global_batch": 4, "validation_fraction": 0.0, **keys})


def many(name: str = "chatml", count: int = 40) -> list[dict]:
    """Conversations in which something is to be learned."""
    given = [drawn.drawn(number)[1] for number in range(200)]
    return [{"messages": one} for one in given if any(m["role"] == "assistant" and m["content"].strip() for m in one)][
        :count]


def alone(data: config.Data, values) -> list[chat.Encoded]:
    """The ids and masks of each by itself."""
    template = sources.describe(data, vocab_size=1024).chats.template
    return chat.encode(template, [conversations.parse(value) for value in values])


def documents(batches) -> list[tuple[tuple, tuple]]:
    """(tokens, targets) of every segment of some batches."""
    found = []
    for batch in batches:
        for tokens, targets, segments in zip(batch["tokens"], batch["targets"], batch["segments"]):
            found += [(tuple(tokens[segments == k]), tuple(targets[segments == k]))
                      for k in range(1, segments.max() + 1)]
    return found


def learned(one: chat.Encoded) -> tuple[tuple, tuple]:
    """(tokens, targets) of a conversation by itself, as transformers takes labels: shifted by one, nothing behind the
    last."""
    return tuple(one.ids), (*np.where(one.mask[1:], one.ids[1:], NO_TARGET), NO_TARGET)


SAME = [
    {"messages": [ASK, ANSWER], "id": 3},
    {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "the cat sat"}]},
    {"conversations": [ASK, ANSWER], "system": ""},
    {"prompt": "why?", "completion": "the cat sat"},
    {"prompt": [ASK], "completion": [ANSWER]},
    {"messages": [{**ASK, "content": [{"type": "text", "text": "why"}, {"type": "text", "text": "?"}]},
                  {**ANSWER, "weight": 1}]},
]


def test_forms_are_told_apart_by_their_keys_and_mean_the_same():
    assert [conversations.parse(json.loads(json.dumps(value)))._replace(trained=[True, True]) for value in SAME] == \
        [Conversation([ASK, ANSWER], [True, True])] * len(SAME)


def test_what_is_given_is_not_learned():
    parse = conversations.parse
    assert parse({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]}).trained == [False, False, False, True]
    assert parse({"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER]}) == Conversation(
        [ASK, ANSWER] * 2, [True, False, True, True])
    asked = parse({"system": "be brief",
                   "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "x"}]})
    assert asked.messages[0] == {"role": "system", "content": "be brief"} and len(asked.trained) == 3
    both = parse({"conversations": [{"from": "human", "value": "asked", "content": "x"},
                                    {"from": "gpt", "value": "said", "content": None}]})
    assert both.messages == [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "said"}]
    called = parse({"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}],
                    "tools": [{"name": "f"}]})
    assert called.messages[1]["content"] == "" and called.tools == [{"name": "f"}]


# (line, what the one message must contain)
WRONG = [
    ("{", "broken JSON"), ("[1]", 'is not an object; write one a line, e.g. {"messages": […]}'),
    ({"text": "x"}, "is not a conversation (its keys: 'text'); give it messages, conversations, prompt and completion, "
     "or instruction and output"),
    ({"prompt": "x"}, "is not a conversation (its keys: 'prompt')"), ({}, "its keys: none"),
    ({"messages": []}, "has [] in 'messages', which is not a list of messages"),
    ({"messages": "hi"}, "has \"hi\" in 'messages', which is not a list of messages"),
    ({"messages": [ASK, "hi"]}, 'messages[1] is not a message: "hi"'),
    ({"messages": [ASK, {"role": "asistant", "content": "x"}]},
     "messages[1] has the role \"asistant\"; did you mean 'assistant'?"),
    ({"messages": [ASK, {"content": "x"}]}, "messages[1] has the role null"),
    ({"conversations": [{"from": "humam", "value": "x"}]},
     "conversations[0] has the from \"humam\"; did you mean 'human'?"),
    ({"messages": [ASK, {"role": "assistant", "content": None}]}, "messages[1] has null in 'content', which is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, 'messages[0] has [{"type": "image"}] in \'content\', which is not text'),
    ({"messages": [ASK]}, "has no answer of the assistant to learn"),
    ({"messages": [ASK, ANSWER | {"weight": 0}]}, "has no answer of the assistant to learn"),
    ({"messages": [ASK, ANSWER | {"weight": 2}]}, "message 1 (from 0) has weight=2"),
    ({"prompt": "a", "completion": 3}, "has 3 in 'completion', which is not a list of messages"),
    ({"messages": [ASK, ANSWER], "tools": "f"}, 'has tools that are not a list: "f"'),
    ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
     "a lone surrogate"),
    ({"messages": [{"role": "user", "content": "<|im_end|>"}, ANSWER]},
     "holds '<|im_end|>' in a message, which is a special token"),
]


texts = st.sampled_from(["user", "assistant", "human", "gpt", "text", "", "why?", "\ud800", "a" * 50])
keys = st.sampled_from(["messages", "conversations", "prompt", "completion", "system",
                        "tools", "role", "from", "content", "value", "weight",
                        "type", "text", "tool_calls"])
values = st.recursive(st.none() | st.booleans() | st.integers(-1, 2) | st.floats(allow_nan=False) | texts,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
                      max_leaves=12)
messages = st.lists(st.dictionaries(keys, values,
                                    max_size=3) | st.fixed_dictionaries({"role": texts, "content": texts | values}),
                                    max_size=3)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(keys, values, max_size=4) | st.fixed_dictionaries({"messages": messages}) |
       st.fixed_dictionaries({"prompt": texts | messages, "completion": texts | messages}), st.booleans())
def test_any_object_is_a_conversation_or_one_fault(line, learn_all):
    try:
        found = conversations.parse(json.loads(json.dumps(line)), learn_all)
    except ValueError as error:
        assert re.search("; |Known names", str(error)) and "\n" not in str(error) and len(str(error)) < 400
        return
    assert found.messages and len(found.trained) == len(found.messages)
    assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in found.messages)


@pytest.mark.parametrize("line, part", WRONG, ids=[part[:40] for _, part in WRONG])
def test_a_wrong_line_is_one_message_with_file_line_rule_and_remedy(line, part, tmp_path):
    message = fault(chats(tmp_path, [{"messages": [ASK, ANSWER]}, "", line, {"messages": [ASK]}]), tmp_path)
    assert f"{tmp_path / 'chat.jsonl'}, line 3: " in message and part in message


def test_a_template_that_refuses_or_does_not_end_is_told_with_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "LIMIT_S", 0.3)
    data = chats(tmp_path, [{"messages": [ASK, ANSWER]}, {"messages": [ASK, ANSWER, ASK, ANSWER]}])
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        "{% generation %}x{% endgeneration %}{% if messages | length > 2 %}{{ raise_exception('too many turns') }}{% "
        "endif %}")
    assert "chat.jsonl, line 2: the chat template refuses it: too many turns; " in fault(data, tmp_path)
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        "{% generation %}x{% endgeneration %}{% if messages | length > 2 %}{{ 9 ** (messages | length * 10 ** 9) }}{% "
        "endif %}")
    assert re.search("chat.jsonl, line 2: the chat template .* was stopped; ", fault(data, tmp_path))
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        "{% if not messages %}{% generation %}{% endgeneration %}{% endif %}x")
    assert "line 1: has no token to learn as the chat template writes it" in fault(data, tmp_path)


def test_a_line_of_a_later_batch_that_a_template_refuses_is_told_by_its_own_number(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "BATCH_LINES", 2)
    data = chats(tmp_path, [{"messages": [ASK, ANSWER]}] * 4 + [{"messages": [ASK, ANSWER, ASK, ANSWER]}])
    (tmp_path / "chatml" / "chat_template.jinja").write_text(
        "{% generation %}x{% endgeneration %}{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}")
    assert "chat.jsonl, line 5: the chat template refuses it: no; " in fault(data, tmp_path)


@pytest.mark.parametrize("name", drawn.TEMPLATES)
def test_conversations_of_a_run_are_those_by_themselves(name, tmp_path):
    values = many(name)
    data = chats(tmp_path, values, name, seq_len=2048, global_batch=1)
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    per_epoch = packed.train[0].tokens_per_epoch
    found = documents(packed.batch(n) for n in range(-(-per_epoch // 2048)))
    wanted = [learned(one) for one in alone(data, values)]
    assert len(wanted) == 40 and per_epoch == sum(len(ids) for ids, _ in wanted)
    whole = set(found) & set(wanted)      # those that no sequence's end cuts
    assert len(whole) >= len(set(wanted)) - 2 * -(-per_epoch // 2048)


def test_every_masked_target_of_an_epoch_comes_once_however_sequences_fall(tmp_path):
    values = many()
    data = chats(tmp_path, values, seq_len=7, global_batch=3)
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    rounds = 3 * 7      # whole epochs are a whole number of batches
    found = np.concatenate([packed.batch(n)["targets"].ravel() for n in range(packed.train[0].tokens_per_epoch)])
    wanted = np.concatenate([learned(one)[1] for one in alone(data, values)])
    size = max(found.max(), wanted.max()) + 2
    np.testing.assert_array_equal(np.bincount(found + 1, minlength=size),
                                  rounds * np.bincount(wanted + 1, minlength=size))


def test_whole_conversations_share_sequences_and_long_ones_lose_their_end(tmp_path):
    values = many(count=60)
    data = chats(tmp_path, values, seq_len=64, global_batch=4, packing="whole")
    packed = packing.open_batches(data, opened := Opened(data, tmp_path).corpus, seed=0)
    sequences = packed.train[0].num_sequences
    found = documents(packed.batch(n) for n in range(-(-sequences // 4)))
    by_itself = alone(data, values)
    wanted = [tuple(part[:64] for part in learned(one)) for one in by_itself]
    assert len(found) - 4 < len(wanted) <= len(found) and set(found) == set(wanted)
    long = [len(one.ids) - 64 for one in by_itself if len(one.ids) > 64]
    assert packing.notes(data,
                         opened) == [f'data.packing="whole": {len(long)} of 60 documents are longer than '
                                     f'data.seq_len=64 and are truncated; {sum(long):,} of their tokens are left out']
    (padded,) = packing.notes(data.model_copy(update={"seq_len": 8192}), opened)      # all 60 in one half-empty sequence
    share = sum(len(one.ids) for one in by_itself) / 8192
    assert f"sequences of data.seq_len=8192 are {share:.0%} full (estimated from the first 60 documents)" in padded


def test_held_out_conversations_are_whole(tmp_path):
    values = many(count=30)
    data = chats(tmp_path, values, seq_len=2048, global_batch=1, validation_fraction=0.001, packing="whole")
    held = documents([packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0).validation[0].batch(0)])
    assert len(held) == 1 and held[0] in [learned(one) for one in alone(data, values)]


def test_loss_on_all_learns_all_but_the_first_token(tmp_path):
    values = many()
    data = chats(tmp_path, values, seq_len=4096, global_batch=1, loss_on="all")
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    for tokens, targets in documents([packed.batch(0)])[1:-1]:
        assert targets == (*tokens[1:], NO_TARGET)


def test_chat_caches_are_found_again_and_are_others_for_another_template_or_loss(tmp_path):
    data = chats(tmp_path, many())
    assert Opened(data, tmp_path).built and not Opened(data, tmp_path).built
    assert not Opened(data, tmp_path, verify=True).built
    assert Opened(data.model_copy(update={"loss_on": "all"}), tmp_path).built
    path = tmp_path / "chatml" / "chat_template.jinja"
    path.write_text(path.read_text() + " ")
    assert Opened(data, tmp_path).built


def test_a_mask_beside_token_files_says_what_is_learned(tmp_path):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2, 3], [4, 5], [6]])
    np.save(tmp_path / "a.mask.npy", np.array([0, 1, 1, 1, 0, 1], bool))
    data = config.Data(source="tokens", paths=[str(path)], bos_token="0", eos="9", seq_len=3,
                       global_batch=1, validation_fraction=0)
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=1)
    batches = [packed.batch(n) for n in range(3)]
    pairs = sorted((int(a), int(b)) for batch in batches
                   for a, b in zip(batch["tokens"].ravel(), batch["targets"].ravel()))
    assert pairs == [(0, -1), (0, 4), (0, 6), (1, 2), (2, 3), (3, 9), (4, -1), (5, -1), (6, 9)]


@pytest.mark.parametrize("mask, part", [
    (np.ones(7, bool), "a.mask.npy has 7 entries, but a.tokens.npy has 6 ids"),
    (np.zeros(5, bool), "a.mask.npy has 5 entries, but a.tokens.npy has 6 ids"),
    (np.zeros(6, bool), "a.mask.npy is 0 everywhere"), (np.full(6, 2, np.uint8), "entry 0 (from 0) is 2"),
    (np.ones(6, np.int64), "int64 [6], but a mask is one dimension of uint8 or bool"),
])
def test_a_wrong_mask_is_told(mask, part, tmp_path):
    path = write_tokens(tmp_path / "a.tokens.npy", [[1, 2, 3], [4, 5], [6]])
    np.save(tmp_path / "a.mask.npy", mask)
    assert part in fault(config.Data(source="tokens", paths=[str(path)], bos_token="0"), tmp_path)


def test_a_mask_that_changes_or_goes_is_noticed(tmp_path):
    path = write_tokens(tmp_path / "a.tokens.npy", [[0, 1, 2, 3], [0, 4, 5]])
    data = config.Data(source="tokens", paths=[str(path)], bos_token="0")
    for mask in (None, [1, 0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1, 0]):
        if mask:
            np.save(tmp_path / "a.mask.npy", np.array(mask, np.uint8))
        source = Opened(data, tmp_path).corpus.sources[0]
        assert source.masked == bool(mask)
        if mask:    # separators of the file are no tokens of a document
            assert source.mask(0, 0, 3).tolist() == mask[1:4] and source.mask(1, 0, 2).tolist() == mask[5:]
    (tmp_path / "a.mask.npy").unlink()
    assert not Opened(data, tmp_path).corpus.sources[0].masked


# ---- the loss --------------------------------------------------------------------------------------------------------


def model(data: config.Data, **sections) -> config.Run:
    return config.Run(model=config.Model(vocab_size=1024, embed_dim=32, num_layers=2,
                                         num_heads=4, num_kv_heads=2, mlp_dim=64,
                                         compute_dtype="float32"), data=data, **sections)


def summed(made, state, batch) -> tuple[float, int]:
    nll, count = made.program.evaluate(state.params, made.program.place(batch))
    return float(nll), int(count)


def test_packed_and_masked_loss_is_that_of_the_conversations_one_by_one(tmp_path):
    values = [value for value in many(count=60) if len(str(value)) < 800]
    data = chats(tmp_path, values, seq_len=512, global_batch=2)
    packed = packing.open_batches(data, Opened(data, tmp_path).corpus, seed=0)
    batch = packed.batch(0)
    made = assembly.assemble(model(data), jax.devices()[:1])
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        state = assembly.initialize(made)
        together, counted = summed(made, state, batch)
        total = count = 0
        parts = [part for part in documents([batch]) if any(t >= 0 for t in part[1])]
        assert len(parts) > 8
        for k in range(0, len(parts), 2):
            rows = {key: np.zeros_like(array) for key, array in batch.items()}
            rows["targets"] -= 1
            rows["positions"][:] = rows["index"][:] = np.arange(512)
            for row, (tokens, targets) in enumerate(parts[k:k + 2]):
                rows["tokens"][row, :len(tokens)], rows["targets"][row, :len(tokens)] = tokens, targets
                rows["segments"][row, :len(tokens)] = 1
            nll, targets = summed(made, state, rows)
            total, count = total + nll, count + targets
    assert count == counted == int((batch["targets"] >= 0).sum()) < batch["targets"].size
    np.testing.assert_allclose(together / counted, total / count, rtol=1e-5)


@pytest.mark.parametrize("optimizer, mesh", [
    ("muon", {}), pytest.param("adafactor", dict(fsdp=2), marks=pytest.mark.long),
    pytest.param("lion", dict(context=2), marks=pytest.mark.long),
    pytest.param("adamw", dict(stage=2), marks=pytest.mark.long),
], ids=str)
def test_a_batch_without_a_target_makes_no_nan(optimizer, mesh, tmp_path):
    rules = "zero3" if mesh and not {"stage", "context"} & mesh.keys() else "ddp"
    run = model(config.Data(seq_len=16, global_batch=4), mesh=config.Mesh(**mesh),
                optimizer=config.Optimizer(name=optimizer),
                sharding=config.Sharding(rules=f"sharding_rules/{rules}.toml"),
                training=config.Training(microbatches=2))
    made = assembly.assemble(run, jax.devices()[:max([1, *mesh.values()])])
    batch = {key: np.ones((4, 16), np.int32) for key in ("tokens", "segments", "positions", "index")}
    batch |= {"targets": np.full((4, 16), NO_TARGET, np.int32), "sequence": np.arange(4, dtype=np.int32)}
    with jax.set_mesh(made.mesh):
        state, metrics = made.program.compile()(assembly.initialize(made), made.program.place(batch))
        assert (float(metrics["loss"]), int(metrics["tokens"]), bool(metrics["skipped"])) == (0.0, 1, False)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state.params)))


@pytest.mark.long
def test_the_run_file_for_fine_tuning_trains_on_conversations_and_goes_on(tmp_path, monkeypatch):
    data = chats(tmp_path, many())
    monkeypatch.chdir(tmp_path)
    words = {"mesh.simulated_devices": 8, "optimizer.name": "adamw", "model.vocab_size": 512, "model.embed_dim": 32,
             "model.num_layers": 2, "model.num_heads": 4,
             "model.num_kv_heads": 2, "model.head_dim": 8, "model.mlp_dim": 64, "model.compute_dtype": "float32",
             "data.seq_len": 64,
             "data.global_batch": 8, "data.paths": json.dumps(list(data.paths)), "data.tokenizer": data.tokenizer,
             "data.bos_token": "<s>"}
    argv = [f"--{key}={value}" for key, value in words.items()]
    for steps in (2, 3):
        ran = call(train.main, ROOT / "configs/llama3.2-1b-sft.toml", *argv, "--training.steps", steps)
        assert ran.code == 0, ran
    assert "resuming after step 2" in ran.out and "generate runs/llama3.2-1b-sft --chat" in ran.out
    rows = [json.loads(line) for line in (tmp_path / "runs/llama3.2-1b-sft/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(0 < row["val_loss"] < 10 for row in rows[1:])
    assert (tmp_path / "runs/llama3.2-1b-sft/export/3/model.safetensors").is_file()
    again = call(train.main, ROOT / "configs/llama3.2-1b-sft.toml", *argv, "--training.steps",
                 4, "--data.packing", "stream")
    assert again.code == 2 and 'data.packing="stream", but the run in ' in again.err


def test_a_mask_beside_a_bare_file_of_ids_counts_its_separators(tmp_path):
    np.array([0, 1, 2, 0, 3], np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.mask.npy", np.array([0, 0, 1, 0, 1], np.uint8))
    source = Opened(config.Data(source="tokens", paths=[str(tmp_path / "a.bin")], bos_token="0"),
                    tmp_path).corpus.sources[0]
    assert [source.mask(0, 0, 2).tolist(), source.mask(1, 0, 1).tolist()] == [[0, 1], [1]]
