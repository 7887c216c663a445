"""When which bases are put into the vault, and how many bytes that makes at most.

Bases are renewed in turn, one share per step, so that a step costs the same every time: gradients
of everything, and 1/RENEW of all bases. They are read where they lie while the step computes;
before the update, which changes them, the fence waits until they have been read.

Where all bases must be of one version (inventory.py) all are renewed at once, every RENEW steps.
With a parity all ranks do so at the same versions, and behind every swap.
"""

from __future__ import annotations

from keepstep.worker.vault.gpu_staging import PinnedStaging
from keepstep.worker.vault.inventory import Inventory
from keepstep.worker.vault.parity import ParityLine
from keepstep.worker.vault.units import Unit, views
from keepstep.worker.vault.vault import VaultLine

RENEW = 4  # steps in which all bases are renewed once; more gradients are kept, fewer bases sent
UNIT_BYTES = 1 << 10  # of a base, between its tensors


class Bases:
    def __init__(self, inventory: Inventory, parity: ParityLine | None) -> None:
        self._inventory = inventory
        self._parity = parity
        self.staging: PinnedStaging | None = None  # on a GPU
        self._begun = -1  # version whose share was put, but for what is due
        self._due: list[Unit] = []
        self._realign = True  # all ranks put bases at the version that they have now
        self._aligned = -1  # version at which they did last

    def anew(self, realign: bool = False) -> None:
        """What was put of this version may be lost."""
        self._begun = -1
        self._realign = self._realign or realign

    # ------------------------------------------------------------------ in a step

    def begin(self, line: VaultLine, version: int) -> None:
        """Those of this version, if they were not begun yet."""
        if self._begun == version:
            return
        self._begun = version
        if self.staging is not None:
            self.staging.reset()
        due = self._share_of(version)
        self._due = []
        if self.staging is not None:
            # A GPU has nothing to do when a step begins: whatever is done here, it waits for.
            # Parameters stay what they are until the update. All else the forward pass may change.
            self._due = [unit for unit in due if unit.parameter is not None]
            due = [unit for unit in due if unit.parameter is None]
        self.put(line, version, due)

    def put_due(self, line: VaultLine, version: int) -> None:
        """The rest of them."""
        if self._begun == version:
            due, self._due = self._due, []
            self.put(line, version, due)

    def put(self, line: VaultLine, version: int, due: list[Unit]) -> None:
        parts = {unit.index: self._inventory.parts(unit) for unit in due}
        left = list(parts)
        if self.staging is not None:
            left = self.staging.put_bases(line, version, parts)
        line.put_all("base", version, {index: views(parts[index]) for index in left})
        for unit in due:
            unit.version = version

    # ------------------------------------------------------------------ which are due

    def _share_of(self, version: int) -> list[Unit]:
        if self._parity is not None:
            return self._with_others(self._parity, version)
        if self._inventory.one_version:
            return self._inventory.units if self._oldest() <= version - RENEW else []
        return self.share()

    def _with_others(self, line: ParityLine, version: int) -> list[Unit]:
        """Of the multiples of RENEW, and of what follows a swap, all ranks have bases."""
        units = self._inventory.units
        if self._realign or version % RENEW == 0:
            self._realign, self._aligned = False, version
        if self._aligned != version:
            return [unit for unit in units if unit.version < 0]
        line.begin(version)
        return units

    def _oldest(self) -> int:
        low = min(unit.version for unit in self._inventory.units)
        return low if low >= 0 else -RENEW - 1

    def share(self) -> list[Unit]:
        """Those that were never sent, and the oldest ones, as many as make up one share."""
        units = self._inventory.units
        due = [unit for unit in units if unit.version < 0]
        if due:
            return due
        room = self._inventory.kept_bytes // RENEW
        for unit in sorted(units, key=lambda one: (one.version, one.index)):
            due.append(unit)
            room -= unit.size
            if room <= 0:
                break
        return due

    # ------------------------------------------------------------------ how much it is

    @property
    def reserve(self) -> int:
        """Bytes in the vault at most. A base is there beside the one before it until the fence of
        the next step: two shares are, each of them up to one unit larger than it should be. Then
        there is the log, of RENEW / 2 + 2.5 steps on average. What is put again is there twice
        until it was received."""
        bases = self._inventory.kept_bytes
        largest = max((unit.size for unit in self._inventory.units), default=0)
        gradients = sum(self._inventory.gradient_bytes.values())
        notes = 1 << 20
        if self._parity is not None:  # faults one after the other may add bases between the common
            return 3 * bases + (RENEW + 5) * gradients + notes  # those of one step in its note
        if self._inventory.one_version:
            return 2 * bases + largest + (RENEW + 2) * gradients + notes
        shares = 2 * (bases // RENEW + largest)
        return bases + shares + largest + (RENEW // 2 + 3) * gradients + notes

    @property
    def bytes_of_step(self) -> int:
        """At most."""
        sizes = [unit.size + UNIT_BYTES for unit in self._inventory.units]
        return sum(sizes) if self._inventory.one_version else sum(sizes) // RENEW + max(sizes)
