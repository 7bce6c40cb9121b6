"""The state of a trainer goes to the host, to checkpoints and to model folders, and comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.conformance.promise import promise
from rlcore.conformance.tiny_model import changed, damaged_copy
from rlcore.conformance.under_test import UnderTest, new_train, same_weights
from rlcore.errors import CheckpointError, InvalidInputError


def trained(engine: Any, batches: list[Any], loss_fn: Any) -> list[float]:
    """Train on the batches; return the losses, which are the same only where weights, optimizer and scheduler are."""
    return [engine.train_batch(batch, loss_fn)["loss"] for batch in batches]


@pytest.fixture(scope="session")
def batches(make_batch: Any) -> list[Any]:
    return [make_batch(seed=number) for number in range(4)]


@promise("A state dict has every weight of the folder, on the host, by its name there.", "state_dict", "build")
def test_a_built_engine_has_the_folders_weights(train: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    state = train.state_dict()
    assert {tensor.device for tensor in state.values()} == {torch.device("cpu")}
    assert same_weights(state, {name: tensor.float() for name, tensor in stored.items()})


@promise(
    "A state dict that is loaded is what state_dict() gives then, and later steps do not change it.", "load_state_dict"
)
def test_a_state_dict_comes_back(train: Any, batches: Any, loss_fn: Any) -> None:
    new = changed(train.initial, 1)
    train.load_state_dict(new)
    found = train.state_dict()
    assert same_weights(found, new)
    trained(train, batches[:1], loss_fn)
    assert same_weights(found, new), "it is the trainer's own memory"
    assert not same_weights(train.state_dict(), new), "a step changes nothing"


@promise("A state dict of other names, shapes or values that are no numbers is refused whole.", "load_state_dict")
def test_a_bad_state_dict_is_refused(train: Any) -> None:
    new = changed(train.initial, 1)
    *_, last = new
    lacking = {name: tensor for name, tensor in new.items() if name != last}
    for bad in (
        lacking,
        new | {"unheard_of.weight": torch.zeros(1)},
        new | {last: new[last][..., :-1]},
        new | {last: torch.full_like(new[last], torch.nan)},
        new | {last: new[last].long()},
    ):
        with pytest.raises(InvalidInputError):
            train.load_state_dict(bad)
        assert same_weights(train.state_dict(), train.initial), "a part of it was taken"


@promise("Training goes on after load() as it went on after save(), bit for bit.", "load", "save")
def test_training_resumes_bit_for_bit(
    train: Any, under_test: UnderTest, batches: Any, loss_fn: Any, tmp_path: Path
) -> None:
    trained(train, batches[:2], loss_fn)
    train.save(tmp_path / "checkpoint", {"step": 2})
    expected = trained(train, batches[2:], loss_fn), train.state_dict()
    assert train.load(tmp_path / "checkpoint") == {"step": 2}
    assert trained(train, batches[2:], loss_fn) == expected[0], "the same engine trains otherwise"
    assert same_weights(train.state_dict(), expected[1])
    with new_train(under_test) as another:
        another.load(tmp_path / "checkpoint")
        assert trained(another, batches[2:], loss_fn) == expected[0], "another engine trains otherwise"
        assert same_weights(another.state_dict(), expected[1])


@promise("A checkpoint on two workers is read by one, and the other way around.", "several workers", "load")
def test_a_checkpoint_is_of_no_number_of_workers(
    train: Any, train_on: Any, batches: Any, loss_fn: Any, tmp_path: Path
) -> None:
    pair = train_on(2)
    trained(pair, batches[:2], loss_fn)
    pair.save(tmp_path / "pair")
    train.load(tmp_path / "pair")
    assert same_weights(train.state_dict(), pair.state_dict())
    train.save(tmp_path / "one")
    pair.load_state_dict(pair.initial)
    pair.load(tmp_path / "one")
    assert same_weights(train.state_dict(), pair.state_dict())


@promise("A save in the background writes the state of its call, whatever trains meanwhile.", "save", "end_save")
def test_a_save_in_the_background_is_of_its_moment(train: Any, batches: Any, loss_fn: Any, tmp_path: Path) -> None:
    trained(train, batches[:1], loss_fn)
    state = train.state_dict()
    pending = train.save(tmp_path / "checkpoint", blocking=False)
    trained(train, batches[1:2], loss_fn)
    pending.wait()
    train.load(tmp_path / "checkpoint")
    assert same_weights(train.state_dict(), state)


@promise("A checkpoint that is missing or damaged is refused with a CheckpointError, and nothing is changed.", "load")
def test_a_damaged_checkpoint_is_refused(train: Any, batches: Any, loss_fn: Any, tmp_path: Path) -> None:
    trained(train, batches[:1], loss_fn)
    train.save(tmp_path / "checkpoint")
    largest = max((path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()), key=_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    trained(train, batches[1:2], loss_fn)
    state = train.state_dict()
    for path in (tmp_path / "checkpoint", tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            train.load(path)
        assert same_weights(train.state_dict(), state)


def _size(path: Path) -> int:
    return path.stat().st_size


@promise("An exported folder is a Hugging Face model of the trainer's weights.", "export")
def test_an_export_is_a_model_folder(train: Any, batches: Any, loss_fn: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained(train, batches[:1], loss_fn)
    train.export(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32, local_files_only=True)
    own, state = dict(model.named_parameters()), train.state_dict()
    assert state.keys() >= own.keys() or own.keys() >= state.keys()
    assert all(torch.equal(own[name], state[name]) for name in own.keys() & state.keys())
    assert own.keys() & state.keys()


@promise("A module whose folder is damaged is refused with a CheckpointError that names it.", "build")
def test_a_damaged_folder_is_refused(under_test: UnderTest, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        under_test.train(damaged_copy(folder, tmp_path / "damaged"))


@promise("An option of build() that the executor does not know is refused, and its name is said.", "build")
def test_an_unknown_option_is_refused(under_test: UnderTest) -> None:
    with pytest.raises(InvalidInputError, match="no_such_option"):
        under_test.train(no_such_option=1)
