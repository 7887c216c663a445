"""The tree that a position is (see position.py), and a newcomer's way along it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

Tree = dict[str, Any]


class _Missing:
    """The result of a transaction that this process does not know."""

    def __repr__(self) -> str:
        return "<unknown>"


MISSING: Final = _Missing()


class Encoded(NamedTuple):
    """What a rank itself has published of a transaction: its result, and the script's variables as
    they were then."""

    data: bytes | None
    variables: bytes | None
    mark: str = ""


@dataclass
class Txn:
    """`result` is encoded (results.py), and so are the script's variables as of its fence, or its
    end (script/variables.py): both are part of every position until the level is left. A result
    may still be on its way from a device; of one that is too large there is a mark."""

    site: str
    step: bool
    result: bytes | Callable[[], bytes] | None = None
    variables: bytes | None = None
    mark: str = ""

    def tree(self) -> Tree:
        return {
            "t": self.site,
            "s": self.step,
            "r": self.known(),
            "v": self.variables,
            "m": self.mark,
        }

    def known(self) -> bytes | None:
        if callable(self.result):
            self.result = self.result()
        return self.result

    @property
    def size(self) -> int:
        result = b"" if callable(self.result) else self.result
        return len(result or b"") + len(self.variables or b"")


@dataclass(eq=False)
class LoopPos:
    """One ks.batches loop. `outside` counts batches up to the last one handed to the script's own
    loop (which a newcomer must get again); `yields` also counts those a step pulled itself."""

    yields: int = 0
    outside: int = 0
    closed: bool = False
    ahead: int = -1  # batches that the script holds back when a step begins; -1: not known yet
    ended: bool = False  # no more batches, but steps for those that were held back
    entry: bytes | None = None  # all streams when the iterator was made
    before: Any = None  # stateful loaders: state before the batch `outside` was fetched
    drawn: bytes | None = None  # all streams before the batch `outside` was fetched
    workers: dict[int, bytes] | None = None  # streams of DataLoader workers at `begin`
    variables: bytes | None = None  # of the script, when the batch `outside` was handed out
    batch: dict[str, str] | None = None  # digests of the batch `outside`
    varies: bool = False  # not every round begins with the same step or section
    first: str = ""  # what the last round began with
    begun: bool = False  # in this process; not part of the position
    # Not part of it either: what the workers tell, while there are any.
    told: Callable[[int], dict[int, bytes]] | None = None

    @property
    def begin(self) -> int:
        """The batch at which a newcomer begins to fetch."""
        if not self.outside:
            return self.yields
        return max(self.outside - 1 - max(self.ahead, 0), 0)

    def tree(self) -> Tree:
        return {
            "d": self.drawn,
            "w": self.told(self.begin) if self.told is not None else self.workers,
            "y": self.yields,
            "o": self.outside,
            "c": self.closed,
            "a": self.ahead,
            "n": self.ended,
            "e": self.entry,
            "b": self.before,
            "v": self.variables,
            "h": self.batch,
            "x": self.varies,
            "f": self.first,
        }


@dataclass
class Scope:
    """A finished scope; `frozen` while it holds the last committed step."""

    kind: str
    frozen: Level | None = None
    width: int = 1  # loops side by side: zip(ks.batches(a), ks.batches(b))
    variables: bytes | None = None  # of the script, where it came to its end

    def tree(self) -> Tree:
        frozen = self.frozen.tree() if self.frozen else None
        return {"scope": self.kind, "f": frozen, "w": self.width, "v": self.variables}

    @property
    def size(self) -> int:
        return len(self.variables or b"")


@dataclass(eq=False)  # two levels with the same content are still two
class Level:
    kind: str  # program, epochs, loops
    epoch: int = 0
    loops: list[LoopPos] = field(default_factory=list)
    log: list[Txn | Scope] = field(default_factory=list)
    child: Level | None = None

    def tree(self) -> Tree:
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "loops": [loop.tree() for loop in self.loops],
            "log": [entry.tree() for entry in self.log],
            "child": self.child.tree() if self.child else None,
        }

    def steps(self) -> int:
        """Step entries that a replay of this level will meet."""
        count = self.child.steps() if self.child else 0
        for entry in self.log:
            if isinstance(entry, Txn):
                count += entry.step
            elif entry.frozen is not None:
                count += entry.frozen.steps()
        return count


def level_from(tree: Tree) -> Level:
    def entry_from(item: Tree) -> Txn | Scope:
        if "scope" in item:
            frozen = level_from(item["f"]) if item["f"] else None
            return Scope(item["scope"], frozen, item["w"], item.get("v"))
        return Txn(item["t"], item["s"], item["r"], item["v"], item.get("m", ""))

    return Level(
        kind=tree["kind"],
        epoch=tree["epoch"],
        loops=[
            LoopPos(
                yields=x["y"],
                outside=x["o"],
                closed=x["c"],
                ahead=x["a"],
                ended=x["n"],
                entry=x["e"],
                before=x["b"],
                drawn=x.get("d"),
                workers=x.get("w"),
                variables=x.get("v"),
                batch=x.get("h"),
                varies=x.get("x", False),
                first=x.get("f", ""),
            )
            for x in tree["loops"]
        ],
        log=[entry_from(item) for item in tree["log"]],
        child=level_from(tree["child"]) if tree["child"] else None,
    )


@dataclass
class Seek:
    """What must happen before a walk counts, when it starts in the middle of a script.

    `until` "batch": the loop in `level` hands out the target's batch; "epoch": the epochs in
    `level` go on to the target's epoch; "close": the scope `level`, finished in the target, ends
    here too. Until then transactions return stand-ins and scopes below yield nothing."""

    until: str
    level: Level


class Replay:
    """Leads a newcomer along a target position, level by level."""

    def __init__(self, target: Level) -> None:
        self.target = target
        self.path: list[tuple[Level, int]] = [(target, 0)]  # (level, next entry of its log)
        self.seek: Seek | None = None
        self.stand_ins = 0  # calls answered while seeking

    def expected(self) -> Txn | Scope | Level | None:
        """The next thing the script should do here; None: the walk is over."""
        level, index = self.path[-1]
        if index < len(level.log):
            return level.log[index]
        return level.child

    def ends_here(self) -> bool:
        """The transaction that comes next is the last of the walk."""
        path, (level, index) = self.path, self.path[-1]
        self.path = [*path[:-1], (level, index + 1)]
        try:
            return index < len(level.log) and self.seek is None and self.over()
        finally:
            self.path = path

    def advance(self) -> None:
        level, index = self.path[-1]
        self.path[-1] = (level, index + 1)

    def remaining_steps(self) -> int:
        count = 0
        for level, index in self.path:
            for entry in level.log[index:]:
                if isinstance(entry, Txn):
                    count += entry.step
                elif entry.frozen is not None and (entry.frozen, 0) not in self.path:
                    count += 0 if self._inside(entry.frozen) else entry.frozen.steps()
            if level.child is not None and not self._inside(level.child):
                count += level.child.steps()
        return count

    def _inside(self, level: Level) -> bool:
        return any(level is other for other, _ in self.path)

    def over(self) -> bool:
        return len(self.path) > 0 and all(
            index >= len(level.log) and (level.child is None or self._inside(level.child))
            for level, index in self.path
        )
