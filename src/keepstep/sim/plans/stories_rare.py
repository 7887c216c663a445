"""Named stories of what rarely breaks: starts, disks of ranks, slots, providers, long taints."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from keepstep.sim.plans.table import MIGRATIONS, PHASES
from keepstep.sim.plans.world_plan import Fault, Plan
from keepstep.sim.times import MS, SECOND

FALL_BACK = "fall-back"
LAST_HOLDERS = "last-holders"
PARITY = "parity"
PARITY_START = "parity-start"
COME_BACK = "come-back"
STRAGGLER = "straggler"
REBALANCE = "rebalance"
DARK_GROUPS = "dark-groups"
DIVERGENCE = "divergence"
Policy = Literal["hold", "fall-back", "continue"]
STOP = "stop"
# In the common draw these would change the worlds of all other seeds.
APART = frozenset(
    {FALL_BACK, LAST_HOLDERS, PARITY, PARITY_START, COME_BACK, STRAGGLER, REBALANCE, DARK_GROUPS}
    | {DIVERGENCE, STOP}
)


def _full_disk(seed: int, draw: random.Random) -> Plan:
    """Newcomers fail until the job is given up, and a rank cannot write its part of the state:
    its disk is full, or does not answer at all."""
    disk = Fault("disk", draw.choice(("full", "stuck")), length_ns=300 * SECOND)
    crashes = tuple(Fault("spare", "crash", at_ns=(n + 1) * 2500 * MS) for n in range(9))
    return Plan(seed=seed, copy_ns=3 * SECOND, spares=3, faults=(disk, *crashes))


def _no_spare(seed: int, draw: random.Random) -> Plan:
    """A node is lost and there is no other: the ranks hold, and their state goes to disk when
    there is room again; then the orchestrator is restarted, and a node comes."""
    faults = (
        Fault("disk", "full", length_ns=20 * SECOND),
        Fault("agent", "crash", at_ns=draw.randrange(2 * SECOND)),
        Fault("orchestrator", "crash", at_ns=draw.randrange(84, 90) * SECOND, length_ns=SECOND),
        Fault("provider", "node", at_ns=draw.choice((95, 300)) * SECOND),
        Fault("orchestrator", "crash", at_ns=110 * SECOND, length_ns=draw.randrange(40) * SECOND),
    )
    start = 0 if draw.random() < 0.8 else 1  # without the full disk
    return Plan(seed=seed, migration="", spare_nodes=0, spares=0, faults=faults[start:])


def _absent_node(seed: int, draw: random.Random) -> Plan:
    """A node of the job never joins: one of the first ones, or one that has only spares."""
    fault = Fault("bystander", "crash", at_ns=draw.randrange(2 * SECOND))
    return Plan(seed=seed, migration="", missing=draw.choice((0, 3, 5)), faults=(fault,))


def _late_attach(seed: int, draw: random.Random) -> Plan:
    """A rank hangs while it builds its model, and the others wait for it in attach; once, or each
    time it is started."""
    first = 2500 * MS + draw.randrange(SECOND)
    faults = (
        Fault("bystander", "hang", at_ns=first),
        Fault("bystander", "hang", at_ns=first + 75 * SECOND),
    )
    count = draw.choice((1, 1, 2))
    return Plan(
        seed=seed, migration="", from_start=True, model_ns=10 * SECOND, faults=faults[:count]
    )


def _slow_model(seed: int, draw: random.Random) -> Plan:
    """The script takes longer to come to attach than anybody expects."""
    fault = Fault("bystander", "crash", at_ns=draw.randrange(2 * SECOND))
    return Plan(seed=seed, migration="", model_ns=70 * SECOND, faults=(fault,))


def _odd_groups(seed: int, draw: random.Random) -> Plan:
    """A rank creates a process group that the others do not have; that is known when it attaches,
    also to an orchestrator that is away at the time."""
    length = draw.randrange(SECOND, 4 * SECOND)
    faults = (
        Fault("bystander", "groups", at_ns=300 * MS),
        Fault("orchestrator", "crash", at_ns=SECOND, length_ns=length),
    )
    count = draw.choice((1, 2))
    return Plan(seed=seed, migration="", from_start=True, faults=faults[:count])


def _bad_slot(seed: int, draw: random.Random) -> Plan:
    """Whatever is started in one slot ends at once."""
    fault = Fault("slot", "crash", at_ns=draw.randrange(SECOND), length_ns=20 * SECOND)
    return Plan(seed=seed, migration=draw.choice(("", "planned")), faults=(fault,))


def _long_taint(seed: int, draw: random.Random) -> Plan:
    """Taints that stay for longer than the breaker's minute, with or without a restart in it."""
    faults = (
        Fault("operator", "mass-taint", at_ns=SECOND, length_ns=130 * SECOND),
        Fault("orchestrator", "crash", at_ns=draw.randrange(10, 40) * SECOND, length_ns=SECOND),
    )
    count = draw.choice((1, 2))
    return Plan(seed=seed, step_ns=3 * SECOND, migration="", faults=faults[:count])


