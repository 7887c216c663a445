"""What a rank keeps in a vault while it trains brings its successor to the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep.agent.blobs import BlobServer
from keepstep.errors import UsageError
from keepstep.model.commands import Parity, WorkerSettings
from keepstep.model.messages import Address
from keepstep.worker.device import cuda
from keepstep.worker.state import shards
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.shards import Replicas
from keepstep.worker.vault import early, gpu_staging, inventory, redundancy, replay, vault
from keepstep.worker.vault.redundancy import Redundancy
from keepstep.worker.vault.units import part_of, same_order

Optimizers = dict[str, torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Place(NamedTuple):
    address: Address
    device: str
    sharded: bool = False
    settings: WorkerSettings = WorkerSettings()


class Now:
    """A stream or an event of a device that does everything at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...


def stage_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU's memory, but for the GPU."""
    for name, stand_in in {
        "Stream": Now, "Event": Now, "current_stream": Now, "set_device": lambda _: None,
        "stream": lambda _: contextlib.nullcontext(),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0
        ),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(inventory, "part_of", lambda tensor: shards.local(tensor).detach())
    monkeypatch.setattr(cuda, "settle_in", lambda _: None)
    monkeypatch.setattr(cuda, "home", torch.device("cpu"))


HOW = [
    pytest.param(how, marks=[GPU] * ("cuda" in how))
    for how in ("cpu", "staged", "cuda", "cpu-sliced", "staged-sliced", "cuda-sliced")
]
on_gpu = pytest.mark.parametrize(
    "place", [how for how in HOW if "cpu" not in str(how.values[0])], indirect=True
)


@pytest.fixture(params=HOW)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # What is hung into torch is taken out again.
    inner = nn.utils.clip_grad._clip_grads_with_norm_
    monkeypatch.setattr(nn.utils.clip_grad, "_clip_grads_with_norm_", inner)
    monkeypatch.setattr(nn.utils, "clip_grads_with_norm_", inner)
    monkeypatch.setattr(cuda, "home", None)
    server = BlobServer("t", lambda rank: [])
    try:
        address = asyncio.run(server.start("127.0.0.1"))
        device, _, how = request.param.partition("-")
        if device == "staged":
            stage_host_memory(monkeypatch)
        settings = WorkerSettings()
        if how == "sliced":
            settings = WorkerSettings(vault_lanes="3", vault_slice="2000")
        yield Place(address, "cuda" if device == "cuda" else "cpu", settings=settings)
    finally:
        server.close()


@pytest.fixture
def sharded(place: Place) -> Iterator[Place]:
    """FSDP2 in a world of one: its hooks, its streams, and DTensors."""
    backend = "gloo" if place.device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield place._replace(sharded=True)
    finally:
        dist.destroy_process_group()


