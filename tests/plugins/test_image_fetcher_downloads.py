"""How images are downloaded: limits, time, types, TLS, and what happens to the other downloads of a request."""

from __future__ import annotations

import asyncio
import base64
import datetime
import gzip
import itertools
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import trustme

from plugins.image_fetcher import ImageFetcherSettings
from plugins.image_fetcher.download import NOT_AN_IMAGE, NOT_VISITED, Downloader, PlacedImage
from proxy.errors import GatewayError, Kind
from tests.plugins.fake_internet import OTHER, PNG, PUBLIC, FakeInternet, Step, redirect, reply
from tests.process import eventually

MIB = 2**20
URL = "http://public.example/a.png"
LOST = "the connection to its host was lost"
NO_ANSWER = "its host gave no valid answer"
TOO_LARGE = "it is larger than 10 MB"
COMPRESSED = "its host sent it compressed though that was not asked for"
NOT_CONNECTED = "its host could not be connected to"
NOT_SECURE = "no secure connection to its host could be made"
TOO_SLOW = "it took longer than 0.3 seconds"
JPEG = b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0" + b"\0" * 16
GIF = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff!\xf9\4\1\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
WEBP = b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0/\0\0\0\x10\7\x10\x11\x11\x88\x88\xfe\7\0"


@pytest.fixture
async def internet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeInternet]:
    internet = FakeInternet(monkeypatch)
    internet.names["public.example"] = [PUBLIC]
    internet.names["other.example"] = [OTHER]
    yield internet
    await internet.close()


async def fetch(internet: FakeInternet, *urls: str, **settings: Any) -> dict[str, dict[str, str]]:
    """One request's images, at ``images[N]``; by URL their sources. Raises GatewayError."""
    downloader = Downloader(ImageFetcherSettings(**settings), internet.resolver())
    try:
        images = [PlacedImage(f"images[{number}]", url) for number, url in enumerate(urls)]
        return dict(await downloader.sources(images))
    finally:
        await downloader.close()


