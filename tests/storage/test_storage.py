"""Files at addresses, read from servers on loopback: what is found, copied once and read again, what a failing server
costs, and that no secret is told."""
import dataclasses
import glob
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from corpora import TEXTS, Opened, bpe, fault, section, write, write_tokens  # noqa: F401
from folders import GOLDENS, ROOT

pytest.importorskip("obstore", reason="files at s3:// and gs:// need pip install -e '.[storage]'")
pytest.importorskip("moto", reason="the S3 server on loopback needs pip install -e '.[ci]'")

from stores import BUCKET, COMMIT, SECRET, TOKEN, Fault, SlowLine, server, surroundings  # noqa: E402, F401

from meshtrain import files  # noqa: E402
from meshtrain.data.documents import tokenizer  # noqa: E402
from meshtrain.huggingface import folder  # noqa: E402
from meshtrain.storage import addresses, buckets, copies, model_folder, retries  # noqa: E402
from meshtrain.storage.addresses import StorageError  # noqa: E402

TREE = ("a.txt", "b.TXT", "sub/a.txt", "sub/deep/c.txt", ".hidden.txt", "sub/.dot/d.txt", "x[1].txt", "x1.txt",
        "é ?.txt", "sub/a.txt.gz", "n^.txt")
PATTERNS = ("*.txt", "**/*.txt", "sub/*", "**", "sub/**", "s*/a.*", "x[0-9].txt", "x[!0-9].txt", "x[[]1].txt", "?.txt",
            ".*.txt", "**/.dot/*", "sub/**/c.txt", "[a-b].*", "n[^a].txt", "**/deep/**/*", "[]x].txt", "*[", "nothing*")


@pytest.fixture(autouse=True)
def own_files(surroundings, server, tmp_path):
    """Nothing in the hub and on the web, and nothing that this process has seen there."""
    server.hub, server.private, server.web = {}, False, tmp_path / "web"
    server.web.mkdir()
    copies.forget()


def copied(*names: str, tell=lambda line: None) -> list[Path]:
    return copies.copy_files(names, lambda name: (), copies.Copying(copies.home(), tell))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_glob_of_addresses_matches_what_glob_finds(pattern, tmp_path):
    for name in TREE:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()
    paths = glob.glob(f"{tmp_path}/tree/{pattern}", recursive=True)
    found = {os.path.relpath(path, tmp_path / "tree") for path in paths if os.path.isfile(path)}
    assert {name for name in TREE if addresses.is_match(name, pattern)} == found


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_gives_the_files_that_a_glob_matches_and_their_bytes(scheme, server):
    for name in TREE:
        server.put(f"{scheme} tree/{name}", name.encode())
    home = f"{scheme}://{BUCKET}/{scheme} tree"
    found = copies.match(f"{home}/**/*.txt")
    assert found == sorted(f"{home}/{name}" for name in TREE if addresses.is_match(name, "**/*.txt"))
    assert [path.read_text() for path in copied(*found)] == [name.removeprefix(f"{home}/") for name in found]
    assert copies.match(f"{home}/x[1].txt") == [f"{home}/x[1].txt"], "an existing name is taken literally"
    assert [path.name for path in copied(*copies.match(f"{home}/a.txt"))] == ["a.txt"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "arrow", "txt.zst", "tokens.npy"])
