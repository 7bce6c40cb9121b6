"""Damaged checkpoints and exports are refused, whatever is wrong with them, before anything is changed."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import rlcore
from rlcore.engines.checkpoints import checkpoint, loading, verify
from rlcore.engines.checkpoints.checkpoint import Save
from rlcore.engines.checkpoints.damage import damage_of
from rlcore.engines.checkpoints.manifest import encode_manifest
from rlcore.engines.checkpoints.random_states import random_states
from rlcore.engines.checkpoints.saved_tensor import TensorPart, covers_once, parts_of
from rlcore.engines.checkpoints.tensor_file import Stamp
from rlcore.errors import CheckpointError, InvalidInputError, MissingDependencyError
from rlcore.nn import HuggingFaceTrainModule
from rlcore.ops import ppo_clip

VOCAB = 21
Damage = Callable[[Path], object]


def write_shares(folder: Path, save: str, size: int = 2, algorithm: str = "xxh3_128") -> Path:
    """A checkpoint of ``size`` workers: a matrix by rows, and a vector for each rank."""
    for rank in range(size):
        matrix = TensorPart(torch.full((2, 3), float(rank + int(save, 16))), [2 * rank, 0], [2 * size, 3])
        own = parts_of({f"rank-{rank}-x": torch.arange(5)})
        groups = ["weights", "optimizer", "rng"]
        share = Save(folder, Stamp(save, algorithm), rank=rank, size=size, groups=groups, state={"step": 1})
        with share.held():
            share.write({"weights": {"w": matrix}, "optimizer": {"m": matrix}, "rng": own})
    return folder


def in_format_3(folder: Path) -> Path:
    """The same checkpoint as the format before wrote it: without digests, ids and shapes."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest = {"schema": "rlcore.checkpoint/3"} | {
        key: value for key, value in manifest.items() if key not in ("schema", "seal", "algorithm")
    }
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    for file in folder.glob("*/*.safetensors"):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = msgspec.json.decode(data[8 : 8 + size])
        given = header["__metadata__"].items()
        header["__metadata__"] = {key: value for key, value in given if not key.startswith("rlcore.")}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return folder


def file_of(folder: Path, name: str) -> Path:
    """Such as ``weights-0``."""
    return next(folder.glob(f"data-*/{name}.safetensors"))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data)


