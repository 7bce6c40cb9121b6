"""The self-test of a plan: it must write what the engine's own load writes, of values that are made for the test.

    values drawn by tensors' numbers -> the engine's own load, with what it does after loading -> sums of its tensors
    tensors poisoned                 -> the same values through the plan                       -> sums, which must agree

A kernel that wants its weights in another order than the loader gave them, or anything that a loader trace cannot see,
shows as another sum: that tensor is left to the engine's loader. The engine must be out of service, for all that the
plan writes is overwritten; a whole round makes it right again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.engines.weight_sync.planning.manifest import WeightManifest, dtype_of
from rlcore.engines.weight_sync.planning.plan import PlanPiece, SyncPlan, misfits
from rlcore.engines.weight_sync.planning.quantized import Quantized, QuantizedExecution
from rlcore.kernels.strided_copy.op import StridedCopies, StridedPiece

_POISONS = (96, -96)
"""Beyond the values that are made, which are within 8 standard deviations, or 0 to 63; in every dtype."""
_CHUNK = 1 << 24
"""Values that are drawn at once to be rounded, and words that are summed: their products take 8 bytes each."""
_DRAWN = {torch.float64, torch.float32, torch.uint8}
"""The dtypes that torch draws numbers in; for others they are rounded from one of these. In bfloat16 torch up to 2.11
draws no more than 256 different numbers on a host."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BATCH_BYTES = 1 << 28
_ODD = (0x2545F4914F6CDD1D, 0x1D8E4E27C47D124F)

Reload = Callable[[Iterable[tuple[str, Tensor]]], Any]


@torch.no_grad()
def run_self_test(
    plan: SyncPlan,
    manifest: WeightManifest,
    tensors: Callable[[], Mapping[str, Tensor]],
    reload: Reload,
    quantized: Callable[[], Quantized] = dict,
) -> dict[str, str]:
    """Return the destinations that the plan does not write as the engine's own load does, and why.

    They have to be excluded from it.

    Args:
        tensors: the engine's live tensors, by the names of its destinations.
        reload: the engine's own load; it is called with all weights of the manifest.
        quantized: the live matrices that are quantised on the way, by the names of their destinations.
    """
    if not plan.destinations:
        return {}
    live = _all_planned(plan, tensors(), quantized())
    poison([tensor for _, tensor in live], 0)
    reload(made_weights(manifest, live[0][1].device))
    loaded = quantized()
    plain = [one for one in plan.destinations if one.name not in loaded]
    if wrong := misfits(plain, tensors()):
        return {name: f"after a load, {reason}" for name, reason in wrong.items()}
    live = _all_planned(plan, tensors(), loaded)
    golden = checksums([tensor for _, tensor in live])
    poison([tensor for _, tensor in live], 1)
    apply_made(plan, manifest, tensors(), loaded)
    return {
        name: "the engine's own load leaves other values in it than its loader copied"
        for (name, _), one, other in zip(live, golden, checksums([tensor for _, tensor in live]), strict=True)
        if one != other
    }


def _all_planned(plan: SyncPlan, tensors: Mapping[str, Tensor], quantized: Quantized) -> list[tuple[str, Tensor]]:
    """Return each tensor that the plan writes, with the name of its destination: of a quantised one two."""
    found: list[tuple[str, Tensor]] = []
    for destination in plan.destinations:
        matrices = quantized.get(destination.name)
        own = [tensors[destination.name]] if matrices is None else [matrices.weight, matrices.scale]
        found += [(destination.name, tensor) for tensor in own]
    return found


# ------------------------------------------------------------------------------------------------------ values