@pytest.mark.parametrize("where", ["s3", "web", "hub"])
def test_files_at_addresses_are_the_documents_of_the_same_files_by_path(kind, where, server, tmp_path, bpe):
    source = tmp_path / "web" / "data" / f"a.{kind}"
    source.parent.mkdir()
    write_tokens(source, [[5, 6, 7], [8], [9, 10]]) if kind == "tokens.npy" else \
        write(source, ["one text"] if kind.startswith("txt") else TEXTS)
    if kind == "tokens.npy":    # not learned: the second document
        np.save(str(source).replace(".tokens.npy", ".mask.npy"), np.array([1, 1, 1, 0, 1, 1], np.uint8))
    for path in source.parent.iterdir():
        server.put(f"{kind}/{path.name}", path)
    server.hub["datasets/owner/name"] = source.parent
    name = {"s3": f"s3://{BUCKET}/{kind}/*.{kind}", "web": f"{server.url}/web/data/a.{kind}",
            "hub": f"hf://datasets/owner/name/**/*.{kind}"}[where]
    keys = dict(bos_token="1") if kind == "tokens.npy" else dict(tokenizer=bpe)
    here = Opened(section([source], cache=str(tmp_path / "here"), **keys), tmp_path / "run")
    there = Opened(section([name], cache=str(tmp_path / "there"), **keys), tmp_path / "run")
    assert there.ids() == here.ids() and there.corpus.fingerprint == here.corpus.fingerprint
    assert there.built and any("copying" in line for line in there.told)
    masks = [[getattr(pair.mask, "size", None) for pair in one.corpus.sources[0].pairs] for one in (here, there)]
    assert masks[0] == masks[1] == [6 if kind == "tokens.npy" else None]
    server.log.clear()
    copies.forget()
    again = Opened(section([name], cache=str(tmp_path / "there"), **keys), tmp_path / "run")
    assert again.ids() == here.ids() and not again.built and not again.told
    assert server.of_content() == [] and 0 < len(server.log) <= 3


def test_an_object_that_changes_is_copied_again_and_the_older_copy_stays(server):
    name = server.put("changing.txt", b"before")
    (before,) = copied(*copies.match(name))
    copies.forget()
    first = copies.identities()
    assert (copied(*copies.match(name)), first) == ([before], "")
    same = copies.identities()
    server.put("changing.txt", b"after!")
    assert copied(*copies.match(name)) == [before], "of a run all sees one state"
    copies.forget()
    (after,) = copied(*copies.match(name))
    assert (before.read_bytes(), after.read_bytes()) == (b"before", b"after!") and copies.identities() != same


def test_an_object_that_changes_while_it_is_read_is_told(server):
    name = server.put("torn.txt", b"before")
    copies.match(name)
    server.put("torn.txt", b"after!")
    with pytest.raises(StorageError, match="torn.txt has changed since it was listed; start again"):
        copied(name)
    assert not [path for path in copies.home().rglob("*torn*") if path.is_file()]


def test_large_objects_come_in_ranges(server, monkeypatch):
    monkeypatch.setattr(buckets, "RANGE_BYTES", 1000)
    content = np.random.default_rng(0).bytes(10_001)
    (path,) = copied(*copies.match(server.put("large.bin", content)))
    assert path.read_bytes() == content
    assert sorted(int(one.headers["Range"][6:].split("-")[0]) for one in server.log if "Range" in one.headers) == [
        *range(0, 10_001, 1000)]


@pytest.mark.parametrize("status", [500, 503, 429, 0], ids=["500", "503", "429", "cut in half"])
@pytest.mark.parametrize("scheme", ["s3", "http", "hf"])
def test_a_server_that_fails_for_a_moment_costs_a_moment(scheme, status, server, tmp_path):
    content = np.random.default_rng(1).bytes(5000)
    (tmp_path / "web" / "moment.bin").write_bytes(content)
    server.put("moment.bin", content)
    server.hub["models/owner/name"] = tmp_path / "web"
    name = {"s3": f"s3://{BUCKET}/moment.bin", "http": f"{server.url}/web/moment.bin",
            "hf": "hf://owner/name/moment.bin"}[scheme]
    server.faults += [Fault("/api/" if scheme == "hf" else "moment.bin", 3, status)] * (status != 0)
    found = copies.match(name)
    server.faults.append(Fault("moment.bin", 3, status))
    assert copied(*found)[0].read_bytes() == content
    assert not any(one.times for one in server.faults)
    if status == 0 and scheme != "s3":      # each goes on where the one before broke
        assert [one.headers["Range"] for one in server.log if "Range" in one.headers] == [
            "bytes=2500-", "bytes=3750-", "bytes=4375-"]


def test_a_redirection_is_followed_and_a_head_stays_one(server, tmp_path):
    (tmp_path / "web" / "a.txt").write_bytes(b"moved")
    found = copies.match(f"{server.url}/moved/a.txt")
    assert server.asked() == ["HEAD /moved/a.txt", "HEAD /web/a.txt"]
    assert copied(*found)[0].read_bytes() == b"moved"


