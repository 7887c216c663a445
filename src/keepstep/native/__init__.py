"""Native parts, compiled on demand for the torch that is installed.

They reach into private members of c10d, so a binary fits exactly one torch build; compiling on
the spot (about 25 s, once) replaces a wheel per torch version. `python -m keepstep.native` does
it ahead of time.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from keepstep.native import build

_extension: ModuleType | None = None


def store_host_path() -> str:
    """The `keepstep-store` program. Never imports torch: the control plane calls this."""
    return str(build.ensure().store_host)


def load_extension() -> ModuleType:
    """The module `keepstep_ext`. Imports torch: for training processes only."""
    global _extension
    if _extension is None:
        import torch.distributed  # noqa: F401  (its symbols and Python types must be there first)

        path = build.ensure().extension
        loader = importlib.machinery.ExtensionFileLoader(build.EXTENSION, str(path))
        spec = importlib.util.spec_from_file_location(build.EXTENSION, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[build.EXTENSION] = module
        _extension = module
    return _extension
