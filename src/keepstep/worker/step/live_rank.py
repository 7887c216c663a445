"""One rank that runs: its facts, and the parts that recovery, transactions and newcomers share.

It is used by the user's main thread. The daemon thread of the channel only sets flags, shuts
sockets down and starts the builder thread of `Stager`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from keepstep.errors import UsageError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.device import cuda
from keepstep.worker.groups import groups, nccl, reducers
from keepstep.worker.groups.stager import Stager
from keepstep.worker.line.process import OwnProcess
from keepstep.worker.script.batches import Loop
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.rank_streams import RankStreams
from keepstep.worker.script.roots import Roots, script_roots
from keepstep.worker.script.unasked import OF_OPTIMIZERS, PREFIX, Unasked
from keepstep.worker.state import buckets
from keepstep.worker.state.flags import Flags
from keepstep.worker.state.gradients import Gradients
from keepstep.worker.state.objects import Registered, changes_alike
from keepstep.worker.state.parameters import Parameters, content
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import FLAGS, StateSet
from keepstep.worker.state.witness import Agreement, Replicated
from keepstep.worker.step.boundary import Boundary
from keepstep.worker.step.failures import Injector
from keepstep.worker.step.known import Known
from keepstep.worker.step.publishing import Publisher
from keepstep.worker.step.side_state import Parts, SideState
from keepstep.worker.vault.redundancy import Redundancy

if TYPE_CHECKING:
    from keepstep.worker.checkpoint.periodic import Periodic


class LiveRank(RankFacts):
    """One attribute for each part of a rank that acts, and no logic of theirs: hence so many."""

    def __init__(
        self,
        process: OwnProcess,
        rank: int,
        world: int,
        models: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> None:
        super().__init__(process, rank, world, models, optimizers)
        cuda.settle_in(self.parameters)
        self.tracker = Tracker()
        self.loops: list[Loop] = []
        self.functions: dict[str, Any] = {}  # steps and sections, by site
        self.streams = RankStreams(self.roots)
        self.known = Known(self)
        self.variables = self.known.variables
        self.gradients = Gradients(self.parameters)
        self.flags = Flags(models, self.parameters, lambda: buckets.modules(self.parameters))
        self.redundancy = Redundancy(self)
        self.publisher = Publisher(self, self.redundancy)
        parts = Parts(self.tracker, self.streams, self.variables, self.gradients)
        self.side = SideState(self, parts, self.publisher)
        self.changes = Parameters(self, self.redundancy)
        self.unasked = Unasked(
            self.roots,
            self.known.knows,
            content,
            self._register_unasked,
            self._unregister_unasked,
            optimizers,
            lambda: self.tick,
        )
        self.side.left_out = self.unasked.left_out
        self.agreement = Agreement()
        self.replicated = Replicated(self, self.make_own)
        self.side.first_changes = self.replicated.first_changes
        changing = lambda: self.replicated.changing | self.replicated.first  # noqa: E731
        self.boundary = Boundary(self, changing, OF_OPTIMIZERS)
        self.stager = Stager(self.channel, rank, world)
        self.injector = Injector(self.channel.armed, self.channel.send)
        self.unfinished = 0  # steps that others have behind them, and whose rest is made here
        self.behind_elsewhere: dict[str, dict[str, int]] = {}  # a newcomer's source's
        self.natural = b""  # digest of what only this rank has, as the script built it
        self.resumed = -1  # generation whose first commit must be announced
        self.abort_ns = 0
        self.last_commit_ns = 0
        self.step_times_ns: deque[int] = deque(maxlen=65)
        self.state = self._new_state()
        self.periodic: Periodic | None = None
        if self.welcome.checkpoints:
            from keepstep.worker.checkpoint.periodic import Periodic  # takes a while to be imported

            self.periodic = Periodic(self, self.welcome.checkpoints)
            self.channel.on_seal = self.periodic.seal
        self.channel.on_abort = self._on_abort
        self.channel.on_stage = self.stager.begin
        nccl.watch(self._network_failed)

    # ------------------------------------------------------------------ state

    def _new_state(self) -> StateSet:
        shared = {n: o for n, o in self.objects.items() if not o.per_rank}
        shared[FLAGS] = Registered(FLAGS, self._save_flags, self._load_flags)
        shared["keepstep/ddp"] = Registered(
            "keepstep/ddp",
            lambda: buckets.layouts(self.parameters),
            lambda layouts: buckets.set_layouts(self.parameters, layouts),
        )
        shared["keepstep/results"] = Registered(
            "keepstep/results", self._save_results, self._load_results
        )
        shared["keepstep/updates"] = Registered(
            "keepstep/updates", lambda: self.redundancy.updated, self._load_updates
        )
        state = StateSet(
            self.models,
            self.optimizers,
            shared,
            self.replicas,
            reducers.ddp_modules,
            lambda: bool(self.gradients.outliving) or self.gradients.carrying,
        )
        state.expect = self._expect
        state.comes = lambda n: n.startswith(PREFIX) and not n.startswith(OF_OPTIMIZERS)
        state.apart = frozenset(self.objects.keys() - shared.keys())
        return state

    def _expect(self, names: set[str]) -> None:
        """A newcomer's import is under way: objects are added to the state it goes to."""
        state = self.state
        self.unasked.expect(names)
        found = {name: self.objects[name] for name in self.unasked.names}
        shared = {name: item for name, item in found.items() if not item.per_rank}
        state.objects = {**state.objects, **shared}
        self.state = state

    def register(self, item: Registered) -> None:
        if item.name in self.objects or item.name.startswith("keepstep/"):
            raise UsageError(
                f"{item.name!r} is registered already", hint="give each object a name of its own"
            )
        self.objects[item.name] = item
        self.state = self._new_state()

    def _register_unasked(self, name: str, save: Any, load: Any, thing: Any) -> None:
        own = name.startswith(OF_OPTIMIZERS) and not isinstance(save(), bool)
        if own and self.redundancy.needed:  # it makes updates again, and they would change it
            raise UsageError(
                f"{name.removeprefix('script/')}, an attribute of the optimizer, changes with its "
                "updates, and no other rank has the shards that it belongs to: after a loss it "
                "could not be made again",
                hint="keep it in optimizer.state[parameter]",
            )
        scaler = thing if hasattr(thing, "_per_optimizer_states") else None
        item = Registered(name, save, load, scaler=scaler)
        item.alike = name.startswith(OF_OPTIMIZERS) or changes_alike(thing)
        item.late = self.unasked.kept.is_late(thing)
        before = self.objects.get(name)  # another object, in the same place
        if before is not None:
            item.per_rank, item.own = before.per_rank, before.own
        self.objects[name] = item
        self.state = self._new_state()
        if before is not None:
            return
        self.replicated.unmet = True
        self.warn(
            f"{name.removeprefix('script/')} is used by the script and was not given to attach: it "
            "is carried as if it were registered"
        )

    def _unregister_unasked(self, name: str) -> None:
        """The script has let go of it."""
        del self.objects[name]
        self.replicated.leave(name)
        self.replicated.unmet = True  # other ranks may keep it
        self.state = self._new_state()

    def make_own(self, name: str, why: str) -> None:
        """A registered object is not the same on all ranks, although nobody said so."""
        item = self.objects[name]
        if item.late and item.large:
            self._leave_out(name, why)
            return
        item.per_rank = True
        self.state = self._new_state()
        self.warn(
            f"registered object {name.removeprefix('script/')!r} {why}: it is carried as each "
            "rank's own, as with per_rank=True"
        )

    def _leave_out(self, name: str, why: str) -> None:
        """The best model so far, on one rank: it would be published with every step."""
        self.unasked.leave_out(name)
        self._unregister_unasked(name)
        self.warn(
            f"{name.removeprefix('script/')}, which the script has made as it trained, {why} and "
            "is large: it is not carried. As long as the script keeps it, a replacement of this "
            "rank is stopped, and so is who resumes from a checkpoint (hint: make it alike on all "
            "ranks, keep its state_dict in a file, or register it with per_rank=True)"
        )

    def refuse_left_out(self, names: Iterable[str]) -> None:
        """On a newcomer: its rank had these."""
        for name in sorted(names):
            raise UsageError(
                f"rank {self.rank} had {name.removeprefix('script/')!r}, a large model that the "
                "script has made while it trained and that other ranks do not have or have "
                "otherwise: it was not carried",
                hint="make it alike on all ranks, keep its state_dict in a file, or register it "
                "with per_rank=True",
            )

    def expect_own(self, names: Iterable[str]) -> None:
        """On a newcomer: its rank had these objects as its own."""
        names = set(names)
        self.unasked.expect(names)
        if missing := sorted(names - self.objects.keys()):
            raise UsageError(
                f"rank {self.rank} had {missing[0].removeprefix('script/')!r} as an object of its "
                "own, and its newcomer has none",
                hint="register the same objects on every start of the script",
            )
        for name in names:
            self.objects[name].per_rank = True
        self.state = self._new_state()

    def roots(self) -> Roots:
        """Where the script's own state is looked for."""
        named: dict[str, Any] = {f"step {site}": x for site, x in self.functions.items()}
        named |= {f"model {name}": model for name, model in self.models.items()}
        asked = {n: item for n, item in self.objects.items() if not n.startswith(PREFIX)}
        named |= {f"registered {name}": item.save for name, item in asked.items()}
        running = [loop for loop in self.loops if not loop.pos.closed]
        return script_roots(named, {f"loader{i}": loop.loader for i, loop in enumerate(running)})

    def after_update(self) -> None:
        for item in self.objects.values():
            if item.after_update is not None:
                item.after_update()

    def _save_results(self) -> dict[str, Any]:
        """The newest result of every step and section, for a newcomer that walks past them."""
        return self.tracker.results

    def _load_results(self, results: dict[str, Any]) -> None:
        self.tracker.results = results

    def _save_flags(self) -> dict[str, Any]:
        return {
            "flags": self.flags.save(),
            "extra": self.cells.extra(),
            "late": self.cells.export_late(),
            "changing": self.changes.noted(),
            "outliving": sorted(self.gradients.outliving),
            "carrying": self.gradients.carrying,
            "comparable": self.agreement.comparable,
            "first": sorted(n for n in self.replicated.first if not self.objects[n].alike),
            "unchanged": sorted(
                n for n in self.replicated.unchanged() if not self.objects[n].alike
            ),
            "objects": sorted(self.replicated.changing),
            "per_rank": sorted(name for name, item in self.objects.items() if item.per_rank),
            "behind": self.side.behind.export(),
            "looked": self.unasked.export(),
            "boundary": self.boundary.export(),
        }

    def _load_flags(self, saved: dict[str, Any]) -> None:
        self.flags.load(saved["flags"])
        own = self.state.own or frozenset()
        self.cells.import_late(saved["late"])
        self.cells.put_extra({n: v for n, v in saved["extra"].items() if n not in own})
        self.changes.noted(saved["changing"])
        self.gradients.outliving |= set(saved["outliving"])
        self.gradients.carrying = saved["carrying"]
        self.agreement.comparable = saved["comparable"]
        self.replicated.changing = set(saved.get("objects", ()))
        self.state.unseen = set(saved.get("first", ()))
        self.replicated.first = self.state.unseen & self.objects.keys()
        self.state.unchanged = set(saved.get("unchanged", ()))
        for name in saved["per_rank"]:  # some may be on other ranks only
            if name in self.objects:
                self.objects[name].per_rank = True
        self.behind_elsewhere = saved.get("behind", {})
        self.unasked.load(saved.get("looked", {}))
        self.boundary.load(saved.get("boundary", {}))

    def _load_updates(self, updated: list[str]) -> None:
        self.redundancy.updated = updated

    # ------------------------------------------------------------------ faults

    def _on_abort(self, command: commands.Abort) -> None:
        """Again every second, until the main thread has come back from whatever it was doing."""
        groups.abort()
        self.publisher.interrupt()
        self.stager.discard(below=self.channel.inbox.abort_generation)

    def _network_failed(self, reason: str) -> None:
        """In a thread of its own: the main one may wait for the device, and never hear of it."""
        if not self.aborted():
            self.channel.send(
                m.Failure(
                    generation=self.generation,
                    error_kind="comm",
                    error=f"Connection lost: {reason}",
                    version=self.version,
                )
            )

    def median_step_ns(self) -> int:
        return int(statistics.median(self.step_times_ns)) if self.step_times_ns else 0

    def committed(self, step: bool) -> None:
        now = time.monotonic_ns()
        self.tick += 1
        self.version += step
        self.side.committed()
        page = self.page
        page.set("tick", self.tick)
        page.set("version", self.version)
        page.set("commit_ns", now)
        page.new_tick()
        if self.resumed == self.generation:
            self._announce(now)
        elif step and self.last_commit_ns:
            self.step_times_ns.append(now - self.last_commit_ns)
        self.last_commit_ns = now

    def _announce(self, now: int) -> None:
        self.resumed = -1
        self.channel.send(
            m.Resumed(
                generation=self.generation,
                tick=self.tick,
                version=self.version,
                last_commit_ns=self.last_commit_ns,
                first_commit_ns=now,
                median_step_ns=self.median_step_ns(),
                abort_ns=self.abort_ns,
            )
        )
        self.abort_ns = 0  # a planned move that follows has none