def test_more_bytes_than_the_server_told_are_no_copy(server, tmp_path):
    (tmp_path / "web" / "a.txt").write_bytes(b"four")
    (name,) = copies.match(f"{server.url}/web/a.txt")
    copies._seen.files[name] = dataclasses.replace(copies._seen.files[name], size=2)
    with pytest.raises(StorageError, match="has 4 bytes, but its server reported 2; start again"):
        copied(name)
    assert [path for path in copies.home().rglob("*a.txt") if path.is_file()] == []


def test_a_slow_server_is_waited_for_and_one_that_hangs_is_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "SILENCE_S", 0.5)
    (tmp_path / "web" / "slow.bin").write_bytes(b"slow")
    server.faults.append(Fault("slow.bin", 2, seconds=0.2))
    assert copied(*copies.match(f"{server.url}/web/slow.bin"))[0].read_bytes() == b"slow"
    copies.forget()
    (tmp_path / "web" / "slow.bin").write_bytes(b"hung")
    server.faults.append(Fault("slow.bin", 1, seconds=1.5))
    assert copied(*copies.match(f"{server.url}/web/slow.bin"))[0].read_bytes() == b"hung"
    buckets._bucket.cache_clear()
    server.put("slow.bin", b"bucket")
    server.faults.append(Fault("slow.bin", 1, seconds=1.5))
    assert copied(*copies.match(f"s3://{BUCKET}/slow.bin"))[0].read_bytes() == b"bucket"
    buckets._bucket.cache_clear()


def test_a_slow_line_is_waited_for_while_it_moves(server, monkeypatch):
    """However long a request takes: a write whose time was too short is sent again with more."""
    line, content = SlowLine(server, 400_000), np.random.default_rng(2).bytes(1_000_000)
    monkeypatch.setattr(retries, "SILENCE_S", 0.5)
    monkeypatch.setattr(buckets, "SENT_BYTES_S", 1_000_000)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
    place = addresses.parse(f"s3://{BUCKET}/slow-line")
    buckets.write(place, content)
    (path,) = copied(*copies.match(str(place)))
    assert path.read_bytes() == content and len(server.of_content()) == 1
    line.close()


@pytest.mark.parametrize("act", [lambda place: buckets.write(place, bytes(100)), buckets.read, buckets.list_files,
                                 lambda place: buckets.write_if(place, b"", None)])
