"""What a world is like, drawn from its seed: size, speeds, and what will go wrong when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from keepstep.model.job import JobSpec, NodeSpec
from keepstep.model.schedule import Policy, Provision
from keepstep.sim.times import MS, SECOND


@dataclass(frozen=True, slots=True)
class Fault:
    """`actor` suffers `kind`. When: in `phase` of a migration, or `at_ns` after the start of
    training; `delay_ns` later in either case."""

    actor: str
    kind: str
    phase: str = ""
    at_ns: int = 0
    delay_ns: int = 0
    length_ns: int = 0
    nth: int = 1  # COMMIT only: the how manieth of this world


FOREVER_NS = 1 << 60
SAVED = "/saved/j"
PROCESSES = ("victim", "source", "spare", "bystander", "understudy", "waiting", "asking")
QUIET_NS = 20 * SECOND
GRACE_NS = 15 * SECOND
STRAGGLER_NS = 10 * SECOND
HOLD_NS = 60 * SECOND  # for a divergence
CRASHES = ("crash", "record", "effect", "full")


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a world is made from. It is a table of facts, hence so many, each with its
    ordinary value: a story says only what is special about it."""

    seed: int
    ranks: int = 8
    per_node: int = 2
    spare_nodes: int = 2
    spares: int = 2
    understudies: int = 0
    parity: bool = False  # ranks have shards, kept by their agents and a parity
    stall_ns: int = 10 * SECOND
    progress_ns: int = SECOND
    step_ns: int = 300 * MS
    jitter_ns: int = 800_000  # of every message
    copy_ns: int = 500 * MS
    notice_ns: int = SECOND
    late_nodes: tuple[int, ...] = ()  # spare nodes that join later, after so many ns
    missing: int = -1  # this node never joins
    model_ns: int = 0  # from a rank's first rendezvous to attach
    from_start: bool = False  # faults come while the ranks are being started
    resume_tick: int = 0  # the job starts from a checkpoint of this tick
    checkpoint_ns: int = 0  # time between periodic checkpoints; 0: there are none
    spoiled: bool = False  # the first checkpoint that is read with another one before it is damaged
    answers: tuple[str, ...] = ()  # of a scheduler: give, refuse, late, silent; (): there is none
    pool: int = 0  # nodes without ranks to keep, by asking the scheduler
    racks: int = 0  # nodes stand in so many, and ranks stay within theirs
    extra: int = 0  # slots of each node beyond those for its ranks
    rebalance: bool = False
    stragglers: Literal["report", "move"] = "report"
    on_divergence: Literal["hold", "fall-back", "continue"] = "hold"
    migration: str = "unplanned"  # planned, pre-emptive, unplanned: what is going on
    faults: tuple[Fault, ...] = field(default_factory=tuple)
    job: str = "j"
    priority: int = 0
    preempts: bool = False  # it may take nodes from jobs of lower priority
    beside: tuple[Plan, ...] = ()  # other jobs of the same orchestrator (play/several.py)
    free: int = 0  # places that nobody uses; only with others

    @property
    def only_processes(self) -> bool:
        """Nothing but processes, streams and the orchestrator is hurt: nobody has an excuse for
        fencing a healthy rank."""
        harmless = ("crash", "hang", "pause", "drain", "migrate", "drain-spare")
        processes = ("victim", "source", "spare", "bystander", "operator")
        return not self.from_start and all(
            (fault.actor in processes and fault.kind in harmless)
            or (fault.actor in ("link", "orchestrator") and fault.kind in CRASHES)
            for fault in self.faults
        )

    @property
    def streams_well(self) -> bool:
        """Whatever is said is heard at once: neither the orchestrator nor a node is hurt."""
        actors = {fault.actor for fault in self.faults}
        return self.jitter_ns <= 30 * MS and actors <= {*PROCESSES, "operator", "provider"}

    @property
    def pause_ns_max(self) -> int:
        """How long training may stand still when only one thing goes wrong."""
        roomy = self.spare_nodes >= 2 and not self.late_nodes and self.missing < 0
        if len(self.faults) != 1 or self.from_start or not roomy or self.jitter_ns > MS:
            return FOREVER_NS
        (fault,) = self.faults
        if fault.actor == "data":
            return fault.length_ns + 25 * SECOND
        crashes = fault.kind == "crash" and fault.actor in (*PROCESSES, "store")
        refused = (fault.actor, fault.kind) == ("store", "refuse")
        return 12 * SECOND + 4 * self.copy_ns if crashes or refused else FOREVER_NS

    @property
    def start_ns_max(self) -> int:
        """A node without ranks is waited for two seconds, one with ranks for a minute. A spare
        that never parks is given up after 300 s."""
        if self.missing < 0 or self.from_start:
            return 500 * SECOND
        return 80 * SECOND if self.missing < self.rank_nodes else 10 * SECOND

    @property
    def rank_nodes(self) -> int:
        return self.ranks // self.per_node

    @property
    def slots(self) -> int:
        return self.per_node + self.extra

    def place(self, node: str) -> str:
        return f"p-{node}" if self.job == "j" else f"p-{self.job}-{node}"

    def spec(self) -> JobSpec:
        names = [f"n{index}" for index in range(self.rank_nodes + self.spare_nodes)]
        places = {name: self.place(name) for name in names}
        provision = Provision(
            scheduler="sim",
            places=places,
            kinds=["idle", "preempt"] if self.preempts else ["idle"],
            back_after_ns=1,
        )
        return JobSpec(
            job=self.job,
            world=self.ranks,
            local_world=self.per_node,
            nodes=[NodeSpec(name=name, slots=self.slots) for name in names],
            spares=self.spares,
            understudies=self.understudies,
            redundancy="parity" if self.parity else "auto",
            stall_timeout_ns=self.stall_ns,
            script=["train.py"],
            directory="/jobs/j",
            resume="/jobs/i/checkpoint" if self.resume_tick else "",
            checkpoints=SAVED if self.checkpoint_ns else "",
            checkpoint_interval_ns=self.checkpoint_ns,
            provision=provision if self.answers else None,
            policy=Policy(
                priority=self.priority,
                grace_ns=GRACE_NS,
                dedicated=self.pool,
                within=["rack"] if self.racks else [],
                rebalance="when-free" if self.rebalance else "never",
                quiet_ns=QUIET_NS,
                stragglers=self.stragglers,
                straggler_after_ns=STRAGGLER_NS,
                on_divergence=self.on_divergence,
                hold_ns=HOLD_NS,
            ),
        )
