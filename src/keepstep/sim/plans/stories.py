"""Named stories: worlds whose faults belong together."""

from __future__ import annotations

import random
from collections.abc import Callable

from keepstep.sim.plans.stories_rare import RARE
from keepstep.sim.plans.table import ACTORS, KINDS, MIGRATIONS, PHASES, length_ns
from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.times import MS, SECOND


def _orchestrator_effect(seed: int, draw: random.Random) -> Plan:
    """kill -9 between a record and its effects, at any record of a migration."""
    kind = draw.choice(("record", "effect"))
    fault = Fault("orchestrator", kind, phase=draw.choice(PHASES), delay_ns=draw.randrange(20 * MS))
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(fault,))


def _disk_full(seed: int, draw: random.Random) -> Plan:
    fault = Fault("orchestrator", "full", phase=draw.choice(PHASES))
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(fault,))


def _two_faults(seed: int, draw: random.Random) -> Plan:
    return _several(seed, draw, 2)


def _three_faults(seed: int, draw: random.Random) -> Plan:
    return _several(seed, draw, 3)


def _several(seed: int, draw: random.Random, count: int) -> Plan:
    """At the same moment or shortly after one another, in one phase."""
    phase = draw.choice(PHASES)
    faults = []
    for _ in range(count):
        actor, kind = draw.choice(ACTORS), draw.choice(KINDS)
        delay = draw.choice((0, draw.randrange(500 * MS), draw.randrange(3 * SECOND)))
        length = length_ns(actor, kind, draw)
        faults.append(Fault(actor, kind, phase=phase, delay_ns=delay, length_ns=length))
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=tuple(faults))


def _migrate_back(seed: int, draw: random.Random) -> Plan:
    """A rank is moved, is moved again at once, and something breaks in between."""
    actor = draw.choice(("spare", "source", "bystander", "agent"))
    faults = (
        Fault("operator", "migrate", phase="RETIRE"),
        Fault("operator", "drain", phase="RETIRE", delay_ns=draw.randrange(2 * SECOND)),
        Fault(actor, "crash", phase="RETIRE", delay_ns=draw.randrange(6 * SECOND)),
    )
    return Plan(seed=seed, migration="planned", spare_nodes=3, spares=3, faults=faults)


def _mass_taint(seed: int, draw: random.Random) -> Plan:
    """30 % of the nodes are tainted within a minute, and then something breaks."""
    faults = (
        Fault("operator", "mass-taint", at_ns=SECOND, length_ns=20 * SECOND),
        Fault(draw.choice(ACTORS[1:]), "crash", at_ns=draw.randrange(30 * SECOND)),
    )
    return Plan(
        seed=seed, ranks=20, spare_nodes=2, spares=2, step_ns=SECOND, migration="", faults=faults
    )


def _blackout(seed: int, draw: random.Random) -> Plan:
    """Nobody reaches the orchestrator for longer than any limit, while training is well."""
    length = length_ns("partition", "blackout", draw)
    faults = (Fault("orchestrator", "blackout", at_ns=draw.randrange(SECOND), length_ns=length),)
    return Plan(seed=seed, migration=draw.choice(("", "planned", "unplanned")), faults=faults)


def _late_spares(seed: int, draw: random.Random) -> Plan:
    """No spare when one is needed: nodes join later, or processes cannot be started at first."""
    faults = [Fault("agent", "crash", at_ns=draw.randrange(2 * SECOND))]
    if draw.random() < 0.5:
        faults.append(Fault("provider", "refuse", at_ns=draw.randrange(SECOND)))
    late = tuple(draw.randrange(5 * SECOND, 40 * SECOND) for _ in range(2))
    migration = draw.choice(("", "planned"))
    return Plan(seed=seed, migration=migration, late_nodes=late, faults=tuple(faults))


def _lying_detectors(seed: int, draw: random.Random) -> Plan:
    kind = draw.choice(("stalled", "all-stalled", "taint"))
    faults = (
        Fault("detector", kind, at_ns=SECOND, length_ns=length_ns("detector", kind, draw)),
        Fault("detector", "taint", at_ns=draw.randrange(5 * SECOND)),
    )
    return Plan(seed=seed, migration=draw.choice(("", *MIGRATIONS)), faults=faults)


def _late_news(seed: int, draw: random.Random) -> Plan:
    """A node dies and nobody hears of it for a long time, or ever."""
    fault = Fault("agent", "crash", at_ns=draw.randrange(3 * SECOND))
    return Plan(seed=seed, migration="", notice_ns=30 * SECOND, faults=(fault,))


