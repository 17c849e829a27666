"""The command line: serve, check, plugins."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from proxy import logs
from proxy.command_store import add_store_commands
from proxy.errors import CannotStart
from proxy.first_run import conversation, first_key, first_model, greeting, show
from proxy.loading import load_all
from proxy.plugin import Plugin
from proxy.server import Gateway
from proxy.yaml_source import ConfigError

DEFAULT_CONFIG = Path("config/gateway.yaml")


class Loaded:
    """A configuration with everything that was made from it."""

    def __init__(self, path: Path, bundled: Mapping[str, type[Plugin]]) -> None:
        try:
            self.config, self.models, self.pipeline = load_all(path, bundled)
        except ConfigError as error:
            raise click.ClickException(f"the configuration can't be used:\n{error}") from None


def main(bundled: Mapping[str, type[Plugin]], arguments: Sequence[str]) -> None:
    """Run the command line. ``serve`` is meant where no command is named."""
    _cli(bundled).main(args=list(arguments), prog_name="run.py")


def _cli(bundled: Mapping[str, type[Plugin]]) -> click.Group:
    where = click.option(
        "--config",
        "path",
        type=click.Path(path_type=Path),
        default=DEFAULT_CONFIG,
        show_default=True,
        help="The configuration file.",
    )

    @click.group(invoke_without_command=True, help="EZAT Router: an LLM gateway. Without a command it serves.")
    @where
    @click.pass_context
    def cli(context: click.Context, path: Path) -> None:
        if context.invoked_subcommand is None:
            serve_with(path)
        else:
            context.obj = path

    def chosen(context: click.Context, path: Path) -> Path:
        given = context.get_parameter_source("path") is not click.core.ParameterSource.DEFAULT
        return path if given or context.obj is None else context.obj

    def serve_with(path: Path) -> None:
        sys.exit(asyncio.run(_serve(Loaded(path, bundled))))

    @cli.command(help="Serve until SIGTERM or SIGINT; running requests may end.")
    @where
    @click.pass_context
    def serve(context: click.Context, path: Path) -> None:
        serve_with(chosen(context, path))

    @cli.command(help="Hold a conversation of three turns through a gateway of its own, and show what the cache does.")
    @where
    @click.pass_context
    def demo(context: click.Context, path: Path) -> None:
        sys.exit(asyncio.run(_demo(Loaded(chosen(context, path), bundled))))

    @cli.command(help="Check the configuration and nothing else; exit code 1 if it can't be used.")
    @where
    @click.pass_context
    def check(context: click.Context, path: Path) -> None:
        path = chosen(context, path)
        loaded = Loaded(path, bundled)
        click.echo(f"{path}: {len(loaded.models)} models, {len(loaded.pipeline.plugins)} plugins, no problems")

    @cli.command(help="Print the chains of plugins, and what each plugin does.")
    @where
    @click.pass_context
    def plugins(context: click.Context, path: Path) -> None:
        loaded = Loaded(chosen(context, path), bundled)
        table = Table("plugin", "what it does", box=None)
        for name, purpose in loaded.pipeline.purposes():
            table.add_row(name, purpose)
        Console().print(table)
        click.echo("\n" + loaded.pipeline.described())

    add_store_commands(cli, DEFAULT_CONFIG)
    return cli


async def _serve(loaded: Loaded) -> int:
    logs.set_up(pretty=sys.stderr.isatty())
    gateway = Gateway(loaded.config, loaded.models, loaded.pipeline)
    stop = asyncio.Event()

    def asked_to_stop() -> None:
        if stop.is_set():
            gateway.stop_at_once()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop)
    try:
        await gateway.start()
        host = loaded.config.server.host
        click.echo(loaded.pipeline.described() + "\n")
        address = f"[{host}]" if ":" in host else host
        click.echo(greeting(loaded.config, f"http://{address}:{gateway.port}{loaded.config.server.base_path}"))
        await stop.wait()
    except CannotStart as error:
        click.echo(f"the gateway can't start: {error}", err=True)
        return 1
    except OSError as error:
        click.echo(f"the gateway can't start: {error.strerror or error}", err=True)
        return 1
    except Exception as error:
        click.echo(f"the gateway can't start: {type(error).__name__}: {error}", err=True)
        return 1
    finally:
        await gateway.stop()
    return 0


async def _demo(loaded: Loaded) -> int:
    logs.set_up(pretty=True, quiet=True)
    config = loaded.config
    server = config.server.model_copy(update={"host": "127.0.0.1", "port": 0})
    own = config.model_copy(update={"server": server, "store": "sqlite:///:memory:"})  # the other may be in use
    gateway = Gateway(own, loaded.models, loaded.pipeline)
    try:
        await gateway.start()
        url = f"http://127.0.0.1:{gateway.port}{config.server.base_path}"
        show(await conversation(url, first_key(config), first_model(config)))
    finally:
        await gateway.stop()
    return 0
