"""Images of packed sequences: a decoder runs inside the model that puts image features in the place of tokens.

Letters: T packed tokens, N sequences, L longest sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.image_inputs import GRID, IS_IMAGE, NUMBERS, PIXELS, POSITIONS, ImageInputs

_OF_IMAGES = {"last_hidden_state", "pooler_output", "hidden_states", "attentions"}
"""Results of ``get_image_features``, of which the model uses one alone: ``pooler_output``, features of each image."""


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of a micro-batch, and the model that reads them."""

    base: Any
    """The model around the decoder: it has the vision tower and no output head."""
    token_id: int
    types_name: str | None
    inputs: Mapping[str, Tensor]
    """Pixels and the like, in the order of the sequences."""
    different: Mapping[str, Tensor]
    """The same without images that an earlier sequence has, too."""
    order: list[int]
    """Which of the different images each image is."""
    is_image_T: Tensor
    """The tokens that stand for images."""
    position_T3: Tensor | None
    """Positions of the tokens in time, height and width; None where they count within their sequence."""

    @classmethod
    def of(cls, model: Any, batch: Mapping[str, Tensor]) -> PackedImages | None:
        """Return the images of a batch whose inputs ``image_inputs.prepared`` made, or None if it has no images.

        Args:
            model: of transformers, with its output head.
        """
        images = ImageInputs.of(model) if len(batch.get(PIXELS, ())) else None
        if images is None:
            return None
        inputs = {name: batch[name] for name in images.names}
        numbers = batch[NUMBERS].tolist()
        index_of = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
        return cls(
            images.model.base_model,
            images.token_id,
            images.types_name,
            inputs,
            inputs if len(index_of) == len(numbers) else _chosen(inputs, [numbers.index(one) for one in index_of]),
            [index_of[number] for number in numbers],
            batch[IS_IMAGE],
            batch.get(POSITIONS),
        )

    def run(self, decoder: Any, ids_NL: Tensor, laid_out: Callable[[Tensor], Tensor], **options: Any) -> Tensor:
        """Return the hidden states [N, L, H] of ``decoder``, called by its model.

        Args:
            laid_out: brings values of the packed tokens into the shape of ``ids_NL``.
            options: what the decoder is to be called with.
        """
        is_image_NL = laid_out(self.is_image_T)
        # The model puts an image at each token of this number, also where it has sampled such a token.
        is_stray_NL = (ids_NL == self.token_id) & ~is_image_NL
        if self.types_name is not None:
            options[self.types_name] = is_image_NL.long()
        if self.position_T3 is not None:
            options["position_ids"] = laid_out(self.position_T3).movedim(-1, 0)
        handle = decoder.register_forward_pre_hook(partial(self._put_back, is_stray_NL), with_kwargs=True)
        try:
            ids_NL = ids_NL.masked_fill(is_stray_NL, 0 if self.token_id else 1)
            with self._repeated_features():
                output = self.base(input_ids=ids_NL, use_cache=False, **self.different, **options)
        finally:
            handle.remove()
        hidden_NLH: Tensor = output.last_hidden_state
        return hidden_NLH

    @contextmanager
    def _repeated_features(self) -> Iterator[None]:
        """Inside, the model computes each image once, and takes its features for all sequences that have it."""
        of_model = self.base.get_image_features

        def repeated(*args: Any, **kwargs: Any) -> Any:
            output = of_model(*args, **kwargs)
            if not set(output) <= _OF_IMAGES:  # such as features that go into the decoder's layers
                return of_model(*self.inputs.values(), **kwargs)
            features = output.pooler_output
            is_tensor = isinstance(features, Tensor)
            output.pooler_output = features[self.order] if is_tensor else [features[index] for index in self.order]
            return output

        if self.different is self.inputs:
            yield
            return
        self.base.get_image_features = repeated
        try:
            yield
        finally:
            del self.base.get_image_features

    def _put_back(
        self, is_stray_NL: Tensor, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give sampled image tokens their embedding, which the model was kept from seeing."""
        embeds_NLH = kwargs["inputs_embeds"]
        own_H = self.base.get_input_embeddings()(embeds_NLH.new_full((), self.token_id, dtype=torch.long))
        return args, kwargs | {"inputs_embeds": torch.where(is_stray_NL[..., None], own_H, embeds_NLH)}


def _chosen(inputs: Mapping[str, Tensor], images: list[int]) -> dict[str, Tensor]:
    """Return the inputs of these images alone."""
    found = {name: value[images] for name, value in inputs.items() if name != PIXELS}
    sizes = inputs[GRID].prod(1).tolist() if GRID in inputs else [1] * len(inputs[PIXELS])
    pixels = torch.split(inputs[PIXELS], sizes)
    return {PIXELS: torch.cat([pixels[index] for index in images])} | found
