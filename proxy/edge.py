"""What may stand between the gateway and its clients: reverse proxies, a path that they add, browsers of other origins.

All of it is off by default, and what a client says of itself is believed only from a proxy that is named as trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from aiohttp import web

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

ALLOWED_METHODS = "GET, HEAD, POST, OPTIONS"
EXPOSED = "*"
"""All of them, for whoever sends a key and no cookie; plugins add headers of their own."""
PREFLIGHT_SECONDS = "7200"


def client_address(request: web.BaseRequest, trusted: Sequence[Network]) -> str | None:
    """Who asks: the peer, or behind trusted proxies the last address that none of them vouches for."""
    address = request.remote
    if not trusted or address is None:
        return address
    known = _read(address)
    for hop in reversed(",".join(request.headers.getall("x-forwarded-for", ())).split(",")):
        before = _read(hop.strip())
        if known is None or before is None or not any(known in network for network in trusted):
            break
        known = before
        address = str(before)
    return address


def _read(text: str) -> Address | None:
    """The address, None for what is none. One of IPv4 within IPv6 is that of IPv4."""
    try:
        address = ip_address(text.partition("%")[0])  # behind it anything may stand
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_preflight(request: web.BaseRequest) -> bool:
    """Whether a browser asks if it may send a request to another origin."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def preflight_headers(request: web.BaseRequest) -> dict[str, str]:
    """What a browser may send, beside ``cors_headers``."""
    return {
        "access-control-allow-methods": ALLOWED_METHODS,
        "access-control-allow-headers": request.headers.get("access-control-request-headers", "*"),
        "access-control-max-age": PREFLIGHT_SECONDS,
    }


def cors_headers(request: web.BaseRequest, origins: Sequence[str]) -> dict[str, str]:
    """What tells browsers of these origins (``*``: all) that they may read an answer."""
    origin = request.headers.get("origin")
    if origin is None:
        return {}
    if "*" not in origins and origin not in origins:
        return {"vary": "origin"}
    return {
        "vary": "origin",
        "access-control-allow-origin": "*" if "*" in origins else origin,
        "access-control-expose-headers": EXPOSED,
    }
