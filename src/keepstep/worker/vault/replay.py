"""The way back: what a vault has of a rank is found and brought to the version that is needed.

Bases are put in place when their version is reached; in between the user's own optimizer applies
the gradients of each step, with the hyperparameters of that step. See redundancy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keepstep.errors import PermanentError
from keepstep.model.messages import Address
from keepstep.worker.line import blobs
from keepstep.worker.state import codec, shards
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.replicated import set_hyper
from keepstep.worker.vault import lane, rebuild, vault
from keepstep.worker.vault.early import multiply
from keepstep.worker.vault.inventory import Inventory
from keepstep.worker.vault.units import Unit, fill, rebuilt


class ShardsMissing(PermanentError):
    """State of which there was one copy, and that was lost."""


def fetch(
    token: str, rank: int, holders: list[Address], version: int, *, parity: bool
) -> tuple[vault.FetchedShards, str]:
    """What was kept for a rank, and where, in words. Raises ShardsMissing, or
    blobs.HoldersUnreachable when somebody who may have it did not answer."""
    silent: list[str] = []
    why = "nobody holds a vault"
    for holder in holders:
        try:
            found = vault.fetch(holder, token, rank, version)
            return found, f"the vault of {'its own agent' if parity else 'the buddy'}"
        except OSError as error:
            silent.append(f"{holder.host}:{holder.port}: {error}")
        except lane.VaultLacks as error:
            why = str(error)
    if parity:
        try:
            return rebuild.rebuild(holders, token, rank, version)
        except rebuild.NotRebuilt as error:
            why = f"{why}; {error}"
        except OSError as error:
            silent.append(str(error))
    if silent:
        raise blobs.HoldersUnreachable(f"the vault of rank {rank}: {'; '.join(silent)}")
    raise ShardsMissing(f"state of rank {rank} at step {version} is in no vault: {why}")


def restore(
    me: RankFacts,
    inventory: Inventory,
    missing: frozenset[str],
    version: int,
    updated: list[str],
    fetch: Callable[[], tuple[vault.FetchedShards, str]],
) -> str:
    """Bring everything to `version`; how, in words. Raises ShardsMissing, and what `fetch`
    raises."""
    units = inventory.units
    known = {unit.name for unit in units} | {name for unit in units for name in unit.buffers}
    if not missing <= known:
        names = ", ".join(sorted(missing - known)[:3])
        raise ShardsMissing(f"no rank has {names}, and redundancy is {inventory.mode}")
    fetched, where = fetch()
    if not fetched.layout.startswith(inventory.content):
        raise ShardsMissing("the vault holds another layout than this process has built")
    steps = version - UpdateReplay(me, units).run(fetched, version, updated)
    return (
        f"{fetched.bytes} bytes of {len(units)} units from {where} "
        f"(up to {steps} step{'s' if steps != 1 else ''} replayed)"
    )


class UpdateReplay:
    def __init__(self, me: RankFacts, units: list[Unit]) -> None:
        self._me = me
        self._units = units

    def run(self, fetched: vault.FetchedShards, version: int, updated: list[str]) -> int:
        """Gives the version of the oldest base."""
        me = self._me
        optimizers = me.optimizers
        final = {name: [dict(g) for g in o.param_groups] for name, o in optimizers.items()}
        had = {id(p): p.grad is not None for p in me.parameters}
        notes = {step: codec.loads_inline(data) for step, data in fetched.notes.items()}
        updates = {step: codec.loads_inline(note["update"]) for step, note in notes.items()}
        kept = fetched.whole()
        oldest = min(one.version for one in kept.values())
        for step in range(oldest, version + 1):
            for unit in self._units:
                if kept[unit.index].version == step:
                    self._install(unit, kept[unit.index].tensors)
            if step == version:
                break
            self._set_gradients(kept, step, notes[step])
            following = updates.get(step + 1)
            made = following["before"] if following is not None and step + 1 < version else updated
            self._update(updates[step], made)
        for name, groups in final.items():
            hyper = [{k: v for k, v in g.items() if k != "params"} for g in groups]
            set_hyper(optimizers[name], hyper)
        for parameter in me.parameters:
            parameter.grad = torch.zeros_like(parameter) if had[id(parameter)] else None
        return oldest

    def _set_gradients(self, kept: dict[int, vault.Whole], step: int, note: dict[str, Any]) -> None:
        for parameter in self._me.parameters:
            parameter.grad = None
        found: dict[int, torch.Tensor] = {}
        for unit in self._units:
            one = kept[unit.index]
            data: Any = one.log.get(step) if one.version <= step else None
            if data is not None and unit.index in note["instead"]:
                data = note["instead"][unit.index]
            if data is not None and unit.parameter is not None:
                part = torch.empty_like(shards.local(unit.parameter).detach())
                fill(part, data)
                unit.parameter.grad = shards.wrap(part, shards.spec(unit.parameter))
                found[unit.index] = part
        multiply(found, note["clipped"])

    def _update(self, note: dict[str, Any], made: list[str]) -> None:
        optimizers = self._me.optimizers
        for name in made if note["updating"] else ():
            optimizer: Any = optimizers[name]
            set_hyper(optimizer, note["hyper"][name])
            for key, value in note["scaling"][name].items():
                setattr(optimizer, key, value)
            self._me.rebuilding = True
            try:
                optimizer.step()
            finally:
                self._me.rebuilding = False
            for key in note["scaling"][name]:
                delattr(optimizer, key)
        for unit in self._units:
            if unit.object:
                update = self._me.objects[unit.object].after_update
                assert update is not None
                update()

    @torch.no_grad()
    def _install(self, unit: Unit, parts: list[list[memoryview]]) -> None:
        data, rest = b"".join(parts[0]), parts[1:]
        if unit.buffers:
            named = self._me.state.named_tensors()
            for name, part in zip(unit.buffers, rest[: len(unit.buffers)], strict=True):
                fill(shards.local(named[name]), part)
            return
        own = 1 if unit.parameter is not None else 0
        count = (len(rest) - own) // 2
        tensors = [
            rebuilt(part, codec.loads_inline(b"".join(described)))
            for part, described in zip(rest[own : own + count], rest[own + count :], strict=True)
        ]
        tree = codec.loads(data, tensors)
        if unit.parameter is None:
            self._me.objects[unit.object].load(tree)
            return
        fill(shards.local(unit.parameter).detach(), rest[0])
        if unit.optimizer and tree is not None:
            self._me.optimizers[unit.optimizer].state[unit.parameter] = tree
        elif unit.optimizer:
            self._me.optimizers[unit.optimizer].state.pop(unit.parameter, None)
