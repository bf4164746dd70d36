"""A network on one machine whose links to one rank are slow: gloo's connections of that rank go through a proxy.

Gloo's ranks learn where to connect to from the store. ``Addresses`` is a store that tells the slow rank the addresses
of a proxy in place of its peers', and its peers one of the slow rank that makes them wait to be connected to: of two
ranks the one with the higher address and port connects.
"""

import os
import random
import re
import select
import socket
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

LIMIT = timedelta(seconds=60)
# As gloo writes a socket address: AF_INET, the port, 127.0.0.1.
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
_OURS, _HIGHER = b"\x7f\x00\x00\x01", b"\x7f\x00\x00\x02"
# Below those that a system gives to who asks for any, also with the bytes the other way round, as gloo compares them.
_LOW_PORTS = range(40 * 256, 126 * 256, 256)


class Network:
    """The proxy of one rank: a listening socket for each of its peers, all made before ranks are forked."""

    def __init__(self, folder: Path, size: int, slow: int, delay_s: float) -> None:
        self.folder, self.slow, self.delay_s = folder, slow, delay_s
        self._listening = {peer: _listen() for peer in range(size) if peer != slow}

    def port(self, peer: int) -> int:
        return int(self._listening[peer].getsockname()[1])

    def carry(self) -> NoReturn:
        """Pass everything on, each piece ``delay_s`` after it came, until the process is ended."""
        pipes: dict[socket.socket, tuple[socket.socket, deque[tuple[float, bytes]]]] = {}
        peers = {listening: peer for peer, listening in self._listening.items()}
        while True:
            due = [waiting[0][0] for _, waiting in pipes.values() if waiting]
            timeout = max(0.0, min(due) - time.monotonic()) if due else None
            for ready in select.select([*peers, *pipes], [], [], timeout)[0]:
                if ready in peers:
                    inward, outward = ready.accept()[0], socket.create_connection(self._target(peers[ready]))
                    for one in (inward, outward):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    pipes |= {inward: (outward, deque()), outward: (inward, deque())}
                elif piece := _received(ready):
                    pipes[ready][1].append((time.monotonic() + self.delay_s, piece))
                else:
                    os._exit(0)  # a rank has left: the others only leave, too
            for target, waiting in pipes.values():
                while waiting and waiting[0][0] <= time.monotonic():
                    target.sendall(waiting.popleft()[1])

    def _target(self, peer: int) -> tuple[str, int]:
        return "127.0.0.1", int((self.folder / f"port-{peer}").read_text())


class Addresses(dist.Store):
    """The store of one rank, in which the addresses of peers are those of the network."""

    def __init__(self, network: Network, rank: int, size: int) -> None:
        super().__init__()
        self._inner = dist.FileStore(str(network.folder / "store"), size)
        self._network, self._rank = network, rank

    def get(self, key: str) -> bytes:
        """What a key holds; a rank's address is under a key that ends in its number."""
        value: bytes = self._inner.get(key)
        owner, found = key.rpartition("/")[2], _ADDRESS.search(value)
        if found is None or not owner.isdigit() or int(owner) == self._rank:
            return value
        port, slow = found[1], self._network.slow
        if self._rank == slow:
            file = self._network.folder / f"port-{owner}"
            file.write_text(str(int.from_bytes(port, "big")))
            return _replaced(value, found, self._network.port(int(owner)).to_bytes(2, "big") + _OURS)
        return _replaced(value, found, port + _HIGHER) if int(owner) == slow else value

    def set(self, key: str, value: str) -> None:
        self._inner.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def wait(self, keys: list[str], timeout: timedelta = LIMIT) -> None:
        self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return LIMIT


def _listen() -> socket.socket:
    for port in random.sample(_LOW_PORTS, len(_LOW_PORTS)):
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise OSError("no port is free")


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def _replaced(value: bytes, found: "re.Match[bytes]", address: bytes) -> bytes:
    return value[: found.start(1)] + address + value[found.end() :]