def edit(folder: Path, **changes: Any) -> None:
    """The manifest, with these entries; those that are None go."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes()) | changes
    (folder / "manifest.json").write_bytes(
        msgspec.json.encode({key: value for key, value in manifest.items() if value is not None})
    )


def load_all(folder: Path) -> None:
    checkpoint.read(folder).check_data()


# ------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256"])
def test_a_changed_byte_anywhere_is_found_and_its_file_named(tmp_path: Path, algorithm: str) -> None:
    folder = write_shares(tmp_path, "0" * 12, size=1, algorithm=algorithm)
    load_all(folder)
    for file in sorted(path for path in folder.rglob("*.*") if path.is_file()):
        good = file.read_bytes()
        for at in range(0, len(good), 5):
            flip(file, at)
            with pytest.raises(CheckpointError, match=file.name):
                load_all(folder)
            file.write_bytes(good)
    load_all(folder)


def zero_data(folder: Path) -> None:
    file = file_of(folder, "weights-1")
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + bytes(len(data) - start))


def copy_another_rank(folder: Path) -> None:
    shutil.copy(file_of(folder, "weights-0"), file_of(folder, "weights-1"))


def copy_another_step(folder: Path) -> None:
    other = write_shares(folder / "other", "2" * 12)
    shutil.copy(file_of(other, "weights-1"), file_of(folder, "weights-1"))
    shutil.rmtree(other)


def swap_groups(folder: Path) -> None:
    first, second = file_of(folder, "optimizer-1"), file_of(folder, "weights-1")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def drop_digests(folder: Path) -> None:
    old = in_format_3(write_shares(folder / "other", "1" * 12))
    shutil.copy(file_of(old, "weights-1"), file_of(folder, "weights-1"))
    shutil.rmtree(old)


def test_each_damaged_file_is_reported_with_its_own_damage(tmp_path: Path) -> None:
    """A file that belongs elsewhere is found although the parts of a group, of which one is damaged, are not joined."""
    folder = write_shares(tmp_path, "1" * 12)
    copy_another_step(folder)
    flip(file_of(folder, "weights-0"), -1)
    found = {Path(file.file).stem: file.error for file in verify.verify(folder).files if file.error}
    assert found.keys() == {"weights-0", "weights-1"}
    assert "differ from their digest" in found["weights-0"]
    assert f"of the save {'2' * 12}, where weights-1.safetensors of the save {'1' * 12} belongs" in found["weights-1"]


def use_another_folder(folder: Path) -> None:
    name = next(folder.glob("data-*")).name
    (folder / name).rename(folder.parent / name)
    edit(folder, data=f"../{name}")


def use_a_pipe(file: Path) -> None:
    """Who opens it waits for a writer for ever."""
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "zeros": (zero_data, r"weights-1\.safetensors: the data of w differ from their digest"),
    "another rank's": (
        copy_another_rank,
        r"weights-1.safetensors: it is weights-0.safetensors of the save 1{12}",
    ),
    "another step's": (
        copy_another_step,
        r"weights-1.safetensors: it is weights-1.safetensors of the save 2{12}",
    ),
    "another group's": (swap_groups, r"weights-1.safetensors: it is optimizer-1.safetensors of the save 1{12}"),
    "no digests": (drop_digests, r"weights-1\.safetensors: it has no digests, and the files of its save have"),
    "longer": (
        lambda folder: file_of(folder, "weights-1").write_bytes(file_of(folder, "weights-1").read_bytes() + b"x"),
        r"weights-1\.safetensors: Error while deserializing header",
    ),
    "empty": (lambda folder: file_of(folder, "rng-0").write_bytes(b""), r"rng-0\.safetensors: its 0 bytes are too few"),
    "gone": (lambda folder: file_of(folder, "rng-1").unlink(), r"no complete checkpoint in .*rng-1\.safetensors"),
    "a folder": (
        lambda folder: (file_of(folder, "rng-1").unlink(), (next(folder.glob("data-*")) / "rng-1.safetensors").mkdir()),
        r"rng-1\.safetensors: .*Is a directory",
    ),
    "a pipe": (lambda folder: use_a_pipe(file_of(folder, "rng-1")), r"rng-1\.safetensors: it is a device or a pipe"),
    "a pipe for a manifest": (
        lambda folder: use_a_pipe(folder / "manifest.json"),
        r"manifest\.json: it is a device or a pipe",
    ),
    "elsewhere": (
        use_another_folder,
        r"manifest\.json: its data must be a folder data-<12 .*, not '\.\./",
    ),
    "group elsewhere": (
        lambda folder: edit(folder, groups=["../x"]),
        r"manifest\.json: its groups must be words",
    ),
    "group of a name that no file can have": (
        lambda folder: edit(folder, groups=["a" * 5000]),
        r"its groups must be words of 1 to 32 letters a to z, not 'a{49};",
    ),
    "field that commands a terminal": (
        lambda folder: edit(folder, **{"\x1b[31m": 1}),
        r"manifest\.json: Object contains unknown field `\\x1b\[31m`",
    ),
    "no parts": (lambda folder: edit(folder, num_parts=0), r"manifest\.json: its num_parts must be at least 1, not 0"),
    "other values": (lambda folder: edit(folder, state={}), r"manifest\.json: it differs from the digest in it"),
    "no group": (lambda folder: edit(folder, groups=["weights", "rng"]), r"manifest\.json: it differs from the digest"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_as_it_was_written_is_refused_by_name(tmp_path: Path, damage: Damage, message: str) -> None:
    folder = write_shares(tmp_path / "checkpoint", "1" * 12)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_all(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema": "rlcore.checkpoint/4", "state": ' + b'{"a":' * 100_000,
        b'{"schema": 4}',
        b'{"schema": "rlcore.checkpoint/4"}',
        b'{"schema": "rlcore.checkpoint/3", "data": "data-000000000000", "groups": 1, "num_parts": 1, "state": {}}',
        b'{"schema": "rlcore.checkpoint/3", "data": "data-000000000000", "groups": [], "num_parts": "1", "state": {}}',
        b'{"schema": "rlcore.checkpoint/3", "data": "data-000000000000", "groups": [], "num_parts": 1, "state": []}',
        b'{"schema": "rlcore.checkpoint/2"}',
        b'{"schema": "rlcore.checkpoint/4", "seal": "", "algorithm": "md5", "data": "data-000000000000", "groups": [],'
        b' "num_parts": 1, "state": {}}',
    ],
    ids=range(14),
)
def test_a_damaged_manifest_of_any_kind_is_a_checkpoint_error_that_names_it(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    for use in (checkpoint.read, verify.verify):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            use(tmp_path)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([([0, 0], [2, 3]), ([2, 0], [4, 3])], True),
        ([([0, 0], [4, 1]), ([0, 1], [1, 3]), ([1, 1], [4, 3])], True),
        ([([0, 0], [4, 3]), ([4, 0], [4, 3])], True),
        ([([0, 0], [2, 3])], False),
        ([([0, 0], [2, 3]), ([0, 0], [2, 3])], False),
        ([([0, 0], [3, 3]), ([2, 0], [4, 3])], False),
        ([([0, 0], [2, 3]), ([2, 0], [5, 3])], False),
        ([([-1, 0], [4, 3])], False),
        ([([0], [4])], False),
        ([], False),
    ],
)
def test_boxes_cover_a_matrix_once(boxes: Any, expected: bool) -> None:
    assert covers_once([4, 3], boxes) is expected


def test_boxes_of_scalars_and_of_tensors_without_elements() -> None:
    assert covers_once([], [([], [])]) and not covers_once([], [([], []), ([], [])]) and not covers_once([], [])
    assert covers_once([0, 3], [([0, 0], [0, 3])]) and covers_once([0, 3], [])


# ---------------------------------------------------------------------------------------------- without digests


def test_a_checkpoint_of_the_format_before_is_read(tmp_path: Path) -> None:
    folder = in_format_3(write_shares(tmp_path, "1" * 12))
    found = checkpoint.read(folder)
    found.check_data()
    assert found.tensors["weights"]["w"].shape == (4, 3) and found.state == {"step": 1}
    expected = checkpoint.read(write_shares(tmp_path / "new", "1" * 12)).tensors["weights"]["w"].read()
    assert torch.equal(found.tensors["weights"]["w"].read(), expected)
    report = verify.verify(folder)
    assert report.is_whole and (report.format, report.digest) == ("rlcore.checkpoint/3", "")


@pytest.mark.parametrize("damage", [copy_another_rank, use_another_folder])
def test_what_has_no_digests_is_still_proven_to_be_all_of_every_tensor(tmp_path: Path, damage: Damage) -> None:
    folder = in_format_3(write_shares(tmp_path / "checkpoint", "1" * 12))
    damage(folder)
    with pytest.raises(CheckpointError, match=r"do not cover it exactly once|its data must be a folder"):
        load_all(folder)


# ------------------------------------------------------------------------------------------------------ engines


@pytest.fixture(scope="module")
def policy() -> Any:
    from transformers import Qwen2ForCausalLM

    class Policy(HuggingFaceTrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])

    return Policy


def train(engine: rlcore.TrainEngine, seed: int) -> float:
    batch = {
        "input_ids": torch.randint(VOCAB, (4, 12), generator=torch.Generator().manual_seed(seed)),
        "old_logprobs": torch.full((4, 12), -3.0),
        "advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]),
    }
    return engine.train_batch(batch, ppo_clip())["loss"]


def held(engine: rlcore.TrainEngine) -> dict[str, Tensor]:
    """Copies of all that a load changes."""
    module: Any = engine.executors[0].workers[0].worker.module
    state = {
        f"{index}/{key}": value
        for index, one in module.optimizer.state_dict()["state"].items()
        for key, value in one.items()
    }
    state |= dict(module.named_parameters()) | random_states(rlcore.get_device("cpu"))
    state |= {
        "rate": torch.tensor(module.optimizer.param_groups[0]["lr"]),
        "step": torch.tensor(module.scheduler.last_epoch),
    }
    return {name: value.detach().clone() for name, value in state.items()}


def assert_unchanged(engine: rlcore.TrainEngine, before: dict[str, Tensor]) -> None:
    now = held(engine)
    assert now.keys() == before.keys()
    assert [name for name in now if not torch.equal(now[name], before[name])] == []


def resealed(folder: Path, **changes: Any) -> None:
    """The manifest with other contents, and the digest of these."""
    found = msgspec.json.decode((folder / "manifest.json").read_bytes()) | changes
    stamp = Stamp(found["data"].removeprefix("data-"), found["algorithm"])
    text = encode_manifest(stamp, found["groups"], found["num_parts"], found["state"])
    (folder / "manifest.json").write_bytes(text)


def swap_optimizer_and_rng(folder: Path) -> None:
    first, second = file_of(folder, "optimizer-0"), file_of(folder, "rng-0")
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def without_state(folder: Path, key: str) -> None:
    state = msgspec.json.decode((folder / "manifest.json").read_bytes())["state"]
    resealed(folder, state={name: value for name, value in state.items() if name != key})


ENGINE_DAMAGES: dict[str, tuple[Damage, str]] = {
    "a bit of the weights": (
        lambda folder: flip(file_of(folder, "weights-0"), -5),
        "weights-0.safetensors: the data",
    ),
    "a bit of the optimizer": (
        lambda folder: flip(file_of(folder, "optimizer-0"), -5),
        "optimizer-0.safetensors: the data",
    ),
    "a bit of the random states": (lambda folder: flip(file_of(folder, "rng-0"), -5), "rng-0.safetensors: "),
    "files swapped": (swap_optimizer_and_rng, r"optimizer-0.safetensors: it is rng-0.safetensors of the save"),
    "files swapped, no digests": (
        lambda folder: (in_format_3(folder), swap_optimizer_and_rng(folder)),
        r"optimizer-\*\.safetensors: 'rank-0-\w+' names no tensor of the optimizers \['optimizer'\]",
    ),
    "no optimizer": (
        lambda folder: resealed(folder, groups=["weights", "rng"]),
        r"manifest.json: its groups must be weights, optimizer, rng; it has no optimizer",
    ),
    "no weights": (lambda folder: (in_format_3(folder), edit(folder, groups=["rng"])), "manifest.json: .* no weights"),
    "no optimizers' values": (lambda folder: without_state(folder, "optimizers"), "manifest.json: .*optimizers"),
    "no schedulers": (lambda folder: without_state(folder, "schedulers"), "manifest.json: .*schedulers"),
    "nothing of yours": (lambda folder: without_state(folder, "extra"), "manifest.json: .*extra"),
}


@pytest.mark.parametrize(("damage", "message"), ENGINE_DAMAGES.values(), ids=ENGINE_DAMAGES)
def test_an_engine_that_refuses_a_checkpoint_is_as_it_was(
    engine: rlcore.TrainEngine, tmp_path: Path, damage: Damage, message: str
) -> None:
    train(engine, 0)
    engine.save(tmp_path, {"step": 1})
    train(engine, 1)
    random.gauss(0, 1)
    before = held(engine)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=rf"the checkpoint {tmp_path} is damaged: .*{message}"):
        engine.load(tmp_path)
    assert_unchanged(engine, before)


def test_a_base_model_that_has_gone_is_missed_before_anything_is_changed(
    policy: Any, qwen2_folder: Path, tmp_path: Path
) -> None:
    import peft

    base = Path(shutil.copytree(qwen2_folder, tmp_path / "base"))
    with rlcore.meta_device():
        module = policy.from_pretrained(base)
        module.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with rlcore.TrainEngine(module) as engine:
        engine.build(devices="cpu")
        train(engine, 0)
        engine.save(tmp_path / "checkpoint")
        train(engine, 1)
        before = held(engine)
        (base / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=f"cannot read the model at {base}"):
            engine.load(tmp_path / "checkpoint")
        assert_unchanged(engine, before)


def test_a_scheduler_continues_with_the_state_that_it_had(
    policy: Any, qwen2_folder: Path, engine: rlcore.TrainEngine, tmp_path: Path
) -> None:
    """Its milestones have whole numbers as keys, which JSON has not."""
    train(engine, 0)
    engine.save(tmp_path)
    module: Any = engine.executors[0].workers[0].worker.module
    before = dict(module.scheduler.milestones)
    engine.load(tmp_path)
    assert dict(module.scheduler.milestones) == before
    rates = []
    for seed in range(1, 5):
        train(engine, seed)
        rates.append(module.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


def test_a_digest_of_another_kind_is_refused(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    wrong: Any = "md5"
    for method in (engine.save, engine.export):
        with pytest.raises(InvalidInputError, match=r"takes 'xxh3_128' or 'sha256' as digest, got 'md5'"):
            method(tmp_path / "out", digest=wrong)
    assert list(tmp_path.iterdir()) == []


def test_without_xxhash_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_shares(tmp_path, "1" * 12, algorithm="sha256")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    load_all(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"needs the package 'xxhash'; run: pip install 'rlcore\[hf\]'"):
        write_shares(tmp_path, "2" * 12)


# ----------------------------------------------------------------------------------------------------- together


def test_a_checkpoint_that_is_replaced_while_it_is_checked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shares(tmp_path, "1" * 12)
    looked: list[str] = []

    def look(found: checkpoint.Checkpoint) -> str:
        looked.append(found.manifest.data)
        if len(looked) == 1:
            write_shares(tmp_path, "2" * 12)
        return found.manifest.data

    assert loading.agreed(tmp_path, rlcore.get_device("cpu"), look) == f"data-{'2' * 12}"
    assert looked == [f"data-{'1' * 12}", f"data-{'2' * 12}"]


def test_workers_that_have_opened_different_checkpoints_open_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shares(tmp_path, "1" * 12)
    others = iter([f"data-{'0' * 12}", "", f"data-{'1' * 12}"])
    monkeypatch.setattr(loading, "_exchanged", lambda own, _: [own, loading._RankCheck(next(others), "")])
    looked: list[str] = []
    assert loading.agreed(tmp_path, None, lambda found: looked.append(found.manifest.data)) is None
    assert looked == [f"data-{'1' * 12}"] * 3


def test_what_another_worker_finds_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shares(tmp_path, "1" * 12)
    monkeypatch.setattr(loading, "_exchanged", lambda own, _: [own, loading._RankCheck("", "weights-1: planted")])
    with pytest.raises(CheckpointError, match=r"^weights-1: planted$"):
        loading.agreed(tmp_path, None, lambda found: None)


def test_a_failure_of_any_kind_is_told_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shares(tmp_path, "1" * 12)
    told: list[str] = []
    monkeypatch.setattr(loading, "_exchanged", lambda own, _: (told.append(own.error), [own])[1])

    def look(found: checkpoint.Checkpoint) -> None:
        raise AssertionError("planted \ud800")

    with pytest.raises(AssertionError, match="planted"):
        loading.agreed(tmp_path, None, look)
    assert told == ["planted ?"]


# ------------------------------------------------------------------------------------------------------- verify


def test_verify_finds_every_damaged_file_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_shares(tmp_path, "1" * 12)
    report = verify.verify(folder)
    assert report.is_whole and (report.save, report.digest, report.state) == ("1" * 12, "xxh3_128", {"step": 1})
    assert {file.file: file.tensors for file in report.files} == {
        f"data-{'1' * 12}/{group}-{rank}.safetensors": 1 for group in ("weights", "optimizer", "rng") for rank in (0, 1)
    }
    assert all(file.bytes == (folder / file.file).stat().st_size for file in report.files)
    flip(file_of(folder, "weights-1"), -1)
    file_of(folder, "rng-0").unlink()
    report = verify.verify(folder)
    assert not report.is_whole
    assert {file.file.partition("/")[2]: file.error for file in report.files if file.error} == {
        "weights-1.safetensors": "the data of w differ from their digest",
        "rng-0.safetensors": "it is not there",
    }


@pytest.mark.parametrize("moment", ["file by file", "all together"])
def test_verify_leaves_a_checkpoint_that_a_save_replaces_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = write_shares(tmp_path, "1" * 12)
    name = {"file by file": "_checked", "all together": "open_parts"}[moment]
    real = getattr(verify, name)

    def late(*arguments: Any) -> Any:
        monkeypatch.undo()
        write_shares(tmp_path, "2" * 12)
        return real(*arguments)

    monkeypatch.setattr(verify, name, late)
    report = verify.verify(folder)
    assert report.is_whole and report.save == "2" * 12


def test_a_file_that_goes_while_a_library_opens_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), damage_of(tmp_path / "weights-0.safetensors"):
        raise RuntimeError("unable to open file <...> in read-only mode: No such file or directory (2)")
    with pytest.raises(RuntimeError, match="another"), damage_of(tmp_path):
        raise RuntimeError("another")


def test_verify_finds_damage_in_an_export(engine: rlcore.TrainEngine, tmp_path: Path) -> None:
    engine.export(tmp_path, max_shard_bytes=20_000, digest="sha256")
    report = verify.verify(tmp_path)
    assert report.is_whole and (report.format, report.digest) == ("rlcore.export/1", "sha256")
    names = {file.file for file in report.files} | {"rlcore-export.json"}
    assert names == {path.name for path in tmp_path.iterdir()}
    for name in sorted(names):
        file = tmp_path / name
        good = file.read_bytes()
        flip(file, len(good) // 2)
        if name == "rlcore-export.json":
            with pytest.raises(CheckpointError, match=r"rlcore-export\.json"):
                verify.verify(tmp_path)
        else:
            assert [one.file for one in verify.verify(tmp_path).files if one.error] == [name]
        file.write_bytes(good)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    shutil.copy(first, second)
    assert [one.file for one in verify.verify(tmp_path).files if one.error] == [second.name]


def test_verify_says_what_the_folder_is_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is neither a checkpoint \(no manifest.json\) nor an export"):
        verify.verify(tmp_path)
    (tmp_path / "file").touch()
    for folder in (tmp_path / "absent", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=rf"{folder} is no folder; give the one that save\(\) or export\(\)"):
            verify.verify(folder)
