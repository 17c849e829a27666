"""Every setting of the configuration file, with its type and default. Its docstring is its documentation."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, model_validator

from proxy.checking import WhenMissing
from proxy.models import EFFORT_LEVELS, Effort
from proxy.plugin import Settings
from proxy.setting_types import (
    DEFAULT_CREATED,
    DEMO,
    END_OF_YEAR_9999,
    Count,
    Dollars,
    HeaderName,
    HeaderValue,
    ModelName,
    Port,
    Seconds,
    Text,
    base_path_text,
    effort_levels,
    empty_if_null,
    levels_in_order,
    limiter_url,
    origin_text,
    proxy_url,
    secret_text,
    store_url,
    upstream_url,
    version_date,
)
from proxy.yaml_source import Loc, Source


class Admin(Settings):
    """The listener for the operator: metrics, and what a reload would change. It asks for a token of its own."""

    enabled: bool = True
    """Whether there is one."""
    host: Text = "127.0.0.1"
    """The address that it listens on."""
    port: Port = 8788
    """Its port; 0 takes a free one."""
    token: Annotated[SecretStr, AfterValidator(secret_text), Field(min_length=16)] | None = None
    """Its token. If left out, one is made and printed at the first start, and the store keeps its digest."""


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
    most_body_bytes: Annotated[int, Field(ge=64 * 2**20)] = 512 * 2**20
    """Bytes of all request bodies that are being answered together; beyond it requests are told to come again."""
    shutdown_delay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    """How long it is not ready but still takes requests when a stop was asked for, for load balancers to notice."""
    shutdown_timeout: Seconds = 30
    """How long running requests may go on after that."""
    keepalive_timeout: Seconds = 75
    """How long an idle connection of a client is kept."""
    base_path: Annotated[str, AfterValidator(base_path_text)] = ""
    """A path that a reverse proxy leaves in front of every other, such as /llm."""
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks of the reverse proxies whose x-forwarded-for is believed, for the client's address in the log."""
    cors_origins: tuple[Annotated[str, AfterValidator(origin_text)], ...] = ()
    """Origins such as https://chat.example.org whose pages may call the gateway from a browser; "*" for all."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve the port together. Several need a store and a limiter that they can share."""
    watch: bool = True
    """Reload when the configuration file, or a file that it names, is changed; SIGHUP does so in any case."""
    admin: Annotated[Admin, BeforeValidator(empty_if_null)] = Admin()
    """The listener for the operator."""

    @model_validator(mode="after")
    def _two_listeners(self) -> Server:
        if self.port and self.admin.enabled and (self.host, self.port) == (self.admin.host, self.admin.port):
            raise ValueError("port and admin.port must differ")
        return self


class UpstreamSettings(Settings):
    """A server that speaks the Messages format."""

    base_url: Annotated[str, AfterValidator(upstream_url)]
    """Where it is, without /v1/messages; or `demo` or `local-llm`, the upstreams that the gateway starts itself."""
    api_key: Annotated[SecretStr, AfterValidator(secret_text)] | None = None
    """Its key. After loading, the one of api_key_file stands here, too."""
    api_key_file: Path | None = None
    """A file that holds the key, relative to the configuration file."""
    auth: Literal["x-api-key", "bearer"] = "x-api-key"
    """How the key is sent: as the header x-api-key, or as a bearer token."""
    version: Annotated[str, AfterValidator(version_date)] = "2023-06-01"
    """The anthropic-version that is sent."""
    headers: dict[HeaderName, HeaderValue] = Field(default_factory=dict, repr=False)
    """Further headers for each request to it."""
    proxy: Annotated[str, AfterValidator(proxy_url)] | None = Field(default=None, repr=False)
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
    effort: Annotated[tuple[Effort, ...], BeforeValidator(effort_levels), AfterValidator(levels_in_order)] = (
        EFFORT_LEVELS
    )
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


class ProfileSettings(Settings):
    """What a deployment was found to support; what is left out, nobody has tried. A deployment that can't do what its
    model claims is refused at start. `run.py probe` finds it out, and writes it here when told to."""

    sampling: bool | None = None
    """temperature and top_p."""
    sampling_exclusive: bool | None = None
    """It refuses temperature and top_p together."""
    prompt_caching: bool | None = None
    """What was marked is read from the cache at the next request."""
    effort: Annotated[tuple[Effort, ...], BeforeValidator(effort_levels), AfterValidator(levels_in_order)] | None = None
    """The levels of effort that it takes."""
    thinking: bool | None = None
    """Adaptive thinking, which goes with effort above low."""
    forced_tool_choice: bool | None = None
    """tool_choice that forces a call."""
    images: bool | None = None
    """Images in messages."""
    pdfs: bool | None = None
    """PDFs in messages."""
    structured_outputs: bool | None = None
    """Answers that follow a JSON schema."""
    count_tokens: bool | None = None
    """/v1/messages/count_tokens; without it such a request goes to another deployment."""


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
    profile: Annotated[ProfileSettings, BeforeValidator(empty_if_null)] = ProfileSettings()
    """What it was found to support."""


def price_mapping(value: Any) -> Any:
    if value == "free":
        return dict.fromkeys(PriceSettings.model_fields, 0)
    if not isinstance(value, dict | PriceSettings):
        raise ValueError("must be a mapping with input and output, or the word `free`")
    return value


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
    capabilities: Annotated[CapabilitySettings, BeforeValidator(empty_if_null)] = CapabilitySettings()
    """What it can do."""
    price: Annotated[
        PriceSettings, BeforeValidator(price_mapping), WhenMissing("say `price: free` if it costs nothing")
    ]
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

    server: Annotated[Server, BeforeValidator(empty_if_null)] = Server()
    store: Annotated[str, AfterValidator(store_url)] = Field(default="sqlite:///data/ezat.db", repr=False)
    """Where keys, organizations and the ledger are kept."""
    limiter: Annotated[str, AfterValidator(limiter_url)] = Field(default="memory", repr=False)
    """Where rate limits are counted: `memory`, or a Redis that several gateways share."""
    upstreams: Annotated[dict[Text, UpstreamSettings], Field(min_length=1)]
    models: Annotated[tuple[ModelSettings, ...], Field(min_length=1)]
    plugins: tuple[PluginEntry, ...] = ()
    """In this order on the way in, in the reverse order on the way out."""
    _source: Source = PrivateAttr()
    _files: Mapping[Path, bytes | None] = PrivateAttr(default_factory=dict)

    @property
    def files(self) -> Mapping[Path, bytes | None]:
        """The files that it was read from, each with the digest of its content."""
        return self._files

    @property
    def source(self) -> Source:
        """The file, for the lines of problems in the plugins' settings."""
        return self._source
