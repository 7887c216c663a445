"""The only place where a command line becomes a JobSpec.

`keepstep run`, `slurm launch` and `kubernetes launch` come here with the options that they have in
common, the number of nodes with ranks and, where a scheduler gives the nodes, what it may give.
The words are checked here, before anything is asked for; what they say together is checked by
`core.operator.check_spec`, as it is for a JobSpec that comes by REST.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from keepstep import native
from keepstep.cli.checkpoints import check_periodic, check_resume
from keepstep.cli.layout import JobLayout, check_counts, compose_job_id, lay_out, parse_inject
from keepstep.cli.options import JobOptions
from keepstep.core.operator import check_spec
from keepstep.errors import UsageError
from keepstep.model.job import InjectSpec, JobSpec
from keepstep.model.schedule import Policy, Provision
from keepstep.native import plugin
from keepstep.net.environment import MODE, check_mode
from keepstep.orchestrator.registry import check_id, prepare_home


@dataclass(frozen=True)
class Checked:
    """A command line that is right as far as it can be known without a look at the cluster."""

    options: JobOptions
    layout: JobLayout
    inject: list[InjectSpec]
    policy: Policy


def check(
    options: JobOptions, nodes: int, *, watched: bool, policy: Policy | None = None
) -> Checked:
    """`nodes`: how many get ranks. `watched`: somebody at a terminal sees the job. `policy`: what
    the launcher's own options say."""
    check_counts(
        nproc=options.nproc,
        spares=options.spares,
        spare_nodes=options.spare_nodes,
        understudies=options.understudies,
    )
    check_script(options.script, options.module)
    stall_ns = nanoseconds("--stall-timeout", options.stall_s)
    said = msgspec.structs.replace(
        policy or Policy(),
        within=list(options.within),
        quiet_ns=nanoseconds("--quiet-after", options.quiet_s, zero=True),
        rebalance=options.rebalance,
        stragglers=options.stragglers,
        straggler_factor=options.straggler_factor,
        straggler_after_ns=nanoseconds("--straggler-after", options.straggler_s),
        on_divergence=options.on_divergence,
        # Somebody at a terminal sees a divergence, and decides; where nobody looks, a job must not
        # stand for ever.
        hold_ns=0 if watched else stall_ns,
    )
    return Checked(
        options=options,
        layout=lay_out(
            local_nodes=nodes,
            nproc=options.nproc,
            spares=options.spares,
            spare_nodes=options.spare_nodes,
        ),
        inject=[parse_inject(text, f"inject-{i}") for i, text in enumerate(options.inject, 1)],
        policy=said,
    )


def build(checked: Checked, home: Path, provision: Provision | None = None) -> JobSpec:
    """Makes what the job needs on this machine: folders, and native parts."""
    options, layout = checked.options, checked.layout
    if options.net is not None:
        if provision is None:  # else this machine is none of the job's; each agent looks at its own
            check_mode(options.net)
        plugin.ensure()
    prepare_home(home)
    job = options.job_id or new_job_id(options.script)
    check_id(job)
    resume = check_resume(options.resume, layout.world)
    periodic = check_periodic(options.checkpoint_dir, options.interval, options.mttf_h, job, resume)
    directory = Path(options.log_dir).absolute() if options.log_dir else home / "jobs" / job
    spec = JobSpec(
        job=job,
        world=layout.world,
        local_world=layout.local_world,
        nodes=layout.nodes,
        spares=layout.spares,
        understudies=options.understudies,
        redundancy=options.redundancy,
        mode=options.mode,
        stall_timeout_ns=nanoseconds("--stall-timeout", options.stall_s),
        script=options.words,
        env={MODE: options.net} if options.net is not None else {},
        directory=str(directory),
        resume=resume,
        checkpoints=periodic.directory,
        checkpoint_interval_ns=periodic.interval_ns,
        mttf_ns=periodic.mttf_ns,
        inject=checked.inject,
        provision=provision,
        policy=checked.policy,
    )
    check_spec(spec)
    native.store_host_path()  # builds once per torch; here, where the user sees why it takes time
    return spec


def nanoseconds(name: str, seconds: float, *, zero: bool = False) -> int:
    """`zero`: that is possible too."""
    if not (0 < seconds < 1e9 or (zero and seconds == 0)):
        least = "not below 0" if zero else "above 0"
        raise UsageError(f"{name} is {seconds:g}: it must be {least}", hint="give it in seconds")
    return int(seconds * 1e9)


def check_script(script: str, module: bool) -> None:
    if module:
        top = script.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path.pop(0)
        if not found:
            raise UsageError(f"no module named {script}", hint="run it where python -m finds it")
        return
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"script {script} {what}", hint="the script comes after all options")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {script} cannot be read")


def new_job_id(script: str) -> str:
    return compose_job_id(script, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2))
