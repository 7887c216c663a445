"""Native parts, compiled on demand for the torch that is installed.

They reach into private members of c10d, so a binary fits exactly one torch build; compiling on
the spot (about 25 s, once) replaces a wheel per torch version. `python -m keepstep.native` does
it ahead of time.
"""

from __future__ import annotations

from keepstep.native import build


def store_host_path() -> str:
    """The `keepstep-store` program. Never imports torch: the control plane calls this."""
    return str(build.ensure().store_host)
