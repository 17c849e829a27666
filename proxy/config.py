"""The configuration file: every setting with its type and default, and ``load``, which reports all problems at once.

The docstring of a setting is its documentation. What needs more than one setting to judge (names, upstreams, files)
is judged on the raw values, so that it is reported even where another setting is wrong. The settings of a plugin are
checked later, by whoever knows the plugin, with ``config.source`` for the lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, model_validator

from proxy.checking import WhenMissing, check
from proxy.models import EFFORT_LEVELS, Effort, name_key
from proxy.plugin import Settings
from proxy.yaml_source import (
    ConfigError,
    Loc,
    Problem,
    Source,
    content_of,
    parse,
    path_of,
    read,
    shown,
    unreadable,
)

DEMO = "demo"
"""The base URL that stands for the embedded demo upstream."""
LOCAL_LLM = "local-llm"
"""The base URL that stands for a small real model on this machine."""
BUILT_IN = (DEMO, LOCAL_LLM)
DEFAULT_CREATED = 1767225600  # 2026-01-01
END_OF_YEAR_9999 = 253402300799
VERSION = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
FIRST_VERSION_WITHOUT_SAMPLING = "2026-10-21"
OWN_HEADERS = re.compile(
    r"x-api-key|authorization|host|content-.*|connection|transfer-encoding|accept-encoding|anthropic-version"
)


def _empty_if_null(value: Any) -> Any:
    return {} if value is None else value  # a section whose settings are all commented out


def _one_of(value: str, exact: tuple[str, ...], schemes: tuple[str, ...]) -> str:
    if value in exact or any(value.startswith(scheme) and len(value) > len(scheme) for scheme in schemes):
        return value
    raise ValueError("must be " + " or ".join([*exact, *(f"a {scheme}… URL" for scheme in schemes)]))


def _web_url(value: str, *, bare: bool) -> str:
    """``bare``: without user-info, query and fragment."""
    kind = "an http:// or https:// URL" + (" without user, query and fragment" if bare else "")
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not re.fullmatch(r"[\x21-\x7e]+", value) or (bare and re.search(r"[@?#]", value)):
        raise ValueError(f"must be {kind}")
    return value


def _base_url(value: str) -> str:
    return value if value in BUILT_IN else _web_url(value, bare=True).rstrip("/")


def _base_path(value: str) -> str:
    if value and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value):
        raise ValueError("must begin with a slash and end without one, such as /llm")
    return value


def _origin(value: str) -> str:
    if value != "*" and (urlsplit(value).path or urlsplit(_web_url(value, bare=True)).query):
        raise ValueError("must be an origin such as https://chat.example.org, with no path, or *")
    return value


def _proxy(value: str) -> str:
    return _web_url(value, bare=False)


def _version(value: str) -> str:
    if not VERSION.fullmatch(value):
        raise ValueError("must be a date such as 2023-06-01")
    return value


def _store(value: str) -> str:
    return _one_of(value, (), ("sqlite:///", "postgresql://"))


def _limiter(value: str) -> str:
    return _one_of(value, ("memory",), ("redis://", "rediss://"))


def _secret(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", value.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return value


def _header_name(name: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise ValueError("is no valid name of a header")
    if OWN_HEADERS.fullmatch(name.lower()):
        raise ValueError("is set by the gateway itself")
    return name


def _header_value(value: str) -> str:
    if not re.fullmatch(r"[\x20-\x7e]*", value) or value != value.strip():
        raise ValueError("must be printable ASCII without spaces at its ends")
    return value


def _model_name(name: str) -> str:
    if not 1 <= len(name) <= 128 or name != name.strip() or not name.isprintable():
        raise ValueError("must have 1 to 128 printable characters, with no spaces at its ends")
    return name


def _effort_levels(value: Any) -> Any:
    return {True: EFFORT_LEVELS, False: ()}[value] if isinstance(value, bool) else value


def _in_order(levels: tuple[Effort, ...]) -> tuple[Effort, ...]:
    return tuple(level for level in EFFORT_LEVELS if level in levels)


def _price(value: Any) -> Any:
    if value == "free":
        return dict.fromkeys(PriceSettings.model_fields, 0)
    if not isinstance(value, dict | PriceSettings):
        raise ValueError("must be a mapping with input and output, or the word `free`")
    return value


Text = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
ModelName = Annotated[str, AfterValidator(_model_name)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[str, AfterValidator(_header_value)]


class Admin(Settings):
    """The listener for metrics, console and admin API."""

    host: Text = "127.0.0.1"
    """The address that it listens on. Whoever reaches it sees everything."""
    port: Port = 8788
    """Its port; 0 takes a free one."""


class Server(Settings):
    """The public listener and its limits. Times are in seconds."""

    host: Text = "127.0.0.1"
    """The address that it listens on; 0.0.0.0 for all."""
    port: Port = 8787
    """Its port; 0 takes a free one."""
    open: bool = False
    """Serve without a plugin that asks for a key. Whoever reaches the port spends your money."""
    ping_interval: Seconds = 15
    """Silence towards the client after which a keep-alive is sent."""
    request_timeout: Seconds = 590
    """For a whole request that does not stream."""
    first_event_timeout: Seconds = 300
    """From sending a request upstream to the first event of its answer."""
    idle_timeout: Seconds = 300
    """Silence of an upstream within a stream."""
    connect_timeout: Seconds = 10
    """For connecting to an upstream."""
    body_timeout: Seconds = 120
    """For receiving a request's body."""
    plugin_timeout: Seconds = 30
    """For each waiting step of a plugin, on the way in."""
    shutdown_timeout: Seconds = 30
    """How long running requests may go on after a stop was asked for."""
    keepalive_timeout: Seconds = 75
    """How long an idle connection of a client is kept."""
    base_path: Annotated[str, AfterValidator(_base_path)] = ""
    """A path that a reverse proxy leaves in front of every other, such as /llm."""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks of the reverse proxies whose x-forwarded-for is believed, for the client's address in the log."""
    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    """Origins such as https://chat.example.org whose pages may call the gateway from a browser; "*" for all."""
    admin: Annotated[Admin, BeforeValidator(_empty_if_null)] = Admin()
    """The listener for the operator."""

    @model_validator(mode="after")
    def _two_listeners(self) -> Server:
        if self.port and (self.host, self.port) == (self.admin.host, self.admin.port):
            raise ValueError("port and admin.port must differ")
        return self


