"""The worker API of a rank under `keepstep run`: what `keepstep.attach` returns there."""

from __future__ import annotations

import functools
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from keepstep.errors import UsageError
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK
from keepstep.worker.api.plain import Batch, F, PlainSession
from keepstep.worker.device import alike, cuda
from keepstep.worker.groups import groups
from keepstep.worker.line.process import OwnProcess
from keepstep.worker.script import collectives, loader_workers, results, roots, values
from keepstep.worker.script.batches import Batches, Loop
from keepstep.worker.script.collectives import Bare
from keepstep.worker.script.frames import own_code, script_frames
from keepstep.worker.script.hidden import hidden
from keepstep.worker.script.tree import MISSING, Encoded
from keepstep.worker.script.variables import OutsideSteps
from keepstep.worker.state import codec, fsdp, roundtrip
from keepstep.worker.state.objects import registered
from keepstep.worker.state.tensors import memory, on_cpu
from keepstep.worker.step import trace
from keepstep.worker.step.call import BARE
from keepstep.worker.step.live_rank import LiveRank
from keepstep.worker.step.newcomer import Newcomer
from keepstep.worker.step.recovery import Recovery
from keepstep.worker.step.transaction import Transactions

FIRST_FENCE_TIMEOUT_S = 7 * 86_400.0  # who keeps the others waiting is found by the orchestrator


CONTAINER_ITEMS_MAX = 256


def _to_carry(result: Any) -> Any:
    found = results.keep(result)[1]
    return found.read if isinstance(found, results.Coming) else found


