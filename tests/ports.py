"""Ports for processes that bind them later, by themselves."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# Below it Ray takes ports for its workers.
_FIRST = 20_000


def free_port() -> int:
    """A port that is free, and that no outgoing connection can get: the kernel takes those from a range above it."""
    beyond = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(_FIRST, beyond)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
