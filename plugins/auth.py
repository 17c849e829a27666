"""Who asks, and may it come in? Keys stand in the YAML or in the store; only their digests are kept in memory."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, AwareDatetime, Field, SecretStr, model_validator

from proxy.errors import GatewayError, Kind
from proxy.exchange import KEY_PREFIX, Exchange, Key, Limits
from proxy.models import ModelTable
from proxy.plugin import Plugin, Services, Settings
from proxy.store.directory import Organization, StoredKey
from proxy.store.money import units
from proxy.store.periods import Period
from proxy.store.store import Store

Usd = Annotated[Decimal, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class OrganizationSettings(Settings):
    """An organization that keys belong to."""

    name: Name
    """Its name."""
    balance_usd: Usd | None = None
    """What it has paid in, in USD; left out: it isn't prepaid."""
    suspended: bool = False
    """Its keys are answered with 403."""
    requests_per_minute: Positive | None = None
    """How many requests its keys may send in a minute, together; left out: no limit."""
    input_tokens_per_minute: Positive | None = None
    """How many input tokens its keys may send in a minute, together; left out: no limit."""
    parallel_requests: Positive | None = None
    """How many requests of its keys may be answered at the same time; left out: no limit."""


def key_text(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.startswith(KEY_PREFIX) and len(text) > len(KEY_PREFIX) and text.isascii()):
        raise ValueError(f"must begin with {KEY_PREFIX} and go on")
    return value


class KeySettings(Settings):
    """A key that clients send."""

    name: Name
    """What it is called in logs and in the ledger."""
    key: Annotated[SecretStr, AfterValidator(key_text)]
    """The key itself; it begins with ``ezat_sk_``."""
    organization: str | None = None
    """The organization that it belongs to."""
    models: list[str] | None = None
    """The models that it may use; left out: all."""
    requests_per_minute: Positive | None = None
    """How many requests it may send in a minute; left out: no limit."""
    input_tokens_per_minute: Positive | None = None
    """How many input tokens it may send in a minute, by estimate; left out: no limit."""
    parallel_requests: Positive | None = None
    """How many of its requests may be answered at the same time; left out: no limit."""
    spend_limit_usd: Usd | None = None
    """What it may spend, in USD; left out: no limit."""
    spend_period: Period | None = None
    """The period that the spend limit is for, in UTC; left out: for all time."""
    expires_at: AwareDatetime | None = None
    """When it ends, such as 2030-01-01T00:00:00Z; left out: never."""
    revoked: bool = False
    """It is answered with 401."""