class UpstreamSettings(Settings):
    """A server that speaks the Messages format."""

    base_url: Annotated[str, AfterValidator(_base_url)]
    """Where it is, without /v1/messages; or `demo` or `local-llm`, the upstreams that the gateway starts itself."""
    api_key: Annotated[SecretStr, AfterValidator(_secret)] | None = None
    """Its key. After loading, the one of api_key_file stands here, too."""
    api_key_file: Path | None = None
    """A file that holds the key, relative to the configuration file."""
    auth: Literal["x-api-key", "bearer"] = "x-api-key"
    """How the key is sent: as the header x-api-key, or as a bearer token."""
    version: Annotated[str, AfterValidator(_version)] = "2023-06-01"
    """The anthropic-version that is sent."""
    headers: dict[HeaderName, HeaderValue] = Field(default_factory=dict, repr=False)
    """Further headers for each request to it."""
    proxy: Annotated[str, AfterValidator(_proxy)] | None = Field(default=None, repr=False)
    """The HTTP proxy on the way to it."""
    ca_file: Path | None = None
    """The certificates to trust instead of the system's, relative to the configuration file."""

    @property
    def is_demo(self) -> bool:
        return self.base_url == DEMO

    @model_validator(mode="after")
    def _one_key(self) -> UpstreamSettings:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key and api_key_file can't both be set")
        return self


class CapabilitySettings(Settings):
    """What a model can do; what is left out, it can. What it can't is refused in the OpenAI format."""

    sampling: bool = True
    """temperature and top_p."""
    sampling_exclusive: bool = False
    """It takes only one of temperature and top_p; temperature wins."""
    prompt_caching: bool = True
    """cache_control marks; without it they are cut out of every request."""
    effort: Annotated[tuple[Effort, ...], BeforeValidator(_effort_levels), AfterValidator(_in_order)] = EFFORT_LEVELS
    """The levels of effort that it takes; true for all, false for none."""
    forced_tool_choice: bool = True
    """tool_choice that forces a call."""
    images: bool = True
    """Images in messages."""
    pdfs: bool = True
    """PDFs in messages."""
    structured_outputs: bool = True
    """Answers that follow a JSON schema."""


class PriceSettings(Settings):
    """USD per million tokens."""

    input: Dollars
    """Tokens of the request that no cache holds."""
    output: Dollars
    """Tokens of the answer."""
    cache_write_5m: Dollars | None = None
    """Tokens written to the five-minute cache; 1.25 times input if left out."""
    cache_write_1h: Dollars | None = None
    """Tokens written to the one-hour cache; 2 times input if left out."""
    cache_read: Dollars | None = None
    """Tokens read from a cache; 0.1 times input if left out."""


