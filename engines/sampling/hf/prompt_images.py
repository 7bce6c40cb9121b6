"""The images of a batch of prompts, as a transformers model takes them beside left-padded tokens.

Letters: P prompts, L columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.engines.sampling.prompts import inputs_of
from rlcore.image_inputs import ImageInputs


class PromptImages:
    """Images of checked prompts, of which one has some at least."""

    def __init__(self, images: ImageInputs, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._images, self._prompts, self._device = images, prompts, device
        self._is_image: list[Tensor] = []
        self._positions: list[Tensor | None] = []
        for number, prompt in enumerate(prompts):
            token_ids, inputs = torch.tensor(list(prompt)), images.rows_of(inputs_of(prompt))
            self._is_image.append(images.located(f"prompt {number} of the batch", token_ids, inputs))
            self._positions.append(images.positions(token_ids, self._is_image[-1], inputs))
        self._first_positions = {
            prompt: len(prompt) if position_L3 is None else int(position_L3.max()) + 1
            for prompt, position_L3 in zip(prompts, self._positions, strict=True)
        }

    def first_position(self, prompt: Sequence[int]) -> int:
        """Return the position of the first token after a prompt."""
        return self._first_positions[prompt]

    def arguments(self, num_columns: int) -> dict[str, Tensor]:
        """Return the model's arguments for prompts that are padded on the left to so many columns."""

        def padded(rows: Sequence[Tensor]) -> Tensor:
            """Return [P, L, ...]."""
            widths = [(0, 0) * (row.ndim - 1) + (num_columns - len(row), 0) for row in rows]
            return torch.stack([pad(row, width) for row, width in zip(rows, widths, strict=True)])

        with_images = [inputs for prompt in self._prompts if (inputs := inputs_of(prompt))]
        found = {name: torch.cat([inputs[name] for inputs in with_images]) for name in self._images.names}
        if self._images.types_name is not None:
            found[self._images.types_name] = padded(self._is_image).long()
        known = [position_L3 for position_L3 in self._positions if position_L3 is not None]
        if known:
            found["position_ids"] = padded(known).movedim(-1, 0)
        return {name: value.to(self._device) for name, value in found.items()}
