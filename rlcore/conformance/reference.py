"""The log-probs of a sampler and the steps of a trainer as they have to be: transformers and autograd, in float64.

The same in the executor's own dtype says how near they have to come (`rlcore.conformance.accuracy`).

Letters: R scored tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlcore.conformance.accuracy import AS_ACCURATE, inaccuracy
from rlcore.engines.sampling.completion import RequestOutput
from rlcore.engines.weight_sync.target import load_by_name


def plain_model(folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' own model with these weights, by their checkpoint names; of float64 in every operation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    load_by_name(model, weights.items())
    if dtype == torch.float64:
        for part in model.modules():
            if type(part).__name__.endswith("RMSNorm"):  # those of transformers compute in float32
                part.forward = partial(_rms_norm, part)
    return model.to(device).eval()


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    scale: Tensor = norm.weight * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return scale * hidden


def logits(model: Any, sequence: Sequence[int], num_prompt: int) -> Tensor:
    """[R, V], by which each token after the first ``num_prompt`` is chosen."""
    ids = torch.tensor([list(sequence)], device=model.get_input_embeddings().weight.device)
    found: Tensor = model(input_ids=ids, use_cache=False).logits[0, num_prompt - 1 : -1]
    return found if found.dtype == torch.float64 else found.float()


def restricted(logits_RV: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> Tensor:
    """Log-probs [R, V] after temperature, top-k and then top-p of what top-k left; -inf for all others."""
    scaled_RV, order_RV = (logits_RV / temperature).sort(-1, descending=True)
    if top_k > 0:
        scaled_RV[:, top_k:] = -torch.inf
    if top_p < 1:
        probability_RV = scaled_RV.softmax(-1)
        before_RV = probability_RV.cumsum(-1) - probability_RV
        scaled_RV = scaled_RV.masked_fill(before_RV >= top_p, -torch.inf)
    return torch.empty_like(scaled_RV).scatter_(-1, order_RV, scaled_RV.log_softmax(-1))


class SamplerTruth:
    """The log-probs of weights, exactly and in the sampler's dtype on its device."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._exact = plain_model(folder, rounded, torch.float64, torch.device("cpu"))
        self._reference = plain_model(folder, rounded, dtype, device)

    @torch.no_grad()
    def next_token(self, prompt: Sequence[int], **sampling: Any) -> Tensor:
        """[V] float64: the log-probs of what follows a prompt."""
        return restricted(logits(self._exact, [*prompt, 0], len(prompt)), **sampling)[0]

    @torch.no_grad()
    def is_likeliest(self, prompt: Sequence[int], token: int) -> bool:
        """Return True if no token is likelier than this one, but by errors as the sampler's dtype makes them."""
        exact_V = self.next_token(prompt)
        reference_V = restricted(logits(self._reference, [*prompt, 0], len(prompt)))[0].cpu().double()
        error = AS_ACCURATE * (reference_V - exact_V).abs().max()  # of either of two that are compared
        return bool(exact_V[token] >= exact_V.max() - 2 * error)

    def wrong(self, outputs: Iterable[RequestOutput], **sampling: Any) -> str:
        """Return "" if the completions have the log-probs of these weights, or what is wrong with them."""
        found: list[float] = []
        reference: list[Tensor] = []
        exact: list[Tensor] = []
        for output in outputs:
            for completion in output.outputs:
                found += completion.logprobs
                for model, into in ((self._reference, reference), (self._exact, exact)):
                    into.append(self._chosen(model, output.prompt_token_ids, completion.token_ids, sampling))
        return compared(torch.tensor(found), torch.cat(reference), torch.cat(exact))

    def chosen(self, prompt: Sequence[int], tokens: Sequence[int], **sampling: Any) -> Tensor:
        """[R] float64: the log-probs of a completion."""
        return self._chosen(self._exact, prompt, tokens, sampling)

    @torch.no_grad()
    def _chosen(self, model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: Any) -> Tensor:
        logprob_RV = restricted(logits(model, [*prompt, *tokens], len(prompt)), **sampling)
        chosen_R1 = torch.tensor(tokens, device=logprob_RV.device)[:, None]
        return logprob_RV.gather(1, chosen_R1)[:, 0].cpu()


def compared(found: Tensor, reference: Tensor, exact: Tensor) -> str:
    """Return what `inaccuracy` says of log-probs; an infinite one is of a token that could not have been drawn."""
    assert len(exact) >= 16, "too few to compare"
    if not exact.isfinite().all():
        return f"{int((~exact.isfinite()).sum())} of {len(exact)} tokens are outside top-k and top-p"
    off = inaccuracy(found.double(), reference, exact, reference="of a plain computation")
    return off and f"log-probs: {off}"


# ---------------------------------------------------------------------------------------------------- training


class Step(NamedTuple):
    """One step, in float64 on the host."""

    values: dict[str, Tensor]
    """[R] each: "loss", and the loss function's statistics, of each token that is trained on."""
    weight_R: Tensor
    gradient: Tensor
    """The gradient of all parameters, before it is clipped."""


