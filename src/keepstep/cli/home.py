"""Where Keepstep keeps its state. The only reader of KEEPSTEP_HOME."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home(environ: Mapping[str, str] | None = None) -> Path:
    env = os.environ if environ is None else environ
    if env.get("KEEPSTEP_HOME"):
        return Path(env["KEEPSTEP_HOME"]).expanduser().absolute()
    state = env.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser().absolute() / "keepstep"
