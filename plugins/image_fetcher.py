"""Images given by URL: they are to be downloaded, since many providers take images only inline.

What needs no download is judged in ``on_request``, before any budget is touched; the downloads belong in ``on_send``.
Until these exist a URL is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network
from typing import Any, ClassVar

from pydantic import Field

from plugins.chat_completions.content import PlacedUrl
from proxy.errors import refused
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees, Settings

_MIB = 2**20
_NOT_YET = "could not download the image (downloads by URL are not available yet; send it as a base64 data URL)"


class ImageFetcherSettings(Settings):
    """Where images may be downloaded from, and how much of them."""

    allow_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks that may be visited although they are not public, such as 10.1.0.0/16."""
    timeout: float = Field(15, gt=0)
    """Seconds for one download, its redirects included."""
    max_bytes_each: int = Field(10 * _MIB, ge=1)
    """Bytes of one image."""
    max_bytes_total: int = Field(32 * _MIB, ge=1)
    """Bytes of all images of a request."""
    max_urls: int = Field(20, ge=0)
    """URLs in a request."""
    max_redirects: int = Field(3, ge=0)
    """Redirects that one download follows."""
    parallel: int = Field(5, ge=1)
    """Downloads of a request that run at the same time."""


class ImageFetcher(Plugin):
    """Downloads the images that a request gives by URL."""

    name: ClassVar[str] = "image_fetcher"
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "messages"
    Settings = ImageFetcherSettings
    settings: ImageFetcherSettings

    async def on_request(self, exchange: Exchange) -> None:
        """Raise the GatewayError that needs no download: too many URLs, and until there are downloads, any URL."""
        urls = [source["url"] for source in url_sources(exchange.body)]
        if len(urls) > self.settings.max_urls:
            limit = self.settings.max_urls
            raise refused(urls[limit].path, f"at most {limit} images of a request may be given by URL")
        if urls:
            raise refused(urls[0].path, _NOT_YET)


def url_sources(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The sources to download, those in tool results too: ``{"type": "url", "url": PlacedUrl}``."""
    for message in body["messages"]:
        yield from _sources(message["content"])


def _sources(content: Any) -> Iterator[dict[str, Any]]:
    for block in content if isinstance(content, list) else ():
        if block["type"] == "image" and isinstance(block["source"].get("url"), PlacedUrl):
            yield block["source"]
        elif block["type"] == "tool_result":
            yield from _sources(block.get("content"))
