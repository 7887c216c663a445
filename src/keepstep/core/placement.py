"""Where ranks and spares go. Pure functions over nodes and workers; each says why.

* A spare is a parked spare in a healthy place. Another node than the victim's is preferred:
  what killed the victim may be about to kill its neighbours. So is one of another failure domain,
  and one outside the domain that the job stays within is none (demand.py).
* A slot is free if no process is, or may still be, in it. A rank that died by itself leaves its
  slot reusable; a dead node's slots are gone; a tainted one waits for `untaint`.
* A rank's buddy is the blob server of the next live node in node order, so that every node is
  somebody's buddy and the load is even. A tainted one is only taken if there is no other.
* A parity is kept for ranks with the same place on up to PARITY_MEMBERS nodes that follow each
  other at home, by the next live node on which none of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from keepstep.core.demand import mismatch, shared
from keepstep.core.facts import Node, Worker
from keepstep.model.job import JobSpec
from keepstep.model.messages import Address

CRASHES_MAX = 3  # in one slot, without any training in between
PARITY_MEMBERS = 3


def choose_spare(
    spares: Iterable[Worker],
    nodes: Mapping[str, Node],
    *,
    away_from: str,
    home: str = "",
    prepared: Container[str] = (),
    within: Sequence[str] = (),
) -> tuple[Worker | None, str]:
    """The parked spare to use for a rank that was on node `away_from`.

    `home` is a slot to prefer over everything (a resumed job gets its usual placement), `prepared`
    are those where an understudy of the rank is ready, `within` are labels of nodes (demand.py)."""
    victim = nodes.get(away_from)
    parked: list[Worker] = []
    refused: list[str] = []
    for worker in spares:
        why = unfit(worker, nodes[worker.node], victim, within)
        if why:
            refused.append(f"{worker.id}: {why}")
        else:
            parked.append(worker)
    if not parked:
        return None, "; ".join(refused) or "there is no spare"
    best = min(
        parked,
        key=lambda w: (
            w.place != home,
            w.place not in prepared,
            w.node == away_from,
            len(shared(within, victim, nodes[w.node])),
            nodes[w.node].index,
            w.slot,
            w.started_at,
        ),
    )
    where = "another node" if best.node != away_from else "the same node, no other has one"
    if best.node != away_from and (both := shared(within, victim, nodes[best.node])):
        where = f"another node of the same {', '.join(both)}, none is elsewhere"
    return best, f"{best.id} is parked in {best.place} ({where})"


def only_at(place: str, spares: Iterable[Worker]) -> list[Worker]:
    """Those in `place`; "": all of them."""
    return [worker for worker in spares if place in ("", worker.place)]


def unfit(
    worker: Worker, node: Node, victim: Node | None = None, within: Sequence[str] = ()
) -> str:
    """Why this spare cannot be taken now for a rank of node `victim`; empty if it will do."""
    if node.state != "connected":
        return f"node {node.name} is {node.state}"
    if not node.healthy(worker.slot):
        return f"{worker.place} is tainted"
    return mismatch(within, victim, node) or ("" if worker.parked else "still starting")


def free_slots(nodes: Mapping[str, Node], workers: Iterable[Worker]) -> list[tuple[str, int]]:
    """Healthy, connected and empty, emptiest node first (a spare node before a rank's)."""
    # An understudy only accompanies a spare: where it is alone, the spare is missing.
    taken = {(w.node, w.slot) for w in workers if w.alive and w.role != "understudy"}
    load = Counter(node for node, _ in taken)
    free = [
        (node.name, slot)
        for node in nodes.values()
        if node.state == "connected"
        for slot in range(node.slots)
        if node.healthy(slot) and (node.name, slot) not in taken
    ]
    return sorted(free, key=lambda place: (load[place[0]], nodes[place[0]].index, place[1]))


def home_slots(spec: JobSpec) -> dict[int, tuple[str, int]]:
    """Where torchrun would put the ranks: the first nodes, `local_world` each, in order."""
    return {
        rank: (spec.nodes[rank // spec.local_world].name, rank % spec.local_world)
        for rank in range(spec.world)
    }


def start_slots(
    spec: JobSpec, nodes: Mapping[str, Node], workers: Iterable[Worker]
) -> tuple[dict[int, tuple[str, int]] | None, str]:
    """Slots for all ranks of a start from scratch; spares' slots may be taken for it."""
    held = {(w.node, w.slot) for w in workers if w.alive and w.role != "spare"}
    usable = {  # in order; no values
        (node.name, slot): None
        for node in nodes.values()
        if node.state == "connected"
        for slot in range(node.slots)
        if node.healthy(slot) and (node.name, slot) not in held
    }
    placed: dict[int, tuple[str, int]] = {}
    for rank, place in home_slots(spec).items():
        if place in usable:
            placed[rank] = place
            del usable[place]
    for rank in range(spec.world):
        if rank in placed:
            continue
        if not usable:
            missing = spec.world - len(placed)
            return None, f"{missing} more healthy slots are needed for {spec.world} ranks"
        placed[rank] = next(iter(usable))
        del usable[placed[rank]]
    return placed, "usual placement" if placed == home_slots(spec) else "some ranks moved"


def buddy_node(nodes: Sequence[Node], own: Node, avoid: str = "") -> Node | None:
    """The next live node after `own` in node order; None if there is no other. A tainted one may
    be about to go, and is better than none."""
    tainted: Node | None = None
    for step in range(1, len(nodes)):
        node = nodes[(own.index + step) % len(nodes)]
        if node.state == "connected" and node.blobs is not None and node.name != avoid:
            if not node.taints:
                return node
            tainted = tainted or node
    return tainted


def parity_group(spec: JobSpec, rank: int) -> list[int]:
    """Who shares a parity with `rank`, itself included. Groups are as even as they can be."""
    homes = spec.world // spec.local_world
    count = -(-homes // _parity_members(spec))
    size, larger = divmod(homes, count)  # so many groups have one more, and come first
    node, place = divmod(rank, spec.local_world)
    start = larger * (size + 1)
    if node < start:
        start, size = 0, size + 1
    first = start + (node - start) // size * size
    return [home * spec.local_world + place for home in range(first, first + size)]


def _parity_members(spec: JobSpec) -> int:
    return max(1, min(PARITY_MEMBERS, spec.world // spec.local_world, len(spec.nodes) - 1))


def parity_trouble(spec: JobSpec) -> str:
    """Why the nodes do not do for parities; empty if they do."""
    if _parity_members(spec) >= 2:
        return ""
    homes = spec.world // spec.local_world
    there = "there is 1 node" if len(spec.nodes) == 1 else f"there are {len(spec.nodes)} nodes"
    needs = "a parity needs ranks on two nodes and a third node that keeps it"
    return f"{needs}; {there}, {homes} of them with ranks"


def parity_node(nodes: Sequence[Node], start: int, members: Container[str]) -> Node | None:
    """The next live node from index `start` on that none of `members` is on."""
    for step in range(len(nodes)):
        node = nodes[(start + step) % len(nodes)]
        if node.state == "connected" and node.blobs is not None and node.name not in members:
            return node
    return None


def holders(nodes: Mapping[str, Node], own: str, buddy: str) -> list[Address]:
    """Blob servers to ask for a rank's side state: its node, its buddy, then everybody else.

    The rest is asked too because a buddy may have changed just before the fault."""
    order = [own, buddy] + [node.name for node in sorted(nodes.values(), key=lambda n: n.index)]
    addresses: dict[Address, None] = {}  # in order; no values
    for name in order:
        node = nodes.get(name)
        # A disconnected agent only lost the orchestrator; its blobs may well be served.
        if node is None or node.state in ("absent", "dead"):
            continue
        if node.blobs is not None:
            addresses.setdefault(node.blobs)
    return list(addresses)


def store_node(nodes: Mapping[str, Node], avoid: Iterable[str]) -> Node | None:
    """Hosts the next generation's store: not where ranks are dying, not on a tainted node."""
    avoided = set(avoid)
    connected = [node for node in nodes.values() if node.state == "connected"]
    if not connected:
        return None
    return min(connected, key=lambda n: (n.name in avoided, bool(n.taints), n.index))
