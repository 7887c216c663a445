"""What differs between ranks, in words: the pure part of divergence.py.

Every rank that took part in a comparison has said what it has, as a table "class|name" -> value.
Ranks that have entries of the same class must have the same ones: for each name the ranks are
grouped by value, and the smaller a group, the earlier it is named, because one rank that went
astray is the usual story. Where the tables show nothing, the finders' own sentences stand.

Everything is bounded: a model has many tensors, and one wrong byte spreads to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.core.triage import name_ranks
from keepstep.model.messages import Diverged

SENTENCES_MAX = 8
WORDS_MAX = 500  # letters of a finder's own sentence
VALUES_MAX = 3  # named of one difference
NOTHING = "nothing"

WHAT = {
    "inputs": "the inputs differ",
    "update": "whether an update follows differs",
    "collectives": "the collectives differ",
    "learning-rate": "the learning rates differ",
    "replicas": "what replicas share differs",
    "results": "the results differ",
    "script": "what the script has differs",
}


@dataclass(slots=True)
class Divergence:
    """The facts of one that is being looked into, or that the job stands for."""

    since: int
    said: dict[int, Diverged] = field(default_factory=dict)  # rank -> its last word
    waiting: dict[str, int] = field(default_factory=dict)  # worker -> number of what it found
    incident: str = ""  # once it has a name
    text: str = ""
    named_at: int = 0
    agreed: int = -1
    key: tuple[str, str, int] = ("", "", 0)  # witness, site, tick


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]  # value -> ranks that have it, fewest first

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks outside the largest group. If there is no such group, nobody is odd."""
        sizes = [len(ranks) for _, ranks in self.groups]
        if sizes[-1] == sizes[-2]:
            return ()
        return tuple(sorted(rank for _, ranks in self.groups[:-1] for rank in ranks))

    def sentence(self) -> str:
        shown = self.groups if len(self.groups) <= VALUES_MAX else self.groups[:VALUES_MAX]
        parts = [f"{_who(ranks)} {value}" for value, ranks in shown]
        left = len(self.groups) - len(shown)
        more = f", and other ranks have {left} other value{'s' * (left != 1)}" if left else ""
        return f"{self.name}: {', '.join(parts)}{more}"


def _who(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{len(ranks)} ranks (first: {ranks[0]}) have"
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def differences(tables: Mapping[int, Mapping[str, str]]) -> list[Difference]:
    """In order of names. Keys without a class are compared between all ranks."""
    classes: dict[str, list[int]] = {}
    names: dict[tuple[str, str], None] = {}
    for rank, table in sorted(tables.items()):
        mine = dict.fromkeys(_split(key) for key in table)
        names |= mine
        for kind in dict.fromkeys(kind for kind, _ in mine):
            classes.setdefault(kind, []).append(rank)
    found = []
    for kind, name in sorted(names):
        key = f"{kind}|{name}" if kind else name
        by_value: dict[str, list[int]] = {}
        for rank in classes[kind]:
            by_value.setdefault(tables[rank].get(key, NOTHING), []).append(rank)
        if len(by_value) > 1:
            groups = sorted(by_value.items(), key=lambda one: (len(one[1]), one[1]))
            found.append(Difference(name, tuple((v, tuple(ranks)) for v, ranks in groups)))
    return found


def _split(key: str) -> tuple[str, str]:
    kind, bar, name = key.partition("|")
    return (kind, name) if bar else ("", key)


def describe(said: Mapping[int, Diverged]) -> tuple[str, list[int]]:
    """What differs, and the ranks that are not like the others (none, if that cannot be told)."""
    first = said[min(said)]
    found = differences({rank: word.table for rank, word in said.items()})
    sentences = [one.sentence() for one in found]
    known = dict.fromkeys(word.words for _, word in sorted(said.items()) if word.words)
    odd = sorted({rank for one in found for rank in one.odd})
    if not sentences:
        sentences = [one.rstrip(".")[:WORDS_MAX] for one in known]
    shown = sentences[:SENTENCES_MAX]
    if len(sentences) > len(shown):
        shown.append(f"and {len(sentences) - len(shown)} more")
    if not shown:
        shown = [f"{name_ranks(sorted(said))} found it, and the values were not told"]
    where = f"between ranks in {first.site!r} after step {first.version}"
    return f"{WHAT[first.witness]} {where}: {'; '.join(shown)}", odd
