"""What the host computes of a copy is what a device computes of the original."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.worker.device import extension
from keepstep.worker.vault.gpu_staging import fingerprint, host_fingerprint

extension.load()  # which may have to be compiled first
KINDS = [torch.int64, torch.int32, torch.int16, torch.uint8]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 1 << 20), count=st.integers(1, 40))
def test_of_a_few_words(kind: torch.dtype, seed: int, count: int) -> None:
    limits = torch.iinfo(kind)
    chance = torch.Generator().manual_seed(seed)
    words = torch.randint(limits.min, limits.max, (count,), dtype=kind, generator=chance)
    words[count // 2] = limits.max if seed % 2 else limits.min
    low, high = torch.aminmax(words)
    assert host_fingerprint(words) == (int(words.sum(dtype=torch.int64)), int(low), int(high))


def test_of_a_gradient() -> None:
    gradient = torch.randn(3_000_003, generator=torch.Generator().manual_seed(1))
    words = gradient.view(torch.int32)
    assert host_fingerprint(words) == tuple(map(int, fingerprint(gradient)))


def test_words_of_no_width_are_refused() -> None:
    with pytest.raises(ValueError, match="wide"):
        extension.load().numbers(0, 0, 3)
