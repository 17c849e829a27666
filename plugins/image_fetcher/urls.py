"""The form of a URL to download from, judged before anything is looked up; where it leads is the guard's matter.

What parsers read differently (a backslash, a control character, odd characters in the host) is refused rather than
understood.
"""

from __future__ import annotations

import re

from yarl import URL

_LONGEST = 8192
_TOO_LONG = f"its URL is longer than {_LONGEST} characters"
_NOT_VALID = "its URL is not valid"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_SCHEME = re.compile(r"[A-Za-z][0-9A-Za-z+.-]*:")
_NAME = re.compile(r"[0-9A-Za-z._-]+")


class DownloadFailed(Exception):
    """Why an image could not be downloaded, in words for the client: nothing of the gateway's own network."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parsed_url(text: str) -> URL:
    """The URL, fit to be visited. Raises DownloadFailed."""
    text = text.strip()
    if len(text) > _LONGEST:
        raise DownloadFailed(_TOO_LONG)
    if _CONTROL.search(text):
        raise DownloadFailed(_NOT_VALID)
    try:
        return _judged(URL(text), text)
    except ValueError:
        raise DownloadFailed(_NOT_VALID) from None


def redirected_url(base: URL, location: str) -> URL:
    """Where a redirect leads from ``base``. Raises DownloadFailed."""
    location = location.strip()
    if _SCHEME.match(location):
        return parsed_url(location)
    if len(location) > _LONGEST:
        raise DownloadFailed(_TOO_LONG)
    try:
        return parsed_url(str(base.join(URL(location))))
    except ValueError:
        raise DownloadFailed(_NOT_VALID) from None


def _judged(url: URL, text: str) -> URL:
    if url.scheme not in ("http", "https"):
        raise DownloadFailed("only http and https URLs are visited")
    if "@" in re.split(r"[/?#]", text.partition("://")[2], maxsplit=1)[0]:
        raise DownloadFailed("its URL holds a user name or password")
    host = url.raw_host
    if not host or (":" not in host and not _NAME.fullmatch(host)):
        raise DownloadFailed(_NOT_VALID)
    return url