def _raises(seed: int, draw: random.Random) -> Plan:
    """A rank's own computation raises: a broken device, or a bug in the script."""
    kind = draw.choice(("device", "user", "quit"))
    fault = Fault("bystander", kind, at_ns=draw.randrange(3 * SECOND))
    return Plan(seed=seed, migration=draw.choice(("", *MIGRATIONS)), faults=(fault,))


def _start(seed: int, draw: random.Random) -> Plan:
    """Something breaks before the first step: everything is started again."""
    choices = (
        ("bystander", "crash"),
        ("bystander", "device"),
        ("bystander", "user"),
        ("agent", "crash"),
        ("link", "crash"),
        ("orchestrator", "crash"),
        ("orchestrator", "record"),
        ("provider", "refuse"),
        ("store", "refuse"),
        ("store", "mute"),
    )
    faults = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        actor, kind = draw.choice(choices)
        early = actor in ("provider", "store")
        at = draw.randrange(100 * MS) if early else draw.randrange(2 * SECOND)
        if actor == "bystander":
            at = max(at, 300 * MS)  # there is no process before
        faults.append(Fault(actor, kind, at_ns=at, length_ns=length_ns(actor, kind, draw)))
    return Plan(seed=seed, migration="", from_start=True, faults=tuple(faults))


def _resume(seed: int, draw: random.Random) -> Plan:
    """From a checkpoint: all ranks are newcomers of an attempt without members."""
    actor, kind = draw.choice((("spare", "crash"), ("spare", "hang"), ("link", "crash")))
    at_start = draw.random() < 0.7
    phase = draw.choice(("RESERVE", "HOLD", "COPY", "REWIRE", "RESUME")) if at_start else ""
    fault = Fault(actor, kind, phase=phase, delay_ns=draw.randrange(SECOND))
    migration = "" if at_start else "unplanned"
    return Plan(seed=seed, migration=migration, from_start=at_start, resume_tick=7, faults=(fault,))


def _bad_store(seed: int, draw: random.Random) -> Plan:
    kind = draw.choice(("refuse", "mute", "crash", "host"))
    phase = "HOLD" if kind in ("crash", "host") else ""
    delay = draw.randrange(10 * MS if kind == "host" else 100 * MS)
    fault = Fault("store", kind, phase=phase, delay_ns=delay)
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(fault,))


def _all_stopped(seed: int, draw: random.Random) -> Plan:
    """Every rank stands still for longer than the limit: none of them is to blame."""
    length = draw.randrange(12 * SECOND, 30 * SECOND)
    fault = Fault("everyone", "pause", at_ns=draw.randrange(SECOND), length_ns=length)
    return Plan(seed=seed, migration="", faults=(fault,))


def _hang_after_move(seed: int, draw: random.Random) -> Plan:
    """A rank hangs in a job that has a young process in it."""
    fault = Fault("source", "hang", phase="RETIRE", delay_ns=draw.randrange(3 * SECOND))
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(fault,))


def _unlucky_rank(seed: int, draw: random.Random) -> Plan:
    """The same rank is lost again and again before it makes a step, the last time with its node."""
    faults = (
        Fault("spare", "crash", phase="COMMIT"),
        Fault("spare-node", "crash", phase="COMMIT", nth=2),
    )
    return Plan(seed=seed, migration="unplanned", spares=3, faults=faults)


def _dark_data(seed: int, draw: random.Random) -> Plan:
    """Side state exists and nobody can reach it for a while."""
    length = draw.randrange(5 * SECOND, 30 * SECOND)
    fault = Fault("data", "cut", phase=draw.choice(("HOLD", "COPY")), length_ns=length)
    return Plan(seed=seed, migration="unplanned", faults=(fault,))


def _bad_spares(seed: int, draw: random.Random) -> Plan:
    """Whoever takes the rank over fails: the job is given up, with its state on disk."""
    kinds = ("crash", "user", "device")
    faults = tuple(
        Fault("spare", draw.choice(kinds), at_ns=index * 2500 * MS + draw.randrange(2 * SECOND))
        for index in range(9)
    )
    return Plan(seed=seed, migration="unplanned", copy_ns=3 * SECOND, spares=3, faults=faults)


def _understudies(seed: int, draw: random.Random) -> Plan:
    """Ranks are taken over by processes that were built for them, or by the spare beside them when
    those fail; two victims do not get two ranks in one place."""
    faults = (
        Fault("understudy", draw.choice(("crash", "hang", "user")), at_ns=draw.randrange(SECOND)),
        Fault(draw.choice(("spare", "bystander")), "crash", phase=draw.choice(PHASES)),
    )
    return Plan(
        seed=seed,
        migration=draw.choice(MIGRATIONS),
        spares=draw.choice((1, 2)),
        understudies=draw.choice((2, 8)),
        faults=faults[draw.choice((0, 1)) :],
    )


