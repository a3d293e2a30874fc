"""The command line's shell: two verbs of its own, and every other one from a plugin.

A verb of the core is found in the built-in plugin; the help and any other verb import all plugins. A
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
from draftcore.plugins import catalog
from draftcore.plugins.dists import BUILT_IN, Plugin
from draftcore.plugins.registry import Registry, load

FILE = click.Path(path_type=Path)
SYSTEM = "check the path, its permissions and the space there; --traceback shows who asked for it"
VERBS = "draftcore.verbs"  # where the context keeps the verbs of all plugins
STATUS = (
    f"Exit status: {ExitStatus.DONE} done, {ExitStatus.FAILED} failed, {ExitStatus.REFUSED} wrongly asked, "
    f"{ExitStatus.INTERRUPTED} stopped by Ctrl-C."
)


class Verbs(click.Group):
    """The shell's own verbs and those of the ready plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._all(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._core(ctx).get(cmd_name) or self._all(ctx).get(cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            verbs = self.list_commands(ctx)
            hint, remedy = catalog.advice("verb", args[0], verbs)
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

    def _core(self, ctx: click.Context) -> dict[str, click.Command]:
        built_in = _registry(ctx).judged(lambda plugin: plugin.dist == BUILT_IN)
        return {**{name: verb for _, name, verb in _verbs_of(built_in)}, **self.commands}

    def _all(self, ctx: click.Context) -> dict[str, click.Command]:
        """Return all verbs. Of several with one name the core's is kept, otherwise none."""
        if VERBS not in ctx.meta:
            verbs = ctx.meta[VERBS] = self._core(ctx)
            owners = dict.fromkeys(verbs, "draftcore")
            foreign = (plugin for plugin in _registry(ctx).ready if plugin.dist != BUILT_IN)
            for plugin, name, verb in _verbs_of(foreign):
                first = owners.setdefault(name, plugin)
                if first == plugin:
                    verbs[name] = verb
                else:
                    click.echo(f"warning: {first} and {plugin} have a verb {name!r}", err=True)
                    if first != "draftcore":
                        verbs.pop(name, None)
        return cast(dict[str, click.Command], ctx.meta[VERBS])


def _registry(ctx: click.Context) -> Registry:
    ctx.obj = ctx.obj or load(ctx.params.get("plugin", ()))
    ctx.obj.verbose = ctx.params.get("traceback", False)
    return cast(Registry, ctx.obj)


def _verbs_of(plugins: Iterable[Plugin]) -> Iterator[tuple[str, str, click.Command]]:
    """Yield the name of the plugin, the verb's and the verb."""
    yield from ((plugin.name, str(verb.name), verb) for plugin in plugins for verb in plugin.verbs)


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
