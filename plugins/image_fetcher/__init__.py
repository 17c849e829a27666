"""Images given by URL are downloaded and sent inline, since many providers take them only so.

What needs no download is judged in ``on_request``, before any budget is touched; the downloads belong in ``on_send``.
On ``/v1/messages`` a body passes unread unless ``messages`` is set: the plugin then isn't in that route's chain.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any, ClassVar

from aiohttp.abc import AbstractResolver

from plugins.chat_completions.content import PlacedUrl
from plugins.image_fetcher.download import Downloader, PlacedImage, download_refused
from plugins.image_fetcher.guard import own_resolver
from plugins.image_fetcher.settings import ImageFetcherSettings
from plugins.image_fetcher.urls import DownloadFailed, parsed_url
from proxy.errors import refused
from proxy.exchange import Exchange
from proxy.plugin import Plugin, Route, Sees, Services

__all__ = ["ImageFetcher", "ImageFetcherSettings"]


class ImageFetcher(Plugin):
    """Downloads the images that a request gives by URL."""

    name: ClassVar[str] = "image_fetcher"
    opens_leaves: ClassVar[bool] = False
    routes: ClassVar[frozenset[Route]] = frozenset({Route.CHAT_COMPLETIONS})
    sees: ClassVar[Sees] = "messages"
    Settings = ImageFetcherSettings
    settings: ImageFetcherSettings

    def __init__(self, settings: ImageFetcherSettings) -> None:
        super().__init__(settings)
        self._downloader: Downloader | None = None
        self._trusted = ssl.create_default_context()  # takes long: not while the event loop waits
        if settings.messages:  # what is counted is what is about to be sent
            messages = {Route.MESSAGES, Route.COUNT_TOKENS}
            self.routes = self.routes | messages  # type: ignore[misc]  # this one's own, by its settings

    def resolver(self) -> AbstractResolver:
        """What looks up the names of image hosts; whatever it finds is judged before it is visited."""
        return own_resolver()

    async def start(self, services: Services) -> None:
        self._downloader = Downloader(self.settings, self.resolver(), self._trusted)

    async def stop(self) -> None:
        if self._downloader is not None:
            await self._downloader.close()

    async def on_request(self, exchange: Exchange) -> None:
        """Raise the GatewayError that needs no download: for too many URLs, or one that can't be visited."""
        images = [image for image, _ in images_by_url(exchange.body)]
        limit = self.settings.max_urls
        if len(images) > limit:
            raise refused(images[limit].path, f"at most {limit} images of a request may be given by URL")
        for image in images:
            try:
                parsed_url(image.url)
            except DownloadFailed as failure:
                raise download_refused(image.path, failure.reason) from None

    async def on_send(self, exchange: Exchange) -> None:
        """Put what was downloaded in the place of the URLs. Raises GatewayError where one can't be had."""
        images = [image for image, _ in images_by_url(exchange.body)]
        if not images:
            return
        if self._downloader is None:
            raise RuntimeError("images are downloaded only between start and stop")
        sources = await self._downloader.sources(images)
        for image, block in list(images_by_url(exchange.change())):
            block["source"] = dict(sources[image.url])


def images_by_url(body: dict[str, Any]) -> Iterator[tuple[PlacedImage, dict[str, Any]]]:
    """The images of a Messages body that are given by URL, those in tool results too, each with its block."""
    for index, message in enumerate(body["messages"]):
        if isinstance(message, dict) and isinstance(content := message.get("content"), list):
            yield from _in_blocks(content, f"messages[{index}].content")


def _in_blocks(blocks: list[Any], path: str) -> Iterator[tuple[PlacedImage, dict[str, Any]]]:
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and isinstance(content := block.get("content"), list):
            yield from _in_blocks(content, f"{path}[{index}].content")
        elif kind == "image" and isinstance(source := block.get("source"), dict) and source.get("type") == "url":
            url = source.get("url")
            if isinstance(url, PlacedUrl):
                yield PlacedImage(url.path, url), block
            elif isinstance(url, str):
                yield PlacedImage(f"{path}[{index}].source.url", url), block
