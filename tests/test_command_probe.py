"""``run.py probe`` as an operator uses it: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import asyncio
import difflib
import os
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import click
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from proxy.command_probe import add_probe_command
from proxy.config import load
from proxy.probe import asking
from proxy.probe.writing import CannotWrite, Change, write
from proxy.probe.yaml_edit import Value, with_values
from proxy.settings import Config
from proxy.yaml_source import ConfigError, Loc
from tests.process import REPOSITORY, RUN, run
from tests.test_probe import Json, Odd, OddUpstream, effort, everywhere, holds, never, refusal

KEY = 'provider-"key"-4711'
CONFIG = """\
# The gateway of the house.
server: {open: true}

upstreams:
  own:
    base_url: ${URL}      # where it stands
    api_key: "${OWN_KEY}" # never here
    headers: {x-team: research-and-more}
  other: {base_url: http://127.0.0.1:1}

# What there is to ask.
models:
  - id: test/first
    max_output_tokens: 8192   # as the provider says
    price: free
    deployments:
      - {upstream: other, model: at-other}
      - {upstream: own, model: at-own}   # the good one
  - id: test/second
    max_output_tokens: 8192
    price: free
    capabilities:
      effort: [low, medium]
    deployments:
      - upstream: own
        model: at-own
        profile:
          images: true        # tried in June
      - upstream: own
        model: also-at-own

plugins: [chat_completions]
"""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PAUSE", 0.0)


@pytest.fixture
async def upstream(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OddUpstream]:
    """One that can do everything, until ``odd`` is set."""
    upstream = OddUpstream(never)
    monkeypatch.setenv("URL", await upstream.start())
    monkeypatch.setenv("OWN_KEY", KEY)
    yield upstream
    await upstream.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    return path


async def probe(path: Path, *arguments: str) -> Result:
    """How the command ends. It runs beside this loop, in which the upstream answers."""
    cli = click.Group()
    add_probe_command(cli)
    return await asyncio.to_thread(CliRunner().invoke, cli, ["probe", *arguments], obj=path)


def profiles(config: Config) -> list[Json]:
    deployments = [each for model in config.models for each in model.deployments]
    return [each.profile.model_dump(mode="json", exclude_none=True) for each in deployments]


# What it prints


async def test_each_model_has_its_table(path: Path, upstream: OddUpstream) -> None:
    """An operator sees for each model of the upstream what it can do, and why the probe thinks so."""
    upstream.odd = lambda _, body: refusal(400, "Not\n[bold]here\x1b[31m.") if holds(body, "image") else None

    result = await probe(path, "own")

    assert 0 == result.exit_code, result.output
    titles = [line.strip() for line in result.stdout.splitlines() if " at own" in line]
    assert ["at-own at own", "also-at-own at own"] == titles
    lines = [line.strip().split(maxsplit=2) for line in result.stdout.splitlines()]
    assert [["images", "no", "400: Not [bold]here [31m."]] * 2 == [line for line in lines if line[:1] == ["images"]]
    assert 2 == sum(line[:2] == ["PDFs", "yes"] for line in lines)


async def test_what_would_be_written_is_printed(path: Path, upstream: OddUpstream) -> None:
    """Without --write nothing is touched; the YAML to add is printed with its place."""
    upstream.odd = lambda _, body: refusal(400) if effort(body) else None

    result = await probe(path, "own", "--model", "also-at-own")

    assert path.read_text() == CONFIG
    line = CONFIG[: CONFIG.index("- upstream: own\n        model: also")].count("\n") + 1
    printed = result.stdout.partition("# ")[2]
    assert printed.startswith(f"{path}, line {line}: models[1].deployments[1].profile\nprofile:\n  sampling: true\n")
    assert "\n  effort: []\n  thinking: true\n" in printed
    assert "Nothing is written: --write does that." in result.stdout
    assert (
        "The gateway refuses to start with this, until it is changed:\n"
        f"{path}:{line}: models[1].deployments[1].profile.effort: the deployment can't do what the model claims, "
        "effort low, medium; say `effort: []` in the model's capabilities, or take the deployment out\n"
    ) in result.stderr


ENDS: dict[str, tuple[Odd, str]] = {
    "everywhere": (
        everywhere(lambda: refusal(401, f"Bad key {KEY}, Bearer {KEY}", **{"x-key": KEY})),
        "refuses the key",
    ),
    "as text": (
        everywhere(lambda: web.Response(status=403, text=f"{KEY} research-and-more")),
        "403: [redacted] [redacted]",
    ),
    "in JSON without words": (
        everywhere(lambda: web.json_response({"code": [KEY]}, status=403)),
        '403: {"code":["[redacted]"]}',
    ),
    "in one row": (lambda _, body: refusal(400, KEY) if effort(body) == "max" else None, "400: [redacted]"),
    "where the words are cut": (everywhere(lambda: refusal(400, "x" * 150 + KEY)), "x" * 150 + "[redacted]"),
}


@pytest.mark.parametrize(("odd", "shown"), ENDS.values(), ids=ENDS)
async def test_no_key_is_printed(path: Path, upstream: OddUpstream, odd: Odd, shown: str) -> None:
    """An upstream that quotes the key, or another header's secret, doesn't get it onto the screen."""
    upstream.odd = odd

    result = await probe(path, "own")

    assert shown in result.output
    assert "-4711" not in result.output  # its end, however it is written
    assert "research-and-more" not in result.output


# How it ends

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no such upstream": (("owm",), "there is no upstream owm; known here: own, other"),
    "no such model": (
        ("own", "--model", "elsewhere"),
        "no model is deployed at own as elsewhere; deployed there: at-own, also-at-own",
    ),
    "no server": (("other",), "at-other can't be asked: no answer (ClientConnectorError)"),
}


@pytest.mark.parametrize(("arguments", "why"), WRONG.values(), ids=WRONG)
async def test_what_can_t_be_probed_is_told(
    path: Path, upstream: OddUpstream, arguments: tuple[str, ...], why: str
) -> None:
    """Whoever mistypes a name learns the right ones; the exit code is that of a failure."""
    result = await probe(path, *arguments)

    assert 1 == result.exit_code
    assert f"Error: {why}" in result.stderr


async def test_a_key_that_is_refused_is_told_in_a_sentence(path: Path, upstream: OddUpstream) -> None:
    """The end comes at once, with the words of the upstream, and without a table of nothing."""
    upstream.odd = everywhere(lambda: refusal(401, "No."))

    result = await probe(path, "own", "--write")

    said = "it refuses the key, sent as x-api-key (401: No.) and as bearer (401: No.)"
    assert (1, "") == (result.exit_code, result.stdout)
    assert f"Error: the upstream own can't be probed: {said}\n" == result.stderr
    assert path.read_text() == CONFIG


async def test_one_model_that_is_missing_hides_no_other(path: Path, upstream: OddUpstream) -> None:
    """What was found out about the others is written, and the exit code says that not all went well."""
    upstream.odd = lambda _, body: refusal(404, "No such model.") if body["model"] == "at-own" else None

    result = await probe(path, "own", "--write")

    assert 1 == result.exit_code
    assert "Error: at-own can't be asked: 404: No such model.\n" == result.stderr
    assert [{}, {}, {"images": True}] == profiles(load(path))[:3]
    assert profiles(load(path))[3]["pdfs"]


@pytest.mark.slow
async def test_an_interrupted_probe_ends_cleanly(path: Path, upstream: OddUpstream) -> None:
    """Ctrl-C ends it at once, with nothing written and no traceback."""
    asked = asyncio.Event()

    class Hanging(OddUpstream):
        async def _messages(self, request: web.Request) -> web.StreamResponse:
            asked.set()
            return await self._hang(request)

    hanging = Hanging(never)
    environment = {**os.environ, "URL": await hanging.start()}
    process = await asyncio.create_subprocess_exec(
        *(*RUN, "probe", "--config", str(path), "own", "--write"),
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            await asked.wait()
            process.send_signal(signal.SIGINT)
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await hanging.stop()

    assert (1, "", "Aborted!") == (process.returncode, output.decode(), errors.decode().strip())
    assert path.read_text() == CONFIG


@pytest.mark.slow
async def test_the_demo_is_probed_by_the_real_command(tmp_path: Path) -> None:
    """What the README's reader tries first works: a built-in upstream runs for as long as the probe does."""
    path = tmp_path / "demo.yaml"
    path.write_text((REPOSITORY / "config" / "demo.yaml").read_text())

    ended = await run("--config", str(path), "probe", "demo", "--model", "tiny", "--write")

    assert (0, "") == (ended.code, ended.errors)
    assert "prompt caching" in ended.output
    [profile] = [each for each in profiles(load(path, {})) if each]
    assert profile["prompt_caching"]


# What it writes


async def test_profiles_are_written_and_nothing_else(path: Path, upstream: OddUpstream) -> None:
    """Comments, order and ${NAME}s stay; each deployment of a model gets its profile, and the file can be used."""
    upstream.odd = lambda _, body: refusal(400) if effort(body) == "max" or holds(body, "image") else None
    path.write_text(CONFIG.replace("price: free", "price: free\n    capabilities: {images: false, effort: [low]}", 1))
    path.write_text(path.read_text().replace("effort: [low, medium]", "{effort: [low, medium], images: false}"))
    path.chmod(0o640)
    before = path.read_text()

    result = await probe(path, "own", "--write")

    assert (0, "") == (result.exit_code, result.stderr), result.output
    after = path.read_text()
    removed = [line[2:] for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] == "- "]
    assert 0o640 == stat.S_IMODE(path.stat().st_mode)
    assert [path] == list(path.parent.iterdir())
    assert [
        "      - {upstream: own, model: at-own}   # the good one",
        "          images: true        # tried in June",
    ] == removed
    assert "\n          images: false        # tried in June\n          sampling: true\n" in after
    assert "}}   # the good one\n" in after
    first, second, third, fourth = profiles(load(path))
    assert {} == first
    assert ["low", "medium", "high", "xhigh"] == second["effort"]
    assert second == third == fourth
    assert f"written: {path}: models[1].deployments[0].profile: " in result.stdout
    assert "images: false (was true)" in result.stdout