def test_a_server_that_says_nothing_is_given_up(act, server, monkeypatch):
    line = SlowLine(server, 0)
    monkeypatch.setattr(retries, "SILENCE_S", 0.2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
    began = time.monotonic()
    with pytest.raises(files.FileSystemError, match="did not answer in time, 5 times in a row|not answer within 0.2 s; check"):
        act(addresses.parse(f"s3://{BUCKET}/silent"))
    assert time.monotonic() - began < 30
    line.close()


@pytest.mark.parametrize("key", ["odd//b.txt", "odd/../b.txt", "odd/./b.txt"])
@pytest.mark.parametrize("ask", [lambda place: copies.match(f"{place}/**/*.txt"), buckets.children])
def test_a_key_that_cannot_be_listed_is_named_with_its_remedy(key, ask, server):
    name = f"s3://{BUCKET}/{key.partition('/')[0]}"
    server.put("odd/a.txt", b"a")
    server.put(key, b"b")
    try:
        with pytest.raises(StorageError, match="rename or remove that object") as told:
            ask(addresses.parse(name))
    finally:
        server._client.delete_object(Bucket=BUCKET, Key=key)
    assert f"the bucket has the key '{key.removesuffix('b.txt')}" in str(told.value) and "AWS" not in str(told.value)


@pytest.mark.parametrize(("status", "code", "kind"), [
    (403, "AccessDenied", addresses.Refused), (401, "Unauthorized", addresses.Refused), (400, "ExpiredToken", addresses.Refused),
    (400, "InvalidArgument", StorageError), (404, "NoSuchBucket", addresses.Missing), (503, "SlowDown", retries.Moment),
    (409, "ConditionalRequestConflict", retries.Moment), (412, "PreconditionFailed", addresses.Changed)])
def test_what_a_status_means(status, code, kind):
    """A name that is wrong, a refusal that may end with new credentials, or a moment of the server."""
    error = importlib.import_module("obstore.exceptions").GenericError(
        f"Server returned non-2xx status code: {status} Told: <Error><Code>{code}</Code></Error>")
    assert type(buckets._of_obstore(addresses.parse("s3://bucket/a"), error, "written")) is kind


def test_a_panic_of_the_library_is_a_failure_of_the_bucket():
    def panic(store):
        raise type("PanicException", (BaseException,), {})("the library is confused")
    with pytest.raises(files.FileSystemError, match="the library is confused, 5 times in a row"):
        buckets._ask(addresses.parse("s3://bucket/a"), panic)


@pytest.mark.parametrize(("name", "fault_told", "parts"), [
    ("s3://bucket/none.txt", None, ("s3://bucket/none.txt matches no file", "name files")),
    ("s3://bucket/none*", None, ("matches no file",)),
    ("s3://no-such-bucket/*", None, ("no-such-bucket is not there (404, NoSuchBucket)",)),
    ("s3://bucket/there*", Fault("bucket", 99, 403), ("refused with 403", "AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL")),
    ("hf://owner/none", None, ("hf://owner/none is not there (404", "HF_TOKEN")),
    ("hf://owner/name@other/a.txt", None, ("hf://owner/name@other is not there (404",)),
    ("hf://owner/name/a.txt", Fault("/api/", 99, 401), ("refused with 401", "HF_TOKEN")),
    ("hf://owner/name/none.txt", None, ("hf://owner/name/none.txt matches no file",)),
    ("WEB/none.txt", None, ("/web/none.txt matches no file",)),
    ("WEB/there.txt", Fault("there.txt", 99, 403), ("refused with 403", "anybody may read")),
])
def test_what_cannot_be_had_is_one_message_with_the_remedy(name, fault_told, parts, server, tmp_path):
    server.put("there.txt", b"there")
    (tmp_path / "web" / "there.txt").write_bytes(b"there")
    server.hub["models/owner/name"] = tmp_path / "web"
    server.faults += [fault_told] * (fault_told is not None)
    told = fault(section([name.replace("WEB", f"{server.url}/web")], "text"), tmp_path)
    assert told.startswith("data.paths: ") and [part for part in parts if part not in told] == [], told
    assert SECRET not in told and TOKEN not in told


@pytest.mark.parametrize(("name", "down", "said"), [
    ("s3://bucket/there*", Fault("bucket", 99, 503), r"s3://bucket.* answers 503 \(SlowDown\), 5 times in a row"),
    ("WEB/there.txt", Fault("there.txt", 99, 503), "answers 503 .*, 5 times in a row"),
    ("s3://bucket/a.txt", None, "s3://bucket/a.txt cannot be read: .*, 5 times in a row"),
    ("http://127.0.0.1:9/a.txt", None, "5 times in a row")])
def test_a_server_that_goes_on_failing_is_told_and_is_nobodys_mistake(name, down, said, server, tmp_path, monkeypatch):
    server.put("there.txt", b"there")
    (tmp_path / "web" / "there.txt").write_bytes(b"there")
    server.faults += [down] if down else []
    if not down:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(files.FileSystemError, match=said):
        fault(section([name.replace("WEB", f"{server.url}/web")], "text"), tmp_path)


def test_no_credentials_are_told_with_the_variables(tmp_path, monkeypatch):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    told = buckets._of_obstore(addresses.parse("s3://bucket/a.txt"), Exception(
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3ms - HTTP error: error "
        "sending request"), "read")
    assert "no credentials" in str(told) and "AWS_ACCESS_KEY_ID" in str(told)
    told = buckets._of_obstore(addresses.parse("s3://bucket/a.txt"), Exception(
        f"Generic S3 error: Error performing POST https://sts.host/?WebIdentityToken={SECRET} in 3ms - HTTP error: "
        "timed out\nmore"), "read")
    assert SECRET not in str(told) and "?…" in str(told)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("s3://bucket/a.txt", "AWS_ENDPOINT_URL", f"not a url {SECRET}"),
    ("s3://bucket/a.txt", "AWS_ENDPOINT_URL", f"http://me:{SECRET}@127.0.0.1:9"),
    ("s3://bucket/a.txt", "AWS_ACCESS_KEY_ID", f"{SECRET}\n"),
    ("gs://bucket/a.txt", "GOOGLE_SERVICE_ACCOUNT", "/none.json"),
    ("hf://owner/name/a", "HF_ENDPOINT", f"none {SECRET}"), ("hf://owner/name/a", "HF_TOKEN", f"{SECRET}\nb"),
    ("hf://owner/name/a", "HF_TOKEN", f"{SECRET}é猫")])
