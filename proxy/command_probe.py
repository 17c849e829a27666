"""The command line's ``probe``: what an upstream supports, shown, and written into the configuration when asked to.

What makes the configuration refused at the next start is written all the same: it is true, and the words that follow
say what to change. Hiding it would leave a gateway that promises what its upstream doesn't do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from proxy import logs
from proxy.config import load
from proxy.errors import CannotStart
from proxy.probe.asking import asker_for
from proxy.probe.findings import Verdict, profile_of
from proxy.probe.probing import KeyRefused, Probe, Probed
from proxy.probe.writing import CannotWrite, Change, Differences, change_at, write
from proxy.probe.yaml_edit import as_yaml
from proxy.profiles import misfits
from proxy.setting_types import BUILT_IN
from proxy.settings import Config, ProfileSettings
from proxy.yaml_source import ConfigError, Loc

WIDEST = 1000
_STYLES = {Verdict.YES: "green", Verdict.NO: "red", Verdict.UNKNOWN: "yellow"}


class Results(NamedTuple):
    """What was found out about the models of an upstream; ``refused`` says that it let nobody in."""

    probed: Sequence[Probed]
    other_auth: str | None
    refused: str | None

    @property
    def whole(self) -> bool:
        return self.refused is None and all(each.stopped is None for each in self.probed)


def add_probe_command(cli: click.Group) -> None:
    """Add ``probe`` to the command line."""

    @cli.command(help="Ask an upstream what it supports, with about 25 small requests for each of its models.")
    @click.option("--model", help="Only this one, by the upstream's name for it.")
    @click.option("--write", "writes", is_flag=True, help="Write the profiles into the configuration.")
    @click.argument("upstream")
    @click.pass_obj
    def probe(path: Path, model: str | None, writes: bool, upstream: str) -> None:
        config = _loaded(path)
        models = _models_at(config, upstream, model)
        if config.upstreams[upstream].base_url in BUILT_IN:  # nothing else here has anything to log
            logs.set_up(pretty=True, quiet=True)
        try:
            results = asyncio.run(_ask(config, upstream, models))
        except CannotStart as error:
            raise click.ClickException(f"the upstream {upstream} can't be started: {error}") from None
        for each in results.probed:
            _show(upstream, each)
        if results.refused is not None:
            raise click.ClickException(f"the upstream {upstream} can't be probed: {results.refused}")
        _keep(path, config, list(_changes(config, upstream, results)), writes=writes)
        for each in results.probed:
            if each.stopped is not None:
                click.echo(f"Error: {each.stopped}", err=True)
        sys.exit(0 if results.whole else 1)


def _loaded(path: Path) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        raise click.ClickException(f"the configuration can't be used:\n{error}") from None


def _models_at(config: Config, upstream: str, only: str | None) -> list[str]:
    """The upstream's names for the models that are deployed there, in the order of the file."""
    if upstream not in config.upstreams:
        raise click.ClickException(f"there is no upstream {upstream}; known here: {', '.join(config.upstreams)}")
    deployed = [each.model for model in config.models for each in model.deployments if each.upstream == upstream]
    if not deployed:
        raise click.ClickException(f"no model is deployed at {upstream}")
    if only is not None and only not in deployed:
        names = ", ".join(dict.fromkeys(deployed))
        raise click.ClickException(f"no model is deployed at {upstream} as {only}; deployed there: {names}")
    return [only] if only is not None else list(dict.fromkeys(deployed))


async def _ask(config: Config, upstream: str, models: Sequence[str]) -> Results:
    probed: list[Probed] = []
    refused: str | None = None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    async with asker_for(config, upstream) as asker:
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("")
            probe = Probe(asker, lambda model, row: progress.update(task, description=f"{escape(model)}: {row}"))
            try:
                for model in models:
                    probed.append(await probe.ask_about(model))
            except KeyRefused as error:
                refused = str(error)
    return Results(probed, probe.other_auth, refused)


def _show(upstream: str, probed: Probed) -> None:
    """The table of one model. What an upstream said is text, never markup."""
    table = Table(
        "what", "supported", "evidence", box=None, title=Text(f"{probed.model} at {upstream}"), title_justify="left"
    )
    for row, found in probed.findings.items():
        table.add_row(row, Text(found.verdict.value, style=_STYLES[found.verdict]), Text(found.evidence))
    console = Console(width=None if sys.stdout.isatty() else WIDEST)  # elsewhere a row is a line, whatever it holds
    console.print(table)
    click.echo()


def _changes(config: Config, upstream: str, results: Results) -> Iterator[Change]:
    """What is to be written, of what isn't there yet."""
    if results.other_auth is not None:
        yield change_at(config, ("upstreams", upstream), {"auth": results.other_auth}, {})
    profiles = {each.model: profile_of(each.findings) for each in results.probed}
    for loc, name, had in _deployments_at(config, upstream):
        new = {field: value for field, value in profiles.get(name, {}).items() if had.get(field) != value}
        if new:
            yield change_at(config, loc, new, {"upstream": upstream, "model": name})


def _deployments_at(config: Config, upstream: str) -> Iterator[tuple[Loc, str, Mapping[str, object]]]:
    """The place of each profile at an upstream, the name of its model there, and what it holds."""
    for number, model in enumerate(config.models):
        for place, each in enumerate(model.deployments):
            if each.upstream == upstream:
                yield (
                    ("models", number, "deployments", place, "profile"),
                    each.model,
                    each.profile.model_dump(mode="json"),
                )


def _keep(path: Path, config: Config, changes: Sequence[Change], *, writes: bool) -> None:
    """Write the changes, or show them; and tell what the gateway will say."""
    if not changes:
        click.echo("There is nothing new to write.")
        return
    if not writes:
        for change in changes:
            line = config.source.problem((*change.within, *change.loc), "").line
            values = as_yaml({str(change.loc[-1]): change.values})
            click.echo(f"# {change.file}, line {line}: {change.path}\n{values}\n")
        click.echo("Nothing is written: --write does that.")
        _warn([str(config.source.problem(loc, text)) for loc, text in misfits(_with(config, changes))])
        return
    try:
        for change, differences in write(changes, os.environ):
            click.echo(f"written: {change.file}: {change.path}: {_said(differences)}")
    except CannotWrite as error:
        raise click.ClickException(f"nothing is written to {error}") from None
    try:
        load(path)
    except ConfigError as error:
        _warn([str(problem) for problem in error.problems])


def _with(config: Config, changes: Sequence[Change]) -> Config:
    """The configuration as it would be with the changed profiles."""
    profiles = {(*change.within, *change.loc): change.values for change in changes}
    models = []
    for number, model in enumerate(config.models):
        deployments = []
        for place, each in enumerate(model.deployments):
            values = profiles.get(("models", number, "deployments", place, "profile"), {})
            profile = ProfileSettings.model_validate({**each.profile.model_dump(), **values})
            deployments.append(each.model_copy(update={"profile": profile}))
        models.append(model.model_copy(update={"deployments": tuple(deployments)}))
    return config.model_copy(update={"models": tuple(models)})


def _said(differences: Differences) -> str:
    told = [
        as_yaml({name: new}) + (f" (was {as_yaml({name: old}).partition(': ')[2]})" if old is not None else "")
        for name, (old, new) in differences.items()
    ]
    return ", ".join(told)


def _warn(problems: Sequence[str]) -> None:
    if problems:
        click.echo("\nThe gateway refuses to start with this, until it is changed:\n" + "\n".join(problems), err=True)