class DeploymentSettings(Settings):
    """A model at an upstream."""

    upstream: Text
    """A name from upstreams."""
    model: Text
    """The upstream's name for the model."""
    priority: int = 0
    """The lowest number is asked first, the next ones when it fails."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the conversations, among those of its priority."""
    max_parallel: Count | None = None
    """Requests at the same time; no limit if left out."""


class ModelSettings(Settings):
    """A model that clients may ask for."""

    id: ModelName
    """Its name; what stands before a slash says whose it is."""
    aliases: tuple[ModelName, ...] = ()
    """Other names for it."""
    display_name: Text | None = None
    """Its name for people; made from the id if left out."""
    owned_by: Text | None = None
    """Whose it is; if left out, what stands before the id's slash, else `local`."""
    created: Annotated[int, Field(ge=0, le=END_OF_YEAR_9999)] = DEFAULT_CREATED
    """When it appeared, in seconds since 1970, for the model lists."""
    max_output_tokens: Count
    """The longest answer; a request for more is sent with this."""
    context_window: Count | None = None
    """Tokens of request and answer together; only shown."""
    capabilities: Annotated[CapabilitySettings, BeforeValidator(_empty_if_null)] = CapabilitySettings()
    """What it can do."""
    price: Annotated[PriceSettings, BeforeValidator(_price), WhenMissing("say `price: free` if it costs nothing")]
    """What it costs."""
    deployments: Annotated[tuple[DeploymentSettings, ...], Field(min_length=1)]
    """Where it runs."""


class PluginEntry(Settings):
    """One entry of the list of plugins."""

    name: str
    settings: Annotated[dict[str, Any], Field(repr=False)]
    """As in the file, unchecked."""
    enabled: bool
    loc: Loc
    """Where its settings stand, for ``check``."""


class Config(Settings):
    """The whole configuration."""

    server: Annotated[Server, BeforeValidator(_empty_if_null)] = Server()
    store: Annotated[str, AfterValidator(_store)] = Field(default="sqlite:///data/ezat.db", repr=False)
    """Where keys, organizations and the ledger are kept."""
    limiter: Annotated[str, AfterValidator(_limiter)] = Field(default="memory", repr=False)
    """Where rate limits are counted: `memory`, or a Redis that several gateways share."""
    upstreams: Annotated[dict[Text, UpstreamSettings], Field(min_length=1)]
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    plugins: tuple[PluginEntry, ...] = ()
    """In this order on the way in, in the reverse order on the way out."""
    _source: Source = PrivateAttr()

    @property
    def source(self) -> Source:
        """The file, for the lines of problems in the plugins' settings."""
        return self._source


JudgePlugins = Callable[[Sequence[PluginEntry], Source], list[Problem]]
"""What is wrong with the entries of the list of plugins, told by whoever knows the plugins."""


def load(path: Path, environ: Mapping[str, str] | None = None, judge: JudgePlugins | None = None) -> Config:
    """The configuration in the file, ``${NAME}`` replaced from ``environ`` (the process's own by default).

    Raises ConfigError with all problems at once, those that ``judge`` finds among the plugins included; a file that
    isn't YAML stops at its first.
    """
    environ = os.environ if environ is None else environ
    source = read(path, environ)
    if not isinstance(source.data, dict):
        raise ConfigError([*source.problems, source.problem((), "must be a mapping of settings")])
    problems = list(source.problems)
    problems += _insert_models_file(source, path.parent, environ)
    data = dict(source.data)
    data["plugins"], plugin_problems = _plugin_entries(data.get("plugins", []), source)
    config, setting_problems = check(Config, data, (), source)
    files, file_problems = _upstream_files(data, source, path.parent)
    if judge is not None and isinstance(data["plugins"], list):
        plugin_problems += judge(data["plugins"], source)
    problems += plugin_problems + setting_problems + file_problems
    problems += [*_names_taken(data, source), *_unknown_upstreams(data, source), *_unable_deployments(data, source)]
    if config is None or problems:
        raise ConfigError(sorted(problems, key=lambda problem: (problem.file != source.file, problem.line)))
    upstreams = {name: each.model_copy(update=files.get(name, {})) for name, each in config.upstreams.items()}
    config = config.model_copy(update={"upstreams": upstreams})
    config._source = source
    return config


def _insert_models_file(source: Source, folder: Path, environ: Mapping[str, str]) -> list[Problem]:
    name = source.data.get("models")
    if not isinstance(name, str) or not name or not source.is_readable(("models",)):
        return []
    try:
        inner = parse(content_of(folder / name), str(folder / name), environ, within=("models",))
    except (OSError, ConfigError) as error:
        source.mark_unreadable(("models",))
        return error.problems if isinstance(error, ConfigError) else [source.problem(("models",), unreadable(error))]
    source.insert(("models",), inner)
    return inner.problems


