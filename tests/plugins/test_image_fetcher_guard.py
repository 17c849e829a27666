"""Which addresses the image fetcher may visit."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.image_fetcher.guard import AddressRefused, Guard, is_of_this_machine

REFUSED = {
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback, its end",
    "0.0.0.0": "unspecified",
    "0.1.2.3": "this network",
    "10.0.0.1": "private",
    "10.255.255.255": "private, its end",
    "172.16.0.1": "private",
    "172.31.255.255": "private, its end",
    "192.168.0.1": "private",
    "192.168.255.255": "private, its end",
    "169.254.169.254": "metadata",
    "169.254.170.2": "credentials of containers",
    "169.254.0.1": "link-local",
    "100.64.0.1": "shared by carriers",
    "100.127.255.255": "shared by carriers, its end",
    "100.100.100.200": "metadata in a carrier's range",
    "168.63.129.16": "host agent",
    "192.0.0.1": "protocol assignments",
    "192.0.0.8": "dummy address",
    "192.0.0.9": "port control",
    "192.0.0.10": "relay",
    "192.0.0.170": "discovery of NAT64",
    "192.0.0.192": "metadata of a cloud",
    "192.0.2.1": "documentation",
    "198.51.100.1": "documentation",
    "203.0.113.1": "documentation",
    "192.88.99.1": "relay of 6to4",
    "198.18.0.1": "benchmarks",
    "198.19.255.255": "benchmarks, their end",
    "224.0.0.1": "multicast",
    "239.255.255.250": "multicast of discovery",
    "233.252.0.1": "multicast for documentation",
    "240.0.0.1": "reserved",
    "255.255.255.255": "broadcast",
    "::1": "loopback",
    "::": "unspecified",
    "fc00::1": "unique local",
    "fd00:ec2::254": "metadata",
    "fd12:3456:789a::1": "unique local",
    "fe80::1": "link-local",
    "fe80::1%eth0": "link-local with a scope",
    "2606:4700::1111%eth0": "public with a scope",
    "fec0::1": "site-local",
    "ff02::1": "multicast",
    "ff0e::1": "multicast, global",
    "100::1": "discard",
    "100:0:0:1::1": "dummy prefix",
    "2001:db8::1": "documentation",
    "3fff::1": "documentation",
    "5f00::1": "segment routing",
    "4000::1": "unallocated",
    "8000::1": "unallocated",
    "e000::1": "unallocated",
    "2620:4f:8000::1": "sink of reverse look-ups",
    "2001::1": "Teredo's prefix",
    "2001:0:7f00:1::": "Teredo",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2": "Teredo, complete",
    "2001:2::1": "benchmarks",
    "2001:10::1": "old identifiers",
    "2001:20::1": "identifiers",
    "2001:1ff:ffff::1": "protocol assignments, their end",
    "2002:7f00:1::": "6to4 of loopback",
    "2002:a9fe:a9fe::1": "6to4 of metadata",
    "2002:5db8:d822::1": "6to4 of a public address",
    "::ffff:127.0.0.1": "loopback as IPv6",
    "::ffff:a9fe:a9fe": "metadata as IPv6",
    "::ffff:10.0.0.1": "private as IPv6",
    "::ffff:0.0.0.0": "unspecified as IPv6",
    "::127.0.0.1": "loopback, compatible",
    "::a9fe:a9fe": "metadata, compatible",
    "::ffff:0:7f00:1": "loopback, translated",
    "64:ff9b::7f00:1": "loopback through NAT64",
    "64:ff9b::a9fe:a9fe": "metadata through NAT64",
    "64:ff9b::5db8:d822": "a public address through NAT64",
    "64:ff9b:1::7f00:1": "loopback through a local NAT64",
    "localhost": "a name",
    "2130706433": "one number",
    "127.1": "two numbers",
    "0177.0.0.1": "octal",
    "0x7f.0.0.1": "hexadecimal",
    "": "nothing",
}
ADMITTED = {
    "93.184.216.34": "a public address",
    "1.1.1.1": "a resolver",
    "100.63.255.255": "before the carriers' range",
    "100.128.0.0": "behind it",
    "172.15.255.255": "before a private range",
    "172.32.0.0": "behind it",
    "192.0.1.1": "behind the protocol assignments",
    "168.63.129.17": "behind the host agent",
    "223.255.255.255": "before multicast",
    "2606:4700::1111": "a public address",
    "2a00:1450:4001::1": "a public address",
    "2001:200::1": "behind the protocol assignments",
    "2001:4860:4860::8888": "a resolver",
    "2003::1": "behind 6to4",
    "3ffe::1": "before a documentation range",
    "::ffff:93.184.216.34": "a public address as IPv6",
}
SPECIAL = [
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4", "::/3", "4000::/2", "8000::/1", "2001::/23"),
        *("2001:db8::/32", "2002::/16", "3fff::/20", "2620:4f:8000::/48", "fc00::/7", "fe80::/10", "ff00::/8"),
    )
]
MAPPED = IPv6Network("::ffff:0:0/96")


@pytest.mark.parametrize("address", REFUSED, ids=lambda address: f"{REFUSED[address]} {address}")
def test_what_is_not_public_is_refused(address: str) -> None:
    """No address of a machine, a private network, a tunnel or a cloud's inside is visited, whatever its spelling."""
    assert not Guard([]).admits(address, 80)
    assert not Guard([]).admits(address, 443)