class Rank:
    """One of two ranks, whose tensors the other one does not have; and what a step does to it."""

    def __init__(self, place: Place, make: Make, average: bool = False, model: Any = None) -> None:
        self.place, self.address = place, place.address
        torch.manual_seed(3)
        # As large as a put that is not packed together with others, and as small as one that is.
        self.model = model or nn.Sequential(nn.Linear(16, 1500), nn.ReLU(), nn.Linear(1500, 3))
        self.spare = nn.Linear(16, 2)  # has no gradient in most steps
        self.model.to(place.device), self.spare.to(place.device)
        if place.sharded:
            mesh = init_device_mesh(place.device, (1,))
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            fully_shard(self.spare, mesh=mesh)
        models = {"0": self.model, "1": self.spare}
        self.optimizers = make(nn.ModuleList(models.values()))
        self.average = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        replicas = Replicas(0, 2)
        replicas.plain_equal = False
        self.objects: dict[str, Registered] = {}
        if average:
            item = Registered("average", lambda: dict(self.average), self._load_average)
            item.after_update = self._follow
            self.objects["average"] = item
        parameters = [p for model in models.values() for p in model.parameters()]
        cuda.settle_in(parameters)
        live = SimpleNamespace(
            rank=0, world=2, version=0, generation=1, replicas=replicas, objects=self.objects,
            optimizers=self.optimizers, models=models, parameters=parameters,
            state=StateSet(models, self.optimizers, self.objects, replicas),
            channel=SimpleNamespace(inbox=SimpleNamespace(buddy=self.address)),
            aborted=lambda: False,
            welcome=SimpleNamespace(token="t", blobs=None, settings=place.settings),
            local_world=1,
        )  # fmt: skip
        self.live: Any = live
        self.redundancy = Redundancy(self.live)
        self.redundancy.find_units()
        self.versions = [self.bits()]

    def _load_average(self, state: dict[str, torch.Tensor]) -> None:
        self.average.update(state)

    @torch.no_grad()
    def _follow(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter, 0.1)

    def bits(self) -> Any:
        states = [o.state_dict()["state"] for o in self.optimizers.values()]
        models = [self.model.state_dict(), self.spare.state_dict()]
        return copy.deepcopy([models, states, self.average if self.objects else None])

    def compute(self, passes: int = 1, spare: bool = False) -> None:
        """`passes`: of which the last but one is taken for the last if there are two."""
        step = self.live.version
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        for turn in range(passes):
            rows = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + turn))
            rows = rows.to(self.place.device)
            loss = self.model(rows).square().mean()
            if spare:
                loss = loss + self.spare(rows).square().mean()
            self.redundancy.backward(last=turn == 0)
            loss.backward()
            self.redundancy.backward_done()

    def training(self) -> Rank:
        self.redundancy.connect()
        return self

    def step(self, between: Callable[[], Any] = lambda: None, **how: Any) -> None:
        self.redundancy.begin()
        self.compute(**how)
        between()
        self.publish()
        self.update()

    def publish(self) -> None:
        self.redundancy.publish(self.address, updating=True)
        self.redundancy.confirm(lambda: None)

    def update(self) -> None:
        for number, (name, optimizer) in enumerate(self.optimizers.items()):
            if number:
                self.redundancy.before_update(name)
            optimizer.step()
        self.redundancy.updated = list(self.optimizers)
        if self.objects:
            self._follow()
        self.live.version += 1
        self.versions.append(self.bits())

    @property
    def line(self) -> vault.VaultLine:
        line = self.redundancy._destination.line
        assert line is not None
        return line

    @property
    def staging(self) -> gpu_staging.PinnedStaging | None:
        return self.redundancy._bases.staging

    def sent(self) -> None:
        if self.staging is not None:
            self.staging.flush()
        self.line.wait_all_read()

    def early(self) -> int:
        """Gradients that went to the vault before the fence and are good."""
        return len(self.redundancy._early._sent) if self.redundancy._early is not None else 0

    def of_gpu(self, count: int) -> int:
        """As many gradients go early from a GPU; from host memory none does."""
        return count if self.staging is not None else 0

    def become(self, version: int, updated: list[str], holder: Address | None = None) -> Any:
        self.live.version = version
        kept = partial(self.redundancy.fetch, 0, [holder or self.address], version)
        self.redundancy.restore(frozenset(), version, updated, kept)
        return self.bits()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def adamw(model: nn.Module) -> Optimizers:
    return {"0": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def sgd(model: nn.Module) -> Optimizers:
    return {"0": torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)}


def two(model: nn.Module) -> Optimizers:
    parameters = list(model.parameters())
    return {
        "a": torch.optim.AdamW(parameters[::2], lr=1e-2),
        "b": torch.optim.SGD(parameters[1::2], lr=1e-2, momentum=0.9),
    }


def check(rank: Rank, make: Make, model: nn.Module | None = None) -> None:
    """All versions that may be asked for after the last fence. `model`: if it is another one."""
    now = rank.live.version
    average = bool(rank.objects)
    for version in (now - 1, now):
        newcomer = Rank(rank.place, make, average, copy.deepcopy(model))
        restored = newcomer.become(version, list(rank.optimizers))
        assert equal(restored, rank.versions[version]), version