def _plugin_entries(entries: Any, source: Source) -> tuple[Any, list[Problem]]:
    """The list of plugins, each as a PluginEntry; what isn't a list is left to the check of the whole."""
    if not isinstance(entries, list):
        return entries, []
    good: list[PluginEntry] = []
    problems: list[Problem] = []
    for index, raw in enumerate(entries):
        entry = _plugin_entry(raw, ("plugins", index))
        if isinstance(entry, PluginEntry):
            problems += [
                source.problem(entry.loc, f"is listed already, at {path_of(other.loc[:2])}")
                for other in good
                if other.name == entry.name
            ]
            good.append(entry)
        elif source.is_readable(entry[0]):
            problems.append(source.problem(*entry))
    return good, problems


def _plugin_entry(raw: Any, loc: Loc) -> PluginEntry | tuple[Loc, str]:
    """The entry, or the place and the words of what is wrong with it."""
    entry = {raw: None} if isinstance(raw, str) else raw
    if not isinstance(entry, dict) or len(entry) != 1 or not next(iter(entry)):
        return loc, "must be a plugin's name, alone or with its settings indented below it"
    [(name, settings)] = entry.items()
    if not isinstance(settings, dict | None):
        return (*loc, name), "must be a mapping"
    settings = dict(settings or {})
    enabled = settings.pop("enabled", True)
    if not isinstance(enabled, bool):
        return (*loc, name, "enabled"), "must be true or false"
    return PluginEntry(name=name, settings=settings, enabled=enabled, loc=(*loc, name))


def _upstream_files(data: Any, source: Source, folder: Path) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Per upstream, what its files turn its settings into."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    for name, raw in _items(data.get("upstreams")):
        for setting in ("api_key_file", "ca_file"):
            place: Loc = ("upstreams", name, setting)
            file = _at(raw, setting)
            if not isinstance(file, str) or not file or not source.is_readable(place):
                continue
            update = found.setdefault(str(name), {})
            update[setting] = folder / file
            try:
                content = content_of(folder / file).strip()
                if not content:
                    raise ValueError("the file is empty")
                if setting == "api_key_file":
                    update["api_key"] = _secret(SecretStr(content.decode("utf-8", "replace")))
            except OSError as error:
                problems.append(source.problem(place, unreadable(error)))
            except ValueError as error:
                problems.append(source.problem(place, str(error)))
    return found, problems


def _names_taken(data: Any, source: Source) -> Iterator[Problem]:
    owners: dict[str, Loc] = {}
    for index, model in _items(data.get("models")):
        loc: Loc = ("models", index)
        names = [((*loc, "id"), _at(model, "id"))]
        names += [((*loc, "aliases", number), alias) for number, alias in _items(_at(model, "aliases"))]
        for place, name in names:
            if isinstance(name, str) and source.is_readable(place):
                owner = owners.setdefault(name_key(name), place)
                if owner != place:
                    yield source.problem(place, f"the name is taken by {path_of(owner)} (letter case doesn't count)")


def _unknown_upstreams(data: Any, source: Source) -> Iterator[Problem]:
    known = data.get("upstreams")
    if not isinstance(known, dict):
        return
    for place, _, deployment in _deployments(data):
        name = _at(deployment, "upstream")
        if isinstance(name, str) and name and name not in known and source.is_readable(place):
            names = ", ".join(map(shown, known)) or "none"
            yield source.problem(place, f"there is no such upstream; known here: {names}")


def _unable_deployments(data: Any, source: Source) -> Iterator[Problem]:
    """Deployments that can't do what their model claims."""
    for place, model, deployment in _deployments(data):
        version = _at(_at(data.get("upstreams"), _at(deployment, "upstream")), "version")
        if not isinstance(version, str) or not VERSION.fullmatch(version) or version < FIRST_VERSION_WITHOUT_SAMPLING:
            continue
        if _at(_at(model, "capabilities"), "sampling") in (None, True):
            advice = "say `sampling: false` in the model's capabilities, or give the upstream an older version"
            yield source.problem(place, f"the upstream's version refuses sampling; {advice}")


def _deployments(data: Any) -> Iterator[tuple[Loc, Any, Any]]:
    """The place of each deployment's upstream, its model, and itself."""
    for index, model in _items(data.get("models")):
        for number, deployment in _items(_at(model, "deployments")):
            yield ("models", index, "deployments", number, "upstream"), model, deployment


def _at(value: Any, key: Any) -> Any:
    return value.get(key) if isinstance(value, dict) and isinstance(key, str) else None


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    if isinstance(value, list):
        yield from enumerate(value)