def _everyone_dies(seed: int, draw: random.Random) -> Plan:
    fault = Fault("everyone", "crash", at_ns=draw.randrange(2 * SECOND))
    return Plan(seed=seed, migration=draw.choice(("", *MIGRATIONS)), faults=(fault,))


def _cursed_network(seed: int, draw: random.Random) -> Plan:
    """Every new generation loses its connections before the first step."""
    count = draw.choice((3, 8))
    faults = tuple(Fault("new-groups", "reset", phase="COMMIT", nth=n + 1) for n in range(count))
    return Plan(seed=seed, migration="unplanned", faults=faults)


def _cursed_start(seed: int, draw: random.Random) -> Plan:
    """Ranks die, or whole nodes, each time they are started."""
    actor = draw.choice(("bystander", "agent"))
    faults = tuple(
        Fault(actor, "crash", at_ns=index * 1200 * MS + draw.randrange(SECOND))
        for index in range(8)
    )
    return Plan(seed=seed, migration="", from_start=True, faults=faults)


def _cursed_rank(seed: int, draw: random.Random) -> Plan:
    """The same rank dies in every process it is given."""
    faults = tuple(Fault("spare", "crash", phase="COMMIT", nth=n + 1) for n in range(2))
    return Plan(seed=seed, migration="unplanned", spares=3, faults=faults)


def _frozen(seed: int, draw: random.Random) -> Plan:
    """A process is stopped for longer than the limit, and then goes on as if nothing happened."""
    actor, phase = draw.choice(("bystander", "source", "spare")), draw.choice(("", *PHASES))
    length = draw.randrange(15 * SECOND, 90 * SECOND)
    fault = Fault(actor, "freeze", phase=phase, at_ns=SECOND, length_ns=length)
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(fault,))


def _operators(seed: int, draw: random.Random) -> Plan:
    """Drains, moves and taints that get into each other's way."""
    kinds = (("operator", "drain"), ("operator", "drain-spare"), ("operator", "migrate"))
    choices = (*kinds, ("detector", "taint"), ("bystander", "crash"), ("agent", "crash"))
    faults = tuple(Fault(*draw.choice(choices), at_ns=draw.randrange(8 * SECOND)) for _ in range(4))
    return Plan(seed=seed, migration="planned", spares=draw.choice((1, 2)), faults=faults)


def _torn_fence(seed: int, draw: random.Random) -> Plan:
    """Struck when some ranks have passed a fence and others wait in it: everybody applies."""
    actor, kind = draw.choice(
        (("bystander", "crash"), ("source", "crash"), ("link", "crash"), ("agent", "crash"))
    )
    faults = [Fault(actor, kind, phase="FENCE", delay_ns=draw.randrange(500_000))]
    if draw.random() < 0.5:
        faults.append(Fault("source", "crash", phase="HOLD", delay_ns=draw.randrange(50 * MS)))
    if draw.random() < 0.3:
        faults.append(Fault("orchestrator", "effect", phase="HOLD"))
    return Plan(seed=seed, migration="", faults=tuple(faults))


def _echo(seed: int, draw: random.Random) -> Plan:
    """A slow network, and deaths so close together that answers to one attempt come in the next."""
    jitter = draw.choice((20, 100, 300)) * MS
    phase = draw.choice(("RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME"))
    faults = tuple(
        Fault(
            draw.choice(("bystander", "source", "spare")),
            "crash",
            phase=phase,
            delay_ns=draw.randrange(3 * jitter),
        )
        for _ in range(draw.choice((1, 2, 2, 3)))
    )
    if draw.random() < 0.5:
        faults = (Fault("echo", "late"), *faults)
    migration = draw.choice(MIGRATIONS)
    return Plan(seed=seed, migration=migration, jitter_ns=jitter, spares=3, faults=faults)


def _late_answers(seed: int, draw: random.Random) -> Plan:
    """What was answered in one attempt comes once more when the next one asks the same."""
    again = Fault("bystander", "crash", phase="COPY", delay_ns=draw.randrange(2 * SECOND))
    stuck = Fault("bystander", "stuck-builder", at_ns=draw.randrange(100 * MS))
    cut = Fault("data", "cut", phase="HOLD", length_ns=draw.randrange(8 * SECOND))
    stuck_again = Fault("bystander", "stuck-builder", phase="COPY")
    faults = draw.choice(((stuck,), (stuck, again), (stuck_again, again), (cut,)))
    faults = (Fault("echo", "late"), *faults)
    return Plan(seed=seed, copy_ns=3 * SECOND, spares=3, faults=faults)


