"""Promised ports: held from the promise until the store listens, so that nobody can come between."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from rlhf.cluster.ports import free_port, hold_port, join_store, release_port, serve_store

TIMEOUT = timedelta(seconds=30)


def bind(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_nobody_else_gets_a_promised_port() -> None:
    port = hold_port()
    with pytest.raises(OSError, match="in use"):
        bind(port)
    release_port(port)
    release_port(port)
    bind(port)


def test_a_store_takes_the_promised_port_over() -> None:
    port = hold_port()
    with ThreadPoolExecutor() as pool:
        # It may come before the store is there.
        member = pool.submit(join_store, "127.0.0.1", port, TIMEOUT)
        store = serve_store(port, TIMEOUT)
        member.result(30).set("weights", "v1")
    assert store.port == port
    assert store.get("weights") == b"v1"
    # The promise is spent: what is released now can't close the store's socket.
    release_port(port)
    assert join_store("127.0.0.1", port, TIMEOUT).get("weights") == b"v1"


def test_promises_are_apart_from_each_other() -> None:
    ports = [hold_port() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        release_port(port)


def test_a_port_for_another_process_is_free_and_none_that_a_connection_could_get() -> None:
    port = free_port()
    bind(port)
    assert 20_000 <= port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_without_room_below_the_connections_range_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "1024\t65535\n")
    bind(free_port())
