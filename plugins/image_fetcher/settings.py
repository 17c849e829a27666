"""The settings of the plugin: where images may be downloaded from, and how much of them."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated

from pydantic import Field

from proxy.plugin import Settings

_MIB = 2**20


class ImageFetcherSettings(Settings):
    """Where images may be downloaded from, and how much of them."""

    messages: bool = False
    """Download on /v1/messages, too; by default their URLs reach the provider as they are."""
    allow_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks that may be visited although they are not public, on any port, such as 10.1.0.0/16."""
    nat64: bool = False
    """For networks that reach IPv4 through 64:ff9b::/96 alone: judge such an address by the IPv4 address in it."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 15
    """Seconds for one download, its redirects included."""
    max_bytes_each: Annotated[int, Field(ge=1)] = 10 * _MIB
    """Bytes of one image."""
    max_bytes_total: Annotated[int, Field(ge=1)] = 32 * _MIB
    """Bytes of all images of a request; one whose URL stands there twice counts twice."""
    max_urls: Annotated[int, Field(ge=0)] = 20
    """URLs in a request."""
    max_redirects: Annotated[int, Field(ge=0)] = 3
    """Redirects that one download follows."""
    parallel: Annotated[int, Field(ge=1)] = 4
    """Downloads of a request that run at the same time."""
    max_downloads: Annotated[int, Field(ge=1)] = 100
    """Downloads of all requests that run at the same time. Who waits longer than ``timeout`` for his turn gets 503."""
    max_downloads_per_host: Annotated[int, Field(ge=1)] = 20
    """Downloads from one host that run at the same time. Here the wait counts as part of ``timeout``."""
