"""Groups of real processes over gloo: abort, go solo, stage, swap, and a newcomer in a live.

Three ranks, because a sum of two commutes and would hide a changed order of additions.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from keepstep import native
from tests.integration.groups_worker import STEPS, main

WORLD = 3
SOON_S = 5.0  # generous: the machine may be busy; what it excludes are timeouts of 20 s and more

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])


class Store:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [native.store_host_path()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(5)


class Remote:
    """A rank's process, called through a pipe."""

    def __init__(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, method: str, *args: Any) -> None:
        self.pipe.send((method, args))

    def outcome(self, timeout_s: float = 40.0) -> tuple[str, Any, float]:
        assert self.pipe.poll(timeout_s), "a rank hangs"
        kind, value, seconds = self.pipe.recv()
        return kind, value, seconds

    def result(self) -> Any:
        kind, value, _ = self.outcome()
        assert kind == "ok", value
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.send(method, *args)
        return self.result()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


class World:
    def __init__(self) -> None:
        self.stores = [Store()]
        self.remotes: list[Remote] = []
        self.ranks = [self.remote() for _ in range(WORLD)]
        for rank, remote in enumerate(self.ranks):
            remote.send("start", rank, WORLD, self.stores[0].port, False)
        for remote in self.ranks:
            remote.result()

    def remote(self) -> Remote:
        self.remotes.append(Remote())
        return self.remotes[-1]

    def store(self) -> Store:
        self.stores.append(Store())
        return self.stores[-1]

    def all(self, method: str, *args: Any) -> list[Any]:
        for remote in self.ranks:
            remote.send(method, *args)
        return [remote.result() for remote in self.ranks]

    def steps(self, first: int, last: int) -> list[str]:
        digests = []
        for step in range(first, last):
            found = set(self.all("step", step))
            assert len(found) == 1, f"ranks differ after step {step}"
            digests.append(found.pop())
        return digests

    def close(self) -> None:
        for remote in self.remotes:
            if remote.process.is_alive():
                remote.kill()
        for store in self.stores:
            store.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    made = World()
    try:
        return made.steps(0, STEPS)
    finally:
        made.close()


def expect_errors(remotes: list[Remote]) -> None:
    for remote in remotes:
        kind, value, seconds = remote.outcome()
        assert kind == "error", value
        assert "RuntimeError" in value or "Dist" in value or "Connection" in value, value
        assert seconds < SOON_S, value


def expect_death_is_seen(remotes: list[Remote]) -> None:
    """At least one raises by itself; others may wait for a living peer until an abort."""
    ready = multiprocessing.connection.wait([remote.pipe for remote in remotes], SOON_S)
    assert ready, "nobody saw the death"
    kind, value, _ = next(remote for remote in remotes if remote.pipe in ready).outcome()
    assert kind == "error" and ("by peer" in value or "by rank 2" in value), value


def test_stage_beside_training_then_swap_in_place_is_bit_identical(
    world: World, undisturbed: list[str]
) -> None:
    digests = world.steps(0, 2)
    before = world.all("gloo_sockets")
    store = world.store()
    for remote in world.ranks:
        remote.send("stage_in_thread", 7, store.port)
    for remote in world.ranks:
        remote.result()
    digests += world.steps(2, 4)
    deadline = time.monotonic() + 20
    while not all(world.all("staging_done")):
        assert time.monotonic() < deadline
    world.all("swap")
    world.stores[0].close()  # nothing may depend on the old generation's store any more
    digests += world.steps(4, STEPS)
    assert digests == undisturbed
    assert world.all("gloo_sockets") == before
    used = world.all("use_everything")
    assert [entry["seen"] for entry in used] == [list(range(WORLD))] * WORLD
    assert [entry["pair"] for entry in used] == [2.0, 1.0, 2.0]
    assert {entry["functional"] for entry in used} == {3.0}
    assert {entry["backend"] for entry in used} == {"gloo"}
    assert used[0]["names"] == used[2]["names"] and len(used[0]["names"]) == 2
    assert all("before the first step" in text for text in world.all("refuse"))
    assert all(world.all("destroy"))


@pytest.mark.parametrize("when", [0, 1, 3])
def test_newcomer_takes_the_seat_of_a_killed_rank_bit_identically(
    world: World, undisturbed: list[str], when: int
) -> None:
    digests = world.steps(0, when)
    newcomer = world.remote()
    survivors = world.ranks[:2]
    for remote in survivors:
        remote.send("doomed_step", when)
    world.ranks[2].kill()
    expect_errors(survivors)
    store = world.store()
    newcomer.send("start", 2, WORLD, world.stores[0].port, True)
    for remote in survivors:
        remote.send("go_solo", when > 0)
    for remote in survivors:
        remote.result()
        assert remote.call("gloo_sockets") == 0
    newcomer.result()
    newcomer.call("warm_up", 2 if when else 1)
    newcomer.call("reset_ddp", when > 0)
    newcomer.call("load", survivors[0].call("dump"))
    world.ranks[2] = newcomer
    world.all("stage", 1, store.port)
    world.all("swap")
    digests += world.steps(when, STEPS)
    assert digests == undisturbed
    assert world.all("use_everything")[2]["seen"] == list(range(WORLD))


