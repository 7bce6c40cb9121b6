"""Saves and exports replace what rlcore wrote, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rlcore
from rlcore.engines.checkpoints import checkpoint, folder_swap
from rlcore.engines.checkpoints import export as export_module
from rlcore.engines.checkpoints.checkpoint import Save
from rlcore.engines.checkpoints.saved_tensor import parts_of
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.engines.checkpoints.verify import verify
from rlcore.errors import CheckpointError
from rlcore.nn import HuggingFaceTrainModule


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        pass

    return Policy


def contents(folder: Path) -> dict[str, bytes | str | None]:
    """Of files; where links point to; None of folders."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def save(folder: Path, step: int) -> None:
    share = Save(folder, Stamp(f"{step:012x}"), rank=0, size=1, groups=["weights"], state={"step": step})
    with share.held():
        share.write({"weights": parts_of({"w": torch.full((10,), float(step))})})


# ------------------------------------------------------------------------------------------------------- saves


@pytest.mark.parametrize(
    "manifest", ['{"name": "my app"}', '{"schema": "other/1"}', '{"schema": 3}', "[]", "not JSON", ""]
)
def test_a_manifest_of_another_program_is_not_replaced(tmp_path: Path, manifest: str) -> None:
    write(tmp_path, {"manifest.json": manifest, "data-0123456789ab/rows.csv": "1,2", "data-0123456789ab/commit": "x"})
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"manifest\.json is not a manifest that rlcore wrote .*save to another folder, or move"
    ):
        save(tmp_path, 1)
    assert contents(tmp_path) == before