def made_weights(manifest: WeightManifest, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of a manifest; a value depends on its parameter and its index there alone."""
    parameters = manifest.parameters

    held: dict[int, Tensor] = {}  # the two stacks of a layer's experts come by turns

    def whole(number: int) -> Tensor:
        if number not in held:
            if len(held) == 2:
                del held[next(iter(held))]
            held[number] = made(number, parameters[number].numel, parameters[number].dtype, device)
        return held[number]

    for number, weight in enumerate(manifest.weights):
        if weight.parameter is None:
            numel = torch.Size(weight.shape).numel()
            yield weight.name, made(len(parameters) + number, numel, weight.dtype, device).view(weight.shape)
        else:
            yield weight.name, whole(weight.parameter).as_strided(weight.shape, weight.stride, weight.offset)


def made(number: int, numel: int, dtype: str, device: torch.device) -> Tensor:
    """Return [numel] values of tensor ``number``: the same again on this device.

    torch draws them: to compute them takes ten passes over numbers of 64 bits, seconds for a large model. They are
    normal, so that each block of a matrix has another maximum: a wrong scale of float8 must be another number.
    """
    values = torch.empty(numel, dtype=dtype_of(dtype), device=device)
    generator = torch.Generator(device).manual_seed(number)
    if values.dtype in _DRAWN:
        return _draw(values, generator)
    drawn_as = torch.float32 if values.is_floating_point() else torch.uint8
    for first in range(0, numel, _CHUNK):
        part = values[first : first + _CHUNK]
        part.copy_(_draw(torch.empty(part.numel(), dtype=drawn_as, device=device), generator))
    return values


def _draw(values: Tensor, generator: torch.Generator) -> Tensor:
    if values.is_floating_point():
        return values.normal_(0, 0.25, generator=generator)
    return values.random_(64, generator=generator)


# -------------------------------------------------------------------------------------------------------- apply


def apply_made(
    plan: SyncPlan, manifest: WeightManifest, live: Mapping[str, Tensor], quantized: Quantized | None = None
) -> None:
    """Write the live tensors by the plan, from the values of ``made_weights``."""
    plan.fill(live)
    quantized = quantized or {}
    destinations = [
        quantized[one.name].weight if one.name in quantized else live[one.name] for one in plan.destinations
    ]
    is_quantized = [one.name in quantized for one in plan.destinations]
    by_destination = plan.by_destination()
    for number, destination in enumerate(plan.destinations):
        if is_quantized[number]:
            own = by_destination.get(number, [])
            pieces = [((piece.rank, piece.parameter), destination.name, piece.copy) for piece in own]
            parts = _parts(own, manifest, destinations[0].device, destinations[number].device)
            QuantizedExecution(pieces).run(parts, quantized)
    plain = (piece for piece in plan.pieces if not is_quantized[piece.destination])
    by_parameter = sorted(plain, key=lambda piece: piece.parameter)
    batch: list[PlanPiece] = []
    nbytes = 0
    for parameter, group in itertools.groupby(by_parameter, key=lambda piece: piece.parameter):
        described = manifest.parameters[parameter]
        nbytes += described.numel * dtype_of(described.dtype).itemsize
        batch += group
        if nbytes >= _BATCH_BYTES:
            _apply(batch, manifest, destinations)
            batch, nbytes = [], 0
    if batch:
        _apply(batch, manifest, destinations)


def _apply(pieces: Sequence[PlanPiece], manifest: WeightManifest, destinations: Sequence[Tensor]) -> None:
    parts = _parts(pieces, manifest, destinations[0].device, destinations[pieces[0].destination].device)
    numbers = {place: number for number, place in enumerate(parts)}
    moves = [StridedPiece(numbers[piece.rank, piece.parameter], piece.destination, *piece.copy) for piece in pieces]
    StridedCopies(moves, list(parts.values()), destinations).run()


def _parts(
    pieces: Sequence[PlanPiece], manifest: WeightManifest, drawn_on: torch.device, device: torch.device
) -> dict[tuple[int, int], Tensor]:
    """Return what the ranks hold of the parameters of these pieces, by rank and parameter.

    Args:
        drawn_on: the device that ``made_weights`` was given: others draw other values.
        device: where they are wanted.
    """
    wholes: dict[int, Tensor] = {}
    parts: dict[tuple[int, int], Tensor] = {}
    for piece in pieces:
        if (piece.rank, piece.parameter) in parts:
            continue
        described = manifest.parameters[piece.parameter]
        if piece.parameter not in wholes:
            wholes[piece.parameter] = made(piece.parameter, described.numel, described.dtype, drawn_on)
        held = described.held(manifest.layouts[described.layout][piece.rank])
        box = wholes[piece.parameter].as_strided(held.shape, held.stride, held.offset)
        parts[piece.rank, piece.parameter] = box.contiguous().view(-1).to(device)
    return parts


def poison(tensors: Iterable[Tensor], which: int) -> None:
    """Fill tensors with the first (0) or the second (1) of two values that no load leaves."""
    for tensor in tensors:
        tensor.fill_(_POISONS[which] if tensor.dtype.is_signed else _POISONS[which] % 256)


# ----------------------------------------------------------------------------------------------------- checksums


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor a number that changes with any element, and with two exchanged ones.

    It is computed on the tensor's device. Tensors of one shape and dtype with the same bytes at the same indices have
    the same number.
    """
    given = list(tensors)
    if not given:
        return []
    longest = min(max(map(_num_words, given)), _CHUNK)
    factors = {device: _factors(longest, device) for device in {tensor.device for tensor in given}}
    sums = [_checksum(tensor, factors[tensor.device]) for tensor in given]
    found: list[int] = torch.stack([one.to(sums[0].device) for one in sums]).tolist()
    return found


def _factors(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without order, one for each index of a chunk."""
    bits = torch.arange(count, dtype=torch.int64, device=device) * _ODD[0]
    bits = bits ^ (bits >> 29)
    return (bits * _ODD[1]) | 1


def _checksum(tensor: Tensor, factors: Tensor) -> Tensor:
    words = _words(tensor)
    chunks = [words[first : first + _CHUNK] for first in range(0, words.numel(), _CHUNK)]
    sums = [
        (chunk * factors[: chunk.numel()]).sum() * ((number * _ODD[0]) % 2**63 | 1)
        for number, chunk in enumerate(chunks, 1)
    ]
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum() if sums else factors.new_zeros(())


def _words(tensor: Tensor) -> Tensor:
    """Return whole numbers with the bits of a tensor, in the order of its indices: small elements in words of 4."""
    flat = tensor.detach().contiguous().view(-1)
    width = _word_bytes(tensor)
    if flat.storage_offset() * flat.element_size() % width:  # words begin at multiples of their width
        flat = flat.clone()
    return flat.view(_WORDS[width])


def _word_bytes(tensor: Tensor) -> int:
    return tensor.element_size() if tensor.element_size() > 4 else next(w for w in (4, 2, 1) if not tensor.nbytes % w)


def _num_words(tensor: Tensor) -> int:
    return tensor.nbytes // _word_bytes(tensor)
