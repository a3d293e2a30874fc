"""The command line's shell: two verbs of its own, and every other one from a plugin.

A verb of the core is found in the built-in plugin; the help and any other verb import all plugins. A
verb gets them as the context's `obj`, a Registry. Nothing here imports torch, pydantic or rich:
listing what is installed is quick and works whatever is broken.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import click

from draftcore import listing
from draftcore.errors import DraftcoreError
from draftcore.plugins import catalog
from draftcore.plugins.dists import BUILT_IN
from draftcore.plugins.registry import Plugin, Registry, load, register

FILE = click.Path(path_type=Path)
SYSTEM = "check the path, its permissions and the space there; --traceback shows who asked for it"
VERBS = "draftcore.verbs"  # where the context keeps the verbs of all plugins
STATUS = "Exit status: 0 done, 1 failed, 2 wrongly asked, 130 stopped by Ctrl-C."


class Verbs(click.Group):
    """The shell's own verbs and those of the ready plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._verbs(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        core = () if VERBS in ctx.meta else _plugin_verbs(_registry(ctx).built_in)
        verbs = {verb.name: verb for _, verb in core}
        return verbs.get(cmd_name) or self._verbs(ctx).get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            verbs = self.list_commands(ctx)
            hint, remedy = catalog.advice("verb", args[0], verbs)
            ctx.fail(f"no verb {args[0]!r}{hint}; there are {', '.join(verbs)}\n  {remedy}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DraftcoreError as error:
            if ctx.params["traceback"]:
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:  # of a path, a disk or the network: seldom our bug
            if ctx.params["traceback"] or isinstance(error, BrokenPipeError):
                raise
            click.echo(f"error: {type(error).__name__}: {error}\n  {SYSTEM}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)

    def _verbs(self, ctx: click.Context) -> dict[str, click.Command]:
        """Return all verbs. Of several with one name the core's is kept, otherwise none."""
        if VERBS not in ctx.meta:
            claims = {name: {"draftcore": verb} for name, verb in self.commands.items()}
            for who, verb in _plugin_verbs(_registry(ctx).ready):
                claims.setdefault(str(verb.name), {})[who] = verb
            verbs = ctx.meta[VERBS] = {}
            for name, same in claims.items():
                if len(same) > 1:
                    click.echo(f"warning: {' and '.join(same)} have a verb {name!r}", err=True)
                if len(same) == 1 or "draftcore" in same:
                    verbs[name] = same.get("draftcore", next(iter(same.values())))
        return cast(dict[str, click.Command], ctx.meta[VERBS])


def _registry(ctx: click.Context) -> Registry:
    ctx.obj = ctx.obj or load(files=ctx.params.get("plugin", ()))
    return cast(Registry, ctx.obj)


def _plugin_verbs(plugins: Iterable[Plugin]) -> Iterator[tuple[str, click.Command]]:
    """Yield each verb and whose it is; a plugin that fails here has none."""
    for plugin in (plugin for plugin in plugins if "commands" in plugin.hooks):
        who = "draftcore" if plugin.dist == BUILT_IN else plugin.name
        try:
            with contextlib.redirect_stdout(sys.stderr):
                verbs = [verb for some in register([plugin]).hook.commands() for verb in some]
        except (Exception, SystemExit) as error:
            verbs = []
            click.echo(f"warning: no verbs of {plugin}: {type(error).__name__}: {error}", err=True)
        yield from ((who, verb) for verb in verbs)


@click.group(cls=Verbs, epilog=STATUS)
@click.version_option(package_name="draftcore", message="%(prog)s %(version)s")
@click.option("--plugin", type=FILE, multiple=True, is_eager=True, help="Load a one-file plugin.")
@click.option("--traceback", is_flag=True, help="Show where an error comes from.")
@click.pass_context
def main(ctx: click.Context, plugin: tuple[Path, ...], traceback: bool) -> None:
    """Train draft models for speculative decoding; every method is a plugin."""
    _registry(ctx)


main.add_command(listing.list_plugins)
main.add_command(listing.hooks)
