"""Which addresses may be visited, and the connector that visits no others.

The rule is our own table rather than ``ipaddress.is_global`` alone, which calls multicast, 6to4 and NAT64 global and
changes between releases. It is asked at the last moment before a connection, in the connector's ``socket_factory``: a
resolver never sees the literal addresses of URLs, and what a name meant a moment ago says nothing about now.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from itertools import islice
from ssl import SSLContext

from aiohttp import AddrInfoType, AsyncResolver, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from pycares import ARES_FLAG_EDNS, ARES_FLAG_NOSEARCH

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

PUBLIC_PORTS = frozenset({80, 443})
_MOST_ADDRESSES = 8  # of one name: an answer of thousands would keep the connector busy for long
_NOT_PUBLIC_V4 = (
    IPv4Network("0.0.0.0/8"),  # this network
    IPv4Network("10.0.0.0/8"),  # private
    IPv4Network("100.64.0.0/10"),  # shared by carriers
    IPv4Network("127.0.0.0/8"),  # loopback
    IPv4Network("168.63.129.16/32"),  # the host agent of a cloud
    IPv4Network("169.254.0.0/16"),  # link-local, metadata of clouds
    IPv4Network("172.16.0.0/12"),  # private
    IPv4Network("192.0.0.0/24"),  # protocol assignments
    IPv4Network("192.0.2.0/24"),  # documentation
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv4Network("192.168.0.0/16"),  # private
    IPv4Network("198.18.0.0/15"),  # benchmarks
    IPv4Network("198.51.100.0/24"),  # documentation
    IPv4Network("203.0.113.0/24"),  # documentation
    IPv4Network("224.0.0.0/4"),  # multicast
    IPv4Network("240.0.0.0/4"),  # reserved, broadcast
)
_UNICAST_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = (
    IPv6Network("2001::/23"),  # protocol assignments, Teredo
    IPv6Network("2001:db8::/32"),  # documentation
    IPv6Network("2002::/16"),  # 6to4
    IPv6Network("2620:4f:8000::/48"),  # sink of reverse look-ups
    IPv6Network("3fff::/20"),  # documentation
)
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressRefused(OSError):
    """An address that is not visited. All read the same, so that nobody maps a network by its errors."""

    def __init__(self) -> None:
        super().__init__("this address is not visited")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet."""
    if isinstance(address, IPv4Address):
        special = address.is_multicast or address.is_reserved or not address.is_global
        return not special and not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def is_of_this_machine(address: Address) -> bool:
    """Whether an address is one of this machine's own. The kernel tells by the route to it; nothing is sent."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ip_address(probe.getsockname()[0]) == address
    except OSError:  # no way leads there
        return False


class Guard:
    """The one judge of what may be connected to: public addresses on two ports, and what the operator allows."""

    def __init__(self, allowed: Sequence[Network], nat64: bool = False) -> None:
        self._allowed = allowed
        self._nat64 = nat64

    def admits(self, host: str, port: int) -> bool:
        """Whether this address, written as numbers, may be connected to."""
        address = self._judged(host)
        if address is None:
            return False
        if any(address in network for network in self._allowed):
            return True
        return port in PUBLIC_PORTS and is_public(address) and not is_of_this_machine(address)

    def socket_for(self, address_info: AddrInfoType) -> socket.socket:
        """A socket for an address, about to be connected. Raises AddressRefused."""
        family, kind, protocol, _, (host, port, *_) = address_info
        if not self.admits(str(host), int(port)):
            raise AddressRefused
        return socket.socket(family, kind, protocol)

    def _judged(self, host: str) -> Address | None:
        """The address that decides: for some of IPv6 the IPv4 address in it, for one with a scope none."""
        try:
            address = ip_address(host)
        except ValueError:
            return None
        if isinstance(address, IPv4Address):
            return address
        if address.scope_id is not None:
            return None
        if self._nat64 and address in _NAT64:
            return IPv4Address(int(address) & 0xFFFF_FFFF)
        return address.ipv4_mapped or address


class GuardedResolver(AbstractResolver):
    """Gives of a name's addresses only those that may be visited."""

    def __init__(self, guard: Guard, resolver: AbstractResolver) -> None:
        self._guard = guard
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a name. Raises OSError where there is none to visit."""
        answers = await self._resolver.resolve(host, port, family)
        admitted = (answer for answer in answers if self._guard.admits(answer["host"], port))
        first = list(islice(admitted, _MOST_ADDRESSES))
        if not first:
            raise AddressRefused
        return first

    async def close(self) -> None:
        await self._resolver.close()


def own_resolver(nameservers: Sequence[str] | None = None) -> AbstractResolver:
    """A resolver that shares nothing with that of the upstreams, so that slow names of image hosts delay nobody else.

    A bare name is looked up as it stands, never within the machine's search domain. c-ares keeps an answer for as long
    as its owner allows, no longer; it is judged each time. ``nameservers`` are asked instead of the system's.
    """
    return AsyncResolver(nameservers=nameservers, flags=ARES_FLAG_NOSEARCH | ARES_FLAG_EDNS)


def guarded_connector(guard: Guard, resolver: AbstractResolver, tls: SSLContext, per_host: int) -> TCPConnector:
    """A connector that asks the guard before each connection. It reuses no connection and remembers no name."""
    return TCPConnector(
        resolver=GuardedResolver(guard, resolver),
        socket_factory=guard.socket_for,
        ssl=tls,
        use_dns_cache=False,
        force_close=True,
        limit=0,
        limit_per_host=per_host,
    )
