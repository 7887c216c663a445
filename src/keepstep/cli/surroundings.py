"""What a command takes from its surroundings: read once, at the edge (main.py), and handed down.

Commands find it in click's context, so that none of them reads the environment itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import click

TOKEN = "KEEPSTEP_TOKEN"


@dataclass(frozen=True)
class Surroundings:
    home: Path  # where Keepstep keeps its state
    watched: bool  # somebody at a terminal sees what a command says
    token: str  # of an orchestrator that is named
    environ: Mapping[str, str]  # for processes that a command starts


def read(environ: MutableMapping[str, str]) -> Surroundings:
    """The token is taken out, so that no process (and no script of a user) inherits it."""
    token = environ.pop(TOKEN, "")
    return Surroundings(
        home=home_in(environ),
        watched=sys.stderr.isatty() and not environ.get("CI"),
        token=token,
        environ=environ,
    )


def home_in(environ: Mapping[str, str]) -> Path:
    if environ.get("KEEPSTEP_HOME"):
        return Path(environ["KEEPSTEP_HOME"]).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "keepstep"


def surroundings() -> Surroundings:
    """Of the command that runs in this thread."""
    found = click.get_current_context().find_object(Surroundings)
    assert found is not None, "a command is started by keepstep.cli.main"
    return found


def home() -> Path:
    return surroundings().home