class _Call:
    """The user's function with its arguments. A retry must find the containers among them as they
    were (`batch.pop("labels")`); tensors are not copied."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.function = function
        self.code = own_code(function)
        self.arguments = {**{str(i): x for i, x in enumerate(args)}, **kwargs}
        owner = getattr(function, "__self__", None)
        if owner is not None:
            self.arguments["self"] = owner
        self._before: list[tuple[Any, Any]] = []

    def __call__(self) -> Any:
        self._before = []
        self._note(self._args, 0)
        self._note(self._kwargs, 0)
        return self._function(*self._args, **self._kwargs)

    def _note(self, item: Any, depth: int) -> None:
        if isinstance(item, UserDict):
            item = item.data
        if not isinstance(item, dict | list | tuple):
            return
        if depth > 3 or len(item) > CONTAINER_ITEMS_MAX:
            return
        if isinstance(item, dict):
            self._before.append((item, dict(item)))
        elif isinstance(item, list):
            self._before.append((item, list(item)))
        for inner in item.values() if isinstance(item, dict) else item:
            self._note(inner, depth + 1)

    def undo(self) -> None:
        for container, before in self._before:
            if isinstance(container, dict):
                container.clear()
                container.update(before)
            else:
                container[:] = before


class Session(PlainSession):
    protected = True

    def __init__(self, live: LiveRank) -> None:
        super().__init__()
        self._live = live
        self._recovery = Recovery(live)
        self._transactions = Transactions(live, self._recovery)
        self._newcomer: Newcomer | None = None
        if live.process.assigned is not None:
            self._newcomer = Newcomer(live, self._recovery, self._transactions)
        self._announced = False
        self._begun = False
        self._transactions.passes.outside = self._run

    # ------------------------------------------------------------------ user surface

    @property
    def committed_step(self) -> int:
        """Optimizer steps committed so far; on a newcomer, as seen from where its script is."""
        self._arrive()
        live = self._live
        return live.version - live.tracker.steps_to_replay - live.unfinished

    def step(self, function: F) -> F:
        """One optimizer step, with all its micro-batches; retried until it commits."""
        return self._transaction(function, step=True)

    def section(self, function: F) -> F:
        """Collectives outside a step (evaluation, logging); run again if a fault hits them."""
        return self._transaction(function, step=False)

    def _transaction(self, function: F, *, step: bool) -> F:
        if roots.claim_caller() and self._begun:
            raise UsageError(
                f"{getattr(function, '__qualname__', function)} is made a step or section by an "
                "installed package that has not used Keepstep before the first step",
                hint="decorate the functions of a package before the first step",
            )
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", type(function).__name__)
        site = f"{name}:{code.co_firstlineno if code is not None else 0}"
        self._live.functions[site] = function
        self._live.variables.watch(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self._run(site, step, _Call(function, args, kwargs))

        return wrapper  # type: ignore[return-value]

    def epochs(self, count: int) -> Iterator[int]:
        roots.claim_caller()
        self._arrive()
        tracker = self._live.tracker
        level, start = tracker.open_epochs()
        return self._epochs(level, start, count)

    def _epochs(self, level: Any, start: int, count: int) -> Iterator[int]:
        if start < 0:
            return
        tracker = self._live.tracker
        try:
            while start < count:
                epoch = tracker.next_epoch(level, start)
                if epoch is None:
                    return
                yield epoch
                start = epoch + 1
        finally:
            tracker.close_epochs(level)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        roots.claim_caller()
        if self._transactions.call.site:
            return loader_workers.open_iterator(
                loader
            )  # inside a section the whole pass is repeated, from its start
        self._arrive()
        live = self._live
        live.loops = [x for x in live.loops if not x.pos.closed]
        loop = Loop(live.tracker, loader, live.streams, OutsideSteps(live.variables))
        live.loops.append(loop)
        return Batches(loop, live.page.mark)

    def register(
        self,
        name: str,
        target: Any,
        load: Any = None,
        *,
        per_rank: bool = False,
        after_update: Callable[[], Any] | None = None,
    ) -> None:
        """Protect more state: an object with state_dict/load_state_dict, or (save, load).
        `after_update` is called at the end of every step: what it does to the object can be
        repeated in another process that has the parameters (averages of sharded weights)."""
        if self._begun:
            raise UsageError(
                f"register({name!r}) after the first step", hint="register right after attach"
            )
        item = registered(name, target, load, per_rank=per_rank)
        if self._announced:  # what attach was given has been checked
            roundtrip.check(item, self._live.optimizers.values())
        item.after_update = after_update
        self._live.register(item)

    def progress(self) -> None:
        self._live.page.mark()

    def begin(self) -> None:
        announce(self, self._live.process)
        self._announced = True

    # ------------------------------------------------------------------ inside

    def _arrive(self) -> None:
        if self._newcomer is not None and not self._newcomer.joined:
            self._newcomer.arrive()

    def _begin(self) -> None:
        if not self._begun:
            cuda.settle_in(self._live.parameters)  # the model may have been moved since attach
            groups.refuse_new_groups("process group created after the first step")
            self._live.redundancy.refresh_units()
            if self._live.rank == 0 and self._newcomer is None:
                for text in hidden(self._live.roots()):
                    self._live.warn(text)
            self._begun = True

    def _run(self, site: str, step: bool, function: Callable[[], Any]) -> Any:
        transactions = self._transactions
        if transactions.call.warming:
            return function()
        if transactions.call.site:
            if step:
                raise UsageError(
                    f"step {site!r} called inside {transactions.call.site!r}",
                    hint="steps and sections cannot contain steps",
                )
            return function()
        self._begin()
        newcomer = self._newcomer
        if newcomer is not None and newcomer.joined:
            newcomer = None
        if newcomer is not None:
            self._lead(newcomer, site, step, function)
        known = self._replayed(site, step, function)
        if known is not MISSING:
            return known[0]
        if newcomer is not None:
            newcomer.repeats(site, getattr(function, "arguments", None) if step else None)
            newcomer.enter()
        return transactions.run(site, step, function)

    def _lead(self, newcomer: Newcomer, site: str, step: bool, function: Callable[[], Any]) -> None:
        newcomer.arrive()
        replay = self._live.tracker.replay
        if newcomer.had.installed:
            return
        if step:
            newcomer.first_call(site, function)
        elif replay is None or replay.ends_here():
            newcomer.first_call(site, None)
        # else a section that is done already: walk past it first

    def _replayed(self, site: str, step: bool, function: Callable[[], Any]) -> Any:
        """(result,) for a transaction the job has done already, MISSING for one to be run."""
        tracker = self._live.tracker
        walking = tracker.replay is not None
        answer = tracker.begin(site, step)
        if not walking or answer is MISSING:
            return MISSING
        result = answer[0]
        late: dict[str, Any] = {}
        made: tuple[Any] | None = None
        if isinstance(result, Encoded):
            if tracker.replay is None and self._newcomer is not None:
                made = self._newcomer.walked(site, function, result)
                late = self._newcomer.had.late
                if made is not None and not self._newcomer.had.ended:
                    tracker.learned(_to_carry(made[0]), result.variables)
                    return made
            variables = late.get("variables", result.variables)
            if variables is not None:
                self._live.variables.restore(variables, script_frames())
            if tracker.replay is None and self._newcomer is not None:
                self._newcomer.copying.put_rebuilt()
            data = late.get("result", result.data)
            if made is not None or "result" in late or "variables" in late:
                small = data if data is None or len(data) <= results.RESULT_BYTES_MAX else None
                found = _to_carry(made[0]) if made is not None else small
                tracker.learned(found, variables, late.get("mark", ""))
            if made is not None:
                return made
            if data is not None:
                return (codec.loads_inline(data),)
            # It was too large to be published, or is lost with the rank. A replica's may be equal.
            mark = late.get("mark", result.mark)
            result = tracker.results.get(site, MISSING)
            if result is not MISSING and (not mark or results.mark(result) != mark):
                why = "it is lost with the rank, or large and not the same on all ranks"
                return (results.LostResult(site, why),)
        if result is MISSING:
            why = tracker.unkept.get(site, "no rank had it")
            return (results.LostResult(site, why),)
        return (result,)

    def _gate(self, name: str, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Every collective of the front end after attach comes through here."""
        transactions = self._transactions
        self._live.page.mark()
        if transactions.call.site:
            transactions.passes.saw_collective(name, args, kwargs)
            return call()
        bare = Bare(name, call, args, kwargs)
        return bare.give(self._run(f"{name}{BARE}", False, bare))

    def _finish(self) -> None:
        self._recovery.refuse_debt()
        self._settle()
        if trace.active is not None:
            trace.active.end(self._live)
        self._recovery.linger()

    def _settle(self) -> None:
        """The script ends, or takes its process groups down: the last boundary there is."""
        newcomer = self._newcomer
        if newcomer is not None and newcomer.had.installed and not newcomer.joined:
            newcomer.end()
        self._live.unasked.look_at_models(ended=True)
        self._transactions.carry_out_agreed()