def _stuck_builder(seed: int, draw: random.Random) -> Plan:
    """One rank never finishes its new groups, although all have met."""
    fault = Fault("bystander", "stuck-builder", at_ns=draw.randrange(100 * MS))
    return Plan(seed=seed, migration=draw.choice(("planned", "unplanned")), faults=(fault,))


def _buddy_dies(seed: int, draw: random.Random) -> Plan:
    """A rank's process and the buddy of its side state are lost together: its own node has it."""
    fault = Fault("buddy", "crash", phase="HOLD", delay_ns=draw.randrange(2 * SECOND))
    return Plan(seed=seed, migration="unplanned", spares=3, spare_nodes=3, faults=(fault,))


def _hung_hold(seed: int, draw: random.Random) -> Plan:
    """A rank hangs while it holds for a move that is then undone."""
    faults = (
        Fault("bystander", "hang", phase="COPY"),
        Fault("spare", "crash", phase="COPY", delay_ns=draw.randrange(200 * MS)),
    )
    return Plan(seed=seed, migration="planned", spares=1, spare_nodes=1, faults=faults)


def _lost_while_away(seed: int, draw: random.Random) -> Plan:
    """A machine vanishes while the orchestrator is down, and nobody ever says so."""
    at = draw.randrange(2 * SECOND)
    faults = (
        Fault("agent", "vanish", at_ns=at + draw.randrange(SECOND)),
        Fault("orchestrator", "crash", at_ns=at, length_ns=draw.randrange(SECOND, 25 * SECOND)),
    )
    return Plan(seed=seed, migration=draw.choice(("", "unplanned")), faults=faults)


def _unseen_hang(seed: int, draw: random.Random) -> Plan:
    """A hung rank on a node that the orchestrator gives up long before its agent knows of it."""
    fault = Fault("half-open", "hang", at_ns=draw.randrange(2 * SECOND), length_ns=60 * SECOND)
    return Plan(seed=seed, migration="", faults=(fault,))


def _lost_words(seed: int, draw: random.Random) -> Plan:
    """Streams break when the ranks say that they train again."""
    faults = tuple(
        Fault("link", "crash", phase="RESUME", delay_ns=draw.randrange(250 * MS, 450 * MS))
        for _ in range(4)
    )
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), jitter_ns=20 * MS, faults=faults)


def _remembered_taint(seed: int, draw: random.Random) -> Plan:
    """The only spare node is drained, the orchestrator restarts, and then a spare is needed."""
    length = draw.randrange(SECOND // 2, 2 * SECOND)
    faults = (
        Fault("operator", "drain-spare", at_ns=SECOND // 5),
        Fault("orchestrator", "crash", at_ns=SECOND, length_ns=length),
        Fault("bystander", "crash", at_ns=draw.randrange(16 * SECOND, 20 * SECOND)),
    )
    return Plan(seed=seed, migration="", spare_nodes=1, faults=faults)


STORIES: dict[str, Callable[[int, random.Random], Plan]] = {
    "orchestrator-effect": _orchestrator_effect,
    "disk-full": _disk_full,
    "two-faults": _two_faults,
    "three-faults": _three_faults,
    "migrate-back": _migrate_back,
    "mass-taint": _mass_taint,
    "blackout": _blackout,
    "late-spares": _late_spares,
    "lying-detectors": _lying_detectors,
    "late-news": _late_news,
    "raises": _raises,
    "start": _start,
    "resume": _resume,
    "bad-store": _bad_store,
    "all-stopped": _all_stopped,
    "hang-after-move": _hang_after_move,
    "unlucky-rank": _unlucky_rank,
    "dark-data": _dark_data,
    "torn-fence": _torn_fence,
    "echo": _echo,
    "late-answers": _late_answers,
    "stuck-builder": _stuck_builder,
    "buddy-dies": _buddy_dies,
    "unseen-hang": _unseen_hang,
    "lost-words": _lost_words,
    "remembered-taint": _remembered_taint,
    "lost-while-away": _lost_while_away,
    "hung-hold": _hung_hold,
    "bad-spares": _bad_spares,
    "everyone-dies": _everyone_dies,
    "understudies": _understudies,
    "cursed-network": _cursed_network,
    "cursed-start": _cursed_start,
    "cursed-rank": _cursed_rank,
    "frozen": _frozen,
    "operators": _operators,
    **RARE,
}
