"""Images of packed sequences: a decoder runs inside the model that puts image features in the place of tokens.

Letters: T packed tokens, N sequences, L longest sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlcore.image_inputs import IS_IMAGE, PIXELS, POSITIONS, ImageInputs


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of a micro-batch, and the model that reads them."""

    base: Any
    """The model around the decoder: it has the vision tower and no output head."""
    token_id: int
    types_name: str | None
    inputs: Mapping[str, Tensor]
    """Pixels and the like, in the order of the sequences."""
    is_image_T: Tensor
    """The tokens that stand for images."""
    position_T3: Tensor | None
    """Positions of the tokens in time, height and width; None where they count within their sequence."""

    @classmethod
    def of(cls, images: ImageInputs | None, batch: Mapping[str, Tensor]) -> PackedImages | None:
        """Return the images of a batch whose inputs ``image_inputs.prepared`` made, or None if it has no images."""
        if images is None or not len(batch.get(PIXELS, ())):
            return None
        return cls(
            images.model.base_model,
            images.token_id,
            images.types_name,
            {name: batch[name] for name in images.names},
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
            output = self.base(input_ids=ids_NL, use_cache=False, **self.inputs, **options)
        finally:
            handle.remove()
        hidden_NLH: Tensor = output.last_hidden_state
        return hidden_NLH

    def _put_back(
        self, is_stray_NL: Tensor, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give sampled image tokens their embedding, which the model was kept from seeing."""
        embeds_NLH = kwargs["inputs_embeds"]
        own_H = self.base.get_input_embeddings()(torch.tensor(self.token_id, device=embeds_NLH.device))
        return args, kwargs | {"inputs_embeds": torch.where(is_stray_NL[..., None], own_H, embeds_NLH)}
