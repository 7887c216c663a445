"""What a node keeps of a rank goes when nothing of the rank is left there."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, call

from keepstep.agent.agent import Agent
from keepstep.agent.workers import Workers


def test_shards_stay_until_the_last_process_of_the_rank_is_forgotten() -> None:
    """Its replacement dies before the first process is forgotten: the next one needs them."""
    workers, agent = object.__new__(Workers), object.__new__(Agent)
    workers._workers = {
        name: SimpleNamespace(rank=rank, exited=object(), page=MagicMock())  # type: ignore[misc]
        for name, rank in (("w1", 1), ("w2", 1), ("w3", 0))
    }
    workers._processes, agent._blobs, agent._workers = MagicMock(), MagicMock(), workers
    agent._drop("w1")
    assert not agent._blobs.vault.left.called  # type: ignore[attr-defined]
    agent._drop("w2")
    assert agent._blobs.vault.left.mock_calls == [call(1)]  # type: ignore[attr-defined]
