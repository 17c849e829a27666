"""Downloads of images: the session, the redirects, the limits, and what the client is told when one fails.

Redirects are followed by hand, so that every hop is judged like the first; limits are counted while reading, never
believed from a header. The session carries no secret, no cookie and no proxy of the environment.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
from aiohttp import hdrs
from aiohttp.abc import AbstractResolver
from yarl import URL

from plugins.image_fetcher.guard import AddressRefused, Guard, guarded_connector
from plugins.image_fetcher.inline import InlineImage, NotAnImage
from plugins.image_fetcher.settings import ImageFetcherSettings
from plugins.image_fetcher.urls import DownloadFailed, parsed_url, redirected_url
from proxy.errors import GatewayError, Kind, refused

NOT_VISITED = "its host has no public address, or its port is neither 80 nor 443"
NOT_AN_IMAGE = "it is not a JPEG, PNG, GIF or WebP image"
_NO_ANSWER = "its host gave no valid answer"
_REASONS: Sequence[tuple[type[Exception], str]] = (  # the first that fits counts
    (AddressRefused, NOT_VISITED),
    (aiohttp.ClientConnectorDNSError, NOT_VISITED),  # a name that is unknown reads like one that is private
    (aiohttp.InvalidURL, NOT_VISITED),  # an address in an odd spelling
    (aiohttp.ClientSSLError, "no secure connection to its host could be made"),
    (aiohttp.ClientConnectorError, "its host could not be connected to"),
    (aiohttp.ClientResponseError, _NO_ANSWER),
    (aiohttp.ClientError, "the connection to its host was lost"),
    (OSError, "the connection to its host was lost"),
)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    hdrs.ACCEPT: "image/png, image/jpeg, image/gif, image/webp, */*;q=0.1",
    hdrs.ACCEPT_ENCODING: "identity",
    hdrs.USER_AGENT: "ezat-router (image_fetcher)",
}
_MIB = 2**20


class PlacedImage(NamedTuple):
    """An image to download, and where the client wrote its URL."""

    path: str
    url: str


class _Allowance:
    """The bytes that the images of a request may still hold."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise DownloadFailed(f"the downloaded images of a request may hold {_size(self._limit)} in all")


class Downloader:
    """Downloads the images of requests. Opened once; ``close`` ends it.

    ``trusted`` are the authorities that vouch for a host, the system's by default.
    """

    def __init__(
        self, settings: ImageFetcherSettings, resolver: AbstractResolver, trusted: ssl.SSLContext | None = None
    ) -> None:
        self._settings = settings
        self._resolver = resolver
        self._turns = asyncio.Semaphore(settings.max_downloads)
        guard = Guard(settings.allow_networks, settings.nat64)
        self._session = aiohttp.ClientSession(
            connector=guarded_connector(
                guard, resolver, trusted or ssl.create_default_context(), settings.max_downloads_per_host
            ),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
        await self._resolver.close()

    async def sources(self, images: Sequence[PlacedImage]) -> Mapping[str, dict[str, str]]:
        """By URL the source ``{"type": "base64", "media_type", "data"}`` of each image, a repeated URL fetched once.

        Raises GatewayError for the first that fails, and cancels the others.
        """
        uses: dict[str, list[PlacedImage]] = {}
        for image in images:
            uses.setdefault(image.url, []).append(image)
        allowance = _Allowance(self._settings.max_bytes_total)
        parallel = asyncio.Semaphore(self._settings.parallel)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    url: group.create_task(self._source(placed[0], len(placed), allowance, parallel))
                    for url, placed in uses.items()
                }
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return {url: task.result() for url, task in tasks.items()}

    async def _source(
        self, image: PlacedImage, uses: int, allowance: _Allowance, parallel: asyncio.Semaphore
    ) -> dict[str, str]:
        async with parallel, self._turn():
            try:
                async with asyncio.timeout(self._settings.timeout):
                    return await self._downloaded(parsed_url(image.url), uses, allowance)
            except DownloadFailed as failure:
                reason = failure.reason
            except NotAnImage:
                reason = NOT_AN_IMAGE
            except TimeoutError:
                reason = f"it took longer than {self._settings.timeout:g} seconds"
            except (aiohttp.ClientError, OSError) as error:
                reason = _reason(error)
        raise download_refused(image.path, reason)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the downloads that may run at the same time. Raises GatewayError when none gets free in time."""
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._turns.acquire()
        except TimeoutError:
            message = "too many images are being downloaded at the moment; try again"
            raise GatewayError(Kind.UNAVAILABLE, message, retry_after=1) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _downloaded(self, url: URL, uses: int, allowance: _Allowance) -> dict[str, str]:
        for _ in range(self._settings.max_redirects + 1):
            async with self._session.get(url, allow_redirects=False) as response:
                location = response.headers.get(hdrs.LOCATION)
                if response.status not in _REDIRECTS or location is None:
                    return await self._read(response, uses, allowance)
                url = redirected_url(url, location)
        raise DownloadFailed(f"more than {self._settings.max_redirects} redirects")

    async def _read(self, response: aiohttp.ClientResponse, uses: int, allowance: _Allowance) -> dict[str, str]:
        if response.status != 200:
            raise DownloadFailed(f"HTTP {response.status}")
        if response.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
            raise DownloadFailed("its host sent it compressed though that was not asked for")
        image, limit = InlineImage(), self._settings.max_bytes_each
        if (response.content_length or 0) > limit:
            raise DownloadFailed(f"it is larger than {_size(limit)}")
        async for data in response.content.iter_any():
            if image.size + len(data) > limit:
                raise DownloadFailed(f"it is larger than {_size(limit)}")
            allowance.take(len(data) * uses)
            image.add(data)
        return image.source()


def download_refused(path: str, reason: str) -> GatewayError:
    """The 400 of an image that could not be downloaded."""
    return refused(path, f"could not download the image ({reason})")


def _reason(error: aiohttp.ClientError | OSError) -> str:
    cause: Exception = error
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, AddressRefused):
        cause = error.os_error
    return next(reason for kind, reason in _REASONS if isinstance(cause, kind))


def _size(count: int) -> str:
    return f"{count // _MIB} MB" if count % _MIB == 0 else f"{count} bytes"