def test_an_engine_names_the_foreign_manifest(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    write(tmp_path, {"manifest.json": "{}", "data-0123456789ab/rows.csv": "1,2"})
    before = contents(tmp_path)
    for blocking in (True, False):
        with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest that rlcore wrote"):
            engine.save(tmp_path, blocking=blocking)
    assert contents(tmp_path) == before


def test_an_engine_saves_nothing_into_the_root_or_the_home_folder(
    engine: rlcore.TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, what in (("/", "the root of the file system"), (str(tmp_path), "your home folder")):
        before = set(os.listdir(folder))
        for blocking in (True, False):
            with pytest.raises(CheckpointError) as caught:
                engine.save(folder, blocking=blocking)
            own = Path(folder, "checkpoint")
            assert f"{folder} is {what}: a checkpoint has a folder of its own, such as {own}" in str(caught.value)
        assert set(os.listdir(folder)) == before


def test_folders_and_files_that_no_save_wrote_stay(tmp_path: Path) -> None:
    save(tmp_path, 1)
    foreign = write(tmp_path, {
        "data-0123456789ab/rows.csv": "1,2",
        "data-aaaaaaaaaaaa/weights-0.safetensors": "somebody's",
        "data-bbbbbbbbbbbb/rlcore-save": "",
        "data-bbbbbbbbbbbb/mine.txt": "in a folder of a killed save",
        f"data-{1:012x}/notes.txt": "in the folder of a checkpoint",
        ".manifest.json.bak": "mine",
        "notes.txt": "mine",
    })  # fmt: skip
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights-0.safetensors").touch()
    (tmp_path / "data-cccccccccccc").symlink_to("elsewhere")
    before = contents(foreign)
    save(tmp_path, 2)
    after = contents(tmp_path)
    removed = {f"data-{1:012x}/{name}" for name in ("weights-0.safetensors", "commit", "rlcore-save")}
    assert before.keys() - after.keys() == removed | {"data-bbbbbbbbbbbb/rlcore-save"}
    assert {name for name in before.keys() & after.keys() if before[name] != after[name]} == {"manifest.json"}
    assert checkpoint.read(tmp_path).state == {"step": 2}


def test_what_killed_saves_left_goes_with_the_next(tmp_path: Path) -> None:
    write(tmp_path, {
        ".manifest.json.rlcore-x1_abcde": "{",
        f"data-{7:012x}/rlcore-save": "",
        f"data-{7:012x}/.weights-1.safetensors": "a part",
        f"data-{7:012x}/weights-0.safetensors": "whole",
    })  # fmt: skip
    (tmp_path / f"data-{8:012x}").mkdir()
    save(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"data-{9:012x}", "manifest.json"]


def test_what_killed_saves_left_goes_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what fills the disk."""
    save(tmp_path, 1)
    expected = contents(tmp_path)
    write(tmp_path, {
        ".manifest.json.rlcore-x1_abcde": "{",
        f"data-{7:012x}/rlcore-save": "",
        f"data-{7:012x}/weights-0.safetensors": "whole",
    })  # fmt: skip

    def write_parts(*_: object) -> None:
        found = contents(tmp_path)
        assert expected.keys() == {name for name in found if not name.startswith(f"data-{8:012x}")}
        raise OSError("the disk is full")

    monkeypatch.setattr(checkpoint, "write_parts", write_parts)
    with pytest.raises(OSError, match="the disk is full"):
        save(tmp_path, 8)


@pytest.mark.parametrize(
    ("old", "new"),
    [('"rlcore.checkpoint/4"', '"rlcore.checkpoint/5"'), ('"step": 1', '"step": 7')],
    ids=["of a newer rlcore", "damaged"],
)
def test_the_data_of_a_manifest_that_cannot_be_read_stay_until_the_save_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    before = contents(tmp_path)

    def write_parts(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_parts", write_parts)
        with pytest.raises(OSError, match="the disk is full"):
            save(tmp_path, 2)
    Save(tmp_path, Stamp(f"{2:012x}"), rank=0, size=1, groups=["weights"], state={}).discard()
    assert contents(tmp_path) == before
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"data-{3:012x}", "manifest.json"]


def test_a_save_that_cannot_tell_whether_it_is_the_last_keeps_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Save(tmp_path, Stamp(f"{1:012x}"), rank=0, size=1, groups=["weights"], state={"step": 1})
    with share.held():
        share.write({"weights": parts_of({"w": torch.ones(10)})})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            share.discard()
    assert checkpoint.read(tmp_path).state == {"step": 1}


def test_what_another_program_still_writes_is_not_taken_for_left_behind(tmp_path: Path) -> None:
    other = Save(tmp_path, Stamp(f"{1:012x}"), rank=0, size=1, groups=["weights"], state={"step": 1})
    with other.held():
        for step in (2, 3):
            save(tmp_path, step)
            assert checkpoint.read(tmp_path).state == {"step": step}
        other.write({"weights": parts_of({"w": torch.ones(10)})})
    assert checkpoint.read(tmp_path).state == {"step": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"data-{1:012x}", "manifest.json"]


def test_a_save_that_begins_as_another_looks_is_not_taken_for_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the marker between two looks at its folder."""
    other = Save(tmp_path, Stamp(f"{1:012x}"), rank=0, size=1, groups=["weights"], state={"step": 1})
    other.data.mkdir()
    real = os.open

    with contextlib.ExitStack() as others:

        def open_then_begin(path: Any, *arguments: Any, **options: Any) -> int:
            try:
                return real(path, *arguments, **options)
            except FileNotFoundError:
                monkeypatch.undo()
                others.enter_context(other.held())
                raise

        monkeypatch.setattr(os, "open", open_then_begin)
        save(tmp_path, 2)
        other.write({"weights": parts_of({"w": torch.ones(10)})})
    assert checkpoint.read(tmp_path).state == {"step": 1}


def test_a_save_follows_a_link_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for step in (1, 2):
        save(tmp_path / "link", step)
    assert (tmp_path / "link").is_symlink() and checkpoint.read(tmp_path / "disk").state == {"step": 2}
    assert len(list((tmp_path / "disk").iterdir())) == 2


# ------------------------------------------------------------------------------------------------------ exports

PROJECT = {
    "config.json": '{"my": "app"}',
    ".git/HEAD": "ref: refs/heads/main",
    "src/main.py": "print()",
    "notes.txt": "years of work",
}


def test_a_project_with_a_config_is_not_replaced(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    project = write(tmp_path / "project", PROJECT)
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=rf"{project} is not empty, and no export of rlcore wrote it \(it has no rlcore-export\.json\); nothing "
        "there was touched. Export to another folder, or move this one away",
    ):
        engine.export(project)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moment", ["as it writes", "as it takes the earlier one away"])
def test_what_a_killed_export_left_goes_with_the_next(
    engine: rlcore.TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "model"
    engine.export(folder)
    expected = contents(folder)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "write_record", die)
        if moment == "as it takes the earlier one away":
            patch.undo()
            rename = Path.rename
            patch.setattr(folder_swap, "exchange", lambda *_: False)
            patch.setattr(Path, "rename", lambda self, to: die() if self.name == "new" else rename(self, to))
        module = engine.executors[0].workers[0].worker.module  # a fork may not use the engine
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Exception):
                export_module.export(module, folder, max_shard_bytes=1 << 30, writes=True)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".model.rlcore-*"))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(CheckpointError, match="the disk is full"):
            engine.export(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"] and contents(folder) == expected


def test_an_export_in_which_somebody_has_put_files_is_not_replaced(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    engine.export(folder)
    for add in (
        lambda: write(folder, {"README.md": "mine"}),
        lambda: write(folder, {".git/HEAD": "mine"}),
        (folder / "empty").mkdir,
        lambda: (folder / "link").symlink_to(tmp_path),
    ):
        add()
        before = contents(tmp_path)
        with pytest.raises(CheckpointError, match=r"files that no export wrote: (README\.md|\.git/HEAD|empty|link)"):
            engine.export(folder)
        assert contents(tmp_path) == before
        for name in ("README.md", "link"):
            (folder / name).unlink(missing_ok=True)
        for name in (".git", "empty"):
            shutil.rmtree(folder / name, ignore_errors=True)
    engine.export(folder)
    assert verify(folder).is_whole


def test_an_export_whose_files_somebody_changed_is_not_replaced(
    engine: rlcore.TrainEngine, qwen2_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    engine.export(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    for changed, data in (
        (config, config.read_bytes().replace(b"{", b'{"note": "mine",', 1)),
        (weights, (qwen2_folder / "model.safetensors").read_bytes()),
    ):
        own = changed.read_bytes()
        changed.write_bytes(data)
        before = contents(tmp_path)
        with pytest.raises(CheckpointError, match=rf"a file that was changed after its export: .*{changed.name}: "):
            engine.export(folder)
        assert contents(tmp_path) == before
        changed.write_bytes(own)
    config.unlink()
    engine.export(folder)
    assert verify(folder).is_whole


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"schema": "rlcore.export/9"}'])
def test_an_export_whose_list_of_files_is_damaged_is_not_replaced(
    engine: rlcore.TrainEngine, tmp_path: Path, text: str
) -> None:
    folder = write(tmp_path / "model", PROJECT | {"rlcore-export.json": text})
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"may hold other files than an export's: .*rlcore-export\.json: "):
        engine.export(folder)
    assert contents(tmp_path) == before


def test_a_file_that_comes_while_an_export_is_written_is_kept(
    engine: rlcore.TrainEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    engine.export(folder)
    written = export_module.write_record

    def write_and_add(*args: Any) -> None:
        written(*args)
        (folder / "notes.txt").write_text("mine")

    monkeypatch.setattr(export_module, "write_record", write_and_add)
    with pytest.raises(CheckpointError, match=r"has files that no export wrote: notes\.txt"):
        engine.export(folder)
    assert (folder / "notes.txt").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_folder_that_the_module_is_read_from_is_not_replaced(
    policy: Any, engine: rlcore.TrainEngine, qwen2_folder: Path, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    engine.export(tmp_path / "first")
    (tmp_path / "link").symlink_to("first")
    with rlcore.meta_device():
        module = policy.from_pretrained(tmp_path / "first")
    before = contents(tmp_path)
    with rlcore.TrainEngine(module) as second:
        second.build(devices="cpu")
        for folder in (tmp_path / "first", tmp_path / "link"):
            with pytest.raises(CheckpointError, match="first holds the files that this module is read from; export"):
                second.export(folder)
    assert contents(tmp_path) == before
    own = copy_of(qwen2_folder)
    with pytest.raises(CheckpointError, match="is not empty, and no export of rlcore wrote it"):
        engine.export(own)


def test_an_export_follows_a_link_which_stays(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/model")  # to what is not there yet
    for _ in range(2):
        engine.export(tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and verify(tmp_path / "disk" / "model").is_whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"], "nothing temporary is left"
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(CheckpointError, match=r"cannot write the model to .*circle"):
        engine.export(tmp_path / "circle")


def test_the_list_of_files_is_of_all_that_the_export_wrote(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.export(tmp_path, max_shard_bytes=20_000)
    record = json.loads((tmp_path / "rlcore-export.json").read_text())
    names = {*record["weights"], *record["others"], "rlcore-export.json"}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert "config.json" in record["others"] and "tokenizer.json" in record["others"]
