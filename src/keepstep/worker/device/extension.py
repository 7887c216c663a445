"""Loads the native module that reaches into c10d (see keepstep.native)."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

import torch.distributed  # noqa: F401  (its symbols and Python types must be there first)

from keepstep.native import build

_extension: ModuleType | None = None


def load() -> ModuleType:
    """The module `keepstep_ext`, compiled first if need be."""
    global _extension
    if _extension is None:
        path = build.ensure().extension
        loader = importlib.machinery.ExtensionFileLoader(build.EXTENSION, str(path))
        spec = importlib.util.spec_from_file_location(build.EXTENSION, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[build.EXTENSION] = module
        _extension = module
    return _extension
