"""How well a model predicts: the loss of a run's own validation, on any mesh, and the numbers of the evaluation
harness."""
import json
import math
import shutil

import jax
import numpy as np
import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401
from corpora import Opened, section, write
from folders import GOLDENS

from meshtrain import config, trained
from meshtrain.commands import evaluate, train
from meshtrain.data.batches import packing
from meshtrain.data.cache import token_cache
from meshtrain.data.documents import text_bytes, tokenizer
from meshtrain.inference import score
from meshtrain.names import NO_TARGET

MIXTURE = '[{source="text", paths=["%s"], weight=3, name="squares"}, {source="text", paths=["%s"], name="cubes"}]'


@pytest.fixture(scope="module")
def run_dir(home, tiny):
    """A run of two sources, and what it said of its validation."""
    (home / "cubes.txt").write_text("".join(f"{i}: {i ** 3} é\n" for i in range(400)))
    words = [*tiny, "--data.source=mixture", "--data.paths=[]",
             f"--data.mixture={MIXTURE % (home / 'corpus.txt', home / 'cubes.txt')}",
             "--data.validation_fraction=0.1", "--validation.batches=100", "--training.steps=3",
             "--run.sample_tokens=0",
             "--model.compute_dtype=float32", "--run.dir", home / "mixed"]
    ran = call(train.main, *words)
    assert (ran.code, ran.err) == (0, ""), ran
    return home / "mixed"


