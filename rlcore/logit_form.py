"""How a transformers model makes logits of hidden states: measured on its own code, not read from its config.

Each family names its factor and its softcap in its own way, and some have them without a name. So the model's own
``forward`` runs without its decoder: known hidden states come in the decoder's place, and a head of few columns in the
place of the whole one. It has all the rows, because some models cut logits off, or mask them. All other weights are on
the meta device: a model that reads them is refused, whatever their values, and a module without weights will do.

Letters: T tokens, H a hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rlcore._torch_private import fake_tensors
from rlcore.errors import UnsupportedError, one_line
from rlcore.evaluation_mode import evaluation_mode

_TINY, _HUGE = 2.0**-40, 2.0**60
"""Logits that no softcap bends, and that every softcap holds back. Powers of two: no factor is rounded."""
_ROUNDING = 2.0**-20
"""The error allowed, of the sum of absolute products: models may compute in float32, which rounds by 2**-24."""
_TOKENS, _HIDDEN_SIZE = 8, 8


class LogitForm(NamedTuple):
    """logits = logit_scale * softcap * tanh((hidden @ weight.T + bias) / softcap), or without tanh for no softcap."""

    softcap: float | None
    logit_scale: float

    def __call__(self, product: Tensor) -> Tensor:
        bent = product if self.softcap is None else self.softcap * torch.tanh(product / self.softcap)
        return self.logit_scale * bent


def measure_logit_form(model: Any, forward: Callable[..., Any]) -> LogitForm:
    """Return how, in evaluation mode, ``forward`` makes logits of what the model's decoder returns.

    Args:
        model: of transformers; on any device, and sharded by nobody yet.
        forward: of transformers' class of the model, which a class derived from it may have replaced.

    Raises:
        UnsupportedError: the model has no output head, or its logits are not a ``LogitForm`` of the hidden states.
    """
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise _unsupported(model, "get_output_embeddings() gives no module with a weight")
    problem = ""
    for replaced in _replaceable(model):
        head_alone = _HeadAlone(model, forward, replaced, head)
        try:
            with evaluation_mode(model):
                form = head_alone.measured_form()
                is_proven = head_alone.agrees_with(form)
        except Exception as error:  # of any kind: it is the model's code, amid what it does not expect
            problem = problem or one_line(error)
            continue
        if is_proven:
            return form
        raise _unsupported(model, "they are another function of them")
    raise _unsupported(model, problem)


def _replaceable(model: Any) -> Iterator[nn.Module]:
    """Yield the modules that known hidden states may stand for.

    Where the code around the decoder needs values that the meta device lacks, the whole base model is answered for, if
    it returns the decoder's hidden states untouched: those are what a loss is given.
    """
    decoder = model.get_decoder()
    yield decoder
    try:
        with evaluation_mode(model):
            is_base_alike = _returns_untouched(model, decoder)
    except Exception:  # of any kind, as above: then nothing is known of it
        return
    if is_base_alike:
        yield model.base_model


@torch.no_grad()
def _returns_untouched(model: Any, decoder: nn.Module) -> bool:
    """Return True if the base model gives the hidden states of the decoder, the very same tensor."""
    with fake_tensors():  # of no values, with shapes and a device: more code bears it than bears the meta device
        states = torch.empty(1, _TOKENS, model.get_input_embeddings().weight.shape[1], device="cpu")
        ids_1T = torch.zeros(1, _TOKENS, dtype=torch.int64, device="cpu")
        tensors = _without_values(model.base_model, "cpu")
        with _known_states(model, decoder, states):
            output = functional_call(model.base_model, tensors, (ids_1T,), tie_weights=False)
    return output.last_hidden_state is states


@dataclass(frozen=True, slots=True)
class _HeadAlone:
    """A model that makes logits of given hidden states, by given weights, all in float64 on the host."""

    model: Any
    forward: Callable[..., Any]
    decoder: nn.Module
    head: nn.Module

    def measured_form(self) -> LogitForm:
        """Return the form that the logits of a tiny and a huge product have."""
        weight_VH, bias_V = _zeros(self._vocab_size, _HIDDEN_SIZE), _zeros(self._vocab_size)
        weight_VH[0, 0] = 1.0
        tiny, huge = (
            self._logits(weight_VH[:1] * product, weight_VH, bias_V)[0, 0].item() for product in (_TINY, _HUGE)
        )
        logit_scale = tiny / _TINY
        is_bent = 0 < abs(huge) < abs(logit_scale * _HUGE) / 2
        return LogitForm(huge / logit_scale if is_bent else None, logit_scale)

    def agrees_with(self, form: LogitForm) -> bool:
        """Return True if the logits of random hidden states, weights and bias are those of the form."""
        random = torch.Generator("cpu").manual_seed(0)
        # Larger and larger: a softcap is reached, and a norm on the way would show.
        hidden_TH = torch.logspace(-2, 1, _TOKENS, device="cpu")[:, None] * _normal(random, _TOKENS, _HIDDEN_SIZE)
        weight_VH, bias_V = _normal(random, self._vocab_size, _HIDDEN_SIZE), _normal(random, self._vocab_size)
        if not self._has_bias:
            bias_V.zero_()
        logits_TV = self._logits(hidden_TH, weight_VH, bias_V)
        if logits_TV.shape != (_TOKENS, self._vocab_size):
            return False
        magnitude = hidden_TH.abs() @ weight_VH.abs().T + bias_V.abs()
        if form.softcap is not None:
            magnitude.clamp_(max=abs(form.softcap))
        error = logits_TV - form(hidden_TH @ weight_VH.T + bias_V)
        return bool((error.abs() <= _ROUNDING * abs(form.logit_scale) * magnitude).all())

    @property
    def _has_bias(self) -> bool:
        return getattr(self.head, "bias", None) is not None

    @property
    def _vocab_size(self) -> int:
        weight: Any = self.head.weight
        return int(weight.shape[0])

    @torch.no_grad()
    def _logits(self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor) -> Tensor:
        """Return the logits [T, V]."""
        name = next(name for name, module in self.model.named_modules() if module is self.head)
        tensors = _without_values(self.model, "meta") | {f"{name}.weight": weight_VH}
        if self._has_bias:
            tensors[f"{name}.bias"] = bias_V
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        ids_1T = torch.zeros(1, len(hidden_TH), dtype=torch.int64, device="cpu")
        with _known_states(self.model, self.decoder, hidden_TH[None]):
            # Untied: the embedding keeps the weight that it may share with the head.
            output = functional_call(_Forward(self.model, self.forward), tensors, (ids_1T,), tie_weights=False)
        logits_1TV: Tensor = output.logits
        return logits_1TV[0].double()


def _without_values(model: nn.Module, device: str) -> dict[str, Tensor]:
    """Return tensors like the model's parameters and buffers, by name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in named}


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu")


