"""The requests of a replica under way: a job for each prompt, of ``n`` samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan


@dataclass(eq=False, slots=True)
class PromptJob:
    """All samples of one prompt."""

    number: int
    prompt: str | None
    token_ids: list[int]
    completions: list[Completion | None]

    @property
    def output(self) -> RequestOutput | None:
        """The output of the prompt; None until every sample has ended."""
        done = [completion for completion in self.completions if completion is not None]
        return RequestOutput(self.prompt, self.token_ids, done) if len(done) == len(self.completions) else None


@dataclass(eq=False, slots=True)
class RunningSample:
    """One completion being made."""

    job: PromptJob
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def close_span(self, version: int, num_tokens: int | None = None) -> None:
        """Add a span for the tokens since the last one, which were made by ``version``.

        Args:
            num_tokens: how many tokens there are, where they are known elsewhere only; None: those of ``token_ids``.
        """
        start = self.spans[-1].end if self.spans else 0
        end = len(self.token_ids) if num_tokens is None else num_tokens
        if end > start:
            self.spans.append(VersionSpan(version, start, end))