def attach_rank(process: OwnProcess, models: dict[str, Any], optimizers: dict[str, Any]) -> Session:
    """A rank or a newcomer of a Keepstep job."""
    environment, settings = process.environment, process.channel.welcome.settings
    world, rank = environment.world, environment.rank
    if world > 1 and not dist.is_initialized():
        raise UsageError(
            f"attach before init_process_group on rank {rank} of {world}",
            hint="call torch.distributed.init_process_group first",
        )
    live = LiveRank(process, rank, world, models, optimizers)
    live.generation = environment.generation
    values.slot_now = values.slot(environment.local_rank)
    trace.start(settings)
    return Session(live)


def _plain_equal(live: LiveRank) -> bool:
    """Whether all ranks have the same plain tensors, as far as nobody says how they are spread."""
    if live.world == 1:
        return True
    digest = xxhash.xxh3_128()
    for name, tensor in live.state.undescribed().items():
        digest.update(name.encode())
        digest.update(memory(on_cpu(tensor)))
    value = digest.intdigest()
    words = [(value >> shift) & 0x3FFFFFF for shift in (0, 26, 52, 78, 104)]
    low, high = groups.fence(words)
    live.replicas.plain_equal = low == high
    return low == high


def notices(live: LiveRank) -> list[str]:
    """What the guarantee rests on besides what Keepstep can see for itself."""
    replicas, inventory = live.replicas, live.redundancy.inventory
    found = []
    plain = [
        name
        for name, tensor in live.state.undescribed().items()
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
    ]
    if plain and live.world > 1 and replicas.plain_equal:
        found.append(
            f"{len(plain)} parameters (first: {plain[0]}) are plain tensors that neither "
            "DistributedDataParallel nor a device mesh describes; they are equal on all ranks now "
            "and are taken to stay so: where ranks change them differently, a moved rank would get "
            "another rank's (hint: wrap the model, or distribute them over the mesh)"
        )
    if inventory.unprotected:
        found.append(
            f"{inventory.unprotected} tensors (first: {inventory.first_unprotected}) are on one "
            "rank only, the layout has no dimension of replicas for them, and redundancy is off: "
            "the loss of that rank falls back (hint: --redundancy auto)"
        )
    found += alike.may_choose(live.models.values())
    for text in found:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)
    return found


def _facts(live: LiveRank) -> dict[str, str]:
    return alike.facts(cuda=any(p.device.type == "cuda" for p in live.parameters))


def announce(session: Session, process: OwnProcess) -> None:
    live = session._live
    fsdp.refuse_old(live.models.values())
    known = {t.untyped_storage().data_ptr() for t in live.state.export().tensors.values()}
    newcomer = process.assigned is not None
    if not newcomer:
        live.page.where("attaching")
        if live.world > 1:
            groups.build_first_fence(
                process.environment.master.host,
                process.environment.master.port,
                live.rank,
                live.world,
                live.welcome.interface,
                FIRST_FENCE_TIMEOUT_S,
            )
        about: dict[str, Any] = {"plain_equal": _plain_equal(live), "alike": _facts(live)}
        live.redundancy.find_units()
        live.natural = about["natural"] = live.redundancy.inventory.digest()
        record = collectives.front_door.encoded(known, about)
        live.channel.wait_until(lambda: live.channel.inbox.buddy_known, 10.0)
        live.redundancy.connect()
        live.publisher.publish(INIT_TICK, record)
    elif collectives.front_door.replay is not None:
        assert process.assigned is not None
        resumed = bool(process.assigned.checkpoint)
        alike.require(process.about.get("alike") or {}, live.rank, resumed=resumed)
        live.replicas.plain_equal = process.about["plain_equal"]
        live.redundancy.find_units()
        live.natural = live.redundancy.inventory.digest()
        live.page.publish(INIT_TICK, process.init_record)
    collectives.front_door.gate = session._gate
    groups.before_destroy(session._settle)
    exported = live.state.export()
    live.page.where("outside")
    live.channel.send(
        m.Attached(
            generation=live.generation,
            groups=groups.names(),
            members=groups.members(),
            parameters=sum(p.numel() for p in live.parameters),
            bytes_state=sum(t.nbytes for t in exported.tensors.values()),
            redundant=not live.redundancy.inventory.unprotected,
            kept_bytes=live.redundancy.inventory.kept_bytes,
            warnings=notices(live) if live.rank == 0 and not newcomer else [],
        )
    )