class _Forward(nn.Module):
    """A model whose ``forward`` is that of another class."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, input_ids: Tensor) -> Any:
        return self._forward(self.model, input_ids=input_ids)


class _DecoderOutput(dict[str, Tensor]):
    """Stands for the output of any decoder: it has the last hidden state, and of all else nothing."""

    def __getattr__(self, name: str) -> Tensor | None:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@contextlib.contextmanager
def _known_states(model: Any, decoder: nn.Module, states_1TH: Tensor) -> Iterator[None]:
    """Inside, ``decoder`` returns these hidden states whatever it is given, and no token has an embedding but zeros."""
    inputs = model.get_input_embeddings()

    def embed(input_ids: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.zeros(*input_ids.shape, inputs.weight.shape[1], dtype=states_1TH.dtype, device="cpu")

    def decode(*args: Any, **options: Any) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=states_1TH)

    with answering(inputs, embed), answering(decoder, decode):
        yield


@contextlib.contextmanager
def answering(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``forward`` runs in the place of the module's own."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _unsupported(model: Any, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the output head of {type(model).__name__}",
        "its logits cannot be shown to be logit_scale * softcap * tanh((hidden @ weight.T + bias) / softcap) of its "
        f"decoder's hidden states ({reason}); override hidden_states() and output_head() so that they are",
    )