@pytest.mark.parametrize("address", ADMITTED, ids=lambda address: f"{ADMITTED[address]} {address}")
def test_what_is_public_is_admitted(address: str) -> None:
    """Public addresses are visited, those beside a special range too."""
    assert Guard([]).admits(address, 80)


@given(st.sampled_from(SPECIAL).flatmap(lambda network: st.ip_addresses(network=network)))
def test_no_address_of_a_special_range_is_admitted(address: IPv4Address | IPv6Address) -> None:
    """Wherever in a special range an address lies, it is refused."""
    if isinstance(address, IPv6Address) and address in MAPPED:
        return
    assert not Guard([]).admits(str(address), 443)


@given(
    st.one_of(st.ip_addresses(v=4), st.sampled_from(SPECIAL[:15]).flatmap(lambda n: st.ip_addresses(network=n))),
    st.booleans(),
)
def test_an_ipv4_address_is_judged_alike_as_ipv6(address: IPv4Address, nat64: bool) -> None:
    """Written as IPv6, or reached through an admitted NAT64, an address is judged as the IPv4 address that it is."""
    guard = Guard([], nat64)
    expected = guard.admits(str(address), 80)

    assert expected == guard.admits(f"::ffff:{address}", 80)
    assert (expected and nat64) == guard.admits(f"64:ff9b::{address}", 80)
    assert not guard.admits(f"64:ff9b:1::{address}", 80)
    assert not guard.admits(f"::{address}", 80)
    assert not guard.admits(str(IPv6Address(int(IPv6Address("2002::")) | int(address) << 80)), 80)


PORTS = {80: True, 443: True, 0: False, 22: False, 25: False, 6379: False, 8080: False, 65535: False}


@pytest.mark.parametrize(("port", "expected"), PORTS.items())
def test_public_addresses_are_visited_on_two_ports(port: int, expected: bool) -> None:
    """The fetcher is no scanner of ports."""
    assert expected == Guard([]).admits("93.184.216.34", port)


ALLOWED = {
    "inside": ("10.1.2.3", 80, True),
    "inside, another port": ("10.1.2.3", 9000, True),
    "inside, written as IPv6": ("::ffff:10.1.2.3", 9000, True),
    "inside, IPv6": ("fd00::5", 9000, True),
    "inside, with a scope": ("fd00::5%eth0", 80, False),
    "outside": ("10.2.0.1", 80, False),
    "loopback": ("127.0.0.1", 80, False),
    "public": ("93.184.216.34", 80, True),
    "public, another port": ("93.184.216.34", 9000, False),
}


@pytest.mark.parametrize(("address", "port", "expected"), ALLOWED.values(), ids=ALLOWED)
def test_an_operator_allows_networks(address: str, port: int, expected: bool) -> None:
    """An allowed network is visited on any port, and nothing else changes."""
    guard = Guard([ip_network("10.1.0.0/16"), ip_network("fd00::/64")])

    assert expected == guard.admits(address, port)


OWN = {"127.0.0.1": True, "93.184.216.34": False, "2606:4700::1111": False}


@pytest.mark.parametrize(("address", "expected"), OWN.items())
def test_the_kernel_knows_this_machines_addresses(address: str, expected: bool) -> None:
    """An address of this machine is told from others, where no way leads there too."""
    assert expected == is_of_this_machine(ip_address(address))


def test_a_socket_is_made_only_for_an_admitted_address() -> None:
    """The last step before a connection asks the guard."""
    info = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")

    with pytest.raises(AddressRefused):
        Guard([]).socket_for((*info, ("127.0.0.1", 80)))
    with Guard([]).socket_for((*info, ("93.184.216.34", 80))) as made:
        assert (socket.AF_INET, socket.SOCK_STREAM) == (made.family, made.type)
