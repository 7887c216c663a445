"""Taints of single devices (dynamic resource allocation), where the server has that API group.

A driver publishes the devices of a node in ResourceSlices, with taints of its own; administrators
taint devices of others by DeviceTaintRules. A place is a whole node, so a device that nobody is to
use any more is a reason to leave its node. The effect `None` only informs, and is no reason.
"""

from __future__ import annotations

import functools
import logging

from keepstep.adapters.schedule.kubernetes_api import Api, Mirror, Object
from keepstep.errors import KeepstepError

log = logging.getLogger("keepstep.kubernetes")

GROUP = "resource.k8s.io"
SLICES, RULES = "resourceslices", "devicetaintrules"
REASONS = ("NoSchedule", "NoExecute")
# Of the first version of rules: with them it is not for us to say which devices are meant.
NOT_UNDERSTOOD = {"deviceClassName", "selectors"}


class Devices:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._mirrors: dict[str, Mirror] | None = None
        self._trouble = ""

    def look(self) -> dict[str, list[str]]:
        """Node -> what is said of its devices. Nothing where the server knows no such thing, or
        does not let us look."""
        try:
            if self._mirrors is None:
                served = self._api.served(GROUP)
                custom = self._api.custom.list_cluster_custom_object
                self._mirrors = {
                    name: Mirror(self._api, functools.partial(custom, GROUP, served[name], name))
                    for name in (SLICES, RULES)
                    if name in served
                }
            found = {name: mirror.look() for name, mirror in self._mirrors.items()}
        except KeepstepError as error:
            if error.message != self._trouble:
                self._trouble = error.message
                log.warning("taints of devices are not read: %s", error.message)
            return {}
        return tainted(found.get(SLICES, []), found.get(RULES, []))


def tainted(slices: list[Object], rules: list[Object]) -> dict[str, list[str]]:
    """Node -> "DEVICE: KEY=VALUE" for each device that is not to be used."""
    newest: dict[tuple[str, str], int] = {}
    for one in slices:
        pool = one["spec"]["pool"]
        key = (one["spec"]["driver"], pool["name"])
        newest[key] = max(newest.get(key, 0), int(pool.get("generation", 0)))
    found: dict[str, list[str]] = {}
    for one in slices:
        spec = one["spec"]
        pool = spec["pool"]
        if int(pool.get("generation", 0)) < newest[spec["driver"], pool["name"]]:
            continue  # its driver is replacing it
        for device in spec.get("devices") or []:
            said = {**device, **(device.get("basic") or {})}  # there until v1beta1
            node = said.get("nodeName") or spec.get("nodeName", "")
            where = {"driver": spec["driver"], "pool": pool["name"], "device": device["name"]}
            taints = [*(said.get("taints") or []), *_ruled(rules, where)]
            words = [_words(taint) for taint in taints if taint.get("effect") in REASONS]
            if node and words:
                found.setdefault(node, []).append(f"{device['name']}: {', '.join(words)}")
    return {node: sorted(words) for node, words in found.items()}


def _ruled(rules: list[Object], where: dict[str, str]) -> list[Object]:
    found = []
    for rule in rules:
        meant = rule["spec"].get("deviceSelector") or {}
        if not meant.keys() & NOT_UNDERSTOOD and meant.items() <= where.items():
            found.append(rule["spec"]["taint"])
    return found


def _words(taint: Object) -> str:
    return f"{taint['key']}={taint['value']}" if taint.get("value") else str(taint["key"])
