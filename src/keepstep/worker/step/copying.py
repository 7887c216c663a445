"""A newcomer's copy: state from holders, side state from the rank's agent or its buddy.

It may be made more than once: a source may be lost on the way, a planned move copies once more when
the job holds, and the walk may have changed what was copied (newcomer.py).
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from keepstep.errors import UsageError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.page import CHECKPOINT_TICK, NOTE_TICK, late_tick
from keepstep.worker.checkpoint import checkpoint
from keepstep.worker.groups import reducers
from keepstep.worker.line import blobs
from keepstep.worker.script.unasked import PREFIX
from keepstep.worker.state import codec, transfer
from keepstep.worker.state.objects import Snapshots
from keepstep.worker.step.live_rank import LiveRank
from keepstep.worker.vault import vault
from keepstep.worker.vault.replay import ShardsMissing


@dataclass
class Inherited:
    """What a newcomer has from the rank that it replaces."""

    position: dict[str, Any] | None = None  # side state that it began with; None: not asked yet
    walking: dict[str, Any] | None = None  # side state for the end of the walk
    note: dict[str, Any] | None = None  # what it noted when it began the next transaction
    late: dict[str, Any] = field(default_factory=dict)  # what it added when the last one had ended
    ended: bool = False  # it had
    locals: dict[str, Any] = field(default_factory=dict)  # of the function, if it had not
    site: str = ""  # where the newcomer stands
    installed: bool = False  # state is here; the walk may go on
    objects: Snapshots = field(default_factory=list)  # as the script built them
    warmed: str = ""  # a model that nobody attached, as a warm-up has left it


class Copying:
    def __init__(self, live: LiveRank, assign: commands.Assign, had: Inherited) -> None:
        self.live = live
        self.assign = assign
        self.had = had
        self.fingerprint: dict[str, bytes] = {}
        self._command: commands.Copy | None = None  # of the last copy
        self._lost_in, self._lost_sources = -1, set[int]()
        self._missing = frozenset[str]()  # of the last copy: no source had these
        # Registered objects that were rebuilt from the vault, with what follows from the update.
        self._rebuilt: dict[str, tuple[bytes, list[torch.Tensor]]] = {}

    def fetch(self, tick: int, holders: list[m.Address]) -> dict[str, Any] | None:
        live = self.live
        if tick == 0:
            return None
        if tick == CHECKPOINT_TICK:
            data = checkpoint.read_side(self.assign.checkpoint, live.rank, "side")
        else:
            blob = blobs.fetch(holders, live.welcome.token, live.rank, tick)
            data = blob.data if blob is not None else None
        side: dict[str, Any] | None = codec.loads_inline(data) if data is not None else None
        return side

    def take(self, copy: commands.Copy) -> m.Copied | m.CopyFailed:
        said = self.copied(copy)
        if isinstance(said, m.Copied):
            self._command = copy
            self.had.installed = True
            complete = not self.live.state.incomplete
            self.fingerprint = self.live.state.fingerprint() if complete else {}
        return said

    def copied(self, copy: commands.Copy) -> m.Copied | m.CopyFailed:
        """Copies and installs what replicas share."""
        live = self.live
        began = time.monotonic_ns()
        # Behind the walk, what it did to this rank's own state stands.
        behind = self.had.installed and live.tracker.replay is None
        try:
            if copy.checkpoint:
                tick = checkpoint.tick_of(copy.checkpoint)
                copy = msgspec.structs.replace(copy, tick=tick)
            kind, side = self._side_state(copy)
            refused = self._refused(side, copy)
            if refused is not None:
                return refused
            if side is not None:
                live.refuse_left_out(side.get("left_out", ()))
                live.expect_own(side["per_rank"])
            live.state.own = frozenset(live.cells.own()) if behind else None
            live.state.walking = not behind and not live.redundancy.needed
            live.state.incomplete = False
            live.state.natural = side is None and not copy.checkpoint
            live.state.blind = not copy.checkpoint and not self._noted(copy)
            if copy.checkpoint:
                copied, missing = checkpoint.read_state(copy.checkpoint, live.rank, live.state)
                sources: list[int] = []
            else:
                result = transfer.pull(
                    copy.sources, copy.tick, live.welcome.token, live.state, lost=self._lost(copy)
                )
                copied, sources = result.bytes_copied, sorted(result.used)
                missing = result.missing
            if behind and not missing <= self._missing:  # they may have changed on the way here
                rank = min(self._lost(copy), default=-1)
                raise transfer.SourceLost(rank, f"nobody has {', '.join(sorted(missing)[:4])}")
            self._missing = missing
            if side is not None and not copy.checkpoint:
                self._require_all()
            self._refuse_warmed()
            if live.state.blind and not behind:
                for item, snapshot in self.had.objects:
                    if item.name in live.state.unseen:
                        item.undo(snapshot)  # as the script built it
            restored = self._restore(missing, side, copy) if not behind else ""
            if not behind:
                self._adopt(side, copy)
            live.redundancy.took_over(copy.holders)
        except transfer.SourceLost as error:
            return self._failed(copy, "source-lost", str(error), error.rank)
        except blobs.HoldersUnreachable as error:
            return self._failed(copy, "side-state-unreachable", str(error))
        except ShardsMissing as error:
            return self._failed(copy, "shards-missing", str(error))
        except transfer.DigestMismatch as error:
            kind = "checkpoint" if copy.checkpoint else "digest"
            return self._failed(copy, kind, str(error), error.rank)
        except Exception as error:
            words = "".join(traceback.format_exception(error))[-4000:]
            return self._failed(copy, "checkpoint" if copy.checkpoint else "error", words)
        return m.Copied(
            generation=copy.generation,
            tick=copy.tick,
            bytes_copied=copied,
            copy_ns=time.monotonic_ns() - began,
            sources=sources,
            side_state=kind,  # type: ignore[arg-type]
            restored=restored,
        )

    def _lost(self, copy: commands.Copy) -> set[int]:
        """Sources that have not answered in this attempt."""
        if self._lost_in != copy.generation:
            self._lost_in, self._lost_sources = copy.generation, set()
        return self._lost_sources

    def _refuse_warmed(self) -> None:
        name = self.had.warmed
        if name and f"{PREFIX}{name}" not in self.live.objects:
            raise UsageError(
                f"{name} is used by the script and was not given to attach; the step changes it "
                "for the first time, and a warm-up has changed it before",
                hint="register it: ks.register(name, model)",
            )

    def _require_all(self) -> None:
        """Before the first fence all is as the script builds it; in a checkpoint there is what the
        script had registered then."""
        live = self.live
        if live.state.unheard:
            raise UsageError(
                f"no other rank shares {live.state.unheard[0].removeprefix('script/')!r}, and rank "
                f"{live.rank} has published none of its own",
                hint="register the same objects on all ranks, before the first step",
            )

    def _restore(
        self, missing: frozenset[str], side: dict[str, Any] | None, copy: commands.Copy
    ) -> str:
        """What no rank has; how it was restored, in words."""
        live = self.live
        self._rebuilt = {}  # an earlier copy's are of another version
        if not missing:
            return ""
        version = side["version"] if side is not None else 0
        if version == 0 and live.natural == live.process.about["natural"]:
            return "shards as the script builds them, before the first step"

        def fetch() -> tuple[vault.FetchedShards, str]:
            if copy.checkpoint:
                return checkpoint.read_vault(copy.checkpoint, live.rank)
            return live.redundancy.fetch(live.rank, copy.holders, version)

        how = live.redundancy.restore(missing, version, live.redundancy.updated, fetch)
        for name in missing:
            kind, _, item = name.partition("/")
            if kind == "object":
                data, tensors = codec.dumps(live.objects[item].save())
                self._rebuilt[item] = data, [tensor.detach().clone() for tensor in tensors]
        return how

    def again(self) -> m.CopyFailed | None:
        """What replicas share, if it has been changed here. Its gradients stay."""
        if not self.fingerprint or self._command is None or not self.changed():
            return None  # or all is copied once more at the entry
        gradients = [(parameter, parameter.grad) for parameter in self.live.parameters]
        said = self.copied(self._command)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return said if isinstance(said, m.CopyFailed) else None

    def changed(self) -> list[str]:
        """What of the shared state is not as it was copied."""
        now, copied = self.live.state.fingerprint(), self.fingerprint
        if not copied and self._command is not None:  # not all of it could be copied then
            said = self.copied(self._command)
            copied = self.live.state.fingerprint() if isinstance(said, m.Copied) else {}
        own = self.live.cells.own()
        return [
            name
            for name, digest in copied.items()
            if now.get(name, digest) != digest
            and name not in own
            and not name.startswith(("grad/", "meta", "object/keepstep/", "object keepstep/"))
        ]

    def put_rebuilt(self) -> None:
        """Where the walk ends, behind the script's variables: these have the tensors of an object
        as they were in the fence, before the update that the vault has replayed."""
        rebuilt, self._rebuilt = self._rebuilt, {}
        for name, (data, tensors) in rebuilt.items():
            self.live.objects[name].load(codec.loads(data, tensors))

    def _side_state(self, copy: commands.Copy) -> tuple[str, dict[str, Any] | None]:
        if copy.tick == 0:
            return "natural", None
        if copy.checkpoint:
            return "checkpoint", self.fetch(CHECKPOINT_TICK, [])
        token, rank = self.live.welcome.token, self.live.rank
        blob = blobs.fetch_surely(copy.holders, token, rank, copy.tick, everybody=copy.everybody)
        if blob is None:
            return "missing", None
        return "own-agent" if blob.own else "buddy", codec.loads_inline(blob.data)

    def _fetch_late(self, copy: commands.Copy) -> dict[str, Any]:
        """Empty if the rank was lost before the transaction had ended."""
        if copy.checkpoint:
            data = checkpoint.read_side(copy.checkpoint, self.live.rank, "late")
        else:
            token, tick = self.live.welcome.token, late_tick(copy.tick)
            blob = blobs.fetch(copy.holders, token, self.live.rank, tick, patience_s=0.0)
            data = blob.data if blob is not None else None
        late: dict[str, Any] = codec.loads_inline(data) if data is not None else {}
        if data is not None:
            self.live.page.publish(late_tick(copy.tick), data)
        self.had.locals = late.pop("locals", {})
        self.had.ended = data is not None and not late.pop("open", False)
        return late

    def _noted(self, copy: commands.Copy) -> bool:
        """The rank had begun the transaction at whose entry the state is."""
        note = self._fetch_note(copy)
        return note is not None and note["tick"] == copy.tick

    def _fetch_note(self, copy: commands.Copy) -> dict[str, Any] | None:
        if copy.checkpoint:
            return None
        token, rank = self.live.welcome.token, self.live.rank
        blob = blobs.fetch(copy.holders, token, rank, NOTE_TICK, patience_s=0.0)
        note: dict[str, Any] | None = codec.loads_inline(blob.data) if blob is not None else None
        return note

    def _refused(self, side: dict[str, Any] | None, copy: commands.Copy) -> m.CopyFailed | None:
        live = self.live
        if side is None and copy.tick != 0:
            return self._failed(
                copy,
                "side-state-missing",
                f"side state {copy.tick} of rank {live.rank} is held by nobody",
            )
        provisional = self.had.position or {}
        tick = side["tick"] if side is not None else 0
        if side is not None and provisional.get("tick", 0) != tick:
            if not live.tracker.can_move_on_to(side["position"], self.had.site):
                return self._failed(
                    copy, "position", "the job has gone on to another epoch or loop"
                )
        elif side is None and provisional:
            return self._failed(copy, "position", "the job was rolled back to its start")
        return None

    def _adopt(self, side: dict[str, Any] | None, copy: commands.Copy) -> None:
        live = self.live
        live.tick = copy.tick
        live.page.set("tick", copy.tick)
        if side is None:
            live.version = 0
            reducers.reset(0)
            for item, snapshot in self.had.objects:  # what the warm-up did to them
                item.undo(snapshot)
            self.had.note = self._fetch_note(copy)
            return
        live.version = side["version"]
        live.page.set("version", live.version)
        self.had.position = self.had.walking = side
        self.had.late = self._fetch_late(copy)
        live.side.take_behind(side, self.had.late)
        self.had.note = self._fetch_note(copy)
        live.page.publish(copy.tick, codec.dumps_inline(side))

    def _failed(
        self, copy: commands.Copy, reason: Any, error: str, source: int = -1
    ) -> m.CopyFailed:
        return m.CopyFailed(generation=copy.generation, reason=reason, error=error, source=source)
