"""`keepstep token`: what lets other machines in. Works where the orchestrator keeps it: in files of
its own, or in the store that it shares with others."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import click

from keepstep.adapters.identity.authority import CA_CERTIFICATE, Authority, fingerprint
from keepstep.adapters.identity.tokens import Folder, KeptToken, Role, Tokens
from keepstep.cli import show
from keepstep.cli.operate import json_option
from keepstep.cli.surroundings import home
from keepstep.core.operator import check_node
from keepstep.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
TTL_S_MAX = 366 * 86400


def there_options(command: F) -> F:
    """--orchestrator and --store become the argument `there`."""

    @functools.wraps(command)
    def told(*args: Any, orchestrator: str | None, store: str, **kwargs: Any) -> Any:
        there = _shared(store) if store and not orchestrator else _own(orchestrator)
        try:
            return command(*args, there=there, **kwargs)
        finally:
            there.close()

    for option in (
        click.option(
            "--store", default="", envvar="KEEPSTEP_STORE", metavar="URL",
            help="Of the orchestrators that share this store [default: KEEPSTEP_STORE].",
        ),
        click.option(
            "--orchestrator", metavar="ID",
            help="Which one, when several have listened beyond loopback.",
        ),
    ):  # fmt: skip
        told = option(told)
    return cast(F, told)


class There(NamedTuple):
    """An authority, and where its tokens are kept."""

    fingerprint: str
    tokens: Tokens
    close: Callable[[], None] = lambda: None


@click.group()
def token() -> None:
    """Let other machines in."""


@token.command()
@there_options
@click.option("--ttl", default="1h", show_default=True, help="How long it is good, e.g. 30m, 7d.")
@click.option("--node", metavar="NAME", default="", help="Only for a node of this name.")
@click.option("--operator", is_flag=True, help="For `keepstep run` and REST: may do everything.")
@json_option
def create(there: There, ttl: str, node: str, operator: bool, as_json: bool) -> None:
    """Print a new token: for nodes that join, or with --operator for people and programs."""
    if operator and node:
        raise UsageError("--operator and --node contradict each other")
    if node:
        check_node(node, 1)
    role: Role = "operator" if operator else "join"
    text, kept = there.tokens.create(
        there.fingerprint,
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
@there_options
@json_option
def list_(there: There, as_json: bool) -> None:
    """List tokens, without what they are made of."""
    kept = there.tokens.all()
    if as_json:
        show.print_json([_shown(one) for one in kept])
        return
    for one in kept:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.expires_at_ns / 1e9))
        state = "expired" if one.expires_at_ns < time.time_ns() else f"until {until}"
        sys.stdout.write(f"{one.id}  {one.role}  {state}  {one.node}".rstrip() + "\n")


@token.command()
@click.argument("id_", metavar="ID")
@there_options
def revoke(id_: str, there: There) -> None:
    """Make a token worthless. Nodes that have joined with it stay."""
    there.tokens.remove(id_)
    show.words(f"token {id_} is revoked")


def seconds(ttl: str) -> int:
    match = re.fullmatch(r"(\d{1,9})([smhd])", ttl.strip())
    value = int(match[1]) * UNITS_S[match[2]] if match else 0
    if not 0 < value <= TTL_S_MAX:
        raise UsageError(f"--ttl {ttl} is no time", hint="for example 30m, 12h or 7d; at most 366d")
    return value


def _shown(kept: KeptToken) -> dict[str, object]:
    return {
        "id": kept.id,
        "role": kept.role,
        "node": kept.node,
        "expires_at_ns": kept.expires_at_ns,
    }


def _shared(store: str) -> There:
    try:
        from keepstep.adapters.store.shared_identity import SharedIdentity
    except ImportError as error:
        raise UsageError(
            f"--store needs psycopg: {error}", hint="pip install 'keepstep[postgres]'"
        ) from error
    shared = SharedIdentity(store)
    certificate = shared.certificate()
    if not certificate:
        shared.close()
        raise UsageError(
            "no orchestrator of this store has listened beyond loopback",
            hint="start one first: keepstep orchestrator --id NAME --host ADDRESS --store URL",
        )
    return There(fingerprint(certificate), Tokens(shared), shared.close)


def _own(named: str | None) -> There:
    found = sorted(path.parent for path in (home() / "authorities").glob(f"*/{CA_CERTIFICATE}"))
    if named is not None:
        found = [path for path in found if path.name == named]
    if len(found) == 1:
        authority = Authority.open(found[0])
        return There(authority.fingerprint, Tokens(Folder(authority.path)))
    if not found:
        raise UsageError(
            f"no orchestrator {named or ''} of {home()} has listened beyond loopback".replace(
                "  ", " "
            ),
            hint="start it first: keepstep orchestrator --id NAME --host ADDRESS",
        )
    names = ", ".join(path.name for path in found)
    raise UsageError(f"{len(found)} orchestrators are there", hint=f"--orchestrator: {names}")
