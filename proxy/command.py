"""The command line: serve, check, plugins, plan."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from proxy import logs
from proxy.command_plan import admin_url, show_plan
from proxy.command_probe import add_probe_command
from proxy.command_store import add_store_commands
from proxy.first_run import conversation, first_key, first_model, show
from proxy.loading import Pipeline, load_all
from proxy.models import ModelTable
from proxy.plugin import Plugin
from proxy.reloading import Loaded
from proxy.server import Gateway
from proxy.serving import SIGNALS, exit_after, serve
from proxy.settings import Admin, Config
from proxy.workers import Supervisor
from proxy.yaml_source import ConfigError

DEFAULT_CONFIG = Path("config/gateway.yaml")


def _loaded(path: Path, bundled: Mapping[str, type[Plugin]]) -> Loaded:
    try:
        return load_all(path, bundled)
    except ConfigError as error:
        raise click.ClickException(f"the configuration can't be used:\n{error}") from None


def main(bundled: Mapping[str, type[Plugin]], arguments: Sequence[str]) -> None:
    """Run the command line. ``serve`` is meant where no command is named."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that can't be shown is no reason not to serve
    _cli(bundled).main(args=_config_first(arguments), prog_name="run.py")


def _config_first(arguments: Sequence[str]) -> list[str]:
    """``--config FILE`` in front of the command, wherever it stood."""
    found, rest = [], list(arguments)
    for place, argument in enumerate(rest):
        end = place + (2 if argument == "--config" else 1)
        if end <= len(rest) and (argument == "--config" or argument.startswith("--config=")):
            found, rest = rest[place:end], rest[:place] + rest[end:]
            break
    return [*found, *rest]


def _cli(bundled: Mapping[str, type[Plugin]]) -> click.Group:
    @click.group(invoke_without_command=True, help="EZAT Router: an LLM gateway. Without a command it serves.")
    @click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        default=DEFAULT_CONFIG,
        show_default=True,
        help="The configuration file; it may stand behind the command, too.",
    )
    @click.pass_context
    def cli(context: click.Context, path: Path) -> None:
        context.obj = path
        if context.invoked_subcommand is None:
            sys.exit(_serve(path, bundled))
        if context.invoked_subcommand != serve_command.name:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # were blocked for whoever serves

    @cli.command("serve", help="Serve until SIGTERM or SIGINT; running requests may end.")
    @click.pass_obj
    def serve_command(path: Path) -> None:
        sys.exit(_serve(path, bundled))

    @cli.command(help="Hold a conversation of three turns through a gateway of its own, and show what the cache does.")
    @click.pass_obj
    def demo(path: Path) -> None:
        sys.exit(asyncio.run(_demo(*_loaded(path, bundled))))

    @cli.command(help="Check the configuration and nothing else; exit code 1 if it can't be used.")
    @click.pass_obj
    def check(path: Path) -> None:
        _, models, pipeline = _loaded(path, bundled)
        click.echo(f"{path}: {len(models)} models, {len(pipeline.plugins)} plugins, no problems")

    @cli.command(help="Print the chains of plugins, and what each plugin does.")
    @click.pass_obj
    def plugins(path: Path) -> None:
        _, _, pipeline = _loaded(path, bundled)
        table = Table("plugin", "what it does", box=None)
        for name, purpose in pipeline.purposes():
            table.add_row(name, purpose)
        Console().print(table)
        click.echo("\n" + pipeline.described())

    @cli.command(help="Print what a reload would change in the running gateway, by its admin listener.")
    @click.option("--admin", help="Where that listens, such as http://127.0.0.1:8788; by default as in the file.")
    @click.option("--token", envvar="EZAT_ADMIN_TOKEN", show_envvar=True, required=True, help="The admin token.")
    @click.pass_obj
    def plan(path: Path, admin: str | None, token: str) -> None:
        sys.exit(asyncio.run(show_plan(admin or admin_url(path), token)))

    add_store_commands(cli)
    add_probe_command(cli)
    return cli


def _serve(path: Path, bundled: Mapping[str, type[Plugin]]) -> int:
    loaded, load = _loaded(path, bundled), partial(load_all, path, bundled)
    if loaded[0].server.workers > 1:
        return Supervisor(loaded, load).run()
    return asyncio.run(exit_after(serve(loaded, load)))


async def _demo(config: Config, models: ModelTable, pipeline: Pipeline) -> int:
    logs.set_up(pretty=True, quiet=True)
    server = config.server.model_copy(update={"host": "127.0.0.1", "port": 0, "admin": Admin(port=0)})
    own = config.model_copy(update={"server": server, "store": "sqlite:///:memory:"})  # the other may be in use
    gateway = Gateway(own, models, pipeline)
    try:
        await gateway.start()
        url = f"http://127.0.0.1:{gateway.port}{config.server.base_path}"
        show(await conversation(url, first_key(config), first_model(config)))
    finally:
        await gateway.stop()
    return 0