def asked(*words) -> dict:
    ran = call(evaluate.main, *words, "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    return json.loads(ran.out)


def test_the_loss_of_each_source_is_that_of_the_runs_validation_on_any_mesh(run_dir):
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    found = asked(run_dir, "--mesh.tensor=1")
    assert set(found) == {"loss", "tokens", "perplexity", "bits_per_byte", "sources", "tasks"}
    for name in ("squares", "cubes"):
        # float32 sums of other orders
        assert found["sources"][name]["loss"] == pytest.approx(row[f"val_loss/{name}"], rel=1e-5)
    each = found["sources"].values()
    assert found["tokens"] == sum(one["tokens"] for one in each)
    assert found["loss"] == pytest.approx(sum(one["loss"] * one["tokens"] for one in each) / found["tokens"])
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    other = asked(run_dir, "--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")
    assert other["tokens"] == found["tokens"] and other["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_of_files_that_are_named_every_token_counts_once_and_bytes_are_those_of_the_files(run_dir, home):
    found = asked(run_dir, "--data.source=text", "--data.mixture=[]", f'--data.paths=["{home}/cubes.txt"]',
                  "--mesh.tensor=1")
    size = (home / "cubes.txt").stat().st_size
    assert found["tokens"] == size + 1, "and the document's end"
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / size)
    assert found["sources"] == {"text": {key: found[key] for key in ("loss", "tokens", "perplexity", "bits_per_byte")}}
    table = call(evaluate.main, run_dir, "--data.source=text", "--data.mixture=[]",
                 f'--data.paths=["{home}/cubes.txt"]', "--mesh.tensor=1").out
    assert f"{found['loss']:.4f}" in table and f"{size + 1:,}" in table


def test_a_text_shorter_than_a_sequence_is_evaluated_and_an_empty_one_is_refused(run_dir, home):
    (home / "short.txt").write_text("7: 343 é")
    (home / "none.txt").write_text("")
    of = lambda name: [run_dir, "--data.source=text", "--data.mixture=[]", f'--data.paths=["{home}/{name}.txt"]']
    assert asked(*of("short"))["tokens"] == 10
    refused(call(evaluate.main, *of("none")), "none.txt")


def test_files_that_are_named_take_the_place_of_what_the_run_validates_on(home, tiny):
    (home / "held.txt").write_text("".join(f"{i}: {i ** 4}\n" for i in range(200)))
    (home / "named.txt").write_text("8: 512 é")
    ran = call(train.main, *tiny, "--training.steps=1", "--run.sample_tokens=0", "--run.dir", home / "curves",
               f'--data.validation_sources=[{{name="held", source="text", paths=["{home}/held.txt"]}}]')
    assert ran.code == 0, ran
    assert list(asked(home / "curves")["sources"]) == ["held"]
    found = asked(home / "curves", f'--data.paths=["{home}/named.txt"]')
    assert found["tokens"] == 10 and list(found["sources"]) != ["held"]


@pytest.mark.parametrize("name", ["gemma2", "phi3_longrope"])     # of the second 28 tokens, 24 originally
def test_log_probabilities_are_those_of_the_logits_of_transformers(name):
    golden = np.load(GOLDENS / name / "golden.npz")
    placed = trained.describe(str(GOLDENS / name), 0, ["--mesh.data=2", "--mesh.tensor=2"], "evaluate").place()
    logits, tokens = golden["logits"][0].astype(np.float64), golden["tokens"][0]
    with jax.set_mesh(placed.mesh), jax.default_matmul_precision("highest"):
        scorer = placed.scorer()
        T = len(tokens)
        B = scorer.rows(T)
        index = np.tile(np.arange(T, dtype=np.int32), (B, 1))
        batch = {"tokens": np.tile(tokens, (B, 1)), "targets": np.tile(np.append(tokens[1:], NO_TARGET), (B, 1)),
                 "index": index,
                 "positions": index, "segments": np.ones_like(index), "sequence": np.zeros(B, np.int32)}
        logprobs, likeliest = scorer.score(batch)
    wanted = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # As the logits: 1e-4.
    np.testing.assert_allclose(logprobs[:, :-1], np.tile(wanted[np.arange(T - 1), tokens[1:]], (B, 1)), atol=1e-4)
    np.testing.assert_array_equal(likeliest[0, :-1], logits.argmax(-1)[:-1] == tokens[1:])


def test_each_document_of_a_row_has_the_length_that_chooses_its_rope():
    placed = trained.describe(str(GOLDENS / "phi3_longrope"), 0, ["--mesh.tensor=1"], "evaluate").place()
    tokens = np.random.default_rng(0).integers(0, 90, 40)
    with jax.set_mesh(placed.mesh), jax.default_matmul_precision("highest"):
        scorer = placed.scorer()
        B = scorer.rows(40)
        apart = [scorer.logits(tokens[None, begin:end])[0] for begin, end in ((0, 10), (10, 40))]     # 10 short, 30 long
        index, begins = np.tile(np.arange(40, dtype=np.int32), (B, 1)), (np.arange(40) >= 10).astype(np.int32)
        batch = {"tokens": np.tile(tokens.astype(np.int32), (B, 1)), "index": index, "positions": index - 10 * begins,
                 "targets": np.tile(np.append(tokens[1:], NO_TARGET).astype(np.int32), (B, 1)),
                 "segments": 1 + np.tile(begins, (B, 1)), "sequence": np.zeros(B, np.int32)}
        found, _ = scorer.score(batch)
    wanted = np.concatenate(apart).astype(np.float64)
    wanted -= np.log(np.exp(wanted).sum(-1, keepdims=True))
    np.testing.assert_allclose(found[0, :39], wanted[np.arange(39), tokens[1:]], atol=1e-4)


def test_sequences_longer_than_learned_positions_are_refused():
    refused(call(evaluate.main, GOLDENS / "gpt2", "--data.seq_len=129", "--data.source=tokens",
                 '--data.paths=["x.tokens.npy"]'),
            "data.seq_len=129 is longer than the model.max_seq_len=128")


# ---- bytes of tokens -------------------------------------------------------------------------------------------------


def trained_tokenizer(path, kind: str):
    tokenizers = pytest.importorskip("tokenizers")
    models, pre, decoders, trainers = (tokenizers.models, tokenizers.pre_tokenizers,
                                       tokenizers.decoders, tokenizers.trainers)
    library = tokenizers.Tokenizer(models.BPE(byte_fallback=kind == "spaces",
                                              unk_token="<unk>" if kind == "spaces" else None))
    if kind == "bytes":
        library.pre_tokenizer, library.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special, alphabet = ["<s>"], pre.ByteLevel.alphabet()
    else:
        library.pre_tokenizer = pre.Metaspace()
        library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                             decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        special, alphabet = ["<s>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))], []
    library.train_from_iterator(["the cat sat on the mat, 12 é times " * 20],
                                trainers.BpeTrainer(vocab_size=700, special_tokens=special,
                                                                                              initial_alphabet=alphabet))
    library.save(str(path))
    return tokenizer.open_file(str(path))


def test_a_stop_leaves_no_token_cache_behind(monkeypatch):
    """It ends the process at once, from a thread: no block comes to its end."""
    ends = []

    def stopped(found, may_be_none, scratch):
        (scratch / "tokens.npy").touch()
        ends[-1]()
        assert not scratch.exists()
        raise config.ConfigError("seen")
    monkeypatch.setattr(evaluate.stops, "end_together", ends.append)
    monkeypatch.setattr(evaluate, "_open_data", stopped)
    refused(call(evaluate.main, GOLDENS / "qwen3"), "seen")


TEXTS = ("the cat", " on the 12 mats\n\n", "日本語 <s> é\u0301 ﬁ Ｔｈｅ", "\x00\ufeff", "\ufeffTHE cat ▁ 🐈 ", "", "the  cat ")


def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(tmp_path):
    reader = trained_tokenizer(tmp_path / "tokenizer.json", "bytes")
    lengths = text_bytes.lengths(reader)
    assert lengths.exact and lengths.prefix == 0 and not text_bytes.are_counted(reader)
    for text in TEXTS:
        assert lengths.bytes_V[reader.encode([text])[0]].sum() == len(text.encode())
    assert lengths.bytes_V[reader.bos] == 0
    spaces = trained_tokenizer(tmp_path / "spaces.json", "spaces")
    lengths = text_bytes.lengths(spaces)
    for text in ("the cat", "on the 12 mats é", "日本 the"):
        assert lengths.bytes_V[spaces.encode([text])[0]].sum() - 1 == len(text.encode())
    assert lengths.prefix is None and not lengths.exact, "a text that begins with a space gets none"
    assert text_bytes.lengths(tokenizer.Ids(10, 1)) is None


def changed(path, kind: str) -> tokenizer.TokenizerFile:
    """A tokenizer that changes or drops text in this way."""
    import tokenizers
    from tokenizers import normalizers, pre_tokenizers
    trained_tokenizer(path, "spaces" if kind in ("metaspace", "prepend") else "bytes")
    library = tokenizers.Tokenizer.from_file(str(path))
    if kind == "prepend":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.pre_tokenizer = None
    elif kind == "prefix":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "removed":
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), library.pre_tokenizer])
    elif kind == "strips":
        library.add_tokens([tokenizers.AddedToken("cat", lstrip=True, rstrip=True)])
    elif kind == "unknown":
        library = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "<s>": 1, "t": 2, " ": 3}, [], unk_token="<unk>"))
        library.add_special_tokens(["<s>", "<unk>"])
    elif kind == "dropped":
        library = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "t": 1, " ": 2}, []))
        library.add_special_tokens(["<s>"])
    elif kind == "suffix":
        library = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "t</w>": 1, "t": 2}, [], end_of_word_suffix="</w>"))
        library.add_special_tokens(["<s>"])
    elif kind != "metaspace":
        library.normalizer = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC, "lower": normalizers.Lowercase,
                              "strip": normalizers.Strip, "accents": normalizers.StripAccents,
                              "replace": lambda: normalizers.Replace("cat", "kitten")}[kind]()
    library.save(str(path))
    return tokenizer.open_file(str(path))


