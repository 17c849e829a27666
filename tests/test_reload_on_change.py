"""Reloading on a changed file, judged from outside, in a folder where the gateway itself writes all the time: its store
and its log stand beside its configuration.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from aiohttp import web

from proxy.testing import ScriptedUpstream, message_reply
from tests.reloads import (
    APPLIED,
    REFUSED,
    UNCHANGED,
    Operated,
    completed,
    configured,
    model,
    operated,
    swap_link,
    text_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

QUIET = 0.8
"""Seconds after which a change would have been noticed."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[ScriptedUpstream]:
    async with ScriptedUpstream() as started:
        yield started


class Watched:
    """A gateway and the files that it is made from, as if both were new."""

    def __init__(self, gateway: Operated, upstream: ScriptedUpstream) -> None:
        self.gateway = gateway
        self.upstream = upstream
        self.folder = gateway.path.parent
        self.models = self.folder / "models.yaml"
        self.key = self.folder / "key"
        self._known = 0

    def config(self, **upstream: Any) -> dict[str, Any]:
        """Its configuration, with these settings of the upstream."""
        config = configured(self.upstream.url, models="models.yaml", server={"watch": True})
        settings = {"base_url": self.upstream.url, "api_key_file": "key", **upstream}
        return {**config, "upstreams": {"test": settings}}

    async def begin(self) -> None:
        """Put the usual files in their places."""
        self.key.write_text("first-key\n")
        self.models.write_text(text_of([model()]))
        self.gateway.exchange(self.config())
        line = await self.gateway.hang_up()
        assert line["event"] in (APPLIED, UNCHANGED)
        self._known = len(self.gateway.told)

    async def told(self) -> dict[str, Any]:
        """The next thing that it says of reloads."""
        self._known += 1
        return await self.gateway.next_told(self._known - 1)

    async def told_nothing(self) -> bool:
        """Whether it says nothing more, for long enough."""
        await asyncio.sleep(QUIET)
        return len(self.gateway.told) == self._known

    async def asked(self, name: str) -> int:
        """The status of a request for this model."""
        return (await self.gateway.ask(model=name)).status


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "key").write_text("first-key\n")
    (folder / "models.yaml").write_text(text_of([model()]))
    path = folder / "gateway.yaml"
    config = configured(upstream.url, models="models.yaml", server={"watch": True})
    path.write_text(text_of(completed(config, folder)))
    with operated(config, folder, path) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def watched(gateway: Operated, upstream: ScriptedUpstream) -> Watched:
    files = Watched(gateway, upstream)
    await files.begin()
    return files


def named(*names: str) -> list[dict[str, Any]]:
    """The usual model, and these."""
    return [model(), *(model(f"test/{name}") for name in names)]


# The ways in which a file becomes another


def write_in_place(file: Path, text: str) -> None:
    file.write_text(text)


def rename_over(file: Path, text: str) -> None:
    new = file.with_name("4913")
    new.write_text(text)
    new.replace(file)


def keep_a_backup(file: Path, text: str) -> None:
    file.replace(file.with_name(f"{file.name}~"))
    file.write_text(text)


