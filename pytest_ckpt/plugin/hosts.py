"""What is said, once a session, of ranks on several hosts: where their targets lie, and which machine is another."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_ckpt.judge.hardware_differences import hardware_differences
from pytest_ckpt.plugin.lead import Lead
from pytest_ckpt.plugin.terminal import TerminalProgress
from pytest_ckpt.records import Probes
from pytest_ckpt.target.interface import Target, WorkFolder
from pytest_ckpt.target.space import require_space
from pytest_ckpt.units import format_rate
from pytest_ckpt.world.spread import Spread, SpreadFolder, find_spread, hardware_of_hosts

_RATES = ("write_direct", "write_synced")


class Hosts:
    """The hosts of an attached world, of which there are several."""

    def __init__(self, config: pytest.Config, lead: Lead) -> None:
        self._config, self._world = config, lead.world
        self._spreads: dict[str, Spread] = {}
        self.notes: list[str] = []
        """What each record must say of them."""

    def folder(self, target: Target, own: WorkFolder) -> WorkFolder:
        """Return the work folder to use in place of `own`, after looking where the hosts see it."""
        try:
            spread = self._spreads[target.label] = find_spread(self._world, own)
            folder = own if spread.shared else SpreadFolder(self._world, own)
        except BaseException:
            own.close()
            raise
        self._say(f"ckpt: target {target.label} = {target.location} is {spread.text}")
        if not spread.shared:
            self._say(
                f"ckpt: warning: target {target.label} is {spread.text}: each holds a part, and a checkpoint there "
                "cannot be loaded from one node"
            )
        return folder

    def require_space(self, target: Target, folder: WorkFolder, need_bytes: int, of_host: Callable[[int], int]) -> None:
        """Raise `CannotFit` where a checkpoint of `need_bytes` does not fit; a local disk needs room for `of_host`."""
        if isinstance(folder, SpreadFolder):
            folder.require_space(of_host)
        else:
            require_space(need_bytes, target.free_bytes(), target.location)

    def compare(self) -> None:
        """Look at the hardware of all hosts, and name those that are another machine than host 0."""
        machines = hardware_of_hosts(self._world)
        for host, hardware in machines.items():
            differences = hardware_differences(now=machines[0], stored=hardware)
            if differences:
                name = self._world.host_names[host]
                self.notes.append(f"host {host} is another machine than host 0: {', '.join(differences)}")
                self._say(f"ckpt: warning: host {host} ({name}): {self.notes[-1]}")

    def spread_text(self, target: Target) -> str:
        """Return how `target` is spread over the hosts, in words."""
        spread = self._spreads.get(target.label)
        return spread.text if spread is not None else ""

    def require_loadable(self, target: Target) -> None:
        """Skip the test where each host holds a part of a checkpoint."""
        spread = self._spreads.get(target.label)
        if spread is not None and not spread.shared:
            pytest.skip(
                f"target {target.label} is {spread.text}: each holds a part, and the checkpoint cannot be loaded; "
                "give a shared file system"
            )

    def say_rates(self, target: Target, probes: Probes) -> None:
        """Print the rate of the slowest and the fastest host, as one of the probes of storage shows them."""
        for probe in probes.details:
            if probe.name in _RATES and probe.per_rank_Bps:
                rates = [
                    sum(rate for rate, of in zip(probe.per_rank_Bps, self._world.hosts, strict=True) if of == host)
                    for host in range(len(self._world.host_names))
                ]
                slowest, fastest = rates.index(min(rates)), rates.index(max(rates))
                self._say(
                    f"ckpt: {probe.name} of {target.label} by host: slowest {slowest} with "
                    f"{format_rate(rates[slowest])}, fastest {fastest} with {format_rate(rates[fastest])}"
                )
                return

    def _say(self, line: str) -> None:
        TerminalProgress(self._config, "", lambda location: 0).say(line)
