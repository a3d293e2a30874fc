"""The command line's shell: a verb of its own, and every other one from a plugin.

A verb is an offer: one of ours is found in its owner's plugin; the help and a stranger's import all
plugins. It gets them as the context's `obj`, a Registry. Nothing here imports torch, pydantic or rich:
listing what is installed is quick and works whatever is broken.
"""

from __future__ import annotations

import contextlib
import faulthandler
from pathlib import Path
from typing import Any, cast

import click

from draftcore import listing
from draftcore.errors import DraftcoreError, ExitStatus, UsageError, raised
from draftcore.plugins.registry import Registry, load_plugins

FILE = click.Path(path_type=Path)
HINT = "\n  check the path, its permissions and the space there; --traceback shows who asked for it"
STATUS = (
    f"Exit status: {ExitStatus.DONE} done, {ExitStatus.FAILED} failed, {ExitStatus.REFUSED} wrongly asked, "
    f"{ExitStatus.INTERRUPTED} stopped by Ctrl-C."
)


class Verbs(click.Group):
    """The shell's own verb and those that plugins offer, which are found as all offers are."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        registry = _registry(ctx)
        registry.judged()
        return sorted({*self.commands, *registry.offered("verb")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb; None where several plugins offer it and it is nobody's own."""
        with contextlib.suppress(UsageError):
            return cast(click.Command, self.resolve_command(ctx, [cmd_name])[1])
        return None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        registry, (name, *rest) = _registry(ctx), args
        return name, self.commands.get(name) or registry.find("verb", name).verbs[name], rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (DraftcoreError, OSError) as error:  # OSError: seldom our bug
            if ctx.params["traceback"] or isinstance(error, BrokenPipeError):
                raise
            text = raised(error) + HINT if isinstance(error, OSError) else error
            click.echo(f"error: {text}", err=True)
            ctx.exit(getattr(error, "exit_status", ExitStatus.FAILED))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(ExitStatus.INTERRUPTED)


def _registry(ctx: click.Context) -> Registry:
    ctx.obj = ctx.obj or load_plugins(ctx.params.get("plugin", ()))
    ctx.obj.verbose = ctx.params.get("traceback", False)
    return cast(Registry, ctx.obj)


@click.group(cls=Verbs, epilog=STATUS)
@click.version_option(package_name="draftcore", message="%(prog)s %(version)s")
@click.option("--plugin", type=FILE, multiple=True, is_eager=True, help="Load a one-file plugin.")
@click.option("--traceback", is_flag=True, is_eager=True, help="Show where errors come from.")
def main(plugin: tuple[Path, ...], traceback: bool) -> None:
    """Train draft models for speculative decoding; every method is a plugin."""


if not faulthandler.is_enabled():
    faulthandler.enable(2)  # says in which file a plugin, or torch, kills the process
main.add_command(listing.list_plugins)
