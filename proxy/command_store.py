"""The command line for what is stored: keys, organizations, usage. It works beside a running gateway, which sees a
change within a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table
from sqlalchemy import Connection, select
from sqlalchemy.exc import SQLAlchemyError

from proxy.command_types import NONE, LimitNumber, Moment, Usd
from proxy.config import load
from proxy.own_view import dollars
from proxy.store import schema
from proxy.store.admin_token import new_admin_token
from proxy.store.administration import (
    NotThere,
    Taken,
    TooMuch,
    add_credit,
    change_key,
    change_organization,
    create_key,
    create_organization,
)
from proxy.store.database import READ_ONLY, open_engine
from proxy.store.directory import now
from proxy.store.migrations import StoreTooNew, migrate
from proxy.store.money import usd
from proxy.store.reports import NoExport, as_csv, differences, sums
from proxy.yaml_source import ConfigError

Opened = Callable[..., Any]
WIDEST = 1000


_LIMITS = (
    click.option("--requests-per-minute", type=LimitNumber(), help="Requests per minute."),
    click.option("--input-tokens-per-minute", type=LimitNumber(), help="Input tokens per minute, by estimate."),
    click.option("--parallel-requests", type=LimitNumber(), help="Requests at the same time."),
)
_KEY_OPTIONS = (
    *_LIMITS,
    click.option("--model", "models", multiple=True, help="A model that it may use; may be given several times."),
    click.option("--spend-limit", type=Usd(), help="What it may spend, in USD."),
    click.option("--period", "spend_period", type=click.Choice(["day", "week", "month", NONE]), help="Of that limit."),
    click.option("--expires", "expires_at", type=Moment(), help="When it ends."),
)
_FORMAT = click.option("--format", "shape", type=click.Choice(["table", "csv", "jsonl"]), default="table")


def with_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """A decorator that adds options to a command."""

    def add(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def add_store_commands(cli: click.Group) -> None:
    """Add ``keys``, ``orgs``, ``usage`` and ``admin-token`` to the command line."""

    @contextmanager
    def store(*, reads: bool = False) -> Iterator[Connection]:
        """A connection; one that only reads keeps no running gateway from writing."""
        path = click.get_current_context().find_root().obj
        try:
            engine = open_engine(load(path).store)
        except ConfigError as error:
            raise click.ClickException(f"the configuration can't be used:\n{error}") from None
        try:
            migrate(engine)
            with engine.connect().execution_options(**(READ_ONLY if reads else {})) as connection, connection.begin():
                yield connection
        except (NotThere, Taken, NoExport, TooMuch, StoreTooNew) as error:
            raise click.ClickException(str(error)) from None
        except SQLAlchemyError as error:
            raise click.ClickException(f"the store can't be used now: {type(error).__name__}") from None
        finally:
            engine.dispose()

    @cli.command("admin-token", help="Make a new token for the admin listener; the one until now ends.")
    def admin_token() -> None:
        with store() as connection:
            text = new_admin_token(connection)
        click.echo(text)
        click.echo("This is shown only once; running gateways take it over within a few seconds.", err=True)

    _add_keys(cli, store)
    _add_organizations(cli, store)
    _add_usage(cli, store)


def _add_keys(cli: click.Group, store: Opened) -> None:
    @cli.group(help="The keys in the store.")
    def keys() -> None: ...

    @keys.command("create", help="Make a key. It is shown once.")
    @click.argument("name")
    @click.option("--organization", help="The organization that it belongs to.")
    @with_options(_KEY_OPTIONS)
    def create(name: str, organization: str | None, **options: Any) -> None:
        with store() as connection:
            new = create_key(connection, name, organization=organization, **_changes(options))
        click.echo(new.text)
        click.echo("This is shown only once; the store keeps its digest.", err=True)

    @keys.command("list", help="List the keys.")
    @_FORMAT
    def listed(shape: str) -> None:
        with store(reads=True) as connection:
            rows = [_shown_key(dict(row)) for row in connection.execute(select(schema.keys)).mappings()]
        show(rows, shape)

    @keys.command("revoke", help="End a key at once.")
    @click.argument("name")
    def revoke(name: str) -> None:
        with store() as connection:
            change_key(connection, name, {"revoked_at": now()})
        click.echo(f"{name} is revoked")

    @keys.command("limit", help=f"Change the limits of a key; `{NONE}` takes one away.")
    @click.argument("name")
    @with_options(_KEY_OPTIONS)
    def limit(name: str, **options: Any) -> None:
        changes = _changes(options, given_only=True)
        if not changes:
            raise click.UsageError("name at least one limit")
        with store() as connection:
            change_key(connection, name, changes)
        click.echo(f"{name}: changed {', '.join(changes)}")


def _changes(options: dict[str, Any], *, given_only: bool = False) -> dict[str, Any]:
    """Columns from options; ``none`` is null. With ``given_only`` those that were left out are left alone."""
    context = click.get_current_context()
    changes = {}
    for name, value in options.items():
        given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if given or not given_only:
            changes[name] = (list(value) or None) if name == "models" else (None if value == NONE else value)
    if changes.get("models") == [NONE]:
        changes["models"] = None
    return changes


def _shown_key(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": row["name"],
        "key": row["shown"],
        "organization": row["organization"],
        "models": ",".join(row["models"]) if row["models"] else None,
        "requests/min": row["requests_per_minute"],
        "tokens/min": row["input_tokens_per_minute"],
        "parallel": row["parallel_requests"],
        "spend limit": None if row["spend_limit"] is None else dollars(usd(row["spend_limit"])),
        "period": row["spend_period"],
        "expires": _time(row["expires_at"]),
        "revoked": _time(row["revoked_at"]),
    }


def _add_organizations(cli: click.Group, store: Opened) -> None:
    @cli.group(help="The organizations in the store.")
    def orgs() -> None: ...

    @orgs.command("create", help="Make an organization.")
    @click.argument("name")
    @click.option("--credit", type=Usd(), help="What it has paid in, in USD; left out: it isn't prepaid.")
    @with_options(_LIMITS)
    def create(name: str, **options: Any) -> None:
        with store() as connection:
            create_organization(connection, name, **options)
        click.echo(f"{name} is made")

    @orgs.command("list", help="List the organizations.")
    @_FORMAT
    def listed(shape: str) -> None:
        with store(reads=True) as connection:
            found = [dict(row) for row in connection.execute(select(schema.organizations)).mappings()]
        show([_shown_organization(row) for row in found], shape)

    @orgs.command("credit", help="Add to what an organization has paid in.")
    @click.argument("name")
    @click.argument("amount", type=Usd())
    def credit(name: str, amount: int) -> None:
        with store() as connection:
            total = add_credit(connection, name, amount)
        click.echo(f"{name} has paid in {dollars(usd(total))} USD")

    @orgs.command("suspend", help="Answer an organization's keys with 403.")
    @click.argument("name")
    def suspend(name: str) -> None:
        with store() as connection:
            change_organization(connection, name, {"suspended": True})
        click.echo(f"{name} is suspended")

    @orgs.command("resume", help="Let a suspended organization in again.")
    @click.argument("name")
    def resume(name: str) -> None:
        with store() as connection:
            change_organization(connection, name, {"suspended": False})
        click.echo(f"{name} may come in")

    @orgs.command("limit", help=f"Change the limits of an organization; `{NONE}` takes one away.")
    @click.argument("name")
    @with_options(_LIMITS)
    def limit(name: str, **options: Any) -> None:
        changes = _changes(options, given_only=True)
        if not changes:
            raise click.UsageError("name at least one limit")
        with store() as connection:
            change_organization(connection, name, changes)
        click.echo(f"{name}: changed {', '.join(changes)}")


def _shown_organization(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": row["name"],
        "suspended": row["suspended"],
        "credit": None if row["credit"] is None else dollars(usd(row["credit"])),
        "requests/min": row["requests_per_minute"],
        "tokens/min": row["input_tokens_per_minute"],
        "parallel": row["parallel_requests"],
        "created": _time(row["created_at"]),
    }


def _add_usage(cli: click.Group, store: Opened) -> None:
    @cli.group(invoke_without_command=True, help="What was used and what it cost.")
    @click.option("--by", type=click.Choice(["key", "organization", "end-user", "model", "day"]), default="model")
    @click.option("--since", type=Moment(), help="From this time on.")
    @click.option("--until", type=Moment(), help="Before this time.")
    @_FORMAT
    @click.pass_context
    def usage(context: click.Context, by: Any, since: float | None, until: float | None, shape: str) -> None:
        if context.invoked_subcommand is not None:
            return
        with store(reads=True) as connection:
            rows = sums(connection, by.replace("-", "_"), since, until)
        show([{**row, "cost": dollars(usd(row["cost"]))} for row in rows], shape)

    @usage.command("reconcile", help="Compare a provider's usage export (CSV) with the ledger, by day and model.")
    @click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @_FORMAT
    def reconcile(file: Path, shape: str) -> None:
        with store(reads=True) as connection:
            found = differences(connection, file.read_text(encoding="utf-8-sig"))
        if not found:
            click.echo("the ledger and the provider's export agree")
            return
        show(
            [
                {
                    "day": each.day,
                    "model": each.model,
                    "tokens": each.kind,
                    "provider": each.provider,
                    "ledger": each.ledger,
                    "difference": each.ledger - each.provider,
                }
                for each in found
            ],
            shape,
        )
        raise SystemExit(1)


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def show(rows: list[dict[str, Any]], shape: str) -> None:
    """Print rows as a table, as CSV or as JSON lines."""
    if shape == "jsonl":
        for row in rows:
            click.echo(orjson.dumps(row).decode())
    elif shape == "csv":
        click.echo(as_csv(rows), nl=False)
    elif not rows:
        click.echo("nothing there")
    else:
        table = Table(*map(str, rows[0]), box=None)
        for row in rows:
            table.add_row(*("" if value is None else str(value) for value in row.values()))
        Console(width=WIDEST).print(table)  # no number is cut off, however narrow the terminal is
