"""The command line's shell: two verbs of its own, and every other one from a plugin.

A verb of ours is found in its owner's plugin; the help and any other verb import all plugins. A
verb gets them as the context's `obj`, a Registry. Nothing here imports torch, pydantic or rich:
listing what is installed is quick and works whatever is broken.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import click

from draftcore import listing
from draftcore.errors import DraftcoreError, ExitStatus
from draftcore.plugins import catalog, dists
from draftcore.plugins.catalog import BUILT_IN
from draftcore.plugins.dists import Plugin
from draftcore.plugins.registry import Registry, load_plugins

FILE = click.Path(path_type=Path)
SYSTEM = "check the path, its permissions and the space there; --traceback shows who asked for it"
VERBS = "draftcore.verbs"  # where the context keeps the verbs of all plugins
STATUS = (
    f"Exit status: {ExitStatus.DONE} done, {ExitStatus.FAILED} failed, {ExitStatus.REFUSED} wrongly asked, "
    f"{ExitStatus.INTERRUPTED} stopped by Ctrl-C."
)


class Verbs(click.Group):
    """The shell's own verbs and those of the ready plugins.

    A verb that the catalog gives to one of our dists is that dist's; nothing else is imported for it.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._all(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        registry = _registry(ctx)
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        if owner := catalog.owners("verb").get(cmd_name):
            plugins = registry.judged(lambda plugin: plugin.dist == owner)
            return {name: verb for _, name, verb in _verbs_of(plugins)}.get(cmd_name)
        return self._all(ctx).get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            verbs = self.list_commands(ctx)
            hint, remedy = dists.advice("verb", args[0], verbs)
            owner = catalog.owners("verb").get(args[0])
            broken = [p for p in _registry(ctx).plugins if p.dist == owner and p.problem]
            for plugin in broken:
                hint, remedy = f": {plugin} is {plugin.state}: {plugin.problem}", plugin.fix
            ctx.fail(f"no verb {args[0]!r}{hint}; there are {', '.join(verbs)}\n  {remedy}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (DraftcoreError, OSError) as error:  # OSError: seldom our bug
            if ctx.params["traceback"] or isinstance(error, BrokenPipeError):
                raise
            system = f"{type(error).__name__}: {error}\n  {SYSTEM}"
            click.echo(f"error: {system if isinstance(error, OSError) else error}", err=True)
            ctx.exit(getattr(error, "exit_status", ExitStatus.FAILED))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(ExitStatus.INTERRUPTED)

    def _all(self, ctx: click.Context) -> dict[str, click.Command]:
        """Return all verbs. Of several with one name its owner's is kept, otherwise none."""
        if VERBS not in ctx.meta:
            verbs = ctx.meta[VERBS] = dict(self.commands)
            owner = {**catalog.owners("verb"), **dict.fromkeys(verbs, BUILT_IN)}
            first: dict[str, Plugin] = {}
            for plugin, name, verb in _verbs_of(_registry(ctx).ready):
                if owner.get(name, plugin.dist) != plugin.dist:
                    other = owner[name].replace(BUILT_IN, "draftcore")
                elif name in first:
                    other = str(first[name].name)
                    verbs.pop(name, None)
                else:
                    verbs[name], first[name] = verb, plugin
                    continue
                click.echo(f"warning: {other} and {plugin.name} have a verb {name!r}", err=True)
        return cast(dict[str, click.Command], ctx.meta[VERBS])


def _registry(ctx: click.Context) -> Registry:
    ctx.obj = ctx.obj or load_plugins(ctx.params.get("plugin", ()))
    ctx.obj.verbose = ctx.params.get("traceback", False)
    return cast(Registry, ctx.obj)


def _verbs_of(plugins: Iterable[Plugin]) -> Iterator[tuple[Plugin, str, click.Command]]:
    """Yield the plugin of a verb, its name and the verb."""
    yield from ((plugin, str(verb.name), verb) for plugin in plugins for verb in plugin.verbs)


@click.group(cls=Verbs, epilog=STATUS)
@click.version_option(package_name="draftcore", message="%(prog)s %(version)s")
@click.option("--plugin", type=FILE, multiple=True, is_eager=True, help="Load a one-file plugin.")
@click.option("--traceback", is_flag=True, is_eager=True, help="Show where errors come from.")
def main(plugin: tuple[Path, ...], traceback: bool) -> None:
    """Train draft models for speculative decoding; every method is a plugin."""


if not faulthandler.is_enabled():
    faulthandler.enable(2)  # says in which file a plugin, or torch, kills the process
main.add_command(listing.list_plugins)
main.add_command(listing.hooks)
