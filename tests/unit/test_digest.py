"""The device digest, on the CPU; tests/gpu compares it with the device's."""

from __future__ import annotations

import pytest
import torch

from keepstep.worker.device import digest as module
from keepstep.worker.device.digest import digest


def of(data: bytes) -> bytes:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0))


def test_every_single_bit_counts() -> None:
    data = bytes(range(1, 42))
    seen = {of(data)}
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(of(bytes(changed)))
    assert len(seen) == 8 * len(data) + 1
    assert {len(value) for value in seen} == {16}


def test_both_halves_change_with_one_bit() -> None:
    """Else a digest would have 64 bits and not 128."""
    one, other = of(b"\0" * 64), of(b"\0" * 63 + b"\1")
    assert one[:8] != other[:8] and one[8:] != other[8:]


def test_place_counts() -> None:
    words = torch.arange(100, dtype=torch.int64)
    swapped = words.clone()
    swapped[[3, 71]] = swapped[[71, 3]]
    assert len({digest(words), digest(swapped), digest(words.roll(1)), digest(words.flip(0))}) == 4


def test_length_counts_for_zeros_too() -> None:
    assert len({of(b"\0" * count) for count in range(40)}) == 40


def test_nothing_has_a_digest() -> None:
    assert of(b"") == digest(torch.empty(0, 5, dtype=torch.bfloat16)) and len(of(b"")) == 16


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64]
)
def test_only_bytes_count(dtype: torch.dtype) -> None:
    values = (torch.randn(7, 5, generator=torch.Generator().manual_seed(1)) > 0).to(dtype)
    raw = values.contiguous().view(-1).view(torch.uint8)
    assert digest(values) == digest(raw) == of(raw.numpy().tobytes())
    assert digest(values.t()) == digest(values.t().contiguous()) != digest(values)


def test_place_in_memory_does_not_count() -> None:
    block = torch.arange(64, dtype=torch.uint8)
    assert digest(block[3:40]) == of(bytes(range(3, 40)))


def test_chunks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 255, (1003,), dtype=torch.uint8)
    whole = digest(data)
    monkeypatch.setattr(module, "CHUNK_WORDS", 17)
    assert digest(data) == whole
