"""Where the image fetcher goes, and where it does not: real connections, recorded as the event loop is asked for them.

The server at a public address redirects to each forbidden one, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from plugins.image_fetcher import ImageFetcherSettings
from plugins.image_fetcher.download import NOT_VISITED, Downloader, PlacedImage
from proxy.errors import GatewayError
from tests.plugins.fake_internet import OTHER, PNG, PUBLIC, FakeInternet, redirect, reply

PATH = "messages[0].content[2].image_url.url"
NOT_VALID = "its URL is not valid"
NO_USER = "its URL holds a user name or password"
OTHER_SCHEME = "only http and https URLs are visited"
STATUSES = (301, 302, 303, 307, 308)


@pytest.fixture
async def internet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeInternet]:
    internet = FakeInternet(monkeypatch)
    internet.names["public.example"] = [PUBLIC]
    internet.names["other.example"] = [OTHER]
    yield internet
    await internet.close()


async def fetch(internet: FakeInternet, *urls: str, **settings: Any) -> Sequence[str]:
    """Download these; for each the data, or the reason of the refusal."""
    downloader = Downloader(ImageFetcherSettings.model_validate(settings), internet.resolver())
    try:
        return [await _fetched(downloader, url) for url in urls]
    finally:
        await downloader.close()


async def _fetched(downloader: Downloader, url: str) -> str:
    try:
        return (await downloader.sources([PlacedImage(PATH, url)]))[url]["data"]
    except GatewayError as error:
        failure = error
    before, found, reason = failure.message.removesuffix(")").partition("could not download the image (")
    assert (f"{PATH}: ", True, PATH) == (before, bool(found), failure.param)
    return reason


FORBIDDEN: dict[str, tuple[str, ...]] = {
    NOT_VISITED: (
        *("http://127.0.0.1/", "http://127.255.255.254/", "http://0.0.0.0/", "http://0.1.2.3/", "http://10.0.0.1/"),
        *("http://172.16.0.1/", "http://192.168.1.1/", "http://169.254.169.254/latest/meta-data/"),
        *("http://100.64.0.1/", "http://100.100.100.200/", "http://168.63.129.16/", "https://127.0.0.1/"),
        *("http://[::1]/", "http://[::]/", "http://[fc00::1]/", "http://[fd00:ec2::254]/", "http://[fe80::1]/"),
        *("http://[fec0::1]/", "http://[ff02::1]/", "http://[100::1]/", "http://[2001:db8::1]/", "http://[3fff::1]/"),
        *("http://[5f00::1]/", "http://[4000::1]/", "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/"),
        *("http://[::ffff:127.0.0.1]/", "http://[::ffff:a9fe:a9fe]/", "http://[::127.0.0.1]/"),
        *("http://[::ffff:0:7f00:1]/", "http://[64:ff9b::7f00:1]/", "http://[64:ff9b:1::7f00:1]/"),
        *("http://[2002:7f00:1::]/", "http://[2001:0:7f00:1::]/"),
        *("http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0177.0.0.1/"),
        *("http://017700000001/", "http://127.1/", "http://127.0.1/", "http://0/", "http://127.0.0.1./"),
        *("http://00000127.0.0.1/", "http://①②⑦.⓪.⓪.①/", "http://127。0。0。1/", "http://１２７.0.0.1/"),
        *("http://ｌocalhost/", "http://ⓛocalhost/", "http://localhost/", "http://LOCALHOST./"),
        *("http://foo.localhost/", "http://ip6-localhost/", "http://metadata/", "http://metadata.google.internal/"),
        *("http://host.docker.internal/", "http://kubernetes.default.svc/", "http://router.local/", "http://intranet/"),
        *("http://unknown.example/", "http://empty.example/", "http://..../", "http://127.0.0.1.nip.example/"),
        *(
            "http://mapped.example/",
            "http://nat64.example/",
            "http://many.example/",
            "http://127.0.0.1#@public.example/",
        ),
        *("http://public.example:22/", "http://public.example:25/", "http://public.example:6379/"),
        *("http://public.example:8080/", "https://public.example:8443/", "http://public.example:0/"),
        *(f"http://{PUBLIC}:8080/", f"http://{OTHER}/own"),
    ),
    NOT_VALID: (
        *("http://public.example:65536/", "http://public.example:-1/", "http://public.example:80:80/"),
        *("http://public.example:x/", r"http://public.example\@127.0.0.1/", r"http://127.0.0.1\.public.example/"),
        *("http://%31%32%37.0.0.1/", "http://a b/", "http://public.example\x00.evil/", "http://[::1/", "http:///x"),
        *("http://127.0.0.1\t/",),
    ),
    NO_USER: (
        *("http://public@127.0.0.1/", "http://public.example:80@127.0.0.1/", "http://user:pw@public.example/"),
        *("http://@127.0.0.1/", "http://:@public.example/", "http://a@b@public.example/"),
    ),
    OTHER_SCHEME: (
        *(
            "ftp://public.example/",
            "file:///etc/passwd",
            "gopher://127.0.0.1:6379/_x",
            "data:image/png;base64,iVBORw0KGgo=",
        ),
        *("ws://public.example/", "javascript:alert(1)"),
    ),
}
PRIVATE_NAMES = {
    "0x7f000001 0x7f.0.0.1 localhost localhost. foo.localhost v1.a": ["127.0.0.1"],
    "ip6-localhost 127.0.0.1.nip.example": ["::1", "127.0.0.1"],
    "metadata metadata.google.internal": ["169.254.169.254"],
    "host.docker.internal kubernetes.default.svc router.local intranet": ["10.0.0.7"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1", "64:ff9b:1::a00:1"],
    "many.example": [f"10.0.{number >> 8}.{number & 255}" for number in range(4000)],
    "empty.example": [],
}
ROWS = [(url, reason) for reason, urls in FORBIDDEN.items() for url in urls]


def add_private_places(internet: FakeInternet) -> None:
    internet.names.update({name: addresses for names, addresses in PRIVATE_NAMES.items() for name in names.split()})
    internet.own.add(OTHER)


@pytest.mark.parametrize(("url", "reason"), ROWS, ids=[repr(url) for url, _ in ROWS])
async def test_a_forbidden_place_is_never_dialled(internet: FakeInternet, url: str, reason: str) -> None:
    """Whatever the spelling or the DNS answer, no connection is begun, and the reason tells nothing of the place."""
    add_private_places(internet)

    assert [reason] == await fetch(internet, url)
    assert [] == internet.dialled


RELATIVE = {
    "//127.0.0.1/": NOT_VISITED,
    "//intranet/": NOT_VISITED,
    "//other.example:8080/": NOT_VISITED,
    "//user:pw@public.example/": NO_USER,
    r"//public.example\@127.0.0.1/": NOT_VALID,
    "//public.example:99999/": NOT_VALID,
}
REDIRECTED = [
    (url, STATUSES[number % len(STATUSES)], reason)
    for number, (url, reason) in enumerate([*ROWS, *RELATIVE.items()])
    if "\x00" not in url  # no header holds it
]


@pytest.mark.parametrize(("url", "status", "reason"), REDIRECTED, ids=[repr(url) for url, _, _ in REDIRECTED])
async def test_no_redirect_leads_to_a_forbidden_place(
    internet: FakeInternet, url: str, status: int, reason: str
) -> None:
    """Every hop is judged like the first: the public host alone is dialled."""
    add_private_places(internet)
    await internet.serve([b"HTTP/1.1 %d Found\r\nLocation: %b\r\n\r\n" % (status, url.encode())])

    reasons = await fetch(internet, "http://public.example/")

    assert [(PUBLIC, 80)] == internet.dialled
    assert reasons[0] in {reason, NOT_VALID}  # what isn't ASCII in a header is no URL to begin with
    assert reasons[0] == reason or not url.isascii()


FOLLOWED = {
    "absolute": ("http://other.example/b.png", OTHER, "/b.png"),
    "relative": ("c.png?x=1", PUBLIC, "/a/c.png?x=1"),
    "from the root": ("/c.png", PUBLIC, "/c.png"),
    "without a scheme": ("//other.example/d.png", OTHER, "/d.png"),
    "to itself": ("", PUBLIC, "/a/first.png"),
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(("location", "address", "target"), FOLLOWED.values(), ids=FOLLOWED)
async def test_a_redirect_is_followed(
    internet: FakeInternet, status: int, location: str, address: str, target: str
) -> None:
    """A redirect to a public place leads there, however it is written."""
    seen: list[str] = []

    def first_redirects(visit: Any) -> Any:
        seen.append(visit.target)
        return redirect(location, status) if len(seen) == 1 else reply()

    await internet.serve(first_redirects)
    await internet.serve([*reply()], OTHER)

    [data] = await fetch(internet, "http://public.example/a/first.png")

    assert data.startswith("iVBORw0KGgo")
    assert [(PUBLIC, "/a/first.png"), (address, target)] == [(v.address, v.target) for v in internet.visits]
    assert [(PUBLIC, 80), (address, 80)] == internet.dialled


HOPS = {
    "three": (3, {}, None),
    "four": (4, {}, "more than 3 redirects"),
    "none allowed": (1, {"max_redirects": 0}, "more than 0 redirects"),
    "one allowed": (1, {"max_redirects": 1}, None),
}


@pytest.mark.parametrize(("hops", "settings", "reason"), HOPS.values(), ids=HOPS)
async def test_redirects_are_counted(
    internet: FakeInternet, hops: int, settings: dict[str, Any], reason: str | None
) -> None:
    """As many redirects are followed as the setting says, and not one more."""

    def hop(visit: Any) -> Any:
        left = int(visit.target.strip("/"))
        return redirect(f"/{left - 1}") if left else reply()

    await internet.serve(hop)

    [result] = await fetch(internet, f"http://public.example/{hops}", **settings)

    if reason is None:
        assert result.startswith("iVBORw0KGgo")
    else:
        assert reason == result


NO_REDIRECT = {
    "without a location": reply(b"", "302 Found"),
    "not modified": reply(b"", "304 Not Modified"),
    "choices": reply(b"", "300 Multiple Choices", location="/b.png"),
    "a proxy": reply(b"", "305 Use Proxy", location="http://127.0.0.1/"),
}


@pytest.mark.parametrize("steps", NO_REDIRECT.values(), ids=NO_REDIRECT)
async def test_what_is_no_redirect_is_a_failure(internet: FakeInternet, steps: Any) -> None:
    """A 3xx that leads nowhere is told by its status."""
    await internet.serve(steps)

    [reason] = await fetch(internet, "http://public.example/")

    assert f"HTTP {steps[0][9:12].decode()}" == reason
    assert [(PUBLIC, 80)] == internet.dialled


async def test_each_download_uses_the_address_that_was_judged(internet: FakeInternet) -> None:
    """A name that is public once and private later is visited once: no answer is kept, none is asked for twice."""
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    internet.names["rebinding.example"] = lambda: next(answers)
    await internet.serve(reply())

    first, second = await fetch(internet, *["http://rebinding.example/"] * 2)

    assert (True, NOT_VISITED) == (first.startswith("iVBORw0KGgo"), second)
    assert [(PUBLIC, 80)] == internet.dialled


async def test_a_redirect_to_itself_is_judged_anew(internet: FakeInternet) -> None:
    """Nor does a connection that is still open stand in for a new look-up."""
    answers = iter([[PUBLIC], ["10.0.0.1"]])
    internet.names["rebinding.example"] = lambda: next(answers)
    await internet.serve(redirect("/again"))

    assert [NOT_VISITED] == await fetch(internet, "http://rebinding.example/")
    assert [(PUBLIC, 80)] == internet.dialled


async def test_of_mixed_answers_only_public_ones_are_dialled(internet: FakeInternet) -> None:
    """A private address beside a public one is passed over, wherever it stands."""
    internet.names["mixed.example"] = ["127.0.0.1", "::1", PUBLIC, "10.0.0.1", "64:ff9b::7f00:1"]
    await internet.serve(reply())

    [data] = await fetch(internet, "http://mixed.example/")

    assert data.startswith("iVBORw0KGgo")
    assert [(PUBLIC, 80)] == internet.dialled


async def test_a_name_with_thousands_of_addresses_is_not_tried_at_all_of_them(internet: FakeInternet) -> None:
    """A DNS answer can't make the gateway dial for ever."""
    internet.names["many.example"] = [f"93.184.{number >> 8}.{number & 255}" for number in range(4000)]

    assert ["its host could not be connected to"] == await fetch(internet, "http://many.example/")
    assert 8 == len(set(internet.dialled))