def remove_and_write(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


def link_to_another(file: Path, text: str) -> None:
    folder = file.with_name("elsewhere")
    folder.mkdir(exist_ok=True)
    (folder / file.name).write_text(text)
    swap_link(file, f"elsewhere/{file.name}")


WAYS: dict[str, Callable[[Path, str], None]] = {
    "written in place": write_in_place,
    "exchanged by a rename, as editors do": rename_over,
    "renamed to a backup and written anew": keep_a_backup,
    "removed and written anew": remove_and_write,
    "exchanged for a link": link_to_another,
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_changed_configuration_is_taken_over(watched: Watched, way: str) -> None:
    """However a file becomes another, that is noticed once, and taken over."""
    config = {**watched.config(), "models": named("second")}

    WAYS[way](watched.gateway.path, watched.gateway.text_of(config))
    line = await watched.told()

    assert (APPLIED, ["models.test/second: added"]) == (line["event"], line["changes"])
    assert 200 == await watched.asked("second")


@pytest.mark.parametrize("way", WAYS)
async def test_a_changed_file_of_models_is_taken_over(watched: Watched, way: str) -> None:
    """So is the file of models that the configuration names."""
    WAYS[way](watched.models, text_of(named("third")))
    line = await watched.told()

    assert (APPLIED, ["models.test/third: added"]) == (line["event"], line["changes"])
    assert 200 == await watched.asked("third")


async def test_a_mounted_volume_is_followed(watched: Watched) -> None:
    """Files that are links through `..data` to a folder of each edition, as Kubernetes mounts them, are followed from
    one edition to the next, also when the old one is removed."""

    def edition(number: int) -> Path:
        folder = watched.folder / f"..edition-{number}"
        folder.mkdir()
        config = {**watched.config(), "models": named(f"edition-{number}")}
        (folder / "gateway.yaml").write_text(watched.gateway.text_of(config))
        return folder

    folders = [edition(1)]
    os.symlink("..edition-1", watched.folder / "..data")
    swap_link(watched.gateway.path, "..data/gateway.yaml")
    seen = [await watched.told()]
    for number in (2, 3):
        folders.append(edition(number))
        swap_link(watched.folder / "..data", f"..edition-{number}")
        (folders[-2] / "gateway.yaml").unlink()
        folders[-2].rmdir()
        seen.append(await watched.told())
    (folders[-1] / "gateway.yaml").write_text(
        watched.gateway.text_of({**watched.config(), "models": named("in-place")})
    )
    seen.append(await watched.told())

    assert [APPLIED] * 4 == [line["event"] for line in seen]
    assert 200 == await watched.asked("in-place")


async def test_a_rotated_key_is_used_by_new_requests(watched: Watched) -> None:
    """A key in a file of its own is exchanged for another while the gateway serves, and told by nobody."""
    await watched.gateway.ask()
    rename_over(watched.key, "second-key\n")
    line = await watched.told()
    await watched.gateway.ask()

    assert ["first-key", "second-key"] == [each.headers["x-api-key"] for each in watched.upstream.received[-2:]]
    assert ["upstreams.test.api_key: changed"] == line["changes"]
    assert "second-key" not in watched.gateway.written


@asynccontextmanager
async def secure_upstream(authority: trustme.CA) -> AsyncIterator[str]:
    """An upstream whose certificate this authority has issued; its URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    [body] = message_reply().pieces

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_renewed_certificates_are_trusted(watched: Watched) -> None:
    """What the file of certificates holds is taken over, too, though no setting has changed."""
    authority, certificates = trustme.CA(), watched.folder / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(certificates))
    async with secure_upstream(authority) as url:
        watched.gateway.exchange(watched.config(base_url=url, ca_file="ca.pem"))
        await watched.told()
        before = (await watched.gateway.ask()).status

        authority.cert_pem.write_to_path(str(certificates))
        line = await watched.told()
        after = (await watched.gateway.ask()).status

    assert (500, 200) == (before, after)
    assert ["upstreams.test.ca_file: the file holds something else"] == line["changes"]


# What is no change, or not yet


async def test_a_touched_file_is_no_news(watched: Watched) -> None:
    """Files that are touched, or written anew with what they held, cause nothing, not even a line in the log."""
    for file in (watched.gateway.path, watched.models, watched.key):
        os.utime(file)
        for act in WAYS.values():
            act(file, file.read_text())

    assert await watched.told_nothing()


async def test_a_file_is_read_when_it_is_written_to_its_end(watched: Watched) -> None:
    """A file that grows piece by piece is taken over once, though its pieces would be configurations of their own."""
    names = [f"piece-{number}" for number in range(12)]

    def write() -> None:
        with watched.models.open("w") as file:
            for each in named(*names):
                file.write(f"- {text_of(each).strip()}\n".replace("\n", "\n  ").rstrip(" "))
                file.flush()
                time.sleep(0.05)

    await asyncio.to_thread(write)
    line = await watched.told()

    assert (APPLIED, [f"models.test/{name}: added" for name in names]) == (line["event"], line["changes"])


async def test_other_files_of_the_folder_are_no_news(watched: Watched) -> None:
    """The store, the log and files of others are written all the time; that reloads nothing, and hides no change."""

    async def make_noise() -> None:
        while True:
            (watched.folder / "others.log").open("a").close()
            rename_over(watched.folder / "others.yaml", str(time.monotonic()))
            await watched.gateway.ask()

    noise = asyncio.create_task(make_noise())
    quiet = await watched.told_nothing()
    watched.models.write_text(text_of(named("amid-noise")))
    line = await watched.told()
    noise.cancel()

    assert quiet
    assert (APPLIED, ["models.test/amid-noise: added"]) == (line["event"], line["changes"])


# Which files are watched


async def test_a_broken_file_is_refused_until_it_is_mended(watched: Watched) -> None:
    """What is written is judged as with SIGHUP, and judged again when it is written again."""
    watched.models.write_text("- id: [\n")
    broken = await watched.told()
    still = await watched.told_nothing()
    answers = await watched.asked("model")

    watched.models.write_text(text_of(named("mended")))
    mended = await watched.told()

    assert (REFUSED, True, 200) == (broken["event"], still, answers)
    assert "models.yaml:" in broken["reason"]
    assert APPLIED == mended["event"]


FIRST_CONTENTS: dict[str, tuple[Sequence[dict[str, Any]] | str | None, str]] = {
    "that holds something else": (named("other"), APPLIED),
    "that holds the same": ([model()], UNCHANGED),
    "that is broken": ("- id: [\n", REFUSED),
    "that isn't there yet": (None, REFUSED),
}


@pytest.mark.parametrize("name", FIRST_CONTENTS)
@pytest.mark.parametrize("by", ["a change", "a hangup"])
async def test_a_file_that_is_named_anew_is_watched(watched: Watched, name: str, by: str) -> None:
    """A configuration that names another file has that watched, whatever came of it at first."""
    content, expected = FIRST_CONTENTS[name]
    folder = watched.folder / f"{name} by {by}"
    folder.mkdir()
    other = folder / "models.yaml"
    if content is not None:
        other.write_text(content if isinstance(content, str) else text_of(content))

    watched.gateway.exchange({**watched.config(), "models": f"{folder.name}/models.yaml"})
    if by == "a hangup":
        await watched.gateway.hang_up()
    first = await watched.told()
    other.write_text(text_of(named("named-anew")))
    then = await watched.told()

    assert (expected, APPLIED) == (first["event"], then["event"])
    assert 200 == await watched.asked("named-anew")


async def test_a_folder_that_was_gone_is_watched_again(watched: Watched) -> None:
    """A folder that is removed with all that is in it, and comes back, is noticed."""
    folder = watched.folder / "coming"
    folder.mkdir()
    (folder / "models.yaml").write_text(text_of(named("there")))
    watched.gateway.exchange({**watched.config(), "models": "coming/models.yaml"})
    seen = [await watched.told()]

    shutil.rmtree(folder)
    seen.append(await watched.told())
    folder.mkdir()
    (folder / "models.yaml").write_text(text_of(named("back")))
    seen.append(await watched.told())

    assert [APPLIED, REFUSED, APPLIED] == [line["event"] for line in seen]
    assert 200 == await watched.asked("back")


async def test_a_loop_of_links_is_refused_and_watched_on(watched: Watched) -> None:
    """A link that leads to itself is a file that can't be read, and the end of nothing."""
    swap_link(watched.models, "models.yaml")
    broken = await watched.told()
    watched.models.unlink()
    watched.models.write_text(text_of(named("no-link")))
    mended = await watched.told()

    assert (REFUSED, APPLIED) == (broken["event"], mended["event"])
