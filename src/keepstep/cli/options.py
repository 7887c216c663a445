"""Options of a job, once for every command that starts one.

`JOB` is the table of click options and `JobOptions` what they become; `keepstep run`, `slurm
launch` and `kubernetes launch` take all of it and add only what says where nodes come from. So an
option that is added here is known to each of them, with one help text and one check (jobspec.py).
What a launcher cannot honour it refuses by name (`refuse`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar

import click
import msgspec

from keepstep.cli.checkpoints import AUTO
from keepstep.errors import UsageError

STALL_S = 300.0
QUIET_S = 600.0

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=msgspec.Struct)
RANKS, FAULTS, CHECKPOINTS, LAUNCH = "Ranks and spares", "Faults", "Checkpoints", "Launch"
NODES, FURTHER = "Nodes", "Further nodes from the scheduler"


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about a job. It is the table of the options and adds
    nothing to it: hence so many."""

    nproc: int
    spares: int
    spare_nodes: int
    understudies: int
    redundancy: Literal["auto", "buddy", "parity", "off"]
    within: tuple[str, ...]
    mode: Literal["aware", "transparent"]
    stall_s: float
    stragglers: Literal["off", "report", "move"]
    straggler_factor: float
    straggler_s: float
    rebalance: Literal["never", "when-free"]
    quiet_s: float
    on_divergence: Literal["hold", "fall-back", "continue"]
    inject: tuple[str, ...]
    resume: str | None
    checkpoint_dir: str | None
    interval: str
    mttf_h: float | None
    orchestrator: str | None
    net: Literal["auto", "tcp"] | None
    log_dir: str | None
    job_id: str | None
    quiet: bool
    module: bool
    script: str
    args: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The script as it will be run."""
        return [*(["-m"] if self.module else []), self.script, *self.args]


class GroupedOption(click.Option):
    """An option that `--help` prints under a heading."""

    def __init__(self, *words: Any, group: str = "", **more: Any) -> None:
        super().__init__(*words, **more)
        self.group = group


def _with_hyphens(word: str) -> str:
    return word.replace("_", "-")


class LaunchCommand(click.Command):
    """Prints its options in groups, takes names with underscores, as torchrun does, and `--net`
    alone as `--net=auto`: click would take the script's name for its value."""

    def __init__(self, *words: Any, **more: Any) -> None:
        more["context_settings"] = {
            "allow_interspersed_args": False,
            "token_normalize_func": _with_hyphens,
        }
        super().__init__(*words, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name: p for p in self.params for name in p.opts if isinstance(p, click.Option)}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            option = options.get(_with_hyphens(args[at]))
            if args[at] == "--net":
                args = [*args[:at], "--net=auto", *args[at + 1 :]]
            elif isinstance(option, click.Option) and not option.is_flag:
                at += 1
            at += 1
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx) if isinstance(one, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(one, "group", LAUNCH), []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def grouped(group: str, *words: str, **more: Any) -> Callable[[F], F]:
    """A click option under a heading."""
    return click.option(*words, cls=GroupedOption, group=group, **more)


JOB = (
    grouped(
        RANKS, "--nproc-per-node", "nproc", type=int, default=1, show_default=True,
        help="Ranks on each node.",
    ),
    grouped(
        RANKS, "--spares", type=int, default=0, show_default=True, help="Warm spares."
    ),
    grouped(
        RANKS, "--spare-nodes", type=int, default=0, show_default=True,
        help="More nodes, all of whose slots are warm spares.",
    ),
    grouped(
        RANKS, "--understudies", type=int, default=0, show_default=True, metavar="N",
        help="Beside each spare, N processes built ahead as presumed ranks.",
    ),
    grouped(
        RANKS, "--redundancy", type=click.Choice(("auto", "buddy", "parity", "off")),
        default="auto", show_default=True,
        help="Keep tensors that no other rank has in the memory of another node.",
    ),
    grouped(
        RANKS, "--within", multiple=True, metavar="LABEL",
        help="Ranks stay in the domain of this label: rack, switch, nvlink, or one of `keepstep "
        "agent --label` (repeatable).",
    ),
    grouped(
        RANKS, "--mode", type=click.Choice(("aware", "transparent")), default="aware",
        show_default=True,
        help="transparent: SCRIPT knows nothing of Keepstep; its processes move as a whole.",
    ),
    grouped(
        FAULTS, "--stall-timeout", "stall_s", type=float, default=STALL_S, show_default=True,
        metavar="S", help="A step that stands still that long is a hang.",
    ),
    grouped(
        FAULTS, "--stragglers", type=click.Choice(("report", "move", "off")), default="report",
        show_default=True, help="A rank that holds the others up: say so, or move it to a spare.",
    ),
    grouped(
        FAULTS, "--straggler-factor", type=float, default=1.5, show_default=True, metavar="X",
        help="It takes X times the median of the ranks for what it does alone.",
    ),
    grouped(
        FAULTS, "--straggler-after", "straggler_s", type=float, default=60.0, show_default=True,
        metavar="S", help="And has done so for so long.",
    ),
    grouped(
        FAULTS, "--rebalance", type=click.Choice(("never", "when-free")), default="never",
        show_default=True,
        help="Move ranks that are not where they belong to better places, at a quiet time.",
    ),
    grouped(
        FAULTS, "--quiet-after", "quiet_s", type=float, default=QUIET_S, show_default=True,
        metavar="S", help="It is quiet when nothing has happened for so long.",
    ),
    grouped(
        FAULTS, "--on-divergence", type=click.Choice(("hold", "fall-back", "continue")),
        default="hold", show_default=True,
        help="Numbers differ between ranks: hold, go back to a checkpoint, or train on regardless.",
    ),
    grouped(
        FAULTS, "--inject", multiple=True, metavar="SPEC",
        help="Inject a fault, e.g. kill:rank=2,step=5,point=in_backward (repeatable).",
    ),
    grouped(
        CHECKPOINTS, "--resume", metavar="DIR",
        help="Start from a checkpoint, or the newest one in DIR.",
    ),
    grouped(
        CHECKPOINTS, "--checkpoint-dir", metavar="DIR",
        help="Write checkpoints here from time to time; a loss that nothing else covers goes back "
        "to one.",
    ),
    grouped(
        CHECKPOINTS, "--checkpoint-interval", "interval", default=AUTO, show_default=True,
        metavar="S|auto", help="Seconds between them; auto: from what they cost and --mttf.",
    ),
    grouped(
        CHECKPOINTS, "--mttf", "mttf_h", type=float, default=None, metavar="HOURS",
        help="Mean time between failures of the job [default: 6000 / nodes].",
    ),
    grouped(
        LAUNCH, "--orchestrator", metavar="URL|ID[,...]",
        help="Use this orchestrator (one of these), do not embed one.",
    ),
    grouped(
        LAUNCH, "--net", type=click.Choice(("auto", "tcp")), default=None, metavar="[=tcp]",
        help="Collectives over Keepstep's network plugin; tcp: even where RDMA devices are.",
    ),
    grouped(
        LAUNCH, "--log-dir", metavar="DIR",
        help="Logs and checkpoints, where all nodes see them [default: KEEPSTEP_HOME/jobs/<job>].",
    ),
    grouped(LAUNCH, "--job-id", metavar="ID", help="Name the job instead of inventing an id."),
    grouped(LAUNCH, "--quiet", "-q", is_flag=True, help="Only ranks' output and errors."),
    grouped(
        LAUNCH, "-m", "--module", is_flag=True,
        help="SCRIPT is a module name, as in python -m.",
    ),
    click.argument("script"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
)  # fmt: skip


def with_options(table: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """A decorator that adds all of `table`, in this order."""

    def decorate(command: F) -> F:
        for one in reversed(table):
            command = one(command)
        return command

    return decorate


job_options = with_options(JOB)


def take(kind: type[S], given: MutableMapping[str, Any]) -> S:
    """The fields of `kind` out of what click has found."""
    return kind(**{name: given.pop(name) for name in kind.__struct_fields__})


def refuse(command: str, given: JobOptions, cannot: Mapping[tuple[str, str], str]) -> None:
    """`cannot`: an option and the value that `command` cannot honour -> what does."""
    for (name, value), hint in cannot.items():
        if str(getattr(given, name)) == value:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value} is not possible with `{command}`", hint=hint)
