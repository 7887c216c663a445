"""What has to be true of the device itself: guarded updates, random states, digests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from keepstep.worker.device import cuda
from keepstep.worker.device.digest import SCRATCH_BYTES, digest
from keepstep.worker.device.guard import GO, SKIP, Guard, apply_unguarded, skip_open
from keepstep.worker.state import rng

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.fixture(autouse=True)
def home() -> Iterator[None]:
    cuda.settle_in([torch.zeros(1, device="cuda")])
    yield
    cuda.home = None


class Twin:
    """The same parameters under two optimizers, of which one is guarded."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.plain = [torch.nn.Parameter(torch.randn(300, 70, device="cuda")) for _ in range(4)]
        self.held = [torch.nn.Parameter(p.detach().clone()) for p in self.plain]
        self.reference, self.guarded = KINDS[kind](self.plain), KINDS[kind](self.held)
        self.guard = Guard()

    def gradients(self) -> None:
        for a, b in zip(self.plain, self.held, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()

    def rehearse(self) -> None:
        self.gradients()
        assert not self.guard.suits(self.guarded)
        self.reference.step()
        self.guard.rehearse(self.guarded)
        apply_unguarded(self.guarded)
        assert not self.guard.end(self.guarded)

    def step(self, word: int) -> None:
        """As between the hooks; nothing here may wait for the device."""
        assert self.guard.suits(self.guarded)
        torch.cuda.synchronize()
        assert self.guard.begin(self.guarded, lambda: False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            apply_unguarded(self.guarded)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert self.guard.end(self.guarded)
        self.guard.wait(lambda: False)
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query(), "the update did not wait"
        assert self.guard.decide(word)
        assert not self.guard.decide(GO)  # too late: the first word counts
        torch.cuda.synchronize()

    def state(self) -> list[torch.Tensor]:
        entries = [copy.copy(self.guarded.state[p]) for p in self.held]
        return [p.detach().clone() for p in self.held] + [
            value.clone() for e in entries for value in e.values() if torch.is_tensor(value)
        ]

    def same(self) -> bool:
        pairs = zip(self.plain, self.held, strict=True)
        return all(torch.equal(a, b) for a, b in pairs) and all(
            torch.equal(value, self.guarded.state[b][key])
            for a, b in zip(self.plain, self.held, strict=True)
            for key, value in self.reference.state[a].items()
            if torch.is_tensor(value)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_guarded_updates_are_bit_identical_and_skipped_ones_never_were(kind: str) -> None:
    twin = Twin(kind)
    twin.rehearse()  # does nothing: the first step has yet to allocate its state
    twin.rehearse()
    for turn in range(20):
        twin.gradients()
        twin.reference.step()
        if turn % 3 == 1:
            before = twin.state()
            twin.step(SKIP)
            assert all(map(torch.equal, before, twin.state()))
            apply_unguarded(twin.guarded)
        else:
            twin.step(GO)
        assert twin.same()
    assert not hasattr(twin.guarded, "found_inf")


def test_found_inf_of_a_scaler_counts_too() -> None:
    twin = Twin("adamw")
    twin.rehearse()
    theirs = torch.ones((), device="cuda")
    twin.guarded.found_inf = theirs  # type: ignore[attr-defined]
    twin.rehearse()
    before = twin.state()
    twin.step(GO)
    assert twin.guarded.found_inf is theirs  # type: ignore[attr-defined]
    assert all(map(torch.equal, before, twin.state()))


def test_guard_keeps_away_from_hooks_and_other_optimizers() -> None:
    twin = Twin("adamw")
    twin.rehearse()
    twin.rehearse()
    assert twin.guard.suits(twin.guarded)
    hook = twin.guarded.register_step_post_hook(lambda *_: None)
    assert not twin.guard.suits(twin.guarded)
    hook.remove()
    other = torch.optim.AdamW(twin.held, foreach=True)
    other.step()
    assert not twin.guard.suits(other)


def test_abort_skips_and_whoever_keeps_the_device_waiting_keeps_the_guard_away() -> None:
    twin = Twin("adamw")
    twin.rehearse()
    twin.rehearse()
    with cuda.exclusive:
        assert not twin.guard.begin(twin.guarded, lambda: False)
    assert not twin.guard.begin(twin.guarded, lambda: True)
    before = twin.state()
    assert twin.guard.begin(twin.guarded, lambda: False)
    apply_unguarded(twin.guarded)
    skip_open()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, twin.state()))
    assert twin.guard.end(twin.guarded)
    assert not twin.guard.decide(GO)
    assert not cuda.exclusive.locked()


def test_random_states_are_captured_without_waiting_and_restored() -> None:
    torch.cuda.manual_seed(5)
    torch.rand(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = rng.capture()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first = torch.rand(5, device="cuda")
    rng.restore(state)
    assert torch.equal(first, torch.rand(5, device="cuda"))


def test_digest_is_the_same_on_cpu_and_device_and_needs_little_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        data = torch.randn(1001, 37).to(dtype)
        assert digest(data) == digest(data.cuda())
    large = torch.arange(200 << 20, dtype=torch.uint8, device="cuda")[3:]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = digest(large)
    assert torch.cuda.max_memory_allocated() - before <= SCRATCH_BYTES
    large[77_777_777] += 1
    assert digest(large) != found
