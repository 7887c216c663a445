"""A 128-bit digest of a tensor's bytes, computed where the tensor is.

Hashing on the host would first have to bring the bytes there. This one is made of operations that
any device has and that are exact and free of order on all of them: 64-bit integers that wrap
around. Every word w at place i is scrambled together with its place, two times with different
constants, and the results are added up:

    digest = (sum of mix(w + i * A1 + B1), sum of mix(w + i * A2 + B2)), then mixed with the length

`mix` is a bijection of 64-bit words with good diffusion (two rounds of xor-shift and multiply), so
changing one word always changes both sums, and a swap of words or a shift does too but for a chance
of 2**-128. It guards against faults of memory and transport, not against an adversary.

Equal bytes give an equal digest whatever the dtype, shape and device. At most SCRATCH_BYTES are
used beside the tensor (and beside a copy of one whose elements are not in order in memory).
"""

from __future__ import annotations

import torch

SCRATCH_BYTES = 32 << 20
_TEMPORARIES = 4  # words that were not aligned, words with their places, shifted ones, one spare
# Blocks of the device's allocator may be a MiB larger than asked for; the sums are small.
CHUNK_WORDS = SCRATCH_BYTES // 8 // _TEMPORARIES - (9 << 14)


def _signed(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_PLACE = (_signed(0x9E3779B97F4A7C15), _signed(0xD6E8FEB86659FD93))
_START = (_signed(0x2545F4914F6CDD1D), _signed(0x5851F42D4C957F2D))
_MULTIPLY = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27, 31)


def digest(tensor: torch.Tensor) -> bytes:
    """Of the bytes in the order of the tensor's elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    whole = raw.numel() // 8 * 8
    sums = [torch.zeros((), dtype=torch.int64, device=raw.device) for _ in _PLACE]
    for start in range(0, whole, 8 * CHUNK_WORDS):
        _add(sums, _words(raw[start : min(start + 8 * CHUNK_WORDS, whole)]), start // 8)
    if whole < raw.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[: raw.numel() - whole] = raw[whole:]
        _add(sums, last.view(torch.int64), whole // 8)
    length = raw.numel()
    words = [_mix_one(_signed(int(value) + length)) for value in torch.stack(sums).tolist()]
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words)


def _words(raw: torch.Tensor) -> torch.Tensor:
    # A view demands that the tensor begins at a multiple of eight bytes in its storage.
    aligned = raw.storage_offset() % 8 == 0 and raw.data_ptr() % 8 == 0
    return (raw if aligned else raw.clone()).view(torch.int64)


def _add(sums: list[torch.Tensor], words: torch.Tensor, first: int) -> None:
    for index, (place, offset) in enumerate(zip(_PLACE, _START, strict=True)):
        scratch = torch.arange(first, first + words.numel(), device=words.device)
        scratch.mul_(place).add_(offset).add_(words)
        sums[index] += _mix(scratch).sum()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """In place. Shifts of signed words copy the sign; xor with a mask of it makes them logical."""
    for shift, factor in zip(_SHIFTS, (*_MULTIPLY, None), strict=True):
        shifted = words >> shift
        words ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            words *= factor
    return words


def _mix_one(word: int) -> int:
    mixed: int = _mix(torch.tensor([word], dtype=torch.int64)).item()  # type: ignore[assignment]
    return mixed
