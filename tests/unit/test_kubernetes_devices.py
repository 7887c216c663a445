"""Taints of devices, in the shapes that servers with dynamic resource allocation give."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_devices import Devices, tainted
from keepstep.errors import TransientError

XID = {"key": "nvidia.com/xid", "value": "79", "effect": "NoExecute", "timeAdded": "2026-11-15"}


def slice_of(node: str, *devices: Any, generation: int = 1, **more: Any) -> Any:
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "pool": pool, "nodeName": node, "devices": list(devices)}
    return {"metadata": {"name": f"{node}-{generation}"}, "spec": {**spec, **more}}


def rule(effect: str = "NoSchedule", **selector: Any) -> Any:
    taint = {"key": "example.com/broken", "effect": effect}
    return {"metadata": {"name": "r"}, "spec": {"deviceSelector": selector, "taint": taint}}


def gpu(index: int, *taints: Any) -> Any:
    found = {"name": f"gpu-{index}", "attributes": {"type": {"string": "gpu"}}}
    return {**found, "taints": list(taints)} if taints else found


@pytest.mark.parametrize(
    "slices, rules, expected",
    [
        ([slice_of("k1", gpu(0))], [], {}),
        ([slice_of("k1", gpu(0), gpu(3, XID))], [], {"k1": ["gpu-3: nvidia.com/xid=79"]}),
        ([slice_of("k1", gpu(0, {**XID, "effect": "None"}))], [], {}),
        # v1beta1 has them one level deeper.
        (
            [slice_of("k1", {"name": "gpu-0", "basic": {"taints": [XID]}})],
            [],
            {"k1": ["gpu-0: nvidia.com/xid=79"]},
        ),
        # One slice for devices of many nodes.
        (
            [slice_of("k1", {**gpu(0, XID), "nodeName": "k2"}, nodeName="")],
            [],
            {"k2": ["gpu-0: nvidia.com/xid=79"]},
        ),
        # A driver that publishes anew: what it said before does not count.
        ([slice_of("k1", gpu(0, XID)), slice_of("k1", gpu(0), generation=2)], [], {}),
        (
            [slice_of("k1", gpu(0), gpu(1)), slice_of("k2", gpu(1))],
            [rule(driver="gpu.nvidia.com", pool="k1", device="gpu-1")],
            {"k1": ["gpu-1: example.com/broken"]},
        ),
        (
            [slice_of("k1", gpu(0)), slice_of("k2", gpu(1))],
            [rule(driver="gpu.nvidia.com")],
            {"k1": ["gpu-0: example.com/broken"], "k2": ["gpu-1: example.com/broken"]},
        ),
        ([slice_of("k1", gpu(0))], [rule(driver="another.example")], {}),
        ([slice_of("k1", gpu(0))], [rule("None", driver="gpu.nvidia.com")], {}),
        ([slice_of("k1", gpu(0))], [rule(selectors=[{"cel": {"expression": "true"}}])], {}),
    ],
)
def test_taints_of_devices_are_said_of_their_nodes(slices: Any, rules: Any, expected: Any) -> None:
    assert tainted(slices, rules) == expected


def test_a_node_with_such_a_device_is_left() -> None:
    ready = {"type": "Ready", "status": "True"}
    node = {"metadata": {"name": "k1"}, "spec": {}, "status": {"conditions": [ready]}}
    place = objects.machines([node], [], {"k1": ["gpu-3: nvidia.com/xid=79"]})["k1"].place
    assert (place.state, place.reason) == ("degraded", "gpu-3: nvidia.com/xid=79")


class Server:
    """Instead of an API server."""

    def __init__(self, served: dict[str, str] | None) -> None:
        self._served = served
        self.custom = self

    def served(self, group: str) -> dict[str, str]:
        if self._served is None:
            raise TransientError("it does not answer")
        return self._served

    def list_cluster_custom_object(self) -> None:
        raise AssertionError("nobody is to ask for it")


@pytest.mark.parametrize("served", [{}, {"deviceclasses": "v1"}, None])
def test_a_server_without_them_is_asked_for_none(served: Any) -> None:
    server: Any = Server(served)
    assert Devices(server).look() == {}
