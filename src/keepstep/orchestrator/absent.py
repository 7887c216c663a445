"""Asked for, and not there: what REST answers with a status of its own."""

from __future__ import annotations

from keepstep.errors import UsageError


class NotFound(UsageError):
    pass


class Gone(UsageError):
    pass
