"""A cluster's network on one machine: every rank behind its own throttled link to one switch.

Each rank gets a network namespace with one interface, ``WIRE``; a veth pair joins it to a bridge in
one more namespace, the switch. Both ends of every pair carry a token bucket (``tc ... tbf``), so a
rank sends and receives at most ``bytes_per_second`` at a time, as on a full-duplex port.

The namespaces have no names: open files of this process are all that keeps them alive. The kernel
takes them away, with their interfaces and buckets, when the block ends and when this process dies,
however it dies. Nothing is ever added to the machine's own network.

Needs Linux, root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

LOOPBACK, WIRE = "lo", "wire"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>

# A bucket this small lets next to nothing through for free after a pause; larger frames keep the
# packets a second, and with them the CPU's share of the traffic, low.
BURST_BYTES = 32 * 1024
FRAME_BYTES = 9000
# Room for what the other ranks send to one at a time: the switch delays frames, it drops none.
QUEUE_BYTES = 16 * 1024 * 1024


class NetworkUnavailable(Exception):
    """This machine or this user cannot make the network; the message says why."""


@dataclass(frozen=True)
class Port:
    """One rank's place in the network; may be sent to the process that is to enter it."""

    path: str
    """Names the namespace for as long as the network is up."""
    interface: str
    """What the rank speaks over there."""

    def enter(self) -> None:
        """Move the calling thread, and what it starts from now on, into the namespace."""
        namespace = os.open(self.path, os.O_RDONLY)
        try:
            _call("setns", namespace, _NEW_NETWORK)
        finally:
            os.close(namespace)


def enter_port(ports: Sequence[Port], rank: int) -> None:
    """Put this process, a rank, behind its port: what it does from now on goes through it."""
    ports[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = ports[rank].interface


@contextmanager
def throttled_network(num_ports: int, bytes_per_second: float) -> Iterator[list[Port]]:
    """One port a rank, each link at most ``bytes_per_second`` in either direction.

    Raises:
        NetworkUnavailable: no Linux, no root, no iproute2, or a kernel without ``tbf``.
    """
    spaces: list[_Namespace] = []
    try:
        for _ in range(num_ports + 1):
            spaces.append(_Namespace.make())
        switch, *ports = spaces
        switch.run("ip link add switch type bridge")
        switch.run(f"ip link set switch mtu {FRAME_BYTES} up")
        for number, port in enumerate(ports):
            near = f"port{number}"
            switch.run(f"ip link add {near} type veth peer name {WIRE} netns {port.path}")
            switch.run(f"ip link set {near} mtu {FRAME_BYTES} master switch up")
            port.run(f"ip addr add 10.0.0.{number + 1}/24 dev {WIRE}")
            port.run(f"ip link set {WIRE} mtu {FRAME_BYTES} up")
            port.run("ip link set lo up")
            for space, device in ((switch, near), (port, WIRE)):
                space.run(
                    f"tc qdisc add dev {device} root tbf rate {int(bytes_per_second)}bps "
                    f"burst {BURST_BYTES} limit {QUEUE_BYTES}"
                )
        yield [Port(port.path, WIRE) for port in ports]
    finally:
        for space in spaces:
            space.close()


@contextmanager
def private_loopback(num_ports: int) -> Iterator[list[Port]]:
    """A loopback interface that these ranks have to themselves: its counter is theirs alone.

    Raises:
        NetworkUnavailable: no Linux, no root, or no iproute2.
    """
    space = _Namespace.make()
    try:
        space.run("ip link set lo up")
        yield [Port(space.path, LOOPBACK)] * num_ports
    finally:
        space.close()


def bytes_sent(interface: str) -> int:
    """Bytes that left through ``interface`` of this thread's namespace, headers included."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise AssertionError(f"no interface {interface}")


@dataclass(frozen=True)
class _Namespace:
    descriptor: int

    @classmethod
    def make(cls) -> _Namespace:
        return cls(_in_own_thread(_leave_for_a_new_namespace))

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def run(self, command: str) -> None:
        """Run ``ip`` or ``tc`` inside."""

        def inside() -> subprocess.CompletedProcess[str]:
            Port(self.path, LOOPBACK).enter()
            return subprocess.run(command.split(), capture_output=True, text=True, timeout=20)

        try:
            done = _in_own_thread(inside)
        except FileNotFoundError:
            tool = command.split()[0]
            raise NetworkUnavailable(f"there is no `{tool}`; install iproute2") from None
        if done.returncode:
            raise NetworkUnavailable(f"`{command}`: {done.stderr.strip()}")

    def close(self) -> None:
        os.close(self.descriptor)


def _leave_for_a_new_namespace() -> int:
    """The calling thread leaves its namespace for a new one; a descriptor of that one."""
    _call("unshare", _NEW_NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _in_own_thread(function: Callable[[], Result]) -> Result:
    """Call ``function`` in a thread that ends with it: the caller's never leaves its namespace."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()


def _call(name: str, *arguments: int) -> None:
    """A system call of the C library (``os.setns`` and ``os.unshare`` came with Python 3.12)."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise NetworkUnavailable(f"this system has no {name}(); network namespaces are Linux's")
    if function(*arguments):
        reason = os.strerror(ctypes.get_errno())
        raise NetworkUnavailable(f"{name}: {reason}; network namespaces need root")