@pytest.mark.parametrize("kind", ["nfc", "nfkc", "lower", "strip", "accents", "replace", "metaspace", "prepend",
                                  "prefix", "removed", "strips", "unknown", "dropped", "suffix"])
def test_where_tokens_do_not_tell_the_bytes_of_a_document_they_are_counted(kind, tmp_path):
    """Of every format, in sets of whole documents; of the tails of documents nothing is told but what tokens tell."""
    reader = changed(tmp_path / "tokenizer.json", kind)
    assert text_bytes.are_counted(reader)
    texts = [*TEXTS, "the cat " * 300]
    paths = [write(tmp_path / name, texts) for name in ("a.jsonl", "b.parquet")]
    for path in (*paths, write(tmp_path / "c.txt", [texts[4]])):
        for _ in range(2):      # built, then found
            opened = Opened(section([path], tokenizer=reader.path, seq_len=16, global_batch=1), tmp_path)
            (held,) = packing.open_whole(opened.data, opened.corpus, 0)
            wanted = sum(len(text.encode()) for text in (texts if path in paths else texts[4:5]))
            assert evaluate._measure(Guessing(), opened.corpus, held).num_bytes == wanted
        assert not opened.built


class Guessing:
    """A scorer that gives every token the same probability."""
    rows = staticmethod(lambda T: 2)
    score = staticmethod(lambda batch: (np.full(batch["targets"].shape, -1.0), None))


@pytest.mark.parametrize("kind, told", [("nfc", False), ("prepend", True), ("metaspace", True), ("unknown", False)])
def test_bytes_of_the_tails_of_documents_are_told_where_tokens_tell_them(kind, told, tmp_path):
    """A tokenizer puts a space before a document, and so none before its tail."""
    reader, text = changed(tmp_path / "tokenizer.json", kind), "the cat sat on the mat, 12 times " * 40
    data = section([write(tmp_path / "a.txt", [text])], tokenizer=reader.path, seq_len=16, global_batch=1,
                   validation_fraction=0.2)
    opened = Opened(data, tmp_path)
    (tail,) = packing.open_batches(data, opened.corpus, 0).validation
    (ids,), found = opened.ids(), evaluate._measure(Guessing(), opened.corpus, tail)
    assert not tail.begins and tail.text_bytes is None
    pieces = [reader.library.id_to_token(one).replace("▁", " ") for one in ids[-(found.tokens - 1):]]
    assert found.num_bytes == (len("".join(pieces).encode()) if told else None)


