"""Functions and items that a configuration names, and the order in which items are trained on."""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rlcore.engines.checkpoints.plain_values import plain_copy
from rlcore.engines.sampling.prompts import prompts_of
from rlcore.errors import InvalidInputError, one_line
from rlcore.training.config import FUNCTION


class ShuffledItems:
    """Items in another order in each pass, which depends on the seed and the pass alone; it keeps its place.

    As a dataloader it gives batches of one, so that an item which is a list is not taken for a batch.
    """

    def __init__(self, items: Sequence[Any], seed: int) -> None:
        self._items, self._seed = items, seed
        self._pass = self._place = 0

    def __iter__(self) -> Iterator[list[Any]]:
        order = list(range(len(self._items)))
        random.Random(f"{self._seed} {self._pass}").shuffle(order)
        while self._place < len(order):
            self._place += 1
            yield [self._items[order[self._place - 1]]]
        self._pass, self._place = self._pass + 1, 0

    @cached_property
    def digest(self) -> str:
        """A text that other items, or the same in another order, do not have: a place means nothing among them."""
        found = hashlib.sha256()
        for item in self._items:
            found.update(f"{item!r}\n".encode())
        return found.hexdigest()

    def state_dict(self) -> dict[str, int]:
        return {"pass": self._pass, "place": self._place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._pass, self._place = state["pass"], state["place"]


def function_of(reference: str, folder: Path) -> Callable[..., Any]:
    """Return the function "module:name", of the Python path or of a file in ``folder``.

    Raises:
        InvalidInputError: it cannot be imported.
    """
    module, _, name = reference.partition(":")
    if (home := str(folder.resolve())) not in sys.path:
        sys.path.insert(0, home)
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises
        raise InvalidInputError(f"cannot import {reference}: {one_line(error)}") from error
    if not callable(found):
        raise InvalidInputError(f"{reference} must be a function, got {found!r:.100}")
    function: Callable[..., Any] = found
    return function


def result_of(reference: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns that a configuration names by ``reference``.

    Raises:
        InvalidInputError: it fails.
    """
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:  # whatever a function of the user's raises
        raise InvalidInputError(f"{reference} failed: {one_line(error)}; call it in Python to see where") from error


def items_of(source: str, folder: Path, *, need_prompt: bool, are_saved: bool = True) -> list[Any]:
    """Return the items of a file of JSON lines, or of a function.

    Args:
        need_prompt: each item must have a "prompt"; a workflow of the user's may do without.
        are_saved: checkpoints hold the items, which must come back equal.

    Raises:
        InvalidInputError: no such file, a line that is no JSON (its number), no items, or some that no checkpoint can
            hold or that lack a prompt that ``SingleTurn`` takes (the number of the item).
    """
    is_function = FUNCTION.has(source)
    items = result_of(source, function_of(source, folder)) if is_function else _lines(Path(source))
    if not isinstance(items, Sequence) or not items:
        raise InvalidInputError(f"{source} must give a list of at least one item, got {items!r:.100}")
    if are_saved:
        items = _plain(list(items), source)
    if need_prompt:
        for number, item in enumerate(items, start=1):
            _check_prompt(item, f"item {number} of {source}")
    return list(items)


def _plain(items: list[Any], source: str) -> list[Any]:
    try:
        found: list[Any] = plain_copy(items, "items")
        return found
    except InvalidInputError as error:
        told = f"the items of {source} must be plain data, for the checkpoint and episodes.jsonl: {error}"
        raise InvalidInputError(told) from error


def _check_prompt(item: Any, what: str) -> None:
    if not (isinstance(item, Mapping) and "prompt" in item):
        raise InvalidInputError(f'{what} must have a "prompt", or give rollout.workflow; got {item!r:.200}')
    prompt = item["prompt"]
    try:
        prompts_of([prompt])
    except InvalidInputError as error:
        told = f'the "prompt" of {what} must be a text or a list of token ids, or give rollout.workflow'
        raise InvalidInputError(f"{told}; got {prompt!r:.200}") from error


def _lines(path: Path) -> list[Any]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        try:
            items.append(msgspec.json.decode(line))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"line {number} of {path} is no JSON: {error}") from error
    return items