def test_fault_in_the_first_fence_drops_the_bucket_record(
    world: World, undisturbed: list[str]
) -> None:
    """All backwards of step 0 are over, so every reducer has its record, and no step is
    committed: the step must run again in the first buckets, and then rebuild."""
    for remote in world.ranks[:2]:
        remote.send("doomed_step", 0)
    world.ranks[2].send("step", 0, False)
    assert world.ranks[2].outcome()[0] == "ok"
    newcomer = world.remote()
    world.ranks[2].kill()
    expect_errors(world.ranks[:2])
    newcomer.call("start", 2, WORLD, world.stores[0].port, True)
    newcomer.call("warm_up", 1)
    newcomer.call("reset_ddp", False)
    for remote in world.ranks[:2]:
        remote.call("go_solo", False)
    newcomer.call("load", world.ranks[0].call("dump"))
    world.ranks[2] = newcomer
    world.all("stage", 1, world.store().port)
    world.all("swap")
    assert world.steps(0, STEPS) == undisturbed


def test_abort_from_another_thread_unblocks_a_pending_operation(world: World) -> None:
    assert world.all("all_reduce") == [6.0] * WORLD
    for remote in world.ranks[:2]:
        remote.call("abort_after", 0.3)
        remote.send("all_reduce")  # rank 2 lives and does not take part
    expect_errors(world.ranks[:2])
    assert world.ranks[2].call("abort") < 0.5
    world.all("go_solo", False)
    assert world.all("all_reduce") == [1.0, 2.0, 3.0]  # solo: everybody's own value
    # and the same processes can be connected again
    world.all("stage", 1, world.store().port)
    world.all("swap")
    assert world.all("all_reduce") == [6.0] * WORLD


def test_fence_hears_all_and_raises_quickly_when_a_peer_dies(world: World) -> None:
    expected = ((0, 1 << 40, -3, 0, 0), (WORLD - 1, 1 << 40, -3, 0, 0))
    assert [tuple(map(tuple, heard)) for heard in world.all("fence")] == [expected] * WORLD
    assert max(world.all("time_fences", 100)) < 0.05
    for remote in world.ranks[:2]:
        remote.call("abort_after", 0.4)
        remote.send("fence")
    time.sleep(0.1)
    world.ranks[2].kill()
    expect_errors(world.ranks[:2])


@pytest.mark.parametrize("waiting_in", ["fence", "all_reduce"])
def test_forked_children_do_not_keep_a_dead_rank_connected(world: World, waiting_in: str) -> None:
    assert world.ranks[2].call("gloo_sockets") > 0
    child, sockets = world.ranks[2].call("fork_and_linger")
    try:
        assert sockets == 0
        assert world.all("all_reduce") == [6.0] * WORLD  # the parent's own are untouched
        for remote in world.ranks[:2]:
            remote.send(waiting_in)
        world.ranks[2].kill()
        expect_death_is_seen(world.ranks[:2])
    finally:
        os.kill(child, signal.SIGKILL)


def test_stage_is_abandoned_by_abort_and_by_the_end_of_its_store(world: World) -> None:
    store = world.store()
    for remote in world.ranks[:2]:  # rank 2 never comes
        remote.call("abort_after", 0.3)
        remote.send("stage", 1, store.port)
    expect_errors(world.ranks[:2])
    for remote in world.ranks[:2]:
        remote.send("stage", 2, store.port)
    time.sleep(0.3)
    store.close()
    expect_errors(world.ranks[:2])
    # abort() above broke the groups in use; what was staged before an abort is never installed
    world.all("abort")
    world.all("go_solo", False)
    world.all("stage", 3, world.store().port)
    world.all("abort")
    assert all("aborted" in text for text in world.all("swap_refused"))
    world.all("stage", 4, world.store().port)
    world.all("swap")
    assert world.all("all_reduce") == [6.0] * WORLD


def test_go_solo_names_the_group_whose_backend_is_kept_elsewhere(world: World) -> None:
    world.ranks[0].call("keep_backend")
    world.all("abort")
    world.ranks[0].send("go_solo", False)
    kind, value, _ = world.ranks[0].outcome()
    assert kind == "error" and "PermanentError" in value and "still in use" in value
