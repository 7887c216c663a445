"""One rank of the worlds in test_groups.py: a process that obeys calls sent through a pipe."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

STEPS = 6


class Rank:
    def start(self, rank: int, world: int, port: int, solo: bool) -> None:
        import torch
        import torch.distributed as dist

        from keepstep.worker.groups import gloo, groups, reducers

        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        torch.set_num_threads(1)
        self.rank, self.world, self.groups, self.dist, self.torch = rank, world, groups, dist, torch
        self.gloo, self.reducers = gloo, reducers
        groups.install(solo=solo)
        dist.init_process_group("gloo")
        self.pair = dist.new_group([0, world - 1])
        self.build()
        if not solo:
            groups.build_first_fence("127.0.0.1", port, rank, world, "127.0.0.1", 10.0)
        self.staged: Any = None

    def build(self) -> None:
        torch = self.torch
        torch.manual_seed(1)
        layers: list[Any] = []
        for _ in range(5):
            layers += [torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(48, 7))
        # Small buckets, so that the rebuild after the first backward really moves parameters.
        self.ddp = torch.nn.parallel.DistributedDataParallel(self.net, bucket_cap_mb=0.02)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def step(self, step: int, fence: bool = True) -> str:
        torch = self.torch
        torch.manual_seed(1000 * step + self.rank)
        self.optimizer.zero_grad()
        self.ddp(torch.randn(6, 48)).square().mean().backward()
        if fence:
            low, high = self.groups.fence((step, -self.rank, self.rank, 7, 8))
            assert low == (step, 1 - self.world, 0, 7, 8)
            assert high == (step, 0, self.world - 1, 7, 8)
        self.optimizer.step()
        return self.digest()

    def doomed_step(self, step: int) -> None:
        """A step whose peer dies; the abort that the orchestrator would order comes 0.2 s later.

        Without it a rank that waits for another survivor would wait on."""
        abort = threading.Timer(0.2, self.groups.abort)
        abort.start()
        try:
            self.step(step)
        finally:
            abort.join()

    def warm_up(self, steps: int) -> None:
        for step in range(steps):
            self.step(step, fence=False)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.state()[0]:
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def state(self) -> tuple[list[Any], int]:
        tensors = [p.detach() for p in self.net.parameters()]
        for p in self.net.parameters():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if p in self.optimizer.state:
                    tensors.append(self.optimizer.state[p][key])
        return tensors, len(self.optimizer.state)

    def dump(self) -> tuple[list[Any], int]:
        tensors, entries = self.state()
        return [tensor.clone().numpy() for tensor in tensors], entries

    def load(self, dumped: tuple[list[Any], int]) -> None:
        if dumped[1] == 0:
            self.optimizer.state.clear()
        for tensor, source in zip(self.state()[0], dumped[0], strict=True):
            tensor.copy_(self.torch.from_numpy(source))

    # -- groups

    def go_solo(self, rebuilt: bool) -> float:
        begin = time.monotonic()
        self.groups.go_solo()
        self.reducers.reset(rebuilt)
        assert self.groups.solo()
        return time.monotonic() - begin

    def reset_ddp(self, steps: int) -> None:
        self.reducers.reset(steps)

    def stage(self, generation: int, port: int, timeout_s: float = 20.0) -> None:
        self.staged = self.groups.stage(
            generation, "127.0.0.1", port, self.rank, self.world, "127.0.0.1", timeout_s
        )

    def stage_in_thread(self, generation: int, port: int) -> None:
        self.thread = threading.Thread(target=self.stage, args=(generation, port), daemon=True)
        self.thread.start()

    def staging_done(self) -> bool:
        return not self.thread.is_alive()

    def swap(self) -> None:
        self.groups.swap(self.staged)
        assert not self.groups.solo()

    def swap_refused(self) -> str:
        try:
            self.groups.swap(self.staged)
        except RuntimeError as error:
            return str(error)
        return ""

    def abort(self) -> float:
        begin = time.monotonic()
        self.groups.abort()
        return time.monotonic() - begin

    def abort_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.groups.abort).start()

    def all_reduce(self) -> float:
        tensor = self.torch.full((5,), float(self.rank + 1))
        self.dist.all_reduce(tensor)
        return float(tensor[0])

    def use_everything(self) -> dict[str, Any]:
        """What a script may do with its groups after a swap."""
        from torch.distributed._functional_collectives import all_reduce

        store = self.dist.distributed_c10d._get_default_store()
        store.set(f"from-{self.rank}", "here")
        store.wait([f"from-{rank}" for rank in range(self.world)])
        seen: list[Any] = [None] * self.world
        self.dist.all_gather_object(seen, {"rank": self.rank})
        ones = self.torch.ones(2)
        if self.rank in (0, self.world - 1):
            self.dist.all_reduce(ones, group=self.pair)
        functional = all_reduce(
            self.torch.ones(1), "sum", self.dist.distributed_c10d._get_default_group()
        )
        self.dist.barrier()
        return {
            "seen": [entry["rank"] for entry in seen],
            "pair": float(ones[0]),
            "functional": float(functional[0]),
            "names": self.groups.names(),
            "backend": self.dist.get_backend(),
        }

    def refuse(self) -> str:
        from keepstep.errors import UsageError

        self.groups.refuse_new_groups("groups cannot be created now")
        try:
            self.dist.new_group([0])
        except UsageError as error:
            return str(error)
        return ""

    def fence(self) -> Any:
        return self.groups.fence((self.rank, 1 << 40, -3, 0, 0))

    def time_fences(self, count: int) -> float:
        begin = time.monotonic()
        for value in range(count):
            self.groups.fence((value, 1, 2, 3, 4))
        return (time.monotonic() - begin) / count

    def gloo_sockets(self) -> int:
        meshes = list(self.gloo._meshes)
        count = 0
        for _, sock in self.gloo.tcp_sockets():
            try:
                local = self.gloo.address(sock.getsockname())
                peer = self.gloo.address(sock.getpeername())
            except OSError:
                continue
            count += any(local in mesh.incoming or peer in mesh.outgoing for mesh in meshes)
        return count

    def fork_and_linger(self) -> tuple[int, int]:
        """Like a DataLoader worker; returns its pid and how many gloo sockets it still has."""
        read, write = os.pipe()
        meshes = set(self.gloo._meshes)
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            assert not self.gloo._meshes
            self.gloo._meshes.update(meshes)
            os.write(write, str(self.gloo_sockets()).encode())
            time.sleep(30)
            os._exit(0)
        count = int(os.read(read, 10))
        return pid, count

    def keep_backend(self) -> None:
        self.kept = self.dist.distributed_c10d._get_default_group()._get_backend(
            self.torch.device("cpu")
        )
        self.groups.RELEASE_TIMEOUT_S = 0.3

    def destroy(self) -> bool:
        self.dist.destroy_process_group()
        return bool(self.groups.destroyed())


def main(pipe: Connection) -> None:
    rank = Rank()
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        begin = time.monotonic()
        try:
            result: Any = getattr(rank, method)(*args)
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}", time.monotonic() - begin))
        else:
            pipe.send(("ok", result, time.monotonic() - begin))