async def test_a_second_probe_finds_nothing_to_write(path: Path, upstream: OddUpstream) -> None:
    """What is there already is not written again."""
    await probe(path, "own", "--write")
    before = path.read_text()

    result = await probe(path, "own", "--write")

    assert "There is nothing new to write." in result.stdout
    assert before == path.read_text()


async def test_what_is_unknown_keeps_what_was_found_out_before(path: Path, upstream: OddUpstream) -> None:
    """A moment's overload takes nothing out of a profile."""
    upstream.odd = lambda _, body: refusal(529) if holds(body, "image") else None

    await probe(path, "own", "--write")

    _, second, third, _ = profiles(load(path))
    assert third == {**second, "images": True}
    assert "images" not in second


async def test_the_other_way_of_sending_the_key_is_written(path: Path, upstream: OddUpstream) -> None:
    """The next start sends the key as the upstream takes it."""
    upstream.odd = lambda _, __: None if "authorization" in upstream.headers[-1] else refusal(401)

    result = await probe(path, "own", "--write", "--model", "also-at-own")

    assert 0 == result.exit_code
    assert f"written: {path}: upstreams.own: auth: bearer\n" in result.stdout
    assert "\n    headers: {x-team: research-and-more}\n    auth: bearer\n  other: " in path.read_text()
    assert "bearer" == load(path).upstreams["own"].auth


