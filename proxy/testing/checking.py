"""An upstream that is as strict as the Messages API, so that a request which a provider would refuse fails a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web

from proxy.demo import DemoUpstream
from proxy.demo.checks import check_request
from proxy.demo.refusal import Refusal
from proxy.testing.scripted import Received
from proxy.testing.strict_checks import check_strictly


class CheckingUpstream(DemoUpstream):
    """Refuses what the Messages API refuses, with 400 and in its words; else it answers like the demo upstream.

    For the test of a plugin that changes requests: put it between ``chat_completions`` and this upstream, and nothing
    that it makes of them may be refused.

        async with CheckingUpstream() as upstream, running_gateway([...], upstream=upstream.url) as url:
            ...
            assert upstream.refusals == []

    It enforces, beyond the right type of each field:

    - turns of user and assistant alternate; none is empty but a final assistant's
    - a call is answered by exactly one result in the turn behind it, results before all else; ids of calls and names
      of tools have their patterns and are unique
    - no text is empty or only white space; a final assistant text has no white space at its end
    - at most four breakpoints, none on thinking or on empty text, those of an hour before those of five minutes
    - ``tool_choice`` only with tools, and only one of them by name; no blank stop sequence
    - thinking neither with a forced choice nor with sampling that it excludes
    - no field that the API doesn't know; no sampling at all from version 2026-10-21 on
    """

    def __init__(self) -> None:
        super().__init__()
        self.url = ""
        """Its base URL, once entered."""
        self.received: list[Received] = []
        """Every request, refused ones too."""
        self.refusals: list[str] = []
        """What it said against those that it refused."""

    async def __aenter__(self) -> CheckingUpstream:
        self.url = await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.append(self._check)
        return app

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.path_qs, headers, raw))
        try:
            counting = request.path.endswith("/count_tokens")
            body = check_request(_json(raw), counting=counting)
            check_strictly(body, headers.get("anthropic-version", ""), counting=counting)
        except Refusal as refusal:
            self.refusals.append(refusal.message)
            raise
        return await handler(request)


def _json(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"The request body is not valid JSON: {error.msg}") from error
