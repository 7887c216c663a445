"""The agent's composition root: arguments, environment and logging become one AgentConfig.

`__main__` hands the environment over; nothing else of an agent reads it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from keepstep.adapters.transport.tls import is_loopback
from keepstep.agent import identity
from keepstep.agent.agent import Agent, AgentConfig
from keepstep.agent.process_sessions import leads_session
from keepstep.agent.stores import native_store_command
from keepstep.agent.worker_environment import TOKEN
from keepstep.agent.workers import check_name
from keepstep.core.agent.network import SECOND, Limits
from keepstep.errors import KeepstepError, UsageError
from keepstep.model import labels
from keepstep.model.messages import Address

LIMIT_MAX = 1_000_000
DEFAULT_WORKER_COMMAND = (sys.executable, "-m", "keepstep.worker")


def main(
    environment: MutableMapping[str, str],
    arguments: Sequence[str] | None = None,
    *,
    worker_command: Sequence[str] = DEFAULT_WORKER_COMMAND,
    store_command: Callable[[], Sequence[str]] = native_store_command,
) -> int:
    try:
        config = _configure(arguments, environment, worker_command, store_command)
        if not leads_session():
            with contextlib.suppress(PermissionError):  # a shell's job leads its group already
                os.setsid()
        _log_to(config.directory / "logs" / f"agent-{config.node}.log")
    except (KeepstepError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return asyncio.run(_run(config))


async def _run(config: AgentConfig) -> int:
    try:
        code = await Agent(config).run()
    except KeepstepError as error:
        logging.getLogger(__name__).error("%s", error)
        print(f"error: {error}", file=sys.stderr)
        return 2
    logging.getLogger(__name__).info("ends with %d", code)
    return code


def _configure(
    arguments: Sequence[str] | None,
    environment: MutableMapping[str, str],
    worker_command: Sequence[str],
    store_command: Callable[[], Sequence[str]],
) -> AgentConfig:
    parser = argparse.ArgumentParser(prog="keepstep.agent", description="Keepstep's node agent.")
    parser.add_argument("--orchestrator", required=True, metavar="HOST:PORT[,...]")
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--slots", required=True, type=int)
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--stall-timeout-ns", required=True, type=int)
    parser.add_argument("--bind", default="127.0.0.1", help="address of this node for its peers")
    parser.add_argument("--identity", type=Path, help="folder with the node's certificate")
    parser.add_argument("--keeper", type=Path, help="folder of the keeper of this node's workers")
    given = parser.parse_args(arguments)
    # Taken out, so that no worker (and no script of a user) inherits it.
    token = environment.pop(TOKEN, "")
    known = identity.load(given.identity) if given.identity is not None else None
    if known is None and not token:
        raise UsageError(f"{TOKEN} is not set", hint="agents are started by `keepstep run`")
    if given.slots < 1 or given.stall_timeout_ns < 1:
        raise UsageError("--slots and --stall-timeout-ns must be positive")
    orchestrators = [_address(one) for one in given.orchestrator.split(",")]
    bind = _bind(given.bind)
    for host in (*(one.host for one in orchestrators), bind):
        if known is None and not is_loopback(host):
            raise UsageError(
                f"{host} is beyond loopback, and this node has no certificate",
                hint="join with `keepstep agent --orchestrator URL --token-file FILE`",
            )
    return AgentConfig(
        orchestrators=orchestrators,
        token=known.token if known is not None else token,
        job_token=known.job_token if known is not None else token,
        tls=identity.tls_files(given.identity, given.job) if known is not None else None,
        job=given.job,
        node=check_name(given.node),
        slots=given.slots,
        directory=given.directory,
        stall_timeout_ns=given.stall_timeout_ns,
        environ=environment,
        bind=bind,
        keeper=given.keeper,
        network=_network_limits(environment),
        labels=labels.parse(filter(None, environment.get(labels.LABELS, "").split(","))),
        worker_command=worker_command,
        store_command=store_command,
    )


def _network_limits(environment: Mapping[str, str]) -> Limits:
    """KEEPSTEP_NET_FLAPS faults within KEEPSTEP_NET_WINDOW_S, or one of KEEPSTEP_NET_DOWN_S."""
    given = {}
    for field, name, unit in (
        ("flaps", "KEEPSTEP_NET_FLAPS", 1),
        ("window_ns", "KEEPSTEP_NET_WINDOW_S", SECOND),
        ("down_ns", "KEEPSTEP_NET_DOWN_S", SECOND),
    ):
        text = environment.get(name, "")
        if not text:
            continue
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= LIMIT_MAX:
            raise UsageError(f"{name}={text}", hint=f"a whole number from 1 to {LIMIT_MAX}")
        given[field] = int(text) * unit
    return Limits(**given)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--orchestrator {text}: not HOST:PORT")
    return Address(host.strip("[]"), int(port))


def _bind(text: str) -> str:
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(text).is_unspecified:
            raise UsageError(
                f"--bind {text}: peers can not connect to that",
                hint="name one address of this node",
            )
    return text


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