async def test_models_in_a_file_of_their_own_are_written_there(path: Path, upstream: OddUpstream) -> None:
    """The file that holds a deployment is the one that is changed, and a link to it stays a link."""
    head, _, rest = CONFIG.partition("models:\n")
    models, _, plugins = rest.partition("\nplugins")
    real = path.with_name("real.yaml")
    real.write_text(models)
    path.with_name("models.yaml").symlink_to(real)
    path.write_text(f"{head}models: models.yaml\nplugins{plugins}")
    before = path.read_text()

    result = await probe(path, "own", "--write")

    assert 0 == result.exit_code, result.output
    assert before == path.read_text()
    assert path.with_name("models.yaml").is_symlink()
    assert f"written: {path.with_name('models.yaml')}: models[0].deployments[1].profile: " in result.stdout
    assert [{}, *[ALL_KNOWN] * 3] == [{name: True for name in each} for each in profiles(load(path))]
    assert real.read_text().startswith("  - id: test/first\n    max_output_tokens: 8192   # as the provider says\n")


ALL_KNOWN = dict.fromkeys(
    (
        *("sampling", "sampling_exclusive", "prompt_caching", "effort", "thinking", "forced_tool_choice"),
        *("images", "pdfs", "structured_outputs", "count_tokens"),
    ),
    True,
)


async def test_a_profile_that_refutes_its_model_is_written_and_told(path: Path, upstream: OddUpstream) -> None:
    """The truth is written, and the operator learns in the words of the start, with the line, what to change."""
    upstream.odd = lambda _, body: refusal(400) if holds(body, "document") else None

    result = await probe(path, "own", "--write", "--model", "also-at-own")

    line = 1 + path.read_text().splitlines().index("          pdfs: false")
    said = (
        f"{path}:{line}: models[1].deployments[1].profile.pdfs: the deployment can't do what the model claims, pdfs; "
        "say `pdfs: false` in the model's capabilities, or take the deployment out"
    )
    assert 0 == result.exit_code
    assert f"\nThe gateway refuses to start with this, until it is changed:\n{said}\n" == result.stderr
    with pytest.raises(ConfigError, match="pdfs"):
        load(path)


def a_change(path: Path, **values: Value) -> Change:
    return Change(path, (), ("models", 0, "deployments", 0, "profile"), values, {"model": "at-other"})


def test_a_file_that_was_changed_meanwhile_is_left_alone(path: Path) -> None:
    """A probe takes a minute; whoever edits the file in it loses nothing."""
    changed = CONFIG.replace("at-other", "renamed")
    path.write_text(changed)

    with pytest.raises(CannotWrite, match="change it by hand"):
        list(write([a_change(path, images=True)], {}))

    assert changed == path.read_text()


