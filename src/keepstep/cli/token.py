"""`keepstep token`: what lets other machines in. Works on the orchestrator's own files."""

from __future__ import annotations

import re
import sys
import time

import click

from keepstep.adapters.identity.authority import CA_CERTIFICATE, Authority
from keepstep.adapters.identity.tokens import Kept, Role, Tokens
from keepstep.cli import show
from keepstep.cli.home import home
from keepstep.cli.operate import json_option
from keepstep.core.operator import check_node
from keepstep.errors import UsageError

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TTL_S_MAX = 366 * 86400


def orchestrator_option(command: click.decorators.FC) -> click.decorators.FC:
    text = "Which one, when several have listened beyond loopback."
    return click.option("--orchestrator", metavar="ID", help=text)(command)


@click.group()
def token() -> None:
    """Let other machines in."""


@token.command()
@orchestrator_option
@click.option("--ttl", default="1h", show_default=True, help="How long it is good, e.g. 30m, 7d.")
@click.option("--node", metavar="NAME", default="", help="Only for a node of this name.")
@click.option("--operator", is_flag=True, help="For `keepstep run` and REST: may do everything.")
@json_option
def create(orchestrator: str | None, ttl: str, node: str, operator: bool, as_json: bool) -> None:
    """Print a new token: for nodes that join, or with --operator for people and programs."""
    if operator and node:
        raise UsageError("--operator and --node contradict each other")
    if node:
        check_node(node, 1)
    role: Role = "operator" if operator else "join"
    authority = _authority(orchestrator)
    text, kept = Tokens(authority.path).create(
        authority.fingerprint,
        role=role,
        now_ns=time.time_ns(),
        ttl_ns=seconds(ttl) * 10**9,
        node=node,
    )
    if as_json:
        show.print_json({**_shown(kept), "token": text})
    else:
        sys.stdout.write(f"{text}\n")


@token.command("list")
@orchestrator_option
@json_option
def list_(orchestrator: str | None, as_json: bool) -> None:
    """List tokens, without what they are made of."""
    kept = Tokens(_authority(orchestrator).path).all()
    if as_json:
        show.print_json([_shown(one) for one in kept])
        return
    for one in kept:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.expires_at_ns / 1e9))
        state = "expired" if one.expires_at_ns < time.time_ns() else f"until {until}"
        sys.stdout.write(f"{one.id}  {one.role}  {state}  {one.node}".rstrip() + "\n")


@token.command()
@click.argument("id_", metavar="ID")
@orchestrator_option
def revoke(id_: str, orchestrator: str | None) -> None:
    """Make a token worthless. Nodes that have joined with it stay."""
    Tokens(_authority(orchestrator).path).remove(id_)
    show.words(f"token {id_} is revoked")


def seconds(ttl: str) -> int:
    match = re.fullmatch(r"(\d{1,9})([smhd])", ttl.strip())
    value = int(match[1]) * UNITS_S[match[2]] if match else 0
    if not 0 < value <= TTL_S_MAX:
        raise UsageError(f"--ttl {ttl} is no time", hint="for example 30m, 12h or 7d; at most 366d")
    return value


def _shown(kept: Kept) -> dict[str, object]:
    return {
        "id": kept.id,
        "role": kept.role,
        "node": kept.node,
        "expires_at_ns": kept.expires_at_ns,
    }


def _authority(named: str | None) -> Authority:
    found = sorted(path.parent for path in (home() / "authorities").glob(f"*/{CA_CERTIFICATE}"))
    if named is not None:
        found = [path for path in found if path.name == named]
    if len(found) == 1:
        return Authority.open(found[0])
    if not found:
        raise UsageError(
            f"no orchestrator {named or ''} of {home()} has listened beyond loopback".replace(
                "  ", " "
            ),
            hint="start it first: keepstep orchestrator --id NAME --host ADDRESS",
        )
    names = ", ".join(path.name for path in found)
    raise UsageError(f"{len(found)} orchestrators are there", hint=f"--orchestrator: {names}")
