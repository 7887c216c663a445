"""Where a node stands, in words: `rack=r1,nvlink=d3`. Agents are told by KEEPSTEP_LABELS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from keepstep.errors import UsageError

LABELS = "KEEPSTEP_LABELS"
COUNT_MAX = 32
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")


def joined(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def parse(words: Iterable[str]) -> dict[str, str]:
    """Of `name=value`, each once."""
    found: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not (sign and WORD.fullmatch(name) and WORD.fullmatch(value)) or name in found:
            raise UsageError(
                f"label {word!r}: not NAME=VALUE, or twice",
                hint="for example rack=r1; letters, digits, '.', '_', '/' and '-'",
            )
        found[name] = value
    if len(found) > COUNT_MAX:
        raise UsageError(f"{len(found)} labels", hint=f"at most {COUNT_MAX} are possible")
    return found


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if not WORD.fullmatch(name):
            raise UsageError(f"label {name!r} cannot be", hint="for example rack, or nvlink")
