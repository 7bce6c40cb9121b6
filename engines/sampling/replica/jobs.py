"""The requests of a replica under way: a job for each prompt, of ``n`` samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlcore.engines.sampling.completion import Completion, RequestOutput, VersionSpan
from rlcore.engines.sampling.params import SamplingParams
from rlcore.engines.sampling.prompts import Prompt, PromptReader
from rlcore.errors import RlcoreError, StateError

PAUSED = "a pause"
"""The reason for which a replica is held that its user has paused."""

LOOK_S = 0.003
"""How often ``collect`` looks if its caller still waits: another replica may have had something."""


@dataclass(eq=False, slots=True)
class PromptJob:
    """All samples of one prompt."""

    number: int
    prompt: str | None
    token_ids: list[int]
    ended: list[Callable[[], Completion] | None]
    """For each sample that has ended, a function that makes its completion."""

    @property
    def is_done(self) -> bool:
        return None not in self.ended

    def output(self) -> RequestOutput:
        """Return the output of the prompt, which is done. Texts are decoded here: call it while no step waits."""
        return RequestOutput(self.prompt, self.token_ids, [completion() for completion in self.ended if completion])


@dataclass(eq=False, slots=True)
class RunningSample:
    """One completion being made."""

    job: PromptJob
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add tokens that were made.

        Raises:
            RlcoreError: a log-prob is no finite number.
        """
        if not all(map(math.isfinite, logprobs)):
            raise RlcoreError(f"the model gives NaN or infinite logits for prompt {self.job.token_ids}")
        self.token_ids += token_ids
        self.logprobs += logprobs

    def close_span(self, version: int, num_tokens: int | None = None) -> None:
        """Add a span for the tokens since the last one, which were made by ``version``.

        Args:
            num_tokens: how many tokens there are, where they are known elsewhere only; None: those of ``token_ids``.
        """
        start = self.spans[-1].end if self.spans else 0
        end = len(self.token_ids) if num_tokens is None else num_tokens
        if end > start:
            self.spans.append(VersionSpan(version, start, end))


class Jobs:
    """The samples that an engine makes, and the jobs that are done and that nobody has taken yet.

    Jobs of ``submit`` have the numbers that their caller gave (>= 0), and those of a call that waits have others.
    """

    def __init__(self, reader: PromptReader) -> None:
        self.samples: dict[str, RunningSample] = {}
        """The samples under way, by the names that the engine knows them by."""
        self._reader = reader
        self._done: dict[int, PromptJob] = {}
        self._waited_for: set[int] = set()
        self._next_number = -1

    @contextlib.contextmanager
    def waited_for(self, count: int) -> Iterator[range]:
        """Give numbers to so many jobs whose caller waits for them: ``collect`` and ``submitted`` leave them alone."""
        numbers = range(self._next_number - count + 1, self._next_number + 1)
        self._next_number -= count
        self._waited_for.update(numbers)
        try:
            yield numbers
        finally:
            self._waited_for.difference_update(numbers)

    def is_waited_for(self, number: int) -> bool:
        return number in self._waited_for

    def read(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Iterator[tuple[PromptJob, Sequence[int], SamplingParams]]:
        """Yield a job for each prompt, its tokens as the reader gives them, and its parameters. All are read first."""
        encoded = self._reader.read(prompts, params)
        for number, prompt, token_ids, one in zip(numbers, prompts, encoded, params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            yield PromptJob(number, text, list(token_ids), [None] * one.n), token_ids, one

    def stop_token_ids(self, params: SamplingParams) -> list[int]:
        """Return all tokens that end a sample: those asked for, and the model's own unless they are to be ignored."""
        own = () if params.ignore_eos else self._reader.stop_token_ids
        return sorted({*params.stop_token_ids, *own})

    def progress(self, lengths: Mapping[str, int]) -> dict[int, int]:
        """Return the tokens that each job under way has so far.

        Args:
            lengths: of samples by name, where the engine has more than was taken from it.
        """
        found: dict[int, int] = {}
        for name, sample in self.samples.items():
            number = sample.job.number
            found[number] = found.get(number, 0) + lengths.get(name, len(sample.token_ids))
        return found

    def end(self, name: str, completion: Callable[[], Completion]) -> None:
        """Take what makes the completion of a sample that has ended; with its last sample a job is done."""
        sample = self.samples.pop(name)
        job = sample.job
        job.ended[sample.index] = completion
        if job.is_done:
            self._done[job.number] = job

    # ------------------------------------------------------------------------------------------------- outputs

    def are_done(self, numbers: Collection[int]) -> bool:
        return all(number in self._done for number in numbers)

    def take(self, numbers: Collection[int]) -> list[PromptJob]:
        """Return jobs that are done, and forget them."""
        return [self._done.pop(number) for number in numbers]

    def ready(self) -> list[int]:
        """Return the submitted jobs that are done."""
        return [number for number in self._done if number not in self._waited_for]

    def collect(self) -> dict[int, PromptJob]:
        """Return the submitted jobs that are done, and forget them."""
        return {number: self._done.pop(number) for number in self.ready()}

    # -------------------------------------------------------------------------------------------- cancelled ones

    def submitted(self, numbers: Collection[int] | None) -> set[int]:
        """Return which of these submitted jobs are under way; None asks for all."""
        found = {sample.job.number for sample in self.samples.values()} - self._waited_for
        return found if numbers is None else found.intersection(numbers)

    def forget_outputs(self, numbers: Collection[int] | None) -> None:
        """Drop the outputs of these jobs; None drops those of all submitted ones."""
        for number in self.ready() if numbers is None else numbers:
            self._done.pop(number, None)

    def names_of(self, numbers: Collection[int]) -> list[str]:
        return [name for name, sample in self.samples.items() if sample.job.number in numbers]

    def forget(self, numbers: Collection[int]) -> None:
        """Drop these jobs, whether they are under way or done."""
        for name in self.names_of(numbers):
            del self.samples[name]
        self.forget_outputs(numbers)


def require_running(held: Collection[str], purpose: str) -> None:
    """Refuse ``purpose`` where a replica is held for some reasons.

    Raises:
        StateError: it is.
    """
    if PAUSED in held:
        raise StateError(f"{purpose} is refused while the engine is paused; call resume()")
    if held:
        raise StateError(f"{purpose} is refused: the replica is held because of {', '.join(sorted(held))}")