def test_a_file_that_can_t_be_read_any_more_is_told(path: Path) -> None:
    """What stands in the way is named."""
    path.unlink()

    with pytest.raises(CannotWrite, match="No such file"):
        list(write([a_change(path, images=True)], {}))


# Values in a text

FLOW = "- {upstream: a, model: b}"
BLOCK = "- upstream: a\n  model: b\n"
LOC: Loc = (0, "profile")
LONG: Mapping[str, Value] = {f"a_setting_of_long_name_{number}": True for number in range(4)}
TEXTS: dict[str, tuple[str, Mapping[str, Value], str]] = {
    "flow": (f"{FLOW}  # why\n", {"images": True}, "- {upstream: a, model: b, profile: {images: true}}  # why\n"),
    "flow, with a comma": (
        "- {upstream: a, model: b,}",
        {"images": True},
        "- {upstream: a, model: b, profile: {images: true},}",
    ),
    "flow over lines": (
        "- {upstream: a,\n   model: b  # why\n  }\n",
        {"images": False},
        "- {upstream: a,\n   model: b, profile: {images: false}  # why\n  }\n",
    ),
    "flow, too long for a line": (
        FLOW,
        LONG,
        "- {upstream: a, model: b,\n"
        "   profile: {a_setting_of_long_name_0: true, a_setting_of_long_name_1: true, a_setting_of_long_name_2: true,\n"
        "     a_setting_of_long_name_3: true}}",
    ),
    "block": (f"{BLOCK}# next\n", {"images": True}, f"{BLOCK}  profile:\n    images: true\n# next\n"),
    "block, with a comment": (
        "- upstream: a\n  model: b  # why\n\n- x: y\n",
        {"effort": ["low", "high"], "images": True},
        "- upstream: a\n  model: b  # why\n  profile:\n    effort: [low, high]\n    images: true\n\n- x: y\n",
    ),
    "block, without an end of line": (
        "- upstream: a",
        {"images": True},
        "- upstream: a\n  profile:\n    images: true\n",
    ),
    "block, with an end of line of its own": (
        "- upstream: a\r\n  model: b\r\n",
        {"images": True},
        "- upstream: a\r\n  model: b\r\n  profile:\r\n    images: true\r\n",
    ),
    "block behind a block": (
        "- upstream: a\n  more:\n    - c\n    - d  # why\n\n# next\n- x: y\n",
        {"images": True},
        "- upstream: a\n  more:\n    - c\n    - d  # why\n  profile:\n    images: true\n\n# next\n- x: y\n",
    ),
    "block behind a text": (
        "- upstream: a\n  more: |\n    c\n    d\n- x: y\n",
        {"images": True},
        "- upstream: a\n  more: |\n    c\n    d\n  profile:\n    images: true\n- x: y\n",
    ),
    "JSON": (
        '[{"upstream": "a", "model": "b"}]',
        {"images": True, "effort": ["low"]},
        '[{"upstream": "a", "model": "b", "profile": {"images": true, "effort": ["low"]}}]',
    ),
    "an empty profile": ("- {profile: {}, x: y}", {"images": True}, "- {profile: {images: true}, x: y}"),
    "a profile of nothing": (
        "- upstream: a\n  profile:  # none\n  model: b\n",
        {"images": True},
        "- upstream: a\n  profile: {images: true}  # none\n  model: b\n",
    ),
    "a flow profile": (
        "- {profile: {images: true, pdfs: true}}",
        {"images": False, "sampling": True},
        "- {profile: {images: false, pdfs: true, sampling: true}}",
    ),
    "a block profile": (
        "- profile:\n    # seen\n    images: true   # in June\n    pdfs: true\n\n  model: b\n",
        {"images": False, "sampling": True},
        "- profile:\n    # seen\n    images: false   # in June\n    pdfs: true\n    sampling: true\n\n  model: b\n",
    ),
    "a list in block": (
        "- profile:\n    effort:\n    - low\n    - high\n    pdfs: true\n",
        {"effort": []},
        "- profile:\n    effort: []\n    pdfs: true\n",
    ),
    "a value of nothing": (
        "- profile:\n    images:\n    pdfs: true\n",
        {"images": True},
        "- profile:\n    images: true\n    pdfs: true\n",
    ),
    "a word that is more than one": ("- profile: {a: b}", {"auth": "it's #1"}, '- profile: {a: b, auth: "it\'s #1"}'),
}


@pytest.mark.parametrize(("text", "values", "expected"), TEXTS.values(), ids=TEXTS)
def test_only_the_values_change_in_a_text(text: str, values: Mapping[str, Value], expected: str) -> None:
    """An operator's file looks as he wrote it, whatever style he likes."""
    assert expected == with_values(text, LOC, values)
