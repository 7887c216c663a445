"""What all stores have in common: rows of records, each chained to the one before by a hash.

    hash(n) = sha256(hash(n-1) + body(n)),   hash(0) = 32 zero bytes

The body is the record as JSON, and the columns beside it (at_ns, job, kind) only repeat what the
body says so that people can query them; `verify_rows` checks both the chain and the repetition.
A chain alone cannot show a cut tail, so every store also keeps a *head*: number and hash of the
newest record, changed in the transaction that appends it. Somebody who cuts both in step leaves no
trace; whoever needs to notice that keeps the last hash elsewhere (`verify_rows` returns it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from keepstep.errors import PermanentError
from keepstep.model.records import Record

ZERO_HASH = bytes(32)
COLUMNS = "seq, at_ns, job, kind, body, prev_hash, hash"

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Head(NamedTuple):
    seq: int
    hash: bytes


EMPTY = Head(0, ZERO_HASH)


class LedgerRow(NamedTuple):
    seq: int
    at_ns: int
    job: str
    kind: str
    body: bytes
    prev_hash: bytes
    hash: bytes


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    ok: bool
    records: int  # rows whose link was found right, up to the first broken one
    broken_seq: int | None
    problem: str
    last_hash: str


def chain(previous: bytes, body: bytes) -> bytes:
    return hashlib.sha256(previous + body).digest()


def kind_of(record: Record) -> str:
    return str(type(record).__struct_config__.tag)


def link(records: Sequence[Record], head: Head) -> list[LedgerRow]:
    """`records` as the rows that follow `head`."""
    rows = []
    for record in records:
        body = _encoder.encode(record)
        seq, here = head.seq + 1, chain(head.hash, body)
        rows.append(
            LedgerRow(seq, record.at_ns, record.job, kind_of(record), body, head.hash, here)
        )
        head = Head(seq, here)
    return rows


def verify_rows(name: str, rows: Iterable[Sequence[Any]], head: Head | None) -> VerifyResult:
    """Walk the whole chain; stop at the first row that does not fit. `head` None: not known."""
    found, problem = EMPTY, ""
    broken_seq: int | None = None
    for row in rows:
        problem = row_problem(row, found)
        if problem:
            broken_seq = int(row[0])
            break
        found = Head(int(row[0]), bytes(row[6]))
    if not problem and head is not None and head != found:
        broken_seq = min(head.seq, found.seq) + 1
        problem = head_problem(head, found)
    return VerifyResult(
        path=name,
        ok=not problem,
        records=found.seq,
        broken_seq=broken_seq,
        problem=problem,
        last_hash=found.hash.hex(),
    )


def check_rows(name: str, rows: Iterable[Sequence[Any]], head: Head) -> list[Record]:
    """All records. Decisions are replayed from them, so a ledger that was altered is not obeyed."""
    records: list[Record] = []

    def seen() -> Iterator[Sequence[Any]]:
        for row in rows:
            yield row  # decoded only once the next row is asked for, that is, once this one fits
            records.append(decode(name, row[0], row[4]))

    result = verify_rows(name, seen(), head)
    if not result.ok:
        raise PermanentError(
            f"the ledger {name} is broken at record {result.broken_seq}: {result.problem}",
            hint="it is evidence, so it was not touched; move it away, or use another --id",
        )
    return records


def decode(name: str, seq: int, body: bytes | str) -> Record:
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise PermanentError(
            f"record {seq} of ledger {name} cannot be read: {error}",
            hint=f"check it with `keepstep ledger verify {name}`",
        ) from error


def row_problem(row: Sequence[Any], before: Head) -> str:
    seq, at_ns, job, kind, body, prev_hash, here = row
    if seq != before.seq + 1:
        return f"record {before.seq + 1} is missing: the next one is {seq}"
    if bytes(prev_hash) != before.hash:
        return f"record {seq} does not follow record {seq - 1}: its previous hash differs"
    body = body.encode() if isinstance(body, str) else bytes(body)
    if chain(before.hash, body) != bytes(here):
        return f"the body of record {seq} was changed: its hash differs"
    try:
        said = msgspec.json.decode(body)
        repeated = (said["at_ns"], said["job"], said["type"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"record {seq} is no record"
    if repeated != (at_ns, job, kind):
        return f"the columns of record {seq} do not repeat its body"
    return ""


def head_problem(head: Head, found: Head) -> str:
    if head.seq > found.seq:
        return f"its end is missing: it has {found.seq} records and should have {head.seq}"
    if head.seq < found.seq:
        return f"it has {found.seq} records and should have {head.seq}: some were added by others"
    return f"the hash of record {head.seq} is not the one that was noted when it was written"
