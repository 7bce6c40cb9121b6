"""examples/count_squares.py: a program with images, by any trainer and sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcore.examples import count_squares

SMALL = ["--steps", "1", "--prompts", "2", "--samples", "2", "--held-out", "4"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_DEVICE", "cpu")


def test_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = count_squares.main(SMALL)
    assert 0 <= before <= 1 and 0 <= after <= 1
    assert f"score {after:.3f} after 1 steps" in capsys.readouterr().out


def test_images_show_what_is_asked(tmp_path: Path) -> None:
    """The pixels that the model gets have as many red fields as the answer says; the processor scales and cuts them."""
    count_squares.write_model(tmp_path, 0)
    squares = count_squares.Squares(tmp_path, 3, 0)
    prompts, red = squares.draw(12)
    for prompt, expected in zip(prompts, red.tolist(), strict=True):
        assert prompt["image_grid_thw"].tolist() == [[1, 6, 6]]
        patches = prompt["pixel_values"].view(9, 4, 3, -1)  # four patches a field, of three channels
        channels = patches.mean((1, 3))
        is_red = (channels[:, 0] > channels[:, 1] + 1) & (channels[:, 0] > channels[:, 2] + 1)
        assert int(is_red.sum()) == expected


def test_the_reward_is_halved_by_each_square() -> None:
    class Answer:
        def __init__(self, token: int) -> None:
            self.token_ids = [token]

    class Output:
        def __init__(self, *tokens: int) -> None:
            self.outputs = [Answer(token) for token in tokens]

    found = count_squares.rewards([Output(3, 2, 5), Output(10, 0, 1)], torch.tensor([3, 0]))
    assert found.tolist() == [[1, 0.5, 0.25], [0, 1, 0.5]]


@pytest.mark.slow
def test_it_learns() -> None:
    before, after = count_squares.main(["--steps", "40", "--prompts", "20"])
    assert after > before + 0.15, (before, after)
