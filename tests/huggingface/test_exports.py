"""checkpoint.export of a run: what fails is made later, what a run has left is set aside, and nothing half written
stays."""
import errno
import fcntl
import os
import shutil

import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401
from folders import contents

from meshtrain import config, files
from meshtrain.checkpoint import checkpoint
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.checkpoint.store import Save
from meshtrain.commands import convert, train
from meshtrain.config import ConfigError
from meshtrain.huggingface.weights import export, exports, new_folder, pretrained
from meshtrain.storage import addresses


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(scope="module")
def words(tiny):
    return [*tiny, "--training.steps=4", "--checkpoint.every=2", "--run.sample_tokens=0",
            "--data.validation_fraction=0"]


@pytest.fixture(scope="module")
def finished(words, tmp_path_factory):
    """A run of four steps without exports, of which 2 and 4 are saved."""
    place = tmp_path_factory.mktemp("finished") / "run"
    assert call(train.main, *words, "--run.dir", place).code == 0
    return place


@pytest.fixture
def again(words, finished, tmp_path):
    """Starts a copy of the finished run with more words."""
    shutil.copytree(finished, tmp_path / "run")
    return lambda *more: call(train.main, *words, "--run.dir", tmp_path / "run", *more)


def names(tmp_path):
    place = tmp_path / "run" / "export"
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def test_a_finished_run_makes_the_exports_that_are_missing(again, tmp_path):
    (tmp_path / "run/export/.3.saving").mkdir(parents=True)      # of a start that was killed
    ran = again("--checkpoint.export=last")
    assert (ran.code, ran.err) == (0, "") and "is finished" in ran.out and names(tmp_path) == ["4"]
    assert call(convert.main, tmp_path / "run", tmp_path / "out", "--dtype=float32").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "run/export/4")
    assert again("--checkpoint.export=every").code == 0 and names(tmp_path) == ["2", "4"]


def test_an_export_that_fails_leaves_nothing_is_told_by_the_exit_code_and_made_by_the_next_start(
        again, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for _ in range(2):
            ran = again("--checkpoint.export=every")
            assert ran.code == 1 and names(tmp_path) == []
            assert "export/2 cannot be written" in ran.err and "export/4 cannot be written" in ran.err
            assert "No space left on device" in ran.err
    assert again("--checkpoint.export=every").code == 0 and names(tmp_path) == ["2", "4"]


def test_training_goes_on_where_an_export_fails_and_the_next_one_makes_it(words, tmp_path, monkeypatch):
    failures, create = [full], export.Files._create
    monkeypatch.setattr(export.Files, "_create", lambda *args: (failures.pop() if failures else create)(*args))
    ran = call(train.main, *words, "--run.dir", tmp_path / "run", "--checkpoint.export=every")
    assert ran.code == 0 and "export of step 2 failed" in ran.err and "No space left" in ran.err, ran
    assert names(tmp_path) == ["2", "4"]
    assert call(convert.main, tmp_path / "run", tmp_path / "out", "--dtype=float32", "--step=2").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "run/export/2")


def test_an_export_that_a_kill_prevented_is_made_with_the_next_one(again, tmp_path):
    """Long before the end, and its checkpoint does not go until then."""
    ran = again("--checkpoint.export=every", "--training.steps=8")
    assert ran.code == 0 and names(tmp_path) == ["2", "4", "6", "8"], ran
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["6", "8"]


