"""Delta: a bucket told by what has changed in it since an earlier round, in the encoding that takes the fewest bytes.

    WHOLE      all words of the bucket
    MASK       a bit for each word, 1 where it changed; then the words that changed
    POSITIONS  for each block of 256 words how many changed; the place of each within its block; then the words

A word is as wide as the narrowest dtype in the bucket. All is found on the device; the host learns one number for each
bucket, how many words changed. Parts of a message are aligned to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.engines.weight_sync.planning.manifest import dtype_of
from rlcore.errors import SyncError

_BLOCK = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Encoding(IntEnum):
    """How the changes of a bucket are told."""

    WHOLE = 0
    MASK = 1
    POSITIONS = 2


def word_of(dtypes: Iterable[str]) -> torch.dtype:
    """Return the dtype of the words of a bucket whose pieces have these dtypes."""
    return _WORDS[min(dtype_of(dtype).itemsize for dtype in dtypes)]


def encode(base: Tensor, new: Tensor, word: torch.dtype) -> tuple[Encoding, int, Tensor]:
    """Tell ``new`` by what differs from ``base``.

    Args:
        base, new: [n] uint8 each, n a multiple of 512.

    Returns:
        The encoding, how many words changed, and the message, [m] uint8 with m of at most n, on the device.
    """
    words = new.view(word)
    changed = words != base.view(word)
    count = int(changed.sum())
    sizes = {encoding: sum(_sizes(encoding, words.numel(), count, word)) for encoding in Encoding}
    encoding = min(Encoding, key=lambda one: sizes[one])
    match encoding:
        case Encoding.WHOLE:
            return encoding, count, new
        case Encoding.MASK:
            parts = [(changed.view(-1, 8) * _powers(new.device)).sum(1, dtype=torch.uint8), words[changed]]
        case Encoding.POSITIONS:
            places = changed.nonzero().view(-1)
            counts = pad(changed, (0, -words.numel() % _BLOCK)).view(-1, _BLOCK).sum(1, dtype=torch.int16)
            parts = [counts, (places % _BLOCK).to(torch.uint8), words[places]]
    return encoding, count, torch.cat([_padded(part.view(torch.uint8)) for part in parts])


def apply(message: Tensor, encoding: int, num_changed: int, whole: Tensor, word: torch.dtype) -> None:
    """Turn the base of a message, ``whole``, into the bucket that it tells.

    Args:
        message: as ``encode`` made it, [m] uint8.
        whole: [n] uint8, overwritten.

    Raises:
        SyncError: the message is none for such a base. What is in ``whole`` is of no use then.
    """
    words = whole.view(word)
    if encoding not in list(Encoding) or not 0 <= num_changed <= words.numel():
        raise SyncError(f"a bucket came with {num_changed} changes of {words.numel()} words, in encoding {encoding}")
    sizes = _sizes(Encoding(encoding), words.numel(), num_changed, word)
    if sum(sizes) != message.numel():
        raise SyncError(f"{num_changed} changes came in {message.numel()} bytes; {sum(sizes)} were expected")
    parts = torch.split(message, sizes)
    match Encoding(encoding):
        case Encoding.WHOLE:
            words.copy_(parts[0].view(word))
        case Encoding.MASK:
            bits = parts[0][: words.numel() // 8]
            changed = bits.unsqueeze(1).bitwise_and(_powers(bits.device)).ne(0).view(-1)
            _check_count(int(changed.sum()), num_changed)
            words[changed] = parts[1].view(word)[:num_changed]
        case Encoding.POSITIONS:
            counts = parts[0].view(torch.int16)[: _num_blocks(words.numel())].long()
            words[_places(counts, parts[1][:num_changed], words.numel())] = parts[2].view(word)[:num_changed]


def _places(counts: Tensor, within: Tensor, num_words: int) -> Tensor:
    """Return the index of each word that changed."""
    least, total = torch.stack([counts.min(), counts.sum()]).tolist()
    _check_count(total if least >= 0 else least, within.numel())
    starts = torch.arange(0, counts.numel() * _BLOCK, _BLOCK, device=counts.device)
    places = torch.repeat_interleave(starts, counts, output_size=within.numel()) + within
    if within.numel() and int(places.max()) >= num_words:
        raise SyncError(f"a change came for a word behind the last of {num_words}")
    return places


def _check_count(found: int, expected: int) -> None:
    if found != expected:
        raise SyncError(f"{expected} changes came with the places of {found}")


def _sizes(encoding: Encoding, num_words: int, count: int, word: torch.dtype) -> list[int]:
    """Return the bytes of each part of a message."""
    values = count * word.itemsize
    match encoding:
        case Encoding.WHOLE:
            return [num_words * word.itemsize]
        case Encoding.MASK:
            return [_aligned(-(-num_words // 8)), _aligned(values)]
        case Encoding.POSITIONS:
            return [_aligned(2 * _num_blocks(num_words)), _aligned(count), _aligned(values)]


def _num_blocks(num_words: int) -> int:
    return -(-num_words // _BLOCK)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _padded(part: Tensor) -> Tensor:
    return pad(part, (0, -part.numel() % 8))


def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
