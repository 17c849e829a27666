"""Who asks, and may it come in? Keys stand in the YAML; only their digests are kept in memory."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, ClassVar, Self

from pydantic import AwareDatetime, Field, SecretStr, model_validator

from proxy.errors import GatewayError, Kind
from proxy.exchange import KEY_PREFIX, Exchange, Key
from proxy.models import ModelTable
from proxy.plugin import Plugin, Services, Settings

Usd = Annotated[Decimal, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class OrganizationSettings(Settings):
    """An organization that keys belong to."""

    name: Name
    """Its name."""
    balance_usd: Usd | None = None
    """What it has paid in, in USD; left out: it isn't prepaid."""
    suspended: bool = False
    """Its keys are answered with 403."""


class KeySettings(Settings):
    """A key that clients send."""

    name: Name
    """What it is called in logs and in the ledger."""
    key: SecretStr
    """The key itself; it begins with ``ezat_sk_``."""
    organization: str | None = None
    """The organization that it belongs to."""
    models: list[str] | None = None
    """The models that it may use; left out: all."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """How many requests it may send in a minute; left out: no limit."""
    spend_limit_usd: Usd | None = None
    """What it may spend in all, in USD; left out: no limit."""
    expires_at: AwareDatetime | None = None
    """When it ends, such as 2030-01-01T00:00:00Z; left out: never."""
    revoked: bool = False
    """It is answered with 401."""


class AuthSettings(Settings):
    """The keys and organizations of the YAML."""

    organizations: list[OrganizationSettings] = []
    """The organizations that keys belong to."""
    keys: list[KeySettings] = []
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
            secret = key.key.get_secret_value()
            if not (secret.startswith(KEY_PREFIX) and len(secret) > len(KEY_PREFIX) and secret.isascii()):
                yield f"keys[{number}].key: must begin with {KEY_PREFIX} and go on"


class _Known:
    """A key as it is kept: its digest, and what it stands for."""

    __slots__ = ("digest", "expires_at", "key", "revoked", "suspended")

    def __init__(self, settings: KeySettings, organization: OrganizationSettings | None, models: ModelTable) -> None:
        self.digest = _digest(settings.key.get_secret_value())
        self.expires_at = settings.expires_at
        self.revoked = settings.revoked
        self.suspended = organization is not None and organization.suspended
        allowed = None
        if settings.models is not None:
            allowed = frozenset(model.id for name in settings.models if (model := models.find(name)) is not None)
        self.key = Key(
            id=f"yaml:{settings.name}",
            name=settings.name,
            organization=settings.organization,
            models=allowed,
            requests_per_minute=settings.requests_per_minute,
            spend_limit_usd=settings.spend_limit_usd,
            balance_usd=organization.balance_usd if organization is not None else None,
        )


class Auth(Plugin):
    """Judges the key before the body is read."""

    name: ClassVar[str] = "auth"
    authenticates: ClassVar[bool] = True
    Settings = AuthSettings
    settings: AuthSettings

    def __init__(self, settings: AuthSettings) -> None:
        super().__init__(settings)
        self._known: dict[bytes, _Known] = {}

    def needs(self) -> Iterable[tuple[str, str]]:
        for organization in self.settings.organizations:
            if organization.balance_usd is not None:
                yield "usage", f"the organization {organization.name!r} is prepaid"
        for key in self.settings.keys:
            if key.spend_limit_usd is not None:
                yield "usage", f"the key {key.name!r} has a spend limit"
            if key.requests_per_minute is not None:
                yield "rate_limit", f"the key {key.name!r} has a limit of requests per minute"

    def problems(self, models: ModelTable) -> Iterable[tuple[tuple[str | int, ...], str]]:
        for number, key in enumerate(self.settings.keys):
            for place, name in enumerate(key.models or ()):
                if models.find(name) is None:
                    yield ("keys", number, "models", place), f"{name!r} is not among the models"

    async def start(self, services: Services) -> None:
        organizations = {organization.name: organization for organization in self.settings.organizations}
        for settings in self.settings.keys:
            known = _Known(settings, organizations.get(settings.organization or ""), services.models)
            self._known[known.digest] = known

    async def on_headers(self, exchange: Exchange) -> None:
        credential = exchange.credential()
        if credential is None:
            raise GatewayError(Kind.AUTHENTICATION, "no API key was sent; send it as `Authorization: Bearer …`")
        digest = _digest(credential)
        known = self._known.get(digest)
        if known is None or not hmac.compare_digest(known.digest, digest) or known.revoked or _is_over(known):
            raise GatewayError(Kind.AUTHENTICATION, "the API key is not valid")
        if known.suspended:
            raise GatewayError(Kind.PERMISSION, "the organization of this key is suspended")
        exchange.key = known.key


def _is_over(known: _Known) -> bool:
    return known.expires_at is not None and known.expires_at <= datetime.now(UTC)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _doubled(values: list[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})
