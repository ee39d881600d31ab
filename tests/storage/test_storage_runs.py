"""Commands that read from addresses: the same numbers as by path, nothing read twice, and no secret in any file."""
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import test_several_processes
from commands import call, home, in_a_directory_of_its_own, ran, refused, rows, tiny  # noqa: F401
from corpora import bpe  # noqa: F401
from folders import GOLDENS
from test_weights import tokens, without_model  # noqa: F401

from tests import conversations, tiny_run

pytest.importorskip("obstore", reason="files at s3:// and gs:// need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, SECRET, TOKEN, Fault, server, surroundings  # noqa: E402, F401

from meshtrain import config  # noqa: E402
from meshtrain.commands import convert, generate, plan, train  # noqa: E402
from meshtrain.data.documents import chat, tokenizer  # noqa: E402
from meshtrain.huggingface import folder, safetensors  # noqa: E402
from meshtrain.huggingface.weights import peft  # noqa: E402
from meshtrain.storage import addresses, buckets, copies, model_folder  # noqa: E402

TWO = ("--training.steps", "2", "--run.sample_tokens", "0")


def losses(directory) -> list[float]:
    return [row["loss"] for row in rows(directory)]


def with_secrets(directory) -> list[str]:
    return [str(path) for path in directory.rglob("*") if path.is_file() and path.name != "account.json"
            and any(secret.encode() in path.read_bytes() for secret in (SECRET, TOKEN))]


def test_two_steps_from_a_bucket_are_those_from_files_and_a_second_run_reads_none(server, tiny, home, tmp_path):
    lines = (home / "corpus.txt").read_text().splitlines(keepends=True)
    (tmp_path / "files").mkdir()
    for i in range(3):
        path = tmp_path / "files" / f"part{i}.txt"
        path.write_text("".join(lines[200 * i:200 * (i + 1)]))
        server.put(f"corpus/{path.name}", path)
    there = ("--data.paths", json.dumps([f"s3://{BUCKET}/corpus/*.txt"]))
    ran(*tiny, *TWO, "--run.dir", "here", "--data.paths", json.dumps([f"{tmp_path}/files/*.txt"]))
    server.faults += [Fault("corpus/part1.txt", 2, 503), Fault("corpus/part2.txt", 1)]
    first = ran(*tiny, *TWO, *there, "--run.dir", "there")
    assert losses(tmp_path / "there") == losses(tmp_path / "here") and "copying 3 files" in first.out
    assert f"s3://{BUCKET}/corpus/*.txt" in (tmp_path / "there" / "config.toml").read_text()
    server.log.clear()
    ran(*tiny, *TWO, *there, "--run.dir", "again")
    assert losses(tmp_path / "again") == losses(tmp_path / "here")
    assert server.of_content() == [] and len(server.log) == 1, server.asked()
    assert with_secrets(tmp_path) == [] and SECRET not in first.out + first.err
    # The run goes on by its own config.toml, with its copies gone.
    shutil.rmtree(copies.home())
    assert "resuming after step 2" in ran(tmp_path / "there" / "config.toml", "--training.steps", "3").out


def test_a_run_begins_from_the_hub_as_from_the_folder_and_offline_without_a_request(
        server, tiny, tokens, bpe, tmp_path, monkeypatch):
    home = tmp_path / "model"
    shutil.copytree(GOLDENS / "qwen3", home)
    shutil.copy(bpe, home / "tokenizer.json")
    server.hub["models/owner/name"], server.private = home, True
    words = [*without_model(tiny), *tokens, *TWO, "--model.compute_dtype=float32", "--data.validation_fraction=0"]
    ran(*words, "--checkpoint.init_from", home, "--run.dir", "here")
    there = ("--checkpoint.init_from", "hf://owner/name", "--run.dir")
    first = ran(*words, *there, "there")
    assert losses(tmp_path / "there") == losses(tmp_path / "here") and "weights from" in first.out
    kept = sorted(path.name for path in (tmp_path / "there" / "hf").iterdir())
    assert kept == ["config.json", "tokenizer.json"]
    assert 'init_from = "hf://owner/name"' in (tmp_path / "there" / "config.toml").read_text()
    assert with_secrets(tmp_path) == []
    server.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran(*words, *there, "offline")
    assert losses(tmp_path / "offline") == losses(tmp_path / "here") and server.log == []


def model_in_bucket(server, name: str) -> str:
    for path in (GOLDENS / "qwen3").iterdir():
        server.put(f"{name}/{path.name}", path)
    return f"s3://{BUCKET}/{name}"


def test_tensors_of_a_bucket_are_read_by_ranges(server, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "RANGE_BYTES", 1000)
    there = model_in_bucket(server, "ranges")
    directory = model_folder.local_path(there, weights="ranges")
    found, wanted = folder.open_folder(directory), folder.open_folder(GOLDENS / "qwen3")
    assert not list(directory.glob("*.safetensors")) and found.entries.keys() == wanted.entries.keys()
    for name, entry in found.entries.items():
        size = int(np.prod(entry.shape))
        for start, stop in ((0, size), (size // 3, size // 2), (size - 1, size), (0, 0)):
            np.testing.assert_array_equal(safetensors.read(entry, start, stop),
                                          safetensors.read(wanted.entries[name], start, stop))
    safetensors.copy(found.entries, tmp_path / "copied")
    safetensors.copy(wanted.entries, tmp_path / "as it was")
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "as it was").read_bytes()
    largest = max(found.entries.values(), key=lambda entry: entry.stop - entry.start)
    server.put("ranges/model.safetensors", b"another")
    with pytest.raises(addresses.Changed, match="model.safetensors has changed"):
        safetensors.read(largest, 0, int(np.prod(largest.shape)))
    copies.forget()
    with pytest.raises(ValueError, match="its header|less than any header|says that"):
        folder.open_folder(model_folder.local_path(there, weights="ranges"))


def test_of_several_processes_each_reads_its_shares_of_the_weights(server, tiny, tokens, tmp_path):
    there, size = model_in_bucket(server, "shared"), (GOLDENS / "qwen3" / "model.safetensors").stat().st_size
    words = [*without_model(tiny), *tokens, *TWO, "--model.compute_dtype=float32", "--data.validation_fraction=0"]
    ran(*words, "--checkpoint.init_from", GOLDENS / "qwen3", "--run.dir", "here")
    server.log.clear()
    command = [sys.executable, "-m", "meshtrain.launch.local", "--processes", "2", "--", *map(str, words), "--run.dir",
               str(tmp_path / "there"), "--checkpoint.init_from", there]
    done = subprocess.run(command, env=test_several_processes.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "here"), rel=1e-6)
    ranges = [one.headers["Range"].removeprefix("bytes=").split("-") for one in server.log
              if one.path.endswith("model.safetensors") and "Range" in one.headers]
    read = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert size <= read < 1.5 * size      # each process the header, too
    assert not list(copies.home().rglob("*.safetensors"))


def test_a_tokenizer_by_name_gives_the_tokens_of_its_file(server, tiny, home, bpe, tmp_path):
    server.hub["models/owner/name"], server.private = tmp_path / "model", True
    (tmp_path / "model").mkdir()
    shutil.copy(bpe, tmp_path / "model" / "tokenizer.json")
    shutil.copy(home / "corpus.txt", tmp_path)
    words = (*tiny, *TWO, "--model.vocab_size", "320", "--data.paths", '["corpus.txt"]')
    ran(*words, "--data.tokenizer", bpe, "--run.dir", "here")
    ran(*words, "--data.tokenizer", "hf://owner/name", "--run.dir", "there")
    assert losses(tmp_path / "there") == losses(tmp_path / "here")


def test_a_chat_template_is_a_file_or_a_folder_at_an_address(server, tmp_path):
    home = conversations.folder(tmp_path, "chatml")
    copies.forget()
    reader = tokenizer.open_file(str(home / "tokenizer.json"))
    server.hub["models/owner/name"] = server.web = home
    for path in home.iterdir():
        server.put(f"template/{path.name}", path)
    wanted, talk = chat.open_template(reader, str(home)), [{"role": "user", "content": "why?"}]
    for given in (f"s3://{BUCKET}/template", f"s3://{BUCKET}/template/chat_template.jinja", "hf://owner/name",
                  f"{server.url}/web"):
        found = chat.open_template(reader, given)
        assert chat.prompt(found, talk).tolist() == chat.prompt(wanted, talk).tolist() and found.tokens == wanted.tokens
    for given in (f"s3://{BUCKET}/nowhere", f"s3://{BUCKET}/template/other.jinja"):
        with pytest.raises(ValueError, match=given):
            chat.open_template(reader, given)


def test_generate_and_convert_read_a_model_by_name(server, tmp_path):
    server.hub["models/owner/name"] = GOLDENS / "qwen3"
    words = ("--prompt-ids", "[[5, 6, 7]]", "--max-tokens", "4", "--json", "--mesh.simulated_devices", "8",
             "--mesh.data", "8")
    here, there = (call(generate.main, name, *words) for name in (GOLDENS / "qwen3", "hf://owner/name"))
    assert (there.code, there.out) == (0, here.out), there.err
    here, there = (call(convert.main, name) for name in (GOLDENS / "qwen3", "hf://owner/name"))
    assert there.code == 0 and there.out.partition("\n")[2] == here.out.partition("\n")[2]
    refused(call(convert.main, "s3://bucket/run", "out"), "s3://bucket/run has no complete checkpoint", "give the run.dir")
    refused(call(generate.main, "hf://owner/none", *words), "hf://owner/none is not there")


def test_a_model_of_the_hub_is_planned_for_by_its_name(server):
    server.hub["models/owner/name"] = GOLDENS / "qwen3"
    words = ("--gpus", "8", "--gpu", "h100", "--seq-len", "64", "--data.source", "tokens", "--data.tokenizer", "bytes",
             "--json", "--run.name", "a")
    here, there = (call(plan.main, name, *words) for name in (GOLDENS / "qwen3", "hf://owner/name"))
    assert (there.code, json.loads(there.out)) == (0, json.loads(here.out)), there.err
    refused(call(plan.main, "hf://owner/none", *words), "hf://owner/none is not there")
    refused(call(plan.main, "owner/none", *words), "on the Hugging Face hub, give hf://owner/none")


@pytest.mark.parametrize(("words", "fault", "parts"), [
    ("--data.paths ['s3://bucket/none/*']", None, ("data.paths: s3://bucket/none/* matches no file",)),
    ("--data.paths ['s3://bucket/corpus/*']", Fault("bucket", 99, 403), ("refused with 403", "AWS_SECRET_ACCESS_KEY")),
    ("--checkpoint.init_from hf://owner/none", None, ("checkpoint.init_from: hf://owner/none is not there (404",)),
    ("--checkpoint.init_from hf://datasets/owner/data", None, ("checkpoint.init_from: ", "has no config.json")),
    ("--checkpoint.init_from hf://owner/name --checkpoint.init_optimizer true", None, ("which has no optimizer",)),
    ("--checkpoint.init_from hf://owner/name --model.embed_dim 48", None, ("contradicts", "hf://owner/name")),
    ("--data.tokenizer hf://owner/name", None, ("hf://owner/name/tokenizer.json does not exist",)),
])
def test_what_cannot_be_had_ends_with_exit_code_2_and_one_message(words, fault, parts, server, tiny, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    server.hub.update({"models/owner/name": GOLDENS / "qwen3", "datasets/owner/data": tmp_path / "data"})
    server.put("corpus/a.txt", b"text")
    server.private = False
    server.faults += [fault] * (fault is not None)
    own = without_model(tiny) if "init_from" in words else tiny
    told = call(train.main, *own, *TWO, "--run.dir", "new", *words.split())
    refused(told, *parts)
    assert SECRET not in told.err and TOKEN not in told.err and "http://" not in told.err


def test_a_server_that_goes_on_failing_ends_with_exit_code_1_so_that_a_launcher_starts_again(server, tiny):
    server.put("corpus/a.txt", b"text")
    server.faults.append(Fault("bucket", 99, 503))
    told = call(train.main, *tiny, *TWO, "--run.dir", "new", "--data.paths", f'["s3://{BUCKET}/corpus/*"]')
    assert told.code == 1 and "answers 503" in told.err and "start again" in told.err and told.err.count("error: ") == 1


def test_copies_that_cannot_be_written_end_with_exit_code_2(server, tiny, tmp_path, monkeypatch):
    server.hub["models/owner/name"], server.private = GOLDENS / "qwen3", False
    (tmp_path / "file").touch()
    server.put("corpus/a.txt", b"text")
    words = (*TWO, "--run.dir", "new", "--data.paths", f'["s3://{BUCKET}/corpus/a.txt"]')
    refused(call(train.main, *tiny, *words, "--data.cache", "file"), "cannot be written to file", "set data.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(call(train.main, *without_model(tiny), *words, "--checkpoint.init_from", "hf://owner/name"),
            "checkpoint.init_from: copies of files at addresses cannot be written", "XDG_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "relative")
    refused(call(generate.main, "hf://owner/name", "--prompt-ids", "[[5]]"), "set XDG_CACHE_HOME")


def test_adapters_of_a_model_of_the_hub_name_it_as_peft_does():
    made = peft._config(config.Lora(rank=2), "hf://owner/name@v1", {"q_proj": 2}, conv1d=False, whole=[])
    assert (made["base_model_name_or_path"], made["revision"]) == ("owner/name", "v1")
    made = peft._config(config.Lora(rank=2), "folder", {"q_proj": 2}, conv1d=False, whole=[])
    assert (made["base_model_name_or_path"], made["revision"]) == ("folder", None)


@pytest.mark.long
def test_two_processes_read_a_bucket_once_and_train_what_one_trains_from_files(server, tmp_path):
    rng = np.random.default_rng(0)
    for i in range(3):
        content = rng.integers(97, 123, 3000, np.uint8).tobytes()
        (tmp_path / f"{i}.txt").write_bytes(content)
        server.put(f"two/{i}.txt", content)
    (tmp_path / "run.toml").write_text(tiny_run.text(
        run__sample_tokens=0, mesh__data=1, mesh__fsdp=2, mesh__simulated_devices=2,
        sharding__rules="sharding_rules/zero3.toml", training__steps=2))
    server.log.clear()
    for count, paths, directory in ((1, f"{tmp_path}/*.txt", "here"), (2, f"s3://{BUCKET}/two/*.txt", "there")):
        start = [sys.executable, *test_several_processes.command(tmp_path, count, directory)[1:],
                 "--data.paths", json.dumps([paths])]
        done = subprocess.run(start, env=test_several_processes.environment(), capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "there") == pytest.approx(losses(tmp_path / "here"), rel=1e-5)      # sums in another order
    assert sorted(server.of_content()) == [f"GET /{BUCKET}/two/{i}.txt" for i in range(3)]
    assert with_secrets(tmp_path) == []