async def outcome(internet: FakeInternet, url: str = URL, **settings: Any) -> str | tuple[str, bytes]:
    """The reason why a download failed, or the media type and the bytes of the image."""
    try:
        source = (await fetch(internet, url, **settings))[url]
    except GatewayError as error:
        failure = error
    else:
        assert {"type", "media_type", "data"} == source.keys()
        return source["media_type"], base64.b64decode(source["data"], validate=True)
    assert Kind.INVALID_REQUEST is failure.kind
    return failure.message.removeprefix("images[0]: could not download the image (").removesuffix(")")


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
GIF_AND_SCRIPT = b"GIF89a/*" + b"\0" * 40 + b"*/=1;alert(1)"
JPEG_AND_ARCHIVE = JPEG + b"PK\3\4" + b"\0" * 64
PNG_AND_PAGE = PNG + b"<html><script>alert(1)</script>"
HUGE_PNG = PNG[:16] + b"\0\0\xea\x60" * 2 + b"\0" * 1000
TEN_MB = PNG.ljust(10 * MIB, b"\0")
IMAGES: dict[str, tuple[list[Step], str, bytes]] = {
    "png": (reply(PNG), "image/png", PNG),
    "jpeg": (reply(JPEG), "image/jpeg", JPEG),
    "gif": (reply(GIF), "image/gif", GIF),
    "webp": (reply(WEBP), "image/webp", WEBP),
    "named html": (reply(PNG, content_type="text/html"), "image/png", PNG),
    "named as another image": (reply(JPEG, content_type="image/png"), "image/jpeg", JPEG),
    "named by no type": (reply(GIF, content_type="application/octet-stream"), "image/gif", GIF),
    "a signature alone": (reply(PNG[:8]), "image/png", PNG[:8]),
    "gif that is a script, too": (reply(GIF_AND_SCRIPT), "image/gif", GIF_AND_SCRIPT),
    "jpeg with an archive behind it": (reply(JPEG_AND_ARCHIVE), "image/jpeg", JPEG_AND_ARCHIVE),
    "png with a page behind it": (reply(PNG_AND_PAGE), "image/png", PNG_AND_PAGE),
    "png of 60000 by 60000 pixels": (reply(HUGE_PNG), "image/png", HUGE_PNG),
    "without a length": (reply(PNG, length=None), "image/png", PNG),
    "identity named": (reply(PNG, content_encoding="Identity"), "image/png", PNG),
    "more than announced": ([*reply(PNG), 0.05, bytes(1000)], "image/png", PNG),
    "in chunks of one byte": (
        [CHUNKED, *(b"1\r\n%c\r\n" % byte for byte in PNG), b"0\r\n\r\n"],
        "image/png",
        PNG,
    ),
    "after hints": ([b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", *reply(PNG)], "image/png", PNG),
    "as large as allowed": (reply(TEN_MB), "image/png", TEN_MB),
    "as large as allowed, without a length": (reply(TEN_MB, length=None), "image/png", TEN_MB),
}


@pytest.mark.parametrize(("steps", "media_type", "body"), IMAGES.values(), ids=IMAGES)
async def test_an_image_is_taken_by_its_bytes(
    internet: FakeInternet, steps: list[Step], media_type: str, body: bytes
) -> None:
    """The type is told from the bytes, never from a header, and the bytes go on as they came."""
    await internet.serve(steps)

    result = await outcome(internet)

    assert (media_type, body) == result


async def test_the_bytes_of_an_image_arrive_whole(internet: FakeInternet) -> None:
    """Encoded piece by piece, an image is the same as encoded at once."""
    image = PNG + bytes(range(256)) * 4000 + b"!"
    await internet.serve([reply(image)[0], *(image[at : at + 99_991] for at in range(0, len(image), 99_991))])

    source = (await fetch(internet, URL))[URL]

    assert {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()} == source


NO_IMAGES = {
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "svg with a declaration": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>",
    "html": b"<!doctype html><html><body>Not found</body></html>",
    "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n" + b"\0" * 16,
    "bmp": b"BM" + b"\0" * 60,
    "tiff": b"II*\0" + b"\0" * 60,
    "tiff, big-endian": b"MM\0*" + b"\0" * 60,
    "ico": b"\0\0\1\0" + b"\0" * 60,
    "avif": b"\0\0\0 ftypavif\0\0\0\0avifmif1miaf" + b"\0" * 16,
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 16,
    "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0" * 32,
    "jpeg 2000, a bare stream": b"\xffO\xffQ" + b"\0" * 32,
    "jpeg xl": b"\0\0\0\x0cJXL \r\n\x87\n" + b"\0" * 32,
    "jpeg xl, a bare stream": b"\xff\n" + b"\0" * 40,
    "mp4": b"\0\0\0 ftypisom\0\0\2\0isomiso2" + b"\0" * 16,
    "wav": b"RIFF$\0\0\0WAVEfmt " + b"\0" * 32,
    "avi": b"RIFF$\0\0\0AVI LIST" + b"\0" * 32,
    "zip": b"PK\3\4" + b"\0" * 60,
    "gzip": gzip.compress(PNG),
    "empty": b"",
    "one byte": b"\x89",
    "three bytes": b"RIF",
    "half a webp": b"RIFF\x1a\0\0\0",
    "an end that is an image": b"\0" * 64 + PNG,
}


@pytest.mark.parametrize("body", NO_IMAGES.values(), ids=NO_IMAGES)
@pytest.mark.parametrize("length", [-1, None], ids=["with its length", "without"])
async def test_what_is_no_image_is_refused(internet: FakeInternet, body: bytes, length: int | None) -> None:
    """Whatever it is called, only the four types pass."""
    await internet.serve(reply(body, length=length, content_type="image/png"))

    assert NOT_AN_IMAGE == await outcome(internet)


async def test_what_is_no_image_is_not_read_to_its_end(internet: FakeInternet) -> None:
    """The first bytes decide, and the host is left."""
    await internet.serve([reply(b"", length=9 * MIB)[0], b"<html>" * 10, asyncio.Event()])

    assert NOT_AN_IMAGE == await outcome(internet)
    await asyncio.wait_for(internet.left.wait(), 5)


FAILURES: dict[str, tuple[Iterable[Step], str]] = {
    "404": (reply(b"no", "404 Not Found"), "HTTP 404"),
    "410 with an image": (reply(PNG, "410 Gone"), "HTTP 410"),
    "204": (reply(b"", "204 No Content"), "HTTP 204"),
    "206": (reply(PNG, "206 Partial Content"), "HTTP 206"),
    "401 that asks for a password": (reply(b"", "401 No", www_authenticate="Basic realm=x"), "HTTP 401"),
    "429": (reply(b"", "429 Slow Down", retry_after="1"), "HTTP 429"),
    "500": (reply(b"", "500 Oops"), "HTTP 500"),
    "101": (
        [b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n", PNG],
        "HTTP 101",
    ),
    "announced too large": (reply(PNG, length=10 * MIB + 1), TOO_LARGE),
    "too large": (reply(PNG.ljust(10 * MIB + 1, b"\0"), length=None), TOO_LARGE),
    "shorter than announced": (reply(PNG, length=len(PNG) + 20), LOST),
    "chunks cut short": ([CHUNKED, b"40\r\n", PNG], LOST),
    "no answer": ([], LOST),
    "reset before the answer": ([None], LOST),
    "reset within the image": ([*reply(PNG, length=1000), None], LOST),
    "half a header": ([b"HTTP/1.1 200 OK\r\nContent-"], LOST),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"], NO_ANSWER),
    "100 KB of one header": ([b"HTTP/1.1 200 OK\r\nX: ", b"a" * 100_000, b"\r\n\r\n", PNG], NO_ANSWER),
    "10,000 headers": ([b"HTTP/1.1 200 OK\r\n", b"X: a\r\n" * 10_000, b"\r\n", PNG], NO_ANSWER),
    "a length that is none": ([b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", PNG], NO_ANSWER),
    "two lengths": ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", PNG], NO_ANSWER),
    "gzip": (reply(gzip.compress(PNG), content_encoding="gzip"), COMPRESSED),
    "gzip, cut": (reply(gzip.compress(PNG)[:-8], content_encoding="gzip"), COMPRESSED),
    "a bomb": (reply(gzip.compress(bytes(64 * MIB)), content_encoding="x-gzip"), COMPRESSED),
    "br": (reply(PNG, content_encoding="br"), COMPRESSED),
    "an unknown encoding": (reply(PNG, content_encoding="identity, rot13"), COMPRESSED),
    "a redirect to nowhere": (redirect("http://"), "its URL is not valid"),
    "a redirect to a long place": (redirect("/" + "a" * 8_180), "its URL is longer than 8192 characters"),
}


@pytest.mark.parametrize(("steps", "reason"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_is_told_in_few_words(internet: FakeInternet, steps: list[Step], reason: str) -> None:
    """Each failure has its reason, which speaks of the host's answer and of nothing else."""
    await internet.serve(steps)

    assert reason == await outcome(internet)


async def test_a_body_without_end_is_left_at_the_limit(internet: FakeInternet) -> None:
    """No more is read than the limit and what the network holds already."""
    endless = itertools.chain([*reply(length=None)], itertools.repeat(bytes(64 * 1024)))
    await internet.serve(lambda _: endless)

    assert TOO_LARGE == await outcome(internet)
    await asyncio.wait_for(internet.left.wait(), 5)
    assert internet.sent < 24 * MIB


SLOW: dict[str, Iterable[Step]] = {
    "headers byte by byte": itertools.chain(
        [b"HTTP/1.1 200 OK\r\nX-"], itertools.chain.from_iterable(zip(itertools.repeat(b"a"), itertools.repeat(0.02)))
    ),
    "body byte by byte": itertools.chain(
        [*reply(length=10_000)], itertools.chain.from_iterable(zip(itertools.repeat(b"a"), itertools.repeat(0.02)))
    ),
    "nothing at all": [asyncio.Event()],
    "a stall after 9 MB": [*reply(PNG.ljust(9 * MIB, b"\0"), length=10 * MIB), asyncio.Event()],
    "endless provisional answers": itertools.chain.from_iterable(
        zip(itertools.repeat(b"HTTP/1.1 102 Processing\r\n\r\n" * 50), itertools.repeat(0.01))
    ),
}


@pytest.mark.parametrize("steps", SLOW.values(), ids=SLOW)
async def test_a_slow_host_is_given_up(internet: FakeInternet, steps: Iterable[Step]) -> None:
    """The time counts from the beginning to the end of a download, however the host spends it."""
    await internet.serve(lambda _: steps)

    assert TOO_SLOW == await outcome(internet, timeout=0.3)
    await asyncio.wait_for(internet.left.wait(), 5)


async def test_all_hops_share_one_time_limit(internet: FakeInternet) -> None:
    """Three slow redirects and a slow image are one slow download."""

    def hop(visit: Any) -> list[Step]:
        left = int(visit.target.strip("/"))
        return [0.1, *(redirect(f"/{left - 1}") if left else reply())]

    await internet.serve(hop)

    assert TOO_SLOW == await outcome(internet, "http://public.example/3", timeout=0.3)


async def test_a_host_that_is_not_there(internet: FakeInternet) -> None:
    """A public host that refuses connections is told without its address."""
    assert NOT_CONNECTED == await outcome(internet)


async def test_a_url_that_is_used_twice_is_fetched_once(internet: FakeInternet) -> None:
    """One visit serves all places of a URL."""
    await internet.serve(reply())

    sources = await fetch(internet, *[URL] * 20)

    assert [URL] == [*sources]
    assert 1 == len(internet.visits)


TOTALS = {
    "three images, within": (["/1", "/2", "/3"], 3 * len(PNG), True),
    "three images, a byte too much": (["/1", "/2", "/3"], 3 * len(PNG) - 1, False),
    "one image thrice, within": (["/1", "/1", "/1"], 3 * len(PNG), True),
    "one image thrice, a byte too much": (["/1", "/1", "/1"], 3 * len(PNG) - 1, False),
}


@pytest.mark.parametrize(("targets", "limit", "is_within"), TOTALS.values(), ids=TOTALS)
async def test_the_images_of_a_request_share_a_limit(
    internet: FakeInternet, targets: list[str], limit: int, is_within: bool
) -> None:
    """What a request's images hold in all is limited, each use of a URL counted."""
    await internet.serve(reply())
    urls = [f"http://public.example{target}" for target in targets]

    if is_within:
        assert {*urls} == (await fetch(internet, *urls, max_bytes_total=limit)).keys()
        return
    with pytest.raises(GatewayError) as caught:
        await fetch(internet, *urls, max_bytes_total=limit)

    assert f"the downloaded images of a request may hold {limit} bytes in all" in caught.value.message


async def test_when_one_fails_the_others_are_cancelled(internet: FakeInternet) -> None:
    """The failure names its own place, and no connection is left."""
    both_run = asyncio.Event()

    def answer(visit: Any) -> list[Step]:
        if internet.open == 3:
            both_run.set()
        return [both_run, *reply(b"", "404 No")] if visit.target == "/2" else [asyncio.Event()]

    await internet.serve(answer)

    with pytest.raises(GatewayError) as caught:
        await fetch(internet, *(f"http://public.example/{number}" for number in (1, 2, 3)))

    assert ("images[1]: could not download the image (HTTP 404)", "images[1]") == (
        caught.value.message,
        caught.value.param,
    )
    await eventually(lambda: internet.open == 0)


@pytest.mark.parametrize("how", ["the client leaves", "the gateway stops"])
async def test_nothing_is_left_open(internet: FakeInternet, how: str) -> None:
    """Whoever ends a request ends its downloads."""
    await internet.serve([asyncio.Event()])
    downloader = Downloader(ImageFetcherSettings(), internet.resolver())
    task = asyncio.create_task(downloader.sources([PlacedImage("images[0]", URL)]))
    await eventually(lambda: internet.visits)

    if how == "the client leaves":
        task.cancel()
    else:
        await downloader.close()

    with pytest.raises((asyncio.CancelledError, GatewayError)):
        await task
    await asyncio.wait_for(internet.left.wait(), 5)
    await downloader.close()


async def _most_at_a_time(internet: FakeInternet, requests: int, images: int, limit: int, **settings: Any) -> int:
    """How many connections there were at most; the hosts answer once ``limit`` of them stand, and a moment passed."""
    enough = asyncio.Event()

    def answer(_: Any) -> list[Step]:
        if internet.open >= limit:
            enough.set()
        return [enough, 0.05, *reply()]

    for number in range(requests * images):
        internet.names[f"host{number}.example"] = [f"93.184.217.{number}"]
        await internet.serve(answer, f"93.184.217.{number}")
    await internet.serve(answer)
    downloader = Downloader(ImageFetcherSettings(**settings), internet.resolver())
    hosts = iter(range(requests * images))
    same = "max_downloads_per_host" in settings
    urls = [
        [f"http://public.example/{at}" if same else f"http://host{next(hosts)}.example/" for at in range(images)]
        for _ in range(requests)
    ]
    try:
        await asyncio.gather(*(downloader.sources([PlacedImage("x", url) for url in each]) for each in urls))
    finally:
        await downloader.close()
    return internet.most_open


CAPS = {
    "of one request": (1, 6, 2, {"parallel": 2}),
    "of one request, by default": (1, 10, 4, {}),
    "of all requests": (6, 1, 3, {"max_downloads": 3}),
    "from one host": (8, 1, 3, {"max_downloads_per_host": 3}),
}


@pytest.mark.parametrize(("requests", "images", "limit", "settings"), CAPS.values(), ids=CAPS)
async def test_downloads_at_the_same_time_are_limited(
    internet: FakeInternet, requests: int, images: int, limit: int, settings: dict[str, Any]
) -> None:
    """As many downloads run at a time as the setting says, never more; the others wait for their turn."""
    assert limit == await _most_at_a_time(internet, requests, images, limit, **settings)


async def test_who_waits_too_long_for_a_turn_is_told_to_come_again(internet: FakeInternet) -> None:
    """A gateway that is busy says so, rather than blame the image."""
    await internet.serve([asyncio.Event()])
    downloader = Downloader(ImageFetcherSettings(max_downloads=1, timeout=0.1), internet.resolver())
    requests = (downloader.sources([PlacedImage("x", f"http://public.example/{number}")]) for number in range(4))

    errors = await asyncio.gather(*requests, return_exceptions=True)
    await downloader.close()

    kinds = {(error.kind, error.retry_after) for error in errors if isinstance(error, GatewayError)}
    assert {(Kind.INVALID_REQUEST, None), (Kind.UNAVAILABLE, 1)} == kinds


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """An authority that this machine trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    return authority


def tls_server(authority: trustme.CA, kind: str) -> ssl.SSLContext:
    """What a server shows to prove that it is public.example."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    if kind == "of an unknown authority":
        authority = trustme.CA()
    name = {"of another host": "other.example", "of its address": PUBLIC}.get(kind, "public.example")
    certificate = authority.issue_cert(
        name,
        not_after=past if kind == "expired" else None,
        not_before=past - datetime.timedelta(days=1) if kind == "expired" else None,
    )
    certificate.configure_cert(context)
    if kind == "an old protocol":
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1
    return context


SERVERS = {
    "good": ("image/png", PNG),
    "of an unknown authority": NOT_SECURE,
    "expired": NOT_SECURE,
    "of another host": NOT_SECURE,
    "of its address": NOT_SECURE,
    "an old protocol": NOT_CONNECTED,  # the server hangs up
}


@pytest.mark.parametrize(("kind", "expected"), SERVERS.items())
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1 is deprecated:DeprecationWarning")
async def test_a_host_proves_its_name(
    internet: FakeInternet, authority: trustme.CA, kind: str, expected: str | tuple[str, bytes]
) -> None:
    """The certificate is checked for the name in the URL, though the judged address is what is dialled."""
    await internet.serve(reply(), port=443, tls=tls_server(authority, kind))

    result = await outcome(internet, "https://public.example/a.png")

    assert expected == result
    assert [(PUBLIC, 443)] == internet.dialled
    if kind != "an old protocol":
        assert ["public.example"] == internet.server_names


async def test_a_secure_host_may_not_lead_inside(internet: FakeInternet, authority: trustme.CA) -> None:
    """A redirect from https is judged like any other."""
    await internet.serve(redirect("http://169.254.169.254/"), port=443, tls=tls_server(authority, "good"))

    assert NOT_VISITED == await outcome(internet, "https://public.example/a.png")
    assert [(PUBLIC, 443)] == internet.dialled
