"""``run.py plan``: what a reload would change, told by the running gateway itself, which knows what it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import click

from proxy.settings import Admin
from proxy.yaml_source import ConfigError, read

SECONDS = 30


def admin_url(path: Path) -> str:
    """Where the operator's listener of a configuration is. The file may be wrong otherwise, that is what is asked."""
    usual = Admin()
    try:
        data = read(path, os.environ).data
        found = data["server"]["admin"]
        host, port = found.get("host", usual.host), found.get("port", usual.port)
    except (ConfigError, KeyError, TypeError, AttributeError):
        host, port = usual.host, usual.port
    return f"http://{f'[{host}]' if ':' in str(host) else host}:{port}"


async def show_plan(url: str, token: str) -> int:
    """Ask, and print the answer; the exit code: 1 where a reload would be refused, or nobody answers."""
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    headers = {"authorization": f"Bearer {token.strip()}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url.rstrip('/')}/plan", headers=headers) as answer,
        ):
            told: Any = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        click.echo(f"no gateway answers on its admin listener, {url}: {error or type(error).__name__}", err=True)
        return 1
    match told:
        case {"error": {"message": str(message)}}:
            click.echo(f"the gateway refuses to tell: {message}", err=True)
            return 1
        case {"changes": [*_], "refused": _}:
            return _show(told)
        case _:
            click.echo(f"what answers at {url} is no gateway's admin listener", err=True)
            return 1


def _show(told: Mapping[str, Any]) -> int:
    for change in told["changes"]:
        click.echo(f"{change['path']}: {change['change']}{' (needs a restart)' if change['needs_restart'] else ''}")
    if told["refused"]:
        click.echo(f"a reload would be refused:\n{told['refused']}", err=True)
        return 1
    if not told["changes"]:
        click.echo("a reload would change nothing")
    return 0