def _taken_back(seed: int, draw: random.Random) -> Plan:
    """A node is tainted and untainted, another one joins that nobody had named, a third one is
    lost; then the orchestrator is restarted."""
    faults = (
        Fault("detector", "taint", at_ns=SECOND // 2),
        Fault("provider", "node", at_ns=draw.randrange(SECOND)),
        Fault("operator", "untaint", at_ns=3 * SECOND),
        Fault("spare-node", "crash", at_ns=3 * SECOND),
        Fault("orchestrator", "crash", at_ns=6 * SECOND, length_ns=draw.randrange(3 * SECOND)),
        Fault("bystander", "crash", at_ns=draw.randrange(6 * SECOND, 20 * SECOND)),
    )
    return Plan(seed=seed, migration="", faults=faults)


def _dark_resume(seed: int, draw: random.Random) -> Plan:
    """No node reaches another while a job is resumed: there are checkpoints, but no groups."""
    fault = Fault(
        "data",
        "cut",
        phase="HOLD",
        delay_ns=draw.randrange(3 * SECOND),
        length_ns=draw.randrange(2 * SECOND, 8 * SECOND),
    )
    return Plan(seed=seed, migration="", from_start=True, resume_tick=7, faults=(fault,))


def _fall_back(seed: int, draw: random.Random) -> Plan:
    """All state is lost at once, or what one rank alone had: the job goes back to a checkpoint, if
    it has one already. Something else breaks before, or on the way."""
    first = draw.randrange(2 * SECOND, 12 * SECOND)
    if draw.random() < 0.1:  # nothing but a disk that is full for a while
        full = Fault("disk", "full", at_ns=first, length_ns=draw.randrange(5 * SECOND, 20 * SECOND))
        return Plan(seed=seed, migration="", checkpoint_ns=SECOND, faults=(full,))
    lost: tuple[Fault, ...] = (Fault("everyone", "crash", at_ns=first),)
    if draw.random() < 0.5:
        lost = (
            Fault("agent", "crash", at_ns=first),
            Fault("buddy", "crash", phase="RESERVE"),
        )
    late = first + draw.randrange(12 * SECOND)
    others = (
        (),
        (Fault("orchestrator", "crash", at_ns=late, length_ns=SECOND),),
        (Fault("orchestrator", "crash", at_ns=first + 3 * SECOND, length_ns=SECOND),),
        (Fault("spare", "crash", at_ns=late),),
        (Fault("agent", "crash", at_ns=late),),
        (Fault("bystander", "crash", at_ns=draw.randrange(20 * SECOND)),),
        (Fault("disk", draw.choice(("full", "stuck")), length_ns=draw.randrange(20 * SECOND)),),
        (Fault("link", "hang", at_ns=late, length_ns=30 * SECOND),),
        (Fault("everyone", "crash", at_ns=late + 5 * SECOND),),
    )
    return Plan(
        seed=seed,
        migration=draw.choice(("", "", "planned")),
        spare_nodes=draw.choice((2, 3, 5)),
        checkpoint_ns=draw.choice((1, 3)) * SECOND,
        faults=(*lost, *draw.choice(others)),
        spoiled=draw.random() < 0.25,
    )


def _dead_store(seed: int, draw: random.Random) -> Plan:
    """The store of a generation dies after it was opened: at the start, in a move, or while the
    ranks train and need it no more."""
    phase = draw.choice(("", "RESERVE", "HOLD", "COPY"))
    fault = Fault("store", "crash", phase=phase, delay_ns=draw.randrange(2 * SECOND))
    from_start = not phase and draw.random() < 0.5
    return Plan(seed=seed, migration="unplanned", from_start=from_start, faults=(fault,))


def _stale_stall(seed: int, draw: random.Random) -> Plan:
    """A rank was said to stand still and goes on, which is said too, or lost with its stream;
    later another one hangs."""
    kind = draw.choice(("stalled", "stalled-lost"))
    faults = (
        Fault("detector", kind, at_ns=SECOND, length_ns=SECOND),
        Fault("bystander", "hang", at_ns=draw.randrange(6 * SECOND, 10 * SECOND)),
    )
    return Plan(seed=seed, migration="", faults=faults)


def _refused(seed: int, draw: random.Random) -> Plan:
    """Nothing is wrong but a process that cannot be started."""
    fault = Fault("provider", "refuse", at_ns=draw.randrange(SECOND // 2), length_ns=10 * SECOND)
    return Plan(seed=seed, faults=(fault,))


def _long_steps(seed: int, draw: random.Random) -> Plan:
    """A rank is to be moved, and the next boundary is further away than a move may wait for it."""
    faults = (
        Fault("operator", "migrate", at_ns=draw.randrange(10 * SECOND)),
        Fault("waiting", "freeze", at_ns=20 * SECOND, length_ns=60 * SECOND),
    )
    count = draw.choice((1, 1, 2))  # with one that is stopped while it waits for the others
    return Plan(seed=seed, migration="", step_ns=100 * SECOND, faults=faults[:count])


def _cut_off(seed: int, draw: random.Random) -> Plan:
    """The orchestrator is restarted while it cannot reach one node, whose ranks train on."""
    faults = (
        Fault("link", "hang", at_ns=draw.randrange(SECOND), length_ns=40 * SECOND),
        Fault("orchestrator", "crash", at_ns=2 * SECOND, length_ns=SECOND),
    )
    return Plan(seed=seed, migration="", faults=faults)


def _cut_off_twice(seed: int, draw: random.Random) -> Plan:
    """A node is cut off from everybody and given up; before it must have ended its ranks nobody
    reaches the orchestrator, the node is back, and all train on together."""
    faults = (
        Fault("partition", "hang", at_ns=draw.randrange(SECOND), length_ns=45 * SECOND),
        Fault(
            "orchestrator",
            "blackout",
            at_ns=draw.randrange(25 * SECOND, 33 * SECOND),
            length_ns=draw.randrange(40, 60) * SECOND,
        ),
    )
    return Plan(seed=seed, migration="", faults=faults)


def _last_holders(seed: int, draw: random.Random) -> Plan:
    """A node is cut off and given up; before it must have ended its ranks, which hold, all others
    are lost: they wait in a fence, and nobody reaches the orchestrator."""
    faults = (
        Fault(
            "partition",
            "crash",
            at_ns=draw.randrange(SECOND),
            length_ns=draw.randrange(60, 80) * SECOND,
        ),
        Fault(
            "orchestrator",
            "blackout",
            at_ns=draw.randrange(11 * SECOND, 24 * SECOND),
            length_ns=draw.randrange(35, 60) * SECOND,
        ),
    )
    checkpoint_ns = draw.choice((0, 0, 3 * SECOND))
    return Plan(seed=seed, per_node=4, migration="", checkpoint_ns=checkpoint_ns, faults=faults)


def _come_back(seed: int, draw: random.Random) -> Plan:
    """Ranks have lost their buddies and got others. Then nobody reaches the orchestrator, and the
    agents come back one after the other."""
    length = draw.randrange(6, 9) * SECOND
    away = draw.randrange(12 * SECOND, 20 * SECOND)
    faults = (
        Fault("data", "cut", at_ns=draw.randrange(SECOND), length_ns=length),
        Fault("orchestrator", "blackout", at_ns=away, length_ns=draw.randrange(40, 60) * SECOND),
    )
    return Plan(seed=seed, migration="", parity=draw.random() < 0.5, faults=faults)


def _lost_swap(seed: int, draw: random.Random) -> Plan:
    """A move is committed and nobody hears of it: all streams are cut, the orchestrator is
    restarted, and gives up waiting for its agents."""
    crash = draw.randrange(20 * SECOND, 30 * SECOND)
    faults = (
        Fault("orchestrator", "blackout", phase="REWIRE", length_ns=45 * SECOND),
        Fault("orchestrator", "crash", phase="REWIRE", delay_ns=crash, length_ns=SECOND),
    )
    return Plan(seed=seed, migration=draw.choice(("planned", "unplanned")), faults=faults)


def _hung_asking(seed: int, draw: random.Random) -> Plan:
    """A rank that is cut off with its node waits for another buddy, and comes to a stop."""
    length = draw.randrange(22, 30) * SECOND
    at = draw.randrange(12 * SECOND, 20 * SECOND)
    faults = (
        Fault("partition", "crash", at_ns=draw.randrange(SECOND), length_ns=length),
        Fault("asking", draw.choice(("hang", "freeze")), at_ns=at, length_ns=300 * SECOND),
    )
    return Plan(seed=seed, migration="", faults=faults)


def _parity(seed: int, draw: random.Random) -> Plan:
    """Ranks have shards. Nodes are lost, one after the other: with ranks, with parities, and
    something else besides; or a story that is hard on buddies is told of them."""
    if draw.random() < 0.3:
        story = draw.choice((_lost_swap, _cut_off_twice, _fall_back))
        return replace(story(seed, draw), parity=True)
    actor, kind = draw.choice((("agent", "crash"), ("agent", "vanish"), ("bystander", "crash")))
    faults = (
        Fault(actor, kind, at_ns=draw.randrange(3 * SECOND, 6 * SECOND)),
        Fault("agent", "crash", at_ns=draw.randrange(10 * SECOND, 40 * SECOND)),
        Fault(
            draw.choice(("partition", "link", "data", "orchestrator", "buddy", "echo")),
            draw.choice(("crash", "hang")),
            at_ns=draw.randrange(40 * SECOND),
            length_ns=draw.randrange(20 * SECOND),
        ),
    )
    count = draw.choice((1, 2, 2, 3))
    migration = draw.choice(("", "planned", "unplanned"))
    return Plan(
        seed=seed, parity=True, spare_nodes=3, spares=4, migration=migration, faults=faults[:count]
    )


def _parity_start(seed: int, draw: random.Random) -> Plan:
    """Ranks have shards, and some of them cannot be started at home. Nothing moves afterwards."""
    fault = Fault("provider", "node", at_ns=draw.randrange(2 * SECOND))
    return Plan(seed=seed, migration="", missing=draw.randrange(4), parity=True, faults=(fault,))


def _rebalance(seed: int, draw: random.Random) -> Plan:
    """A node is lost, its ranks go to nodes that have their own, and then there is another node;
    ranks go there when it is quiet. Something may happen meanwhile."""
    at = draw.randrange(20, 60) * SECOND
    others = (
        Fault("orchestrator", draw.choice(("crash", "effect")), at_ns=at),
        Fault("bystander", "crash", at_ns=at),
        Fault("spare", "crash", phase=draw.choice(PHASES), delay_ns=draw.randrange(SECOND)),
        Fault("spare-node", "crash", at_ns=at),
    )
    faults = (
        Fault("agent", "crash", at_ns=draw.randrange(2 * SECOND)),
        Fault("provider", "node", at_ns=draw.randrange(5, 30) * SECOND),
        *draw.choice(((), (), *((one,) for one in others))),
    )
    spares = draw.choice((0, 1, 2))
    plan = Plan(seed=seed, migration="", spare_nodes=0, spares=spares, faults=faults)
    return replace(plan, extra=1, rebalance=True)


def _straggler(seed: int, draw: random.Random) -> Plan:
    """A place is slow, and whichever rank is there is moved. Something else may happen meanwhile,
    or there is no spare, or the next place is slow, too."""
    slow = Fault("place", "drag", at_ns=draw.randrange(3 * SECOND), length_ns=60 * SECOND)
    at = draw.randrange(60 * SECOND)
    others = (
        Fault("orchestrator", draw.choice(("crash", "effect")), at_ns=at),
        Fault("bystander", "crash", at_ns=at),
        Fault("agent", "crash", at_ns=at),
        Fault("place", "drag", at_ns=at, length_ns=60 * SECOND),
    )
    more = draw.choice(((), (), others[:1], others[1:2], others[2:3], others[3:]))
    plan = Plan(seed=seed, migration="", step_ns=200 * MS, faults=(slow, *more))
    lonely = draw.random() < 0.1
    return replace(plan, stragglers="move", spares=0 if lonely else 2)


def _dark_groups(seed: int, draw: random.Random) -> Plan:
    """Connections break although everybody lives, and for a minute or two none can be built."""
    reset = Fault("new-groups", "reset", phase="COMMIT")
    length = draw.randrange(60, 150) * SECOND
    dark = Fault("data", "cut", phase="REWIRE", delay_ns=draw.randrange(SECOND), length_ns=length)
    return Plan(seed=seed, migration=draw.choice(MIGRATIONS), faults=(reset, dark))


def _divergence(seed: int, draw: random.Random) -> Plan:
    """Witnesses find that numbers differ, while nothing else happens or in the middle of a move;
    somebody says what to do, or the policy does, or nobody. Something else may break meanwhile."""
    first = draw.randrange(3 * SECOND)
    at = first + draw.randrange(20 * SECOND)
    others = (
        (),
        (Fault("orchestrator", draw.choice(("crash", "record", "effect")), at_ns=at),),
        (Fault("bystander", draw.choice(("crash", "hang")), at_ns=at),),
        (Fault("agent", "crash", at_ns=at), Fault("everyone", "crash", at_ns=at + 5 * SECOND)),
        (Fault("link", draw.choice(("crash", "hang")), at_ns=at, length_ns=30 * SECOND),),
    )
    asked = (Fault("operator", "proceed", at_ns=at + draw.randrange(20 * SECOND)),)
    policies: tuple[Policy, ...] = ("hold", "hold", "hold", "fall-back", "continue")
    policy = draw.choice(policies)
    ranks, per_node = draw.choice(((8, 2), (12, 3)))
    plan = Plan(
        seed=seed,
        ranks=ranks,
        per_node=per_node,
        migration=draw.choice(("", "", "planned", "unplanned")),
        faults=(
            Fault("witness", "differ", at_ns=first),
            *draw.choice(others),
            *(asked if policy == "hold" and draw.random() < 0.6 else ()),
        ),
    )
    return replace(plan, on_divergence=policy, checkpoint_ns=SECOND if policy == "fall-back" else 0)


def _stop(seed: int, draw: random.Random) -> Plan:
    """The job is asked to end, and writes a checkpoint first if it can."""
    at = draw.randrange(1, 6) * SECOND
    soon = at + draw.randrange(3 * SECOND)
    others = (
        (),
        (),
        (Fault("orchestrator", draw.choice(("crash", "effect")), at_ns=soon),),
        (Fault("bystander", draw.choice(("crash", "hang")), at_ns=soon),),
        (Fault("disk", draw.choice(("full", "stuck")), length_ns=60 * SECOND),),
    )
    faults = (Fault("operator", "stop", at_ns=at), *draw.choice(others))
    migration = draw.choice(("", "", "planned", "unplanned"))
    saves = draw.choice((0, 30 * SECOND, 30 * SECOND, SECOND))
    return Plan(seed=seed, migration=migration, faults=faults, checkpoint_ns=saves)


RARE: dict[str, Callable[[int, random.Random], Plan]] = {
    "full-disk": _full_disk,
    "no-spare": _no_spare,
    "absent-node": _absent_node,
    "late-attach": _late_attach,
    "slow-model": _slow_model,
    "odd-groups": _odd_groups,
    "bad-slot": _bad_slot,
    "long-taint": _long_taint,
    "taken-back": _taken_back,
    "dark-resume": _dark_resume,
    "dead-store": _dead_store,
    "stale-stall": _stale_stall,
    "refused": _refused,
    "long-steps": _long_steps,
    "cut-off": _cut_off,
    "cut-off-twice": _cut_off_twice,
    "lost-swap": _lost_swap,
    "hung-asking": _hung_asking,
    LAST_HOLDERS: _last_holders,
    PARITY: _parity,
    PARITY_START: _parity_start,
    COME_BACK: _come_back,
    FALL_BACK: _fall_back,
    STRAGGLER: _straggler,
    REBALANCE: _rebalance,
    DARK_GROUPS: _dark_groups,
    DIVERGENCE: _divergence,
    STOP: _stop,
}