class AuthSettings(Settings):
    """The keys and organizations of the YAML."""

    organizations: list[OrganizationSettings] = Field(default_factory=list)
    """The organizations that keys belong to."""
    keys: list[KeySettings] = Field(default_factory=list)
    """The keys."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        wrong = list(self._inconsistencies())
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _inconsistencies(self) -> Iterator[str]:
        names = [organization.name for organization in self.organizations]
        yield from (f"the organization {name!r} stands twice" for name in _doubled(names))
        yield from (f"the key {name!r} stands twice" for name in _doubled([key.name for key in self.keys]))
        if _doubled([key.key.get_secret_value() for key in self.keys]):
            yield "two keys are the same"
        for number, key in enumerate(self.keys):
            if key.organization is not None and key.organization not in names:
                yield f"keys[{number}].organization: {key.organization!r} is not among the organizations"


@dataclass(frozen=True, slots=True)
class _Known:
    """A key, and what stands against letting it in."""

    key: Key
    expires_at: float | None
    revoked: bool
    suspended: bool


def _of_yaml(settings: KeySettings, organization: OrganizationSettings | None, models: ModelTable) -> _Known:
    key = Key(
        id=f"yaml:{settings.name}",
        name=settings.name,
        organization=settings.organization,
        models=_allowed(settings.models, models),
        limits=_limits(settings),
        organization_limits=Limits() if organization is None else _limits(organization),
        spend_limit=None if settings.spend_limit_usd is None else units(settings.spend_limit_usd),
        spend_period=settings.spend_period,
        credit=None if organization is None or organization.balance_usd is None else units(organization.balance_usd),
    )
    expires_at = None if settings.expires_at is None else settings.expires_at.timestamp()
    return _Known(key, expires_at, settings.revoked, organization is not None and organization.suspended)


def _of_store(stored: StoredKey, organization: Organization | None, models: ModelTable) -> _Known:
    key = Key(
        id=stored.id,
        name=stored.name,
        organization=stored.organization,
        models=_allowed(stored.models, models),
        limits=stored.limits,
        organization_limits=Limits() if organization is None else organization.limits,
        spend_limit=stored.spend_limit,
        spend_period=stored.spend_period,
        credit=None if organization is None else organization.credit,
    )
    suspended = organization is not None and organization.suspended
    return _Known(key, stored.expires_at, stored.revoked_at is not None, suspended)


def _allowed(names: Iterable[str] | None, models: ModelTable) -> frozenset[str] | None:
    if names is None:
        return None
    return frozenset(model.id for name in names if (model := models.find(name)) is not None)


def _limits(settings: KeySettings | OrganizationSettings) -> Limits:
    return Limits(settings.requests_per_minute, settings.input_tokens_per_minute, settings.parallel_requests)


class Auth(Plugin):
    """Judges the key before the body is read."""

    name: ClassVar[str] = "auth"
    opens_leaves: ClassVar[bool] = False
    authenticates: ClassVar[bool] = True
    Settings = AuthSettings
    settings: AuthSettings

    _store: Store

    def __init__(self, settings: AuthSettings) -> None:
        super().__init__(settings)
        self._static: dict[bytes, _Known] = {}
        self._stored: dict[bytes, _Known] = {}
        self._revision = -1

    def needs(self) -> Iterable[tuple[str, str]]:
        for organization in self.settings.organizations:
            if organization.balance_usd is not None:
                yield "usage", f"the organization {organization.name!r} is prepaid"
            if _limits(organization) != Limits():
                yield "rate_limit", f"the organization {organization.name!r} has limits"
        for key in self.settings.keys:
            if key.spend_limit_usd is not None:
                yield "usage", f"the key {key.name!r} has a spend limit"
            if _limits(key) != Limits():
                yield "rate_limit", f"the key {key.name!r} has limits"

    def problems(self, models: ModelTable) -> Iterable[tuple[tuple[str | int, ...], str]]:
        for number, key in enumerate(self.settings.keys):
            for place, name in enumerate(key.models or ()):
                if models.find(name) is None:
                    yield ("keys", number, "models", place), f"{name!r} is not among the models"

    async def start(self, services: Services) -> None:
        self._store = services.store
        self._models = services.models
        organizations = {organization.name: organization for organization in self.settings.organizations}
        for settings in self.settings.keys:
            known = _of_yaml(settings, organizations.get(settings.organization or ""), services.models)
            self._static[_digest(settings.key.get_secret_value())] = known
        self.settings = self.settings.model_copy(update={"keys": []})

    async def on_headers(self, exchange: Exchange) -> None:
        """Find out who asks. Raises GatewayError: 401, 403, or 503 where the store can't be asked."""
        credential = exchange.credential()
        if credential is None:
            raise GatewayError(Kind.AUTHENTICATION, "no API key was sent; send it as `Authorization: Bearer …`")
        digest = _digest(credential)
        known = self._static.get(digest) or self._find_stored(digest)
        if known is None or known.revoked or (known.expires_at is not None and known.expires_at <= time.time()):
            raise GatewayError(Kind.AUTHENTICATION, "the API key is not valid")
        if known.suspended:
            raise GatewayError(Kind.PERMISSION, "the organization of this key is suspended")
        exchange.key = known.key

    def _find_stored(self, digest: bytes) -> _Known | None:
        """A key of the store. Keys are found by their digests, so what a comparison takes tells nothing of a key."""
        if not self._store.is_fresh:
            raise GatewayError(Kind.UNAVAILABLE, "the gateway can't look up keys now; try again", retry_after=5)
        directory = self._store.directory
        if directory.revision != self._revision:
            self._stored, self._revision = {}, directory.revision
        known = self._stored.get(digest)
        if known is None:
            stored = directory.keys.get(digest)
            if stored is None:
                return None
            organization = directory.organizations.get(stored.organization or "")
            known = self._stored[digest] = _of_store(stored, organization, self._models)
        return known


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _doubled(values: list[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})