@pytest.mark.parametrize("make", [adamw, sgd, two])
def test_replay_is_exact(place: Place, make: Make) -> None:
    rank = Rank(place, make).training()
    for step in range(7):
        rank.step(spare=step in (2, 5))
        assert rank.early() == rank.of_gpu(6 if step in (2, 5) else 4)
        check(rank, make)


def large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 2048))  # 8 MiB


@pytest.mark.parametrize("place", ["cpu"], indirect=True)
def test_on_a_cpu_gradients_go_at_the_fence_and_torch_stays_as_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    put = vault.VaultLine.put_all

    def noted(line: Any, kind: Any, *how: Any) -> Any:
        kinds.append(kind)
        return put(line, kind, *how)

    monkeypatch.setattr(vault.VaultLine, "put_all", noted)
    clipping = nn.utils.clip_grad._clip_grads_with_norm_
    rank = Rank(place, adamw, model=large()).training()
    assert nn.utils.clip_grad._clip_grads_with_norm_ is clipping
    assert len(rank.redundancy.inventory.lanes) == len(rank.redundancy.units)  # none is cut
    for _ in range(3):
        kinds.clear()
        rank.step(lambda: (clip(rank), kinds.append("at the fence")))
        assert "grad" not in kinds[: kinds.index("at the fence")] and "grad" in kinds
        check(rank, adamw, large())


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_on_a_gpu_large_units_are_cut(place: Place) -> None:
    rank = Rank(place, adamw, model=large())
    assert len(rank.redundancy.inventory.lanes) == len(rank.redundancy.units) + 3


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_where_no_memory_can_be_pinned_all_is_copied_at_the_fence(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(inventory, "part_of", part_of)
    rank = Rank(place, adamw).training()
    assert rank.staging is None and rank.redundancy._early is None
    assert "copies to the vault are waited for" in capsys.readouterr().err
    for _ in range(5):
        rank.step(lambda: clip(rank))
        check(rank, adamw)


def test_bases_come_with_the_first_backward_pass_or_at_the_fence(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(place, adamw).training()
    rank.step()
    late = rank.staging is not None
    for seen in (True, False, True):
        rank.redundancy.begin()
        rank.redundancy.begin()  # the step was aborted before it had got far
        assert bool(rank.redundancy._bases._due) == late
        with monkeypatch.context() as patch:
            if not seen:  # gradients by torch.autograd.grad
                patch.setattr(rank.redundancy, "backward", lambda last: None)
            rank.compute()
        assert bool(rank.redundancy._bases._due) == (late and not seen)
        rank.publish()
        assert not rank.redundancy._bases._due
        rank.update()
        check(rank, adamw)


class Members:
    """Ranks of a parity that has a single member, and so is a copy."""

    def __init__(self, place: Place, holder: Address) -> None:
        self.place, self.holder = place, holder

    def member(self) -> Rank:
        rank = Rank(self.place, adamw)
        rank.live.welcome.blobs = rank.address
        parity = Parity(holder=self.holder, members=[0])
        inbox = SimpleNamespace(buddy=None, parity=parity)
        rank.live.channel = SimpleNamespace(inbox=inbox, send=Mock())
        return rank

    def restored(self, rank: Rank, version: int, holder: Address) -> bool:
        bits = self.member().become(version, list(rank.optimizers), holder)
        return equal(bits, rank.versions[version])


@pytest.fixture
def members(sharded: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    parity = msgspec.structs.replace(sharded.settings, redundancy="parity")
    sharded = sharded._replace(settings=parity)
    monkeypatch.setattr(early, "PAUSE", 1)
    server = BlobServer("t", lambda rank: [])
    try:
        yield Members(sharded, asyncio.run(server.start("127.0.0.1")))
    finally:
        server.close()


def test_a_parity_gets_gradients_early_and_what_takes_their_place_in_a_note(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redundancy, "NOTED_BYTES", 1000)
    rank = members.member().training()

    def change() -> None:
        weight, bias = rank.model[2].weight, rank.model[2].bias
        shards.local(weight.grad).mul_(0.5)
        bias.grad = None

    for step in range(9):
        wrong = step == 3
        rank.step(change if wrong else lambda: clip(rank))
        # What went together is wrong together.
        assert rank.early() == rank.of_gpu(4 - 2 * wrong), step
        assert not rank.live.channel.send.called
        for version in (step, step + 1):
            assert members.restored(rank, version, rank.address), version
            assert members.restored(rank, version, members.holder), version


def test_a_parity_is_given_up_where_the_vault_gets_other_gradients_than_it(
    members: Members,
) -> None:
    """The connection to the own agent breaks between clipping and the fence."""
    rank = members.member().training()

    def clip_and_break() -> None:
        clip(rank)
        rank.line.interrupt()

    for step in range(12):
        rank.step(clip_and_break if step in (2, 8) else lambda: clip(rank))
        assert members.restored(rank, step + 1, rank.address), step
        if rank.staging is not None and step in (2, 3, 8, 9, 10, 11):
            with pytest.raises(replay.ShardsMissing):
                members.restored(rank, step + 1, members.holder)
        else:
            assert members.restored(rank, step + 1, members.holder), step
    assert not rank.live.channel.send.called


def test_a_parity_is_given_up_where_all_of_it_was_wrong_and_the_vault_is_lost(
    members: Members,
) -> None:
    """The connection to the own agent breaks when the note of what was wrong is on its way."""
    rank = members.member().training()

    def change() -> None:
        for parameter in rank.model.parameters():
            assert parameter.grad is not None
            shards.local(parameter.grad).mul_(0.5)

    for step in range(9):
        rank.redundancy.begin()
        rank.compute()
        if step == 5:
            rank.sent()
            change()
            rank.redundancy.publish(rank.address, updating=True)
            guesses = rank.redundancy._early
            assert guesses is None or guesses.find_changed(rank.line)
            rank.line.interrupt()
            with pytest.raises(OSError):
                rank.redundancy.confirm(lambda: None)
        rank.publish()
        rank.update()
        assert members.restored(rank, step + 1, rank.address), step
    assert not rank.live.channel.send.called
    assert members.restored(rank, 9, members.holder)


def test_replay_of_objects_that_follow_the_parameters(place: Place) -> None:
    rank = Rank(place, adamw, average=True).training()
    for _ in range(6):
        rank.step()
        check(rank, adamw)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_replay_of_shards_is_exact_with_clipping_and_without(sharded: Place, make: Make) -> None:
    rank = Rank(sharded, make).training()
    for step in range(6):
        between = (lambda: clip(rank)) if step % 2 else (lambda: None)
        rank.step(between, spare=step == 4)
        assert rank.early() == rank.of_gpu(6 if step == 4 else 4)
        check(rank, make)


@on_gpu
def test_gradients_of_a_module_go_together_and_one_that_changes_takes_them_along(
    sharded: Place,
) -> None:
    rank = Rank(sharded, adamw).training()
    rank.step()
    rank.step()
    assert rank.redundancy._early is not None
    groups = {id(sent) for sent in rank.redundancy._early._sent.values()}
    assert (rank.early(), len(groups)) == (4, 2)

    def change() -> None:
        rank.sent()
        gradient = rank.model[2].bias.grad
        assert gradient is not None
        shards.local(gradient).data.mul_(0.5)

    rank.step(change)
    assert rank.early() == 2
    check(rank, adamw)


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_a_module_is_copied_behind_its_own_gradients_and_not_behind_those_of_the_next(
    sharded: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Noted(Now):
        def record(self, _: Any) -> None:
            seen.append("recorded")

    rank = Rank(sharded, adamw).training()
    rank.step()
    for parameter in rank.model.parameters():  # after the vault's own hooks
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("reduced"))
    monkeypatch.setattr(cuda, "new_event", Noted)
    copied = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *how, **more: (seen.append("copied"), copied(*how, **more))
    )
    rank.redundancy.begin()
    rank.compute()
    bases, module = ["recorded", "copied"], 2 * ["recorded", "reduced"] + ["copied"]
    assert seen == bases + 2 * module
    rank.publish()


@on_gpu
def test_what_was_clipped_and_goes_over_another_line_is_clipped_once(sharded: Place) -> None:
    rank = Rank(sharded, adamw).training()
    rank.step()

    def clip_and_break() -> None:
        clip(rank)
        assert rank.redundancy._early is not None and rank.redundancy._early.scales
        rank.line.interrupt()

    rank.step(clip_and_break)
    assert rank.early() == 0
    check(rank, adamw)


@on_gpu
def test_what_is_found_again_at_the_first_step_is_watched_once(sharded: Place) -> None:
    rank = Rank(sharded, adamw).training()
    guesses, staging = rank.redundancy._early, rank.staging
    rank.redundancy.refresh_units()
    assert guesses is not None and rank.redundancy._early is guesses and rank.staging is staging
    assert len(guesses._hooks) == 6
    for _ in range(2):
        rank.step(lambda: clip(rank))
        assert rank.early() == 4 and len(guesses.scales) == 1
        check(rank, adamw)


@on_gpu
def test_a_gradient_that_is_clipped_twice_goes_as_it_is(sharded: Place) -> None:
    rank = Rank(sharded, adamw).training()
    rank.step()

    def twice() -> None:
        parameters = [*rank.model.parameters(), *rank.model[2].parameters()]
        nn.utils.clip_grad_norm_(parameters, 1e-3)

    rank.step(twice)
    assert rank.early() == 0
    check(rank, adamw)


def test_two_who_clip_at_once_leave_torch_as_it_was() -> None:
    before = torch._foreach_mul_
    one, other = early._Multiplications(Mock()), early._Multiplications(Mock())
    one.__enter__()
    with other:
        one.__exit__()
        assert torch._foreach_mul_ is before
    with other:
        assert torch._foreach_mul_ is not before
    assert torch._foreach_mul_ is before


def test_a_gradient_is_unchanged_if_all_its_fingerprints_say_so() -> None:
    known: Any = {7: (1, 0, 0), 8: (2, 0, 0), 9: (2, 0, 0), 10: None}
    staged: Any = SimpleNamespace(
        copy_fingerprint=lambda _, copy: copy, fingerprint_at=lambda place: known[place]
    )
    line: Any = None
    copied: Any = (1, 0, 0)
    for places, same in {
        (7,): True, (8,): False, (7, 8, 9): True, (7, 9, 7): False, (7, 8): False,
        (7, 10, 10): False, (): False,
    }.items():  # fmt: skip
        sent = early._Sent(copy=copied, fingerprints=list(places))
        assert early._unchanged(staged, line, sent) == same, places


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_bases_of_which_nothing_is_on_the_device_take_the_same_way(place: Place) -> None:
    staging = Rank(place, adamw).training().staging
    assert staging is not None
    given: list[Any] = []
    line: Any = SimpleNamespace(put_all=lambda *put: given.append(put))
    assert staging.put_bases(line, 1, {0: [b"of the host"]}) == []
    staging.flush()
    assert given == [("base", 1, {0: [b"of the host"]})]


@GPU
def test_memory_that_cannot_be_pinned_leaves_no_error_for_others_to_meet() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    block = torch.empty(1 << 20, dtype=torch.uint8)
    gpu_staging._pin(runtime, device, block)
    try:
        with pytest.raises(RuntimeError, match="could not be pinned"):
            gpu_staging._pin(runtime, device, block)  # it is already
        assert torch.ones(4, device=device).mul_(2).tolist() == [2.0] * 4
    finally:
        gpu_staging._unpin(runtime, [block.data_ptr()])


class Buffer(bytearray):
    """Knows when nobody needs it."""


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_what_a_user_made_for_a_base_lives_until_it_was_copied(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = threading.Event()

    class Late(Now):
        def synchronize(self) -> None:
            assert copied.wait(20)

    staging = Rank(place, adamw).training().staging
    assert staging is not None
    monkeypatch.setattr(torch.cuda, "Event", Late)
    buffer = Buffer(64)
    alive = weakref.ref(buffer)
    bases = {0: [torch.frombuffer(buffer, dtype=torch.uint8)]}
    del buffer
    line: Any = SimpleNamespace(put_all=lambda *_: None)
    assert staging.put_bases(line, 1, bases) == []
    bases.clear()
    assert alive() is not None
    copied.set()
    staging.flush()
    deadline = time.monotonic() + 20
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None


def test_the_reservation_is_enough(place: Place) -> None:
    layers = nn.Sequential(*(nn.Linear(360, 360) for _ in range(24)))
    rank = Rank(place, adamw, model=layers).training()
    for _ in range(10):
        rank.redundancy.begin()
        put_ones(rank)


def put_ones(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rank.publish()
    rank.update()


@pytest.mark.parametrize("place", ["cpu-sliced"], indirect=True)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("lost", [slice(2, 3), slice(None)], ids=["one", "all"])
def test_the_reservation_is_enough_when_bases_were_lost_with_their_connections(
    place: Place, lost: slice, average: bool
) -> None:
    layers = nn.Sequential(*(nn.Linear(240, 240) for _ in range(24)))
    rank = Rank(place, adamw, average, copy.deepcopy(layers)).training()
    for step in range(16):
        line = rank.line
        if step in (4, 9):
            for lane in line._lanes[lost]:
                lane.interrupt()
        rank.redundancy.begin()
        rank.redundancy.backward(last=False)
        put_ones(rank)
        assert (rank.line is not line) == (step in (4, 9))
    check(rank, adamw, layers)


def test_what_was_cut_otherwise_after_attach_is_kept_as_it_is_now(place: Place) -> None:
    layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    rank = Rank(place, adamw, model=layers).training()
    guesses = rank.redundancy._early
    layers.double()
    rank.redundancy.refresh_units()
    assert rank.redundancy._early is guesses
    assert guesses is None or guesses.staging is rank.staging
    for _ in range(2):
        rank.redundancy.begin()
        put_ones(rank)
        rank.line.interrupt()  # and it is opened again
    rank.redundancy.begin()
    put_ones(rank)


@pytest.mark.parametrize("place", ["staged"], indirect=True)
def test_a_base_that_is_made_when_it_is_due_is_copied_behind_that(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Noted(Now):
        def record(self, _: Any) -> None:
            seen.append("recorded")

    rank = Rank(place, adamw, average=True).training()
    monkeypatch.setattr(cuda, "new_event", Noted)
    rank.objects["average"].save = lambda: seen.append("made") or dict(rank.average)
    copied = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *how, **more: (seen.append("copied"), copied(*how, **more))
    )
    rank.redundancy.begin()
    assert seen[:3] == ["made", "recorded", "copied"]


def hidden(rank: Rank) -> None:
    """Writes that no version of a tensor counts."""
    for parameter in rank.model.parameters():
        assert parameter.grad is not None
        before = parameter.grad._version
        parameter.grad.data.mul_(0.75)
        assert parameter.grad._version == before


def seen(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def exchanged(rank: Rank) -> None:
    for parameter in rank.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


def dropped(rank: Rank) -> None:
    rank.model[0].weight.grad = None


@pytest.mark.parametrize("change", [hidden, seen, exchanged, dropped])
def test_what_was_sent_early_and_changed_is_sent_again(
    place: Place, change: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "PAUSE", 2)
    rank = Rank(place, adamw).training()
    counts = []

    def after_it_was_sent() -> None:
        rank.sent()
        counts.append(rank.early())
        change(rank)

    for _ in range(4):
        rank.step(after_it_was_sent)
        assert rank.early() in (0, rank.of_gpu(3))
        check(rank, adamw)
    assert counts == [rank.of_gpu(4), 0] * 2  # who was wrong does not guess for a while


def test_a_gradient_whose_bytes_are_in_another_order_is_replayed_as_it_is(place: Place) -> None:
    rank = Rank(place, adamw).training()

    def turn() -> None:
        for parameter in rank.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.t().contiguous().t()

    for _ in range(3):
        rank.step(turn)
        check(rank, adamw)
    for parameter in rank.model.parameters():  # and the hook finds such a one
        parameter.register_hook(lambda gradient: gradient.t().contiguous().t())
    for _ in range(3):
        rank.step()
        check(rank, adamw)


class Column(nn.Module):
    """Its weight is a part of a larger one, with holes in memory between its rows."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(1500, 32)[:, begin : begin + 16])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight.t()


def test_a_parameter_with_holes_is_kept_as_it_is_in_every_step(place: Place) -> None:
    model = nn.Sequential(Column(8), nn.ReLU(), nn.Linear(1500, 3))
    assert not model[0].weight.is_contiguous()
    rank = Rank(place, adamw, model=copy.deepcopy(model)).training()
    for _ in range(7):
        rank.step()
        check(rank, adamw, model)


def test_a_base_follows_its_tensors_wherever_they_go(place: Place) -> None:
    rank = Rank(place, adamw).training()
    (adam,) = rank.optimizers.values()
    for step in range(6):
        rank.step()
        check(rank, adamw)
        if step == 1:
            adam.load_state_dict(copy.deepcopy(adam.state_dict()))
        if step == 2:
            for state in adam.state.values():
                state["exp_avg"] = state["exp_avg"].clone()
        if step == 3:
            for parameter in rank.model.parameters():
                parameter.data = parameter.data.clone()


WIDTHS = [(1500, 3), (3, 700), (700, 2)]


def clip(rank: Rank) -> None:
    nn.utils.clip_grad_norm_(rank.model.parameters(), 0.01)


def clip_by_parts(rank: Rank) -> None:
    parameters = [*rank.model.parameters()]
    total = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters[:3], 0.01, total)
    nn.utils.clip_grads_with_norm_(parameters[2:], 0.02, total)


def one_by_one(rank: Rank) -> None:
    nn.utils.clip_grad_norm_(rank.model.parameters(), 0.01, foreach=False)


def and_then_some(rank: Rank) -> None:
    clip(rank)
    hidden(rank)


def some_and_then(rank: Rank) -> None:
    rank.sent()
    hidden(rank)
    clip(rank)


CLIPPED = {clip: 4, clip_by_parts: 4, one_by_one: 0, and_then_some: 0, some_and_then: 0}


@pytest.mark.parametrize("make", [adamw, sgd, two])
@pytest.mark.parametrize("how", CLIPPED)
def test_clipping_is_replayed(
    place: Place, how: Callable[[Rank], None], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "PAUSE", 1)
    rank = Rank(place, make).training()
    for step in range(4):
        rank.step(lambda: how(rank), spare=step == 1)
        assert rank.early() == rank.of_gpu(CLIPPED[how] + 2 * (step == 1))  # and not sent again
        check(rank, make)


def test_clipping_that_is_compiled_is_found_by_its_result(
    sharded: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "PAUSE", 1)
    graphs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    try:
        for place in (sharded, sharded._replace(sharded=False)):
            rank = Rank(place, adamw).training()
            compiled = torch.compile(lambda one: clip(one), backend=backend)
            for _ in range(3):
                rank.step(lambda: compiled(rank))  # noqa: B023
                assert rank.redundancy._early is None or rank.redundancy._early._wrong
                check(rank, adamw)
    finally:
        torch.compiler.reset()
    assert sum("foreach_mul_" in code for code in graphs) >= 2


@pytest.mark.parametrize("how", [clip, clip_by_parts, hidden])
def test_gradients_that_go_in_many_groups_and_messages(
    place: Place, how: Callable[[Rank], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "PAUSE", 1)
    monkeypatch.setattr(vault, "BATCH_BYTES", 8192)
    layers = nn.Sequential(nn.Linear(16, 1500), nn.ReLU(), *(nn.Linear(n, m) for n, m in WIDTHS))
    rank = Rank(place, adamw, model=copy.deepcopy(layers)).training()
    for _ in range(4):
        rank.step(lambda: how(rank))
        check(rank, adamw, layers)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_clipped_together_with_what_nobody_keeps(place: Place, kind: torch.dtype) -> None:
    """And of several types, of which torch clips one after the other."""
    model = nn.Sequential(nn.Linear(16, 1500), nn.ReLU(), nn.Linear(1500, 3))
    for parameter in model[2].parameters():
        parameter.data = parameter.data.to(kind)
    model[2].register_forward_pre_hook(lambda _, given: (given[0].to(kind),))
    rank = Rank(place, adamw, model=copy.deepcopy(model)).training()
    other = nn.Parameter(torch.zeros(5, device=place.device))

    def clip_all() -> None:
        other.grad = torch.ones_like(other)
        before = [p.grad.clone() for p in rank.model.parameters() if p.grad is not None]
        total = nn.utils.clip_grad_norm_([other, *rank.model.parameters()], 0.5, foreach=True)
        scale = 0.5 / (total + 1e-6)
        assert 0 < float(scale) < 1 and torch.equal(other.grad, torch.ones_like(other) * scale)
        for parameter, was in zip(rank.model.parameters(), before, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, was * scale)

    for _ in range(4):
        rank.step(clip_all)
        assert rank.early() == rank.of_gpu(4)  # and not sent again
        check(rank, adamw, model)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(40, 16, dtype=torch.complex64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.weight * rows.mean()).sum(-1)


def test_a_conjugate_that_torch_has_only_noted_is_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "PAUSE", 1)
    model = Turned()
    rank = Rank(place, sgd, model=copy.deepcopy(model)).training()

    def turn() -> None:
        rank.sent()
        gradient = rank.model.weight.grad
        rank.model.weight.grad = gradient.conj()
        assert rank.model.weight.grad.is_conj() and rank.early() == rank.of_gpu(1)
        assert same_order(gradient, gradient) and not same_order(gradient, gradient.conj())

    for _ in range(3):
        rank.step(turn)
        check(rank, sgd, model)


def test_what_changes_while_it_is_sent_is_stored_as_it_is_at_the_fence(place: Place) -> None:
    rank = Rank(place, adamw).training()
    for _ in range(5):
        rank.step(lambda: hidden(rank))
        check(rank, adamw)


def test_a_step_with_more_passes_than_the_one_before(place: Place) -> None:
    rank = Rank(place, adamw).training()
    rank.step()
    rank.step(passes=3)
    check(rank, adamw)


def test_a_retried_step_replaces_what_it_had_sent(place: Place) -> None:
    rank = Rank(place, adamw).training()
    rank.step()
    rank.redundancy.begin()
    rank.compute(spare=True)
    hidden(rank)
    rank.publish()  # and the fence is not passed
    rank.redundancy.reconnect()
    rank.step()
    check(rank, adamw)
    rank.redundancy.begin()
    rank.compute()
    rank.redundancy.interrupt()  # in the middle of a pass
    rank.redundancy.reconnect()
    rank.step()
    check(rank, adamw)


def test_gradients_that_change_after_the_first_update_are_refused(place: Place) -> None:
    rank = Rank(place, two).training()
    rank.redundancy.begin()
    rank.compute()
    rank.publish()
    seen(rank)
    with pytest.raises(UsageError, match="changed after the step's first optimizer update"):
        rank.update()


def test_shards_that_change_after_the_first_update_are_refused(sharded: Place) -> None:
    rank = Rank(sharded, two).training()
    rank.step()
    rank.redundancy.begin()
    rank.compute()
    rank.publish()
    clip(rank)  # which no version of a DTensor counts
    with pytest.raises(UsageError, match="changed after the step's first optimizer update"):
        rank.update()
