"""The inputs of a transformers model that reads images, and where among the tokens of a sequence its images are.

Nothing here knows a family by name. A model says itself which inputs its forward takes, how many tokens an image has
(its grid, or its own image features, measured on the meta device), and where an image's tokens lie in position
(``get_rope_index``).

Letters: L tokens of a sequence, P tokens that stand for images.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rlcore.errors import InvalidInputError, one_line
from rlcore.meta import without_foreign_meta
from rlcore.sequence_input import SequenceInput

IS_IMAGE, POSITIONS = "is_image", "image_positions"
"""Inputs that ``prepared`` adds, with one row a token."""
NUMBERS = "image_numbers"
"""One more, with one row an image: the same number where sequences share an image, as completions of a prompt do."""
PIXELS, GRID = "pixel_values", "image_grid_thw"
_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments by which some models are told which tokens are an image's: 1 there, else 0."""


_measured: WeakKeyDictionary[Any, dict[tuple[int, ...], int]] = WeakKeyDictionary()
"""Model -> shape of an image's pixels -> the number of its tokens."""


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The inputs of one model that belong to images."""

    model: Any
    """The transformers model with its output head, on any device."""
    token_id: int
    """The token that stands for a part of an image."""
    names: tuple[str, ...]
    """The inputs beside the tokens; all of them come with every sequence that has an image."""

    @classmethod
    def of(cls, model: Any) -> ImageInputs | None:
        """Return the inputs of this model; None if it reads no images."""
        config = getattr(model, "config", None)
        token_id = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
        base = getattr(model, "base_model", None)
        if token_id is None or not hasattr(base, "get_image_features"):
            return None
        accepted = _arguments(base)
        return cls(model, token_id, tuple(name for name in (PIXELS, GRID) if name in accepted))

    @classmethod
    def of_folder(cls, path: Path) -> ImageInputs | None:
        """Return the inputs of the model in a folder, of which no weight is read."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForImageTextToText

        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return None
        with without_foreign_meta(), torch.device("meta"):
            return cls.of(AutoModelForImageTextToText.from_config(config))

    @property
    def types_name(self) -> str | None:
        """The argument that tells the model which tokens are an image's; None if it needs none."""
        accepted = _arguments(self.model.base_model)
        return next((name for name in _TYPES if name in accepted), None)

    def rows_of(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the inputs of a prompt, each without rows if there are none.

        Raises:
            InvalidInputError: they are not the model's.
        """
        if inputs:
            self.check_names(inputs)
        return inputs or dict.fromkeys(self.names, torch.empty(0))

    def check_names(self, names: Mapping[str, object]) -> None:
        """Raise InvalidInputError unless these are the model's inputs."""
        if set(names) != set(self.names):
            raise InvalidInputError(
                f"{type(self.model).__name__} takes {' and '.join(self.names)} beside its tokens; got "
                f"{', '.join(sorted(names)) or 'none'}"
            )

    def located(
        self, whose: str, token_ids_L: Tensor, inputs: Mapping[str, Tensor], may_stray_L: Tensor | None = None
    ) -> Tensor:
        """Return [L] bool: the tokens that stand for the images of a sequence; arguments and errors as of ``spans``."""
        is_image_L = torch.zeros(len(token_ids_L), dtype=torch.bool)
        for span in self.spans(whose, token_ids_L, inputs, may_stray_L):
            is_image_L[span.start : span.stop] = True
        return is_image_L

    def spans(
        self, whose: str, token_ids_L: Tensor, inputs: Mapping[str, Tensor], may_stray_L: Tensor | None = None
    ) -> list[range]:
        """Return the tokens of each image of a sequence.

        Args:
            whose: the name of the sequence in errors, such as "prompt 3".
            inputs: the rows of the sequence; without rows if it has no images.
            may_stray_L: tokens that may be ``token_id`` without an image, because the model itself sampled them; None
                allows none.

        Raises:
            InvalidInputError: the images are none of this model, or others than the tokens stand for.
        """
        place_P = (token_ids_L == self.token_id).nonzero().squeeze(1)
        is_free_P = torch.ones(len(place_P), dtype=torch.bool)
        lengths, cursor = self._lengths(whose, inputs), 0
        found: list[range] = []
        for number, length in enumerate(lengths):
            spans_P = place_P[cursor + length - 1 :] - place_P[cursor : len(place_P) - length + 1]
            if not (first := (spans_P == length - 1).nonzero()[:1]).numel():
                raise InvalidInputError(
                    f"{whose} has {len(lengths)} images and no run of tokens for image {number}, which is {length} "
                    f"times the token {self.token_id} in a row; {_found(place_P)}. The model's processor makes tokens "
                    "and images that match"
                )
            cursor += int(first)
            is_free_P[cursor : cursor + length] = False
            found.append(range(int(place_P[cursor]), int(place_P[cursor]) + length))
            cursor += length
        stray_P = place_P[is_free_P]
        if may_stray_L is not None:
            stray_P = stray_P[~may_stray_L[stray_P]]
        if len(stray_P):
            raise InvalidInputError(
                f"{whose} has {len(lengths)} images, of {sum(lengths)} tokens, and {len(stray_P)} more image tokens "
                f"({self.token_id}), the first at {int(stray_P[0])}; give the images of all of them"
            )
        return found

    def positions(self, token_ids_L: Tensor, is_image_L: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return the positions [L, 3] of the tokens, or None where they simply count, as in a text."""
        of_model = getattr(self.model.base_model, "get_rope_index", None)
        if of_model is None:
            return None
        grid = inputs.get(GRID)
        options = {"mm_token_type_ids": is_image_L.long()[None], GRID: grid if grid is not None and len(grid) else None}
        known = {name: value for name, value in options.items() if name in inspect.signature(of_model).parameters}
        with torch.device("cpu"):
            position_31L, _ = of_model(token_ids_L[None], **known)
        position_L3: Tensor = position_31L[:, 0].T.contiguous()
        return position_L3

    # ---------------------------------------------------------------------------------------- tokens of an image

    def _lengths(self, whose: str, inputs: Mapping[str, Tensor]) -> list[int]:
        """Return the number of tokens of each image."""
        pixels = inputs[PIXELS]
        if not any(len(rows) for rows in inputs.values()):
            return []
        if not pixels.is_floating_point():
            raise InvalidInputError(
                f"pixel_values of {whose} have dtype {pixels.dtype}; give those of the model's processor, which are "
                "floating-point numbers"
            )
        if GRID in inputs:
            return self._lengths_of_grid(whose, inputs[GRID], pixels)
        return [self._measure(whose, tuple(image.shape)) for image in pixels]

    def _lengths_of_grid(self, whose: str, grid: Tensor, pixels: Tensor) -> list[int]:
        vision = self.model.config.vision_config
        merge = vision.spatial_merge_size
        if grid.ndim != 2 or grid.shape[1] != 3 or grid.is_floating_point():
            raise InvalidInputError(
                f"{GRID} of {whose} must be whole numbers [images, 3] (frames, rows and columns of patches), got "
                f"{grid.dtype} {list(grid.shape)}"
            )
        bad = (grid < 1).any(1) | (grid[:, 1:] % merge != 0).any(1)
        if bad.any():
            number = int(bad.nonzero()[0])
            raise InvalidInputError(
                f"{GRID} of {whose} is {grid[number].tolist()} for image {number}; frames, rows and columns of patches "
                f"are at least 1, rows and columns multiples of {merge}"
            )
        patches, width = int(grid.prod(1).sum()), vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if pixels.shape != (patches, width):
            raise InvalidInputError(
                f"pixel_values of {whose} have shape {list(pixels.shape)}; its {GRID} is of {patches} patches, each of "
                f"{width} numbers"
            )
        return [int(one) for one in grid.prod(1) // merge**2]

    def _measure(self, whose: str, shape: tuple[int, ...]) -> int:
        """Return the number of tokens of an image whose pixels have this shape, by the model's own code."""
        known = _measured.setdefault(self.model, {})
        if shape not in known:
            try:
                # without the values of weights; a module of the user may have real buffers beside its meta weights
                with without_foreign_meta(), torch.device("meta"), torch.no_grad():
                    kind = type(self.model.base_model)
                    twin = kind._from_config(self.model.config, dtype=torch.float32)
                    found = twin.get_image_features(torch.empty(1, *shape), return_dict=True).pooler_output
            except Exception as error:  # the model's own code
                raise InvalidInputError(
                    f"{type(self.model).__name__} cannot read an image of {list(shape)} numbers, which {whose} has: "
                    f"{one_line(error)}"
                ) from error
            known[shape] = len(found[0])
        return known[shape]


def prepared(
    images: ImageInputs, packed: Mapping[str, Tensor], inputs: Mapping[str, SequenceInput]
) -> dict[str, SequenceInput]:
    """Return the inputs that the model needs for these packed sequences, checked; {} if none of them has an image.

    Args:
        packed: ``input_ids`` [T] and ``cu_seqlens`` [N+1]; with a ``loss_mask`` [T], the tokens inside it were sampled
            by the model, and may be image tokens without an image.

    Raises:
        InvalidInputError: names the sequence, and what is wrong with its images.
    """
    if inputs:
        images.check_names(inputs)
    elif not (packed["input_ids"] == images.token_id).any():
        return {}
    cu_seqlens = packed["cu_seqlens"].long()
    lengths_N = cu_seqlens.diff()
    may_stray_T = packed.get("loss_mask", torch.zeros(len(packed["input_ids"]))).bool()
    lengths = lengths_N.tolist()
    each = zip(torch.split(packed["input_ids"], lengths), torch.split(may_stray_T, lengths), strict=True)
    is_image, positions = [], []
    for number, (ids_L, may_stray_L) in enumerate(each):
        own = images.rows_of({name: value.part(number) for name, value in inputs.items()})
        is_image.append(images.located(f"sequence {number}", ids_L, own, may_stray_L))
        positions.append(images.positions(ids_L, is_image[-1], own))
    if not any(map(torch.any, is_image)):
        return {}
    of_tokens = {IS_IMAGE: torch.cat(is_image)}
    if positions[0] is not None:
        of_tokens[POSITIONS] = torch.cat(positions)  # type: ignore[arg-type]
    starts_N = cu_seqlens[:-1]
    an_image = inputs[GRID if GRID in inputs else PIXELS]
    numbers = SequenceInput(torch.arange(len(an_image.rows)), an_image.starts_N, an_image.counts_N)
    of_sequences = {name: SequenceInput(rows, starts_N, lengths_N) for name, rows in of_tokens.items()}
    return dict(inputs) | of_sequences | {NUMBERS: numbers}


def _arguments(base: Any) -> Mapping[str, object]:
    return _parameters(type(base).forward)


@functools.cache
def _parameters(forward: Any) -> Mapping[str, object]:
    return inspect.signature(forward).parameters


def _found(place_P: Tensor) -> str:
    if not len(place_P):
        return "there is none of them"
    return f"it has {len(place_P)} of them, the first at {int(place_P[0])}"
