"""`keepstep doctor`: what a machine can do, before a job depends on it."""

from __future__ import annotations

import click
import msgspec

from keepstep.agent import kernel_namespaces, preflight
from keepstep.cli import find, operate, show
from keepstep.cli.surroundings import home
from keepstep.errors import UsageError
from keepstep.model.agent_messages import Examined

ROOM_MIN = 1 << 28  # bytes: less than an empty process of torch needs


class DoctorLine(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    found: str
    good: bool


def examined(one: Examined) -> list[DoctorLine]:
    """What it takes to take images of processes there, and to wake them."""
    host = one.host
    return [
        DoctorLine(what="CRIU", found=host.criu or "missing", good=bool(host.criu)),
        DoctorLine(what="kernel", found=host.kernel, good=True),
        DoctorLine(
            what="processor", found=f"{host.machine}, {len(host.features)} features", good=True
        ),
        DoctorLine(what="free memory", found=f"{one.memory >> 20} MiB", good=one.memory > ROOM_MIN),
        DoctorLine(what="free for images", found=f"{one.room >> 20} MiB", good=one.room > ROOM_MIN),
        *(
            DoctorLine(what="GPU", found=f"{gpu.name}, {gpu.memory >> 30} GiB", good=True)
            for gpu in host.gpus
        ),
        *([DoctorLine(what="GPU", found=host.gpu_trouble, good=False)] if host.gpu_trouble else []),
        *(DoctorLine(what="trouble", found=trouble, good=False) for trouble in host.trouble),
    ]


def here() -> list[DoctorLine]:
    memory, room = preflight.free()
    checks = examined(Examined(number=0, host=preflight.host(), memory=memory, room=room))
    trouble = kernel_namespaces.trouble()
    found = trouble or "can be made"
    return [*checks, DoctorLine(what="namespaces", found=found, good=not trouble)]


def there(which: find.Which, node: str) -> list[DoctorLine]:
    """A node of a live job, and whether ranks of the other nodes could come to it."""
    job = find.one_job(home(), which)
    client = job.client()

    def ask(name: str) -> Examined:
        return client.get(f"/v1/jobs/{job.view.job}/nodes/{name}/host", Examined)

    one = ask(node)
    checks = examined(one)
    for other in sorted({one.node for one in job.view.ranks} - {node}):
        theirs = ask(other).host
        wrong = preflight.compare_hosts(theirs, msgspec.structs.replace(one.host, trouble=[]))
        if theirs.gpus:
            alone = msgspec.structs.replace(one.host, gpu_trouble="")
            wrong += preflight.compare_gpus(theirs, alone)
        found = "; ".join(wrong) or "alike"
        checks.append(DoctorLine(what=f"ranks of {other}", found=found, good=not wrong))
    return checks


@click.command()
@operate.which_options
@click.option(
    "--transparent", is_flag=True, help="Can processes be moved as a whole, from and to there?"
)
@operate.json_option
@click.argument("node", default="")
def doctor(which: find.Which, transparent: bool, as_json: bool, node: str) -> None:
    """Look at NODE of a live job, or at this machine, ahead of time. Exit code 1: not good."""
    if not transparent:
        raise UsageError("nothing to look at", hint="keepstep doctor --transparent")
    checks = there(which, node) if node else here()
    if as_json:
        show.print_json(checks)
    else:
        show.print_checks([(one.what, one.found, one.good) for one in checks])
    if not all(one.good for one in checks):
        raise SystemExit(1)
