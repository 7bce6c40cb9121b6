"""One batch of completions, from prefill to the last token, with a transformers model.

Prompts are padded on the left, so that all rows append to the cache at the same column. Each distinct prompt
is prefilled once and its cache row is repeated for its samples. Rows that ended leave when enough have.

Legend: N = samples of the batch, B = rows still in it, P = distinct prompts, L = columns, S = new tokens,
V = vocabulary, E = stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.sampling.completion import VersionSpan
from rlcore.engines.sampling.hf.prompt_images import PromptImages
from rlcore.engines.sampling.hf.sampler import Sampler
from rlcore.engines.sampling.hf.schedule import SampleRequest
from rlcore.engines.sampling.prompts import inputs_of
from rlcore.errors import RlcoreError
from rlcore.image_inputs import ImageInputs
from rlcore.routing.record import RouteRecorder

# Activations of one forward pass: at 16384 tokens a 7B model's widest layer takes 0.6 GB in bfloat16.
_MAX_PREFILL_TOKENS = 16384
# Selecting rows copies the cache once, as every step does; dropping a quarter of them soon pays for it.
_COMPACT_BELOW = 0.75
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Decoded:
    """One finished sample."""

    token_ids: list[int]
    logprobs: list[float]
    is_stopped: bool
    """The last token is a stop token."""
    spans: tuple[VersionSpan, ...]
    routed_experts: Tensor | None = None
    """[tokens, layers, experts a token], of all tokens that ran."""


@dataclass(slots=True)
class _DecodingRows:
    """The state of each row still in the batch."""

    sample_B: Tensor
    """Index of the sample that the row makes."""
    is_alive_B: Tensor
    first_position_B: Tensor
    """The position of the first new token; an image may have fewer positions than tokens."""
    max_tokens_B: Tensor
    stop_BE: Tensor
    mask_BL: Tensor | None
    """False on padding, columns of new tokens included; None without padding."""

    def select(self, index_B: Tensor) -> None:
        self.sample_B = self.sample_B[index_B]
        self.is_alive_B = self.is_alive_B[index_B]
        self.first_position_B = self.first_position_B[index_B]
        self.max_tokens_B = self.max_tokens_B[index_B]
        self.stop_BE = self.stop_BE[index_B]
        if self.mask_BL is not None:
            self.mask_BL = self.mask_BL[index_B]


class BatchDecoder:
    """Decodes one batch, a step at a time; each batch needs a new one.

    Between two steps the weights may be replaced: a step makes a token wholly with those that are there.
    """

    def __init__(
        self,
        module: Any,
        samples: Sequence[SampleRequest],
        *,
        eos_token_ids: Sequence[int],
        max_positions: int | None,
        images: ImageInputs | None = None,
        recorder: RouteRecorder | None = None,
    ) -> None:
        self._module, self._recorder = module, recorder
        self._prompt_routes: list[Tensor] = []  # [P, columns, layers, experts] of each part of the prompts
        self._step_routes: list[Tensor] = []  # [N, layers, experts] of each new token that ran
        self._samples = samples
        self._max_positions = max_positions
        self._device: torch.device = module.get_input_embeddings().weight.device
        self._prompts = list(dict.fromkeys(sample.prompt for sample in samples))
        self._index_of = {prompt: index for index, prompt in enumerate(self._prompts)}
        self._num_prompt_columns = max(map(len, self._prompts))
        has_images = images is not None and any(map(inputs_of, self._prompts))
        self._images = PromptImages(images, self._prompts, self._device) if images is not None and has_images else None
        self._num_steps = max(sample.params.max_tokens for sample in samples)
        params = [sample.params for sample in samples]
        self._sampler = Sampler(params, [sample.key for sample in samples], self._device)
        self._stop_NE = self._stop_tokens(eos_token_ids)
        self._token_SN = torch.zeros(self._num_steps, len(samples), dtype=torch.long, device=self._device)
        self._logprob_SN = torch.zeros(self._num_steps, len(samples), device=self._device)
        self._length_N = torch.zeros(len(samples), dtype=torch.long, device=self._device)
        self._is_broken = torch.zeros((), dtype=torch.bool, device=self._device)
        self._cache: Any = None
        self._rows: _DecodingRows
        self._token_B: Tensor
        self._version_S: list[int] = []
        self._num_alive = len(samples)
        self._unfinished = set(range(len(samples)))

    def run(self, on_finished: Callable[[int], None], version: int) -> list[Decoded]:
        """Decode every sample; ``on_finished`` is called with how many more are done.

        Raises:
            RlcoreError: the model gives NaN or infinite logits.
        """
        while not self.is_done:
            num_alive = self._num_alive
            self._decode_token(version)
            on_finished(num_alive - self._num_alive)
        return self._collect(range(len(self._samples)))

    def step(self, version: int) -> list[tuple[int, Decoded]]:
        """Make a token for each sample that is not done; return those that it ended, with their indices.

        Raises:
            RlcoreError: the model gives NaN or infinite logits.
        """
        num_alive = self._num_alive
        self._decode_token(version)
        if self._num_alive == num_alive:
            return []
        alive = set(self._rows.sample_B[self._rows.is_alive_B].tolist())
        ended = sorted(self._unfinished - alive)
        self._unfinished &= alive
        return list(zip(ended, self._collect(ended), strict=True))

    def drop(self, samples: Sequence[int]) -> None:
        """Decode these samples no further; a step that comes later does not return them."""
        if not (dropped := self._unfinished & set(samples)):
            return
        self._unfinished -= dropped
        self._rows.is_alive_B &= ~torch.isin(self._rows.sample_B, self._tensor(sorted(dropped)))
        self._num_alive = int(self._rows.is_alive_B.sum())

    @property
    def is_done(self) -> bool:
        return self._num_alive == 0

    def _decode_token(self, version: int) -> None:
        step = len(self._version_S)
        if step == 0:
            logits_BV, self._rows = self._prefill()
        else:
            logits_BV = self._advance(self._token_B, self._rows, step - 1)
        self._version_S.append(version)
        self._token_B = self._sample(logits_BV, self._rows, step)
        self._num_alive = self._count_alive(self._rows)
        if 0 < self._num_alive < _COMPACT_BELOW * len(self._token_B):
            self._token_B = self._compact(self._rows, self._token_B)

    def _sample(self, logits_BV: Tensor, rows: _DecodingRows, step: int) -> Tensor:
        """Draw and record a token for each row; rows that ended draw too, recorded past their length."""
        token_B, logprob_B = self._sampler.sample(logits_BV, step)
        self._token_SN[step].index_copy_(0, rows.sample_B, token_B)
        self._logprob_SN[step].index_copy_(0, rows.sample_B, logprob_B)
        self._length_N.index_add_(0, rows.sample_B, rows.is_alive_B.long())
        ends_B = (token_B[:, None] == rows.stop_BE).any(1) | (rows.max_tokens_B <= step + 1)
        rows.is_alive_B = rows.is_alive_B & ~ends_B
        self._is_broken = ~logprob_B.isfinite().all()
        return token_B

    def _count_alive(self, rows: _DecodingRows) -> int:
        """Return the number of unfinished rows: the only wait for the device in a step."""
        num_alive, is_broken = torch.stack([rows.is_alive_B.sum(), self._is_broken.long()]).tolist()
        if is_broken:
            raise RlcoreError(
                f"the model {type(self._module).__name__} gives NaN or infinite logits; its weights are "
                f"damaged or overflow {self._module.dtype}: sync or load good weights, "
                f"or build with another dtype"
            )
        return int(num_alive)

    def _compact(self, rows: _DecodingRows, token_B: Tensor) -> Tensor:
        index_B = rows.is_alive_B.nonzero().squeeze(1)
        rows.select(index_B)
        self._sampler.select(index_B)
        self._cache.reorder_cache(index_B)
        return token_B[index_B]

    def _prefill(self) -> tuple[Tensor, _DecodingRows]:
        from rlcore.engines.sampling.hf.kv_cache import grow_in_blocks  # loads transformers

        token_PL, mask_PL = self._padded_prompts()
        position_PL = (mask_PL.long().cumsum(1) - 1).clamp_(min=0)
        num_columns = self._num_prompt_columns
        # An image is read whole, so that prompts with images are not cut.
        chunk = max(1, _MAX_PREFILL_TOKENS // len(self._prompts)) if self._images is None else num_columns
        is_padded = any(len(prompt) < num_columns for prompt in self._prompts)
        for start in range(0, num_columns, chunk):
            end = min(start + chunk, num_columns)
            visible = mask_PL[:, :end] if is_padded else None
            inputs = {} if self._images is None else self._images.arguments(num_columns)
            logits_PV, routes = self._forward(token_PL[:, start:end], position_PL[:, start:end], visible, inputs)
            self._prompt_routes += [] if routes is None else [routes]
        prompt_N = self._tensor([self._index_of[sample.prompt] for sample in self._samples])
        self._cache.reorder_cache(prompt_N)
        grow_in_blocks(self._cache, max_new_columns=self._num_steps - 1)
        columns_PL = torch.nn.functional.pad(mask_PL, (0, self._num_steps), value=True)
        return logits_PV[prompt_N], self._first_rows(columns_PL[prompt_N] if is_padded else None)

    def _first_rows(self, mask_NL: Tensor | None) -> _DecodingRows:
        num_samples = len(self._samples)
        return _DecodingRows(
            sample_B=torch.arange(num_samples, device=self._device),
            is_alive_B=torch.ones(num_samples, dtype=torch.bool, device=self._device),
            first_position_B=self._tensor([self._first_position(sample.prompt) for sample in self._samples]),
            max_tokens_B=self._tensor([sample.params.max_tokens for sample in self._samples]),
            stop_BE=self._stop_NE,
            mask_BL=mask_NL,
        )

    def _advance(self, token_B: Tensor, rows: _DecodingRows, step: int) -> Tensor:
        """Return the logits of the next token, given the one at ``step``."""
        position_B = rows.first_position_B + step
        if self._max_positions is not None:
            # A row that ended may wait for the others beyond the last position the model has.
            position_B = position_B.clamp(max=self._max_positions - 1)
        num_columns = self._num_prompt_columns + step + 1
        visible = None if rows.mask_BL is None else rows.mask_BL[:, :num_columns]
        logits_BV, routes = self._forward(token_B[:, None], position_B[:, None], visible, {})
        if routes is not None:
            of_samples = routes.new_zeros(len(self._samples), *routes.shape[2:])
            self._step_routes.append(of_samples.index_copy_(0, rows.sample_B, routes[:, 0]))
        return logits_BV

    def _first_position(self, prompt: Sequence[int]) -> int:
        return len(prompt) if self._images is None else self._images.first_position(prompt)

    def _forward(
        self, token_BL: Tensor, position_BL: Tensor, mask_BL: Tensor | None, further: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits [B, V] of the last column, and the experts [B, L, layers, experts] if they are recorded.

        The cache grows by the columns given.

        Args:
            further: arguments of the model beside these; they may replace the positions.
        """
        inputs = {
            "input_ids": token_BL,
            "position_ids": position_BL,
            "attention_mask": mask_BL,
            "past_key_values": self._cache,
            "use_cache": True,
            "logits_to_keep": 1,
            **further,
        }
        routes = None
        if self._recorder is None:
            output = self._module(**inputs)
        else:
            output, route_R = self._recorder.run(**inputs)
            routes = route_R.view(*token_BL.shape, *route_R.shape[1:])
        self._cache = output.past_key_values
        return output.logits[:, -1], routes

    def _padded_prompts(self) -> tuple[Tensor, Tensor]:
        width = self._num_prompt_columns
        token_PL = self._tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in self._prompts])
        num_padding_P = self._tensor([width - len(prompt) for prompt in self._prompts])
        return token_PL, torch.arange(width, device=self._device) >= num_padding_P[:, None]

    def _stop_tokens(self, eos_token_ids: Sequence[int]) -> Tensor:
        """Return the stop tokens [N, E]; rows are filled up with a number that is no token."""
        stops = [
            (*sample.params.stop_token_ids, *(() if sample.params.ignore_eos else eos_token_ids))
            for sample in self._samples
        ]
        width = max(1, *map(len, stops)) if stops else 1
        return self._tensor([[*stop, *[_NO_TOKEN] * (width - len(stop))] for stop in stops])

    def _collect(self, samples: Sequence[int]) -> list[Decoded]:
        index_N = self._tensor(list(samples))
        length_N, token_SN = self._length_N[index_N], self._token_SN[:, index_N]
        last_N = token_SN.gather(0, length_N[None] - 1).squeeze(0)
        is_stopped_N = (last_N[:, None] == self._stop_NE[index_N]).any(1)
        num_steps = int(length_N.max())
        columns = zip(
            token_SN[:num_steps].T.tolist(),
            self._logprob_SN[:num_steps, index_N].T.tolist(),
            length_N.tolist(),
            is_stopped_N.tolist(),
            strict=True,
        )
        return [
            Decoded(tokens[:n], logprobs[:n], stopped, _spans(self._version_S[:n]), routes)
            for (tokens, logprobs, n, stopped), routes in zip(
                columns, self._routes(samples, length_N.tolist()), strict=True
            )
        ]

    def _routes(self, samples: Sequence[int], lengths: Sequence[int]) -> list[Tensor | None]:
        """Return the experts of the tokens of each sample that ran: all but its last one."""
        if self._recorder is None:
            return [None] * len(samples)
        found: list[Tensor | None] = []
        for sample, length in zip(samples, lengths, strict=True):
            prompt = self._samples[sample].prompt
            of_prompt = torch.cat([part[self._index_of[prompt]] for part in self._prompt_routes])
            own = [route_N[sample][None] for route_N in self._step_routes[: length - 1]]
            found.append(torch.cat([of_prompt[self._num_prompt_columns - len(prompt) :], *own]).cpu())
        return found

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Return the spans of equal versions, of the version of each token."""
    starts = [at for at, version in enumerate(versions) if at == 0 or version != versions[at - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=True))