def test_an_environment_that_cannot_be_used_is_one_message_without_it(name, key, value, tmp_path, monkeypatch):
    monkeypatch.setenv(key, value)
    told = fault(section([name], "text"), tmp_path)
    assert name.rpartition("/")[0] in told and SECRET not in told, told


def test_a_missing_extra_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "needs the package obstore" in (told := fault(section(["s3://bucket/a.txt"], "text"), tmp_path))
    assert "'.[storage]'" in told


@pytest.mark.parametrize(("text", "part"), [
    ("https://me:secret@host/a", "https://…@host/a has a name or password"),
    ("https://host/a?sig=secret", "has a query"),
    ("s3://id:secret@bucket/a", "s3://…@bucket/a has a name"), ("abfs://a/b", "use s3://"),
    ("hf://name", "hf://OWNER/NAME"), ("hf://datasets/name", "hf://OWNER/NAME"), ("hf://spaces/a/b", "hf://OWNER/NAME"),
    ("s3:///key", "names no bucket"), ("https:///a", "names no host"), ("s3://bucket/a/../b", ". or .."),
    ("s3://bucket/a\nb", "control character")])
def test_an_address_that_is_none_or_holds_a_secret_is_refused(text, part):
    with pytest.raises(StorageError) as caught:
        addresses.parse(text)
    assert part in str(caught.value) and "secret" not in str(caught.value).replace("a secret", "")