async def test_ipv6_hosts_are_visited(internet: FakeInternet) -> None:
    """A public host that has only IPv6 is a host like any other."""
    internet.names["six.example"] = ["2606:4700::1111"]
    await internet.serve(reply(), "2606:4700::1111")

    results = await fetch(internet, "http://six.example/", "http://[2606:4700::1111]/")

    assert [True, True] == [data.startswith("iVBORw0KGgo") for data in results]
    assert [("2606:4700::1111", 80)] * 2 == internet.dialled


async def test_an_allowed_network_is_visited_on_any_port(internet: FakeInternet) -> None:
    """An image store of the operator's own is reached; what lies beside it is not."""
    internet.names["store.corp"] = ["10.1.2.3"]
    await internet.serve(reply(), "10.1.2.3", 9000)

    results = await fetch(internet, "http://store.corp:9000/", "http://10.2.0.1:9000/", allow_networks=["10.1.0.0/16"])

    assert [True, False] == [data.startswith("iVBORw0KGgo") for data in results]
    assert [("10.1.2.3", 9000)] == internet.dialled


async def test_this_machine_is_visited_only_where_it_is_allowed(internet: FakeInternet) -> None:
    """The gateway does not call itself at a public address of its own, unless its operator wants that."""
    internet.own.add(PUBLIC)
    await internet.serve(reply())

    [refused] = await fetch(internet, "http://public.example/")
    [fetched] = await fetch(internet, "http://public.example/", allow_networks=[f"{PUBLIC}/32"])

    assert (NOT_VISITED, True) == (refused, fetched.startswith("iVBORw0KGgo"))
    assert [(PUBLIC, 80)] == internet.dialled