class PlainTraining:
    """A train engine's ``train_batch``, one sequence after the other, by the module's own optimizer and scheduler."""

    def __init__(self, make: Callable[[], Any], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.module = make().to(dtype)
        load_by_name(self.module, weights.items())
        if dtype == torch.float64:
            for part in self.module.modules():
                if type(part).__name__.endswith("RMSNorm"):
                    part.forward = partial(_rms_norm, part)
        self.module.on_weights_materialized()

    def forward(self, batch: Mapping[str, Tensor], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [R] of the tokens that ``loss_mask`` marks."""
        logprobs, entropies = [], []
        for row, mask in enumerate(batch["attention_mask"]):
            ids = batch["input_ids"][row][mask]
            logprob_RV = (logits(self.module, ids.tolist(), 1) / temperature).log_softmax(-1)
            trained_R = batch["loss_mask"][row][mask][1:]
            logprobs.append(logprob_RV.gather(1, ids[1:, None])[:, 0][trained_R])
            entropies.append(-(logprob_RV.exp() * logprob_RV).sum(-1)[trained_R])
        return torch.cat(logprobs), torch.cat(entropies)

    def loss(
        self, batch: Mapping[str, Tensor], loss_fn: Any, *, temperature: float = 1.0
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Values [R] by name, and the weight [R] of each token in the mean over tokens."""
        logprob_R, entropy_R = self.forward(batch, temperature)
        mask_NL = batch["loss_mask"]
        per_token = {name: _of_tokens(entry, mask_NL).to(logprob_R) for name, entry in batch.items()}
        value_R, statistics = loss_fn(logprob_R, entropy_R, per_token)
        return {"loss": value_R} | statistics, torch.full_like(value_R, 1 / len(value_R))

    def step(self, batch: Mapping[str, Tensor], loss_fn: Any, *, temperature: float = 1.0) -> Step:
        values, weight_R = self.loss(batch, loss_fn, temperature=temperature)
        (weight_R * values["loss"]).sum().backward()
        parameters = [one for one in self.module.parameters() if one.grad is not None]
        gradient = torch.cat([one.grad.double().flatten() for one in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self.module.optimizer.step()
        self.module.zero_grad()
        self.module.scheduler.step()
        return Step({name: value.detach().double() for name, value in values.items()}, weight_R.double(), gradient)

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.module.named_weights()}


def _of_tokens(entry: Tensor, mask_NL: Tensor) -> Tensor:
    """[R], of an entry of each token, or of each sequence."""
    return entry[mask_NL] if entry.shape == mask_NL.shape else entry.repeat_interleave(mask_NL.sum(1))


class TrainerTruth:
    """The same training in float64, and in float32."""

    def __init__(self, make: Callable[[], Any], weights: Mapping[str, Tensor]) -> None:
        self.reference, self.exact = (PlainTraining(make, weights, dtype) for dtype in (torch.float32, torch.float64))

    def wrong_step(self, found: Mapping[str, float], *arguments: Any, **options: Any) -> str:
        """Make the step; return "" if these are its metrics, or what is wrong with them."""
        reference, exact = (side.step(*arguments, **options) for side in (self.reference, self.exact))
        norm, apart = exact.gradient.norm(), (reference.gradient - exact.gradient).norm()
        unit = torch.finfo(torch.float32).eps
        lines = [_off("grad_norm", found, norm, AS_ACCURATE * apart + unit * exact.gradient.numel() ** 0.5 * norm)]
        for name, value_R in exact.values.items():
            off_R = AS_ACCURATE * (reference.values[name] - value_R).abs() + unit * len(value_R) * value_R.abs()
            lines.append(_off(name, found, exact.weight_R @ value_R, exact.weight_R @ off_R))
        return "; ".join(filter(None, lines))

    def wrong_loss(self, found: Mapping[str, float], *arguments: Any, **options: Any) -> str:
        """Return "" if this is the loss of the weights as they are, or what is wrong with it."""
        with torch.no_grad():
            (reference, _), (exact, weight_R) = (
                side.loss(*arguments, **options) for side in (self.reference, self.exact)
            )
        unit, value_R = torch.finfo(torch.float32).eps, exact["loss"]
        off_R = AS_ACCURATE * (reference["loss"] - value_R).abs() + unit * len(value_R) * value_R.abs()
        return _off("loss", found, weight_R @ value_R, weight_R @ off_R)

    def wrong_weights(self, found: Mapping[str, Tensor]) -> str:
        reference, exact = self.reference.weights(), self.exact.weights()
        if found.keys() != exact.keys():
            return f"names differ: {sorted(found.keys() ^ exact.keys())}"
        sides = (torch.cat([side[name].double().flatten() for name in exact]) for side in (found, reference, exact))
        joined, near, true = sides
        off = inaccuracy(joined.float(), near.float(), true, reference="of a plain computation")
        return off and f"weights: {off}"

    @torch.no_grad()
    def wrong_logprobs(self, found_NL: Tensor, batch: Mapping[str, Tensor], temperature: float) -> str:
        sides = (side.forward(batch, temperature)[0] for side in (self.reference, self.exact))
        return compared(found_NL[batch["loss_mask"]], *sides)


def _off(name: str, found: Mapping[str, float], value: Tensor, limit: Tensor) -> str:
    if name not in found:
        return f"no {name!r} among {sorted(found)}"
    error = abs(found[name] - float(value))
    return "" if error <= float(limit) else f"{name} is {found[name]:.9g}, expected {float(value):.9g}"