def test_bytes_of_documents_are_counted_on_over_batches_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "BATCH_PIECES", 2)
    reader, texts = changed(tmp_path / "tokenizer.json", "nfkc"), [text for text in TEXTS if text]
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, texts)
    (source,) = Opened(section([tmp_path / "*.jsonl"], tokenizer=reader.path), tmp_path).corpus.sources
    assert source.byte_totals.tolist() == 2 * [len(text.encode()) for text in texts]


def test_parts_are_put_together_with_the_bytes_of_their_documents_and_older_parts_are_read_without(tmp_path):
    reader, key = changed(tmp_path / "tokenizer.json", "nfkc"), {}
    texts = {f"{i}.txt": "ﬁ Ｔ" * i for i in range(1, 6)}
    for name, text in texts.items():
        write(tmp_path / name, [text])
        opened = Opened(section([tmp_path / "*.txt"], tokenizer=reader.path), tmp_path)
        (source,) = opened.corpus.sources       # one part, of which all but the last file are copied
        key[name] = len(text.encode())
        assert source.byte_totals.tolist() == list(key.values())
    counted = max(tmp_path.glob(".meshtrain/*/*.bytes.npy"), key=lambda path: path.stat().st_size)     # of all files
    for damage in (lambda content: content[:-8], lambda content: content[:-1] + bytes([content[-1] ^ 1])):
        counted.write_bytes(damage(counted.read_bytes()))
        opened = Opened(opened.data, tmp_path, verify=True)
        assert opened.built and opened.corpus.sources[0].byte_totals.tolist() == list(key.values())
    manifest = counted.with_name(counted.name.replace(".bytes.npy", ".json"))
    note = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(note | {"crc32": note["crc32"][:2], "stamps": note["stamps"][:2]}))
    counted.unlink()
    opened = Opened(opened.data, tmp_path)
    assert not opened.built and opened.corpus.sources[0].byte_totals is None


def test_texts_are_not_read_as_bytes_because_a_folder_has_no_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    refused(call(evaluate.main, GOLDENS / "qwen3", "--data.source=text", f'--data.paths=["{tmp_path}/a.txt"]'),
            "has no tokenizer.json", "set --data.tokenizer to the path of its tokenizer.json, or to bytes")


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_wrapped", "gemma4_text", "llama2", "run"])
def test_texts_of_tasks_begin_as_a_run_saw_them_or_as_the_folders_tokenizer_writes_them(family, tmp_path, run_dir):
    """Those of Gemma's families with the token that stands before a document, also where the tokenizer forgets it."""
    import tokenizers
    if family == "run":
        found = trained.describe(str(run_dir), 0, [], "evaluate", keys=("data.",))
        assert found.lead(found.text(), 256) == [256]
        return
    shutil.copytree(GOLDENS / family, tmp_path / "f")
    trained_tokenizer(tmp_path / "tokenizer.json", "bytes")
    shutil.move(tmp_path / "tokenizer.json", path := tmp_path / "f" / "tokenizer.json")
    found = trained.describe(str(tmp_path / "f"), 0, [], "evaluate", keys=("data.",))
    assert found.lead(found.text(), 7) == ([7] if family.startswith("gemma") else [])
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_special_tokens(["</s>"])
    for template, wanted in (("<s> $A", [0]), ("<s> $A </s>", [0]), ("$A </s>", [7] * family.startswith("gemma"))):
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 0), ("</s>", library.token_to_id("</s>"))])
        library.save(str(path))
        assert found.lead(found.text(), 7) == wanted


def test_sequences_longer_than_the_model_was_made_for_are_noted(tmp_path):
    np.save(tmp_path / "x.tokens.npy", np.arange(1300, dtype=np.uint16) % 200)
    np.save(tmp_path / "x.ends.npy", np.array([1300]))
    words = (GOLDENS / "qwen3", "--data.source=tokens", '--data.paths=["x.tokens.npy"]', "--mesh.tensor=1", "--json",
             "--data.bos_token=1", "--data.seq_len")
    ran = call(evaluate.main, *words, 600)
    assert ran.code == 0 and "note: data.seq_len=600 exceeds the model's maximum of 512 tokens" in ran.err
    assert json.loads(ran.out)["loss"] > 0
    assert call(evaluate.main, *words, 512).err == ""


@pytest.mark.parametrize("segments, positions, lengths", [
    ([1, 1, 1, 2, 2, 0], [0, 1, 2, 0, 1, 0], [3, 3, 3, 2, 2, 1]),
    ([3, 3, 1, 1], [5, 6, 0, 1], [7, 7, 2, 2]),         # the first began in the row before
    ([1, 2, 3], [0, 0, 0], [1, 1, 1])])
def test_a_token_knows_the_tokens_of_its_document(segments, positions, lengths):
    found = score._lengths(np.array([segments, segments[::-1]]), np.array([positions, positions[::-1]]))
    assert found.tolist() == [lengths, lengths[::-1]]
