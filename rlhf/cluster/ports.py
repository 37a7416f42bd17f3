"""Ports that a process promises to others before it listens on them.

Between asking the kernel for a free port and listening on it, another process may get the same one: an outgoing
connection is enough, since both come from one range. So the socket stays bound from the promise on, and whoever
listens takes it over. Where that can't be, since another process will bind it, `free_port` takes one below that range.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

# Below it Ray takes ports for its workers.
_FIRST = 20_000
_held: dict[int, socket.socket] = {}


def hold_port() -> int:
    """A port of this machine, on all its addresses, that stays this process's until `release_port`."""
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    _held[port] = holder
    return port


def free_port() -> int:
    """A port that is free now, and that no outgoing connection can get: for a process that binds it by itself, later.

    Where the kernel leaves no room below the range of outgoing connections, the port is one of those after all.
    """
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(_FIRST, beyond)
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", secrets.choice(below) if below else 0))
            except OSError:
                continue
            return int(probe.getsockname()[1])


def release_port(port: int) -> None:
    """Let go of a port, for a library that can only bind it by itself; nothing happens when it isn't held."""
    holder = _held.pop(port, None)
    if holder is not None:
        holder.close()


def serve_store(port: int, timeout: timedelta) -> Any:
    """A torch store that others meet at, served by this process on `port`, which it holds as a rule.

    Each wait on it ends after `timeout`. Nobody is waited for here.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    holder = _held.pop(port, None)
    # The store closes the descriptor when it ends.
    descriptor = None if holder is None else holder.detach()
    return TCPStore("localhost", port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def join_store(address: str, port: int, timeout: timedelta) -> Any:
    """The store that a process on `address` serves, or is about to serve within `timeout`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(address, port, None, False, timeout, wait_for_workers=False)
