"""What the values of settings must look like: the checks, and the types that are made of them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

from proxy.models import EFFORT_LEVELS, Effort

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


def empty_if_null(value: Any) -> Any:
    return {} if value is None else value  # a section whose settings are all commented out


def one_of(value: str, exact: tuple[str, ...], schemes: tuple[str, ...]) -> str:
    if value in exact or any(value.startswith(scheme) and len(value) > len(scheme) for scheme in schemes):
        return value
    raise ValueError("must be " + " or ".join([*exact, *(f"a {scheme}… URL" for scheme in schemes)]))


def web_url(value: str, *, bare: bool) -> str:
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


def upstream_url(value: str) -> str:
    return value if value in BUILT_IN else web_url(value, bare=True).rstrip("/")


def base_path_text(value: str) -> str:
    if value and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", value):
        raise ValueError("must begin with a slash and end without one, such as /llm")
    return value


def origin_text(value: str) -> str:
    if value != "*" and (urlsplit(value).path or urlsplit(web_url(value, bare=True)).query):
        raise ValueError("must be an origin such as https://chat.example.org, with no path, or *")
    return value


def proxy_url(value: str) -> str:
    return web_url(value, bare=False)


def version_date(value: str) -> str:
    if not VERSION.fullmatch(value):
        raise ValueError("must be a date such as 2023-06-01")
    return value


def store_url(value: str) -> str:
    return one_of(value, (), ("sqlite:///", "postgresql://"))


def limiter_url(value: str) -> str:
    return one_of(value, ("memory",), ("redis://", "rediss://"))


def secret_text(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", value.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return value


def header_name(name: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise ValueError("is no valid name of a header")
    if OWN_HEADERS.fullmatch(name.lower()):
        raise ValueError("is set by the gateway itself")
    return name


def header_value(value: str) -> str:
    if not re.fullmatch(r"[\x20-\x7e]*", value) or value != value.strip():
        raise ValueError("must be printable ASCII without spaces at its ends")
    return value


def model_name(name: str) -> str:
    if not 1 <= len(name) <= 128 or name != name.strip() or not name.isprintable():
        raise ValueError("must have 1 to 128 printable characters, with no spaces at its ends")
    return name


def effort_levels(value: Any) -> Any:
    return {True: EFFORT_LEVELS, False: ()}[value] if isinstance(value, bool) else value


def levels_in_order(levels: tuple[Effort, ...]) -> tuple[Effort, ...]:
    return tuple(level for level in EFFORT_LEVELS if level in levels)


Text = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
ModelName = Annotated[str, AfterValidator(model_name)]
HeaderName = Annotated[str, AfterValidator(header_name)]
HeaderValue = Annotated[str, AfterValidator(header_value)]