def test_a_model_folder_comes_from_the_hub_and_the_token_goes_nowhere_else(server):
    server.hub["models/owner/name"], server.private = GOLDENS / "qwen3", True
    found = folder.open_folder(model_folder.local_path("hf://owner/name", weights="copied"))
    assert found.model == folder.open_folder(GOLDENS / "qwen3").model
    asked = {one.path.split("/")[1]: one.headers.get("Authorization") for one in server.log}
    assert asked["api"] == asked["owner"] == f"Bearer {TOKEN}" and asked["cdn"] is None
    assert not [path for path in copies.home().rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize("line", [["model.safetensors", None, "etag", "URL/other"], ["URL/x.txt", 4, "etag", "0" * 40]])
def test_a_list_of_files_that_somebody_changed_sends_the_token_nowhere_else(line, server, tmp_path, monkeypatch):
    """Lists are kept in a directory that others may write."""
    with socket.create_server(("127.0.0.1", 0)) as thief:
        thief.settimeout(0.2)
        server.hub["models/owner/name"], server.private = GOLDENS / "qwen3", True
        copies.match("hf://owner/name/*.json")
        copies.forget()
        (kept,) = (copies.home() / copies.LISTINGS).iterdir()
        url = f"http://127.0.0.1:{thief.getsockname()[1]}"
        line = [part.replace("URL", url) if isinstance(part, str) else part for part in line]
        kept.write_text(json.dumps([line]))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        name = f"hf://owner/name/{line[0]}"
        assert copies.match(name) == [name]
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(retries, "SILENCE_S", 0.2)
        with pytest.raises((StorageError, files.FileSystemError)):
            copied(name)
        with pytest.raises(TimeoutError):
            thief.accept()


def test_the_same_bucket_at_another_endpoint_has_other_directories(monkeypatch):
    place = addresses.parse(f"s3://{BUCKET}/run")
    first = copies.home_of("runs", place)
    assert copies.home_of("runs", place) == first
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://another")
    assert copies.home_of("runs", place) != first


def test_only_what_accompanies_weights_is_copied_until_they_are_wanted(server):
    server.hub["models/owner/name"] = GOLDENS / "qwen3"
    assert model_folder.is_at("hf://owner/name") and not server.asked(path=".safetensors")
    first = model_folder.local_path("hf://owner/name")
    assert model_folder.local_path("hf://owner/name", weights="copied") == first and server.asked(path=".safetensors")


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_model_folder_of_several_files_comes_from_a_bucket_and_the_web(scheme, server, tmp_path):
    home = tmp_path / "web" / "model"
    shutil.copytree(GOLDENS / "qwen3", home)
    header = folder.open_folder(home)
    names = [*header.entries]
    (home / "model.safetensors").rename(home / "model-00001.safetensors")
    (home / model_folder.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001.safetensors")}))
    for path in home.iterdir():
        server.put(f"model/{path.name}", path)
    name = f"s3://{BUCKET}/model" if scheme == "s3" else f"{server.url}/web/model"
    assert folder.open_folder(model_folder.local_path(name, weights="copied")).entries.keys() == header.entries.keys()
    with pytest.raises(StorageError, match="has no config.json"):
        model_folder.local_path(f"{name}/none")


def test_the_hub_is_not_asked_offline_nor_for_a_commit_that_is_known(server, tmp_path, monkeypatch, bpe):
    home = tmp_path / "web"
    shutil.copy(bpe, home / "tokenizer.json")
    (home / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    server.hub["models/owner/name"] = home
    online = tokenizer.open_file("hf://owner/name")
    assert online.key == tokenizer.open_file(bpe).key
    assert (Path(online.path).parent / "tokenizer_config.json").is_file()
    tokenizer.open_file(f"hf://owner/name@{COMMIT}/tokenizer.json")
    for offline in (False, True):
        server.log.clear()
        copies.forget()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "0")
        assert tokenizer.open_file(f"hf://owner/name{'' if offline else '@' + COMMIT}").key == online.key
        assert server.log == []
    with pytest.raises(StorageError, match="has not been read on this host, and HF_HUB_OFFLINE"):
        tokenizer.open_file("hf://owner/other")
    shutil.rmtree(Path(online.path).parent)
    with pytest.raises(StorageError, match="has not been copied .* HF_HUB_OFFLINE"):
        tokenizer.open_file("hf://owner/name")
    assert server.log == []


COPY = """
import sys
from meshtrain.storage import copies
names = copies.match(sys.argv[1])
print(*copies.copy_files(names, lambda name: (), copies.Copying(copies.home(), lambda line: print(line, file=sys.stderr))))
"""


def test_several_processes_of_a_host_fetch_once_and_one_that_is_killed_leaves_no_half(server):
    for i in range(3):
        server.put(f"once/{i}.txt", bytes(1000))
    name = f"s3://{BUCKET}/once/*.txt"
    start = lambda: subprocess.Popen([sys.executable, "-c", COPY, name], text=True, stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT.parent)})
    server.faults.append(Fault("once/", 3, seconds=60))
    killed = start()
    while len(server.of_content()) < 3:     # one that is on its way when its process ends would be logged later
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    assert [path for path in copies.home().rglob("[0-2].txt") if path.is_file()] == []
    server.log.clear()
    all_listed = lambda: sum("list-type" in one.query for one in server.log) == 3
    server.faults.append(Fault("once/0.txt", 1, seconds=0.5, until=all_listed))
    ran = [start() for _ in range(3)]
    said = [process.communicate(timeout=60) for process in ran]
    assert [process.returncode for process in ran] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1 and len(said[0][0].split()) == 3
    read = server.of_content()
    assert len(read) == len(set(read)) and any("1.txt" in one for one in read), read
    others = [str(one) for one in server.log if one.headers.get("Range") is None]
    assert len(others) == 3 and all("list-type" in one for one in others), others


def test_a_long_copy_keeps_no_other_waiting(server):
    """Two processes with different files of one directory of copies; the lock of the first is of its own file."""
    for name in ("long.txt", "short.txt"):
        server.put(f"apart/{name}", bytes(1000))
    done = threading.Event()
    long, short = (f"s3://{BUCKET}/apart/{name}.txt" for name in ("long", "short"))
    copies.match(long)
    server.faults.append(Fault("apart/long.txt", 1, seconds=0.01, until=done.is_set))
    copying = threading.Thread(target=copied, args=(long,))
    copying.start()
    while not server.of_content():
        time.sleep(0.01)
    ran = subprocess.run([sys.executable, "-c", COPY, short], text=True, capture_output=True, timeout=60,
                         env=os.environ | {"PYTHONPATH": str(ROOT.parent)})
    assert ran.returncode == 0 and copying.is_alive() and "short.txt" in ran.stdout, ran
    done.set()
    copying.join()
