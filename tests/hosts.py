"""Two hosts on one machine: network and mount namespaces of their own, joined by a pair of virtual cables."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Host:
    """One of them."""

    namespace: str
    address: str
    interface: str

    def command(self, *command: str, mounts: dict[Path, Path] | None = None) -> list[str]:
        """Return the command that runs `command` there, with folders mounted as `{where: what}`, seen there alone."""
        steps = [f"mount --bind {what} {where} && " for where, what in (mounts or {}).items()]
        script = f'{"".join(steps)}exec "$0" "$@"'
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", script, *command]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with addresses of their own; skips the test where that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    tag = os.getpid() % 100_000
    hosts = tuple(Host(f"ckpt-{tag}-{n}", f"10.219.{tag % 250}.{n}", f"ck{tag}-{n}") for n in (1, 2))
    with ExitStack() as stack:
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.namespace)
                stack.callback(_run, "ip", "netns", "delete", host.namespace)
            first, second = hosts
            _run("ip", "link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
            for host in hosts:
                _run("ip", "link", "set", host.interface, "netns", host.namespace)
                inside = ("ip", "-n", host.namespace)
                _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
                _run(*inside, "link", "set", host.interface, "up")
                _run(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        yield first, second


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