def test_a_file_system_that_does_not_answer_where_an_export_would_be_is_told_without_a_traceback(
        again, tmp_path, monkeypatch):
    answer = os.stat

    def stale(path, *args, **more):
        if str(path).endswith("export/4"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return answer(path, *args, **more)
    monkeypatch.setattr(os, "stat", stale)
    monkeypatch.setattr(files, "PAUSES_S", ())
    ran = again("--checkpoint.export=last")
    assert ran.code == 1 and "export/4 cannot be written" in ran.err and "Stale file handle" in ran.err, ran


def test_a_run_whose_last_export_fails_has_its_steps_and_ends_with_1(words, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", full)
    ran = call(train.main, *words, "--run.dir", tmp_path / "run", "--checkpoint.export=last")
    assert ran.code == 1 and "the run is finished, but" in ran.err and "export/4 cannot be written" in ran.err
    assert names(tmp_path) == [] and (tmp_path / "run/checkpoints/4").is_dir()


def test_exports_of_a_course_that_a_run_has_left_are_set_aside(again, tmp_path):
    assert again("--checkpoint.export=every").code == 0
    before = contents(tmp_path / "run/export/4")
    ran = again("--checkpoint.export=every", "--checkpoint.step=2", "--optimizer.learning_rate=0.05")
    assert ran.code == 0 and "exports of later steps are kept as export/4.aside" in ran.out
    assert names(tmp_path) == ["2", "4", "4.aside"]
    assert contents(tmp_path / "run/export/4.aside") == before != contents(tmp_path / "run/export/4")
    assert call(convert.main, tmp_path / "run", tmp_path / "out", "--dtype=float32").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "run/export/4")


def test_a_model_that_cannot_be_exported_is_refused_before_it_is_trained(words, tmp_path):
    ran = call(train.main, *words, "--run.dir", tmp_path / "run", "--checkpoint.export=last", "--model.activation=gelu")
    refused(ran, "checkpoint.export: no Hugging Face family computes this model")


def test_exports_later_than_a_step_are_renamed_and_none_is_overwritten(tmp_path):
    for name in ("2", "4", "4.aside", "10", ".6.saving"):
        (tmp_path / "export" / name).mkdir(parents=True)
    assert exports.set_aside_after(str(tmp_path), 2) == ["4.aside-2", "10.aside"]
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == [
        ".6.saving", "10.aside", "2", "4.aside", "4.aside-2"]
    assert exports.set_aside_after(str(tmp_path / "none"), 0) == []


@pytest.mark.parametrize("code, raised", [(errno.ENOSPC, files.FileSystemError), (errno.ESTALE, files.FileSystemError),
                                          (errno.EACCES, ConfigError)])
def test_exports_that_cannot_be_renamed_are_one_message(tmp_path, monkeypatch, code, raised):
    monkeypatch.setattr(files, "PAUSES_S", (0.0,))
    tries = []

    def refuse(*_):
        tries.append(code)
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(new_folder, "set_aside", refuse)
    (tmp_path / "export" / "4").mkdir(parents=True)
    with pytest.raises(raised, match=f"exports in {tmp_path / 'export'} cannot be set aside: {os.strerror(code)}; "):
        exports.set_aside_after(str(tmp_path), 2)
    assert len(tries) == (2 if raised is files.FileSystemError else 1)


def test_checkpoints_whose_exports_are_missing_stay_for_a_while_and_make_room_where_a_save_fails(tmp_path):
    saved = checkpoint.Checkpoints(DirectoryStore(tmp_path), keep=2)
    for step in range(1, 8):
        (tmp_path / str(step)).mkdir()
    saved.is_needed = lambda step: step in (1, 2, 3, 7)
    saved._clean_after(Save(7, 1, False), 0)
    assert saved.steps() == [2, 3, 6, 7], "as many more as keep, the newest"
    saved._failed = 1
    saved._clean_after(Save(7, 1, False), 0)
    assert saved.steps() == [6, 7]


# ---- two writers of one directory ------------------------------------------------------------------------------------


def test_a_second_writer_of_a_directory_is_refused_and_the_first_is_whole(tmp_path):
    with new_folder.writing(tmp_path / "out") as place:
        (place / "weights").write_text("first")
        with pytest.raises(ConfigError, match="is being written by another process"), new_folder.writing(tmp_path / "out"):
            pass
    with pytest.raises(ConfigError, match="exists already"), new_folder.writing(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out/weights").read_text() == "first"


def test_what_a_killed_writer_left_is_taken_over_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / ".out.saving").mkdir()
    (tmp_path / ".out.saving" / "old").touch()
    (tmp_path / ".out.lock").touch()
    with pytest.raises(RuntimeError), new_folder.writing(tmp_path / "out") as place:
        assert list(place.iterdir()) == []
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []

    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", without)
    with new_folder.writing(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_comes_while_another_is_written_is_not_replaced(tmp_path):
    with pytest.raises(OSError, match="could not be written"), new_folder.writing(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, ConfigError), (errno.ESTALE, OSError),
                                              (errno.ENOSPC, OSError)])
def test_a_directory_that_cannot_be_made_is_a_mistake_or_the_file_system_s_moment(number, kind, tmp_path, monkeypatch):
    def fails(*_, **more):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "mkdir", fails)
    with pytest.raises(kind, match=os.strerror(number)) as found, new_folder.writing(tmp_path / "out"):
        pass
    assert isinstance(found.value, ConfigError) == (kind is ConfigError)


# ---- companions ------------------------------------------------------------------------------------------------------


def test_a_companion_that_links_out_of_the_folder_is_refused_and_the_hub_s_links_are_followed(tmp_path):
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots/main").mkdir(parents=True)
    (hub / "blobs/12ab").write_text("{}")
    (hub / "snapshots/main/config.json").symlink_to("../../blobs/12ab")
    (hub / "snapshots/main/vocab.json").write_text("{}")
    (hub / "snapshots/main/tokenizer.json").symlink_to("vocab.json")
    pretrained.copy_companions(hub / "snapshots/main", tmp_path / "hf")
    copied = sorted((tmp_path / "hf").iterdir())
    assert [path.name for path in copied] == ["config.json", "tokenizer.json", "vocab.json"] and not any(
        map(os.path.islink, copied))
    (tmp_path / "secret").write_text("key")
    for folder in (hub / "snapshots/main", tmp_path / "clone"):
        folder.mkdir(exist_ok=True)
        (folder / "added_tokens.json").symlink_to(tmp_path / "secret")
        with pytest.raises(ValueError,
                           match="added_tokens.json is a link to .*secret, outside the folder, and is not copied"):
            pretrained.copy_companions(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_credentials_that_a_bucket_refuses_an_export_are_a_mistake_but_at_a_restart(tmp_path):
    def refuse():
        raise addresses.Refused("s3://b/out is refused with 403 (AccessDenied); give credentials")

    with pytest.raises(ConfigError, match="is refused with 403"):
        new_folder.on_first(tmp_path, refuse)
    with config.restarting(), pytest.raises(files.FileSystemError, match="is refused with 403"):
        new_folder.on_first(tmp_path, refuse)
