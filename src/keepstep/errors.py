"""Every error that Keepstep raises on purpose.

    KeepstepError
    |-- UsageError              the caller broke a rule; nothing was changed (exit code 2)
    |-- ProtocolError
    |   |-- LocalProtocolError  we were about to break the protocol (a bug here)
    |   `-- RemoteProtocolError the peer broke it (malformed, oversized or unauthenticated frame)
    |-- TransientError          may work later; `retry_after_s` says when
    |   |-- StoreUnavailable    the ledger cannot be reached; the last write may or may not be there
    |   |-- NotActive           another orchestrator decides; `active` says where, if it is known
    |   `-- NoSpare             the scheduler has no machine for us now
    `-- PermanentError          will not work, whatever is tried
        `-- NoRight             the scheduler does not let us do it

A message says what happened and to which ids; `hint` says what to do about it.
"""

from __future__ import annotations


class KeepstepError(Exception):
    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(KeepstepError):
    pass


class ProtocolError(KeepstepError):
    pass


class LocalProtocolError(ProtocolError):
    pass


class RemoteProtocolError(ProtocolError):
    pass


class TransientError(KeepstepError):
    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class StoreUnavailable(TransientError):
    pass


class NotActive(TransientError):
    def __init__(self, message: str, *, hint: str = "", active: str = "") -> None:
        super().__init__(message, hint=hint)
        self.active = active


class NoSpare(TransientError):
    pass


class PermanentError(KeepstepError):
    pass


class NoRight(PermanentError):
    pass