async def test_a_proxy_of_the_environment_is_not_used(internet: FakeInternet, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable leads a download through somebody else."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://user:pw@127.0.0.1:3128")
        monkeypatch.setenv(name.lower(), os.environ[name])
    await internet.serve(reply())

    await fetch(internet, "http://public.example/")

    assert [(PUBLIC, 80)] == internet.dialled


async def test_private_hosts_all_read_the_same(internet: FakeInternet) -> None:
    """Open or closed, existing or not: errors draw no map of a network."""
    add_private_places(internet)
    await internet.serve(reply(), "10.0.0.7", 80)

    reasons = await fetch(
        internet,
        *("http://intranet/", "http://intranet:6379/", "http://10.0.0.7/", "http://10.0.0.8/"),
        *("http://no-such-host/", "http://no-such-host.corp:8080/"),
    )

    assert [NOT_VISITED] * 6 == reasons
    assert [] == internet.visits


async def test_hosts_learn_nothing_and_no_cookie_is_kept(internet: FakeInternet) -> None:
    """A host gets four headers and the end of the connection announced, whatever was set by another before."""
    crossing = {"/1": redirect("http://other.example/2", set_cookie="a=b; Domain=example; Path=/")}
    await internet.serve(lambda visit: crossing.get(visit.target) or reply(PNG, set_cookie="c=d; Path=/"))
    await internet.serve(redirect("http://public.example/3", set_cookie="e=f"), OTHER)

    await fetch(internet, "http://public.example/1", "http://public.example/4")

    common = {
        "accept": "image/png, image/jpeg, image/gif, image/webp, */*;q=0.1",
        "accept-encoding": "identity",
        "user-agent": "ezat-router (image_fetcher)",
        "connection": "close",
    }
    hosts = ["public.example", "other.example", "public.example", "public.example"]
    assert [{"host": host, **common} for host in hosts] == [dict(visit.headers) for visit in internet.visits]


async def test_a_slow_look_up_is_given_up(internet: FakeInternet) -> None:
    """The time limit counts from the look-up on."""
    never = asyncio.Event()

    async def answer() -> list[str]:
        await never.wait()
        return [PUBLIC]

    internet.names["slow.example"] = answer

    assert ["it took longer than 0.05 seconds"] == await fetch(internet, "http://slow.example/", timeout=0.05)
