"""Find the plugins, judge each one alone, and quarantine what cannot be used, with its remedy.

`load` reads metadata. A plugin is imported and judged when a run selects it or somebody lists all;
one that requires another draftcore is never imported, as pip checks that only when it installs. A
bad plugin fails nobody but who selects it (`find`, `named`): listing shows it with its problem.
pluggy's own loader is not used, because its first bad plugin ends the loop, or the process.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pluggy
from importlib_metadata import EntryPoint

from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import UsageError, nearest
from draftcore.plugins import catalog, dists
from draftcore.plugins.dists import BUILT_IN

HOOKS = tuple(name for name in vars(Specs) if not name.startswith("_"))
NEEDED: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("feature_request", "build_draft", "collate", "forward_loss"),
    "capture": ("capture",),
    "store": ("feature_store",),
    "channel": ("channel",),
    "runner": ("runner",),
    "graph": ("graph_backend",),
    "graph-plugin": ("graph_plugin",),
}
DISAGG = ("build_disagg_draft_input",)  # needed also for the capability `disagg`
SEE_HOOKS = "draftcore hooks   # every hook and its arguments"


@dataclass(eq=False)
class Plugin:
    """A plugin that was found; `problem` says why it is not ready, `fix` how to repair it."""

    name: str
    dist: str
    version: str
    module: str
    origin: str = ""
    loose: bool = False
    requires: tuple[str, ...] = field(default=(), repr=False)
    state: Literal["found", "ready", "broken", "conflict", "incompatible"] = "ready"
    problem: str = ""
    fix: str = ""
    offers: tuple[Offer, ...] = ()
    hooks: tuple[str, ...] = ()
    import_ms: float = 0.0
    instance: Any = field(default=None, repr=False)

    def offer(self, kind: str, name: str) -> Offer | None:
        return next((o for o in self.offers if (o.kind, o.name) == (kind, name)), None)

    def __str__(self) -> str:
        return f"{self.name} ({self.dist.strip('()')} {self.version})"


class Registry:
    """What `load` found, sorted by plugin name. A plugin is judged when it is first asked for."""

    def __init__(self, found: Iterable[Plugin]) -> None:
        self._found = tuple(found)

    def judged(self, wanted: Callable[[Plugin], bool] = lambda plugin: True) -> tuple[Plugin, ...]:
        """Judge, and return, the plugins wanted by what their metadata says; by default all."""
        chosen = tuple(plugin for plugin in self._found if wanted(plugin))
        if new := [plugin for plugin in chosen if plugin.state == "found"]:
            trial = register(())
            for plugin in new:
                with _quarantine(plugin):
                    _judge(plugin, trial)
        return chosen

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        return self.judged()

    @property
    def ready(self) -> tuple[Plugin, ...]:
        return tuple(plugin for plugin in self.plugins if plugin.state == "ready")

    @property
    def built_in(self) -> tuple[Plugin, ...]:
        return self.judged(lambda plugin: plugin.dist == BUILT_IN)

    def find(self, kind: Kind, name: str) -> Plugin:
        """Return the one plugin that offers (kind, name). Raises UsageError unless it is ready.

        The built-in plugin, loose files and the entry point of that name go first; the others are
        imported only where none of these offers it.
        """
        near = self.judged(lambda p: p.name == name or p.loose or p.dist == BUILT_IN)
        able = _usable(near, kind, name) or _usable(self.plugins, kind, name)
        if len(able) == 1:
            return able[0]
        names = {name, catalog.ours(kind).get(name)}
        bad = [
            p
            for p in self.plugins
            if p.problem and (p.offer(kind, name) or names & {p.name, p.dist})
        ]
        raise self._refusal(kind, name, able or bad, sorted(self.offered(kind)))

    def named(self, name: str) -> Plugin:
        """Return the plugin of this name. Raises UsageError unless it is ready."""
        same = self.judged(lambda plugin: plugin.name == name)
        if len(same) == 1 and not same[0].problem:
            return same[0]
        raise self._refusal("plugin", name, same, [plugin.name for plugin in self.ready])

    def extras(self, names: Iterable[str]) -> tuple[Plugin, ...]:
        """Return the wrappers and observers of a run: those named, and every loose file."""
        loose = [plugin.name for plugin in self._found if plugin.loose]
        return tuple(self.named(name) for name in dict.fromkeys([*names, *loose]))

    def offered(self, kind: Kind) -> dict[str, frozenset[str]]:
        """Return the capabilities of all usable offers of a kind, by name."""
        offers = (offer for plugin in self.ready for offer in plugin.offers)
        return {offer.name: offer.capabilities for offer in offers if offer.kind == kind}

    def offering(self, kind: Kind, capability: str) -> list[str]:
        """Return the names of the usable offers of a kind that have a capability."""
        return [name for name, has in self.offered(kind).items() if capability in has]

    def _refusal(
        self, what: str, name: str, same: Sequence[Plugin], known: Sequence[str]
    ) -> UsageError:
        """Say why those of this name cannot be used; of none, what is here and what to install."""
        if same:
            lines = [
                f"  {p} is {'in ' * (p.state == 'conflict')}{p.state}"
                + f": {p.problem}\n  {p.fix}" * bool(p.fix)
                for p in same
            ]
            remedy = [] if same[0].fix else ["  uninstall all but one; a file: leave out --plugin"]
            return UsageError("\n".join([f"cannot use the {what} {name!r}", *lines, *remedy]))
        hint, install = catalog.advice(what, name, known)
        bad = [f"\n  quarantined: {p}: {p.problem}" for p in self.plugins if p.problem]
        return UsageError(
            f"there is no {what} {name!r}{hint}\n"
            f"  installed: {', '.join(known) or 'none'}{''.join(bad)}\n"
            f"  {install}"
        )

    def manifest(self, plugins: Iterable[Plugin]) -> list[dict[str, str]]:
        """Describe the plugins of a run, for its checkpoints and exports."""
        keys = ("name", "dist", "version", "origin")
        return [{key: getattr(plugin, key) for key in keys} for plugin in plugins]

    def missing(self, manifest: Collection[Mapping[str, str]]) -> str:
        """Say which plugins of a manifest are not here in any version; '' when all are."""
        names = {entry["name"] for entry in manifest}
        here = self.judged(lambda plugin: plugin.name in names)
        return dists.missing(manifest, [plugin.name for plugin in here if not plugin.problem])


def load(
    group: str = "draftcore", files: Iterable[Path] = (), path: Sequence[str] | None = None
) -> Registry:
    """Find the plugins installed on `path` (default: `sys.path`) and the one-file plugins `files`.

    Raises UsageError for a file that is not there, and nothing for a plugin, however bad.
    """
    found = list(dists.entry_points(group, sys.path if path is None else path))
    core = next((dist.version for _, dist in found if dist.name == "draftcore"), "")
    for file in dict.fromkeys(file.resolve() for file in files):
        found.append((EntryPoint(file.stem, file.stem, group), dists.loose(file)))
    plugins: list[Plugin] = []
    for entry, dist in sorted(found, key=lambda pair: (pair[0].name, pair[1].name)):
        shown = BUILT_IN if dist.name == "draftcore" else dist.name
        rest = (dist.version, entry.value, dist.origin, dist.loose, dist.requires)
        plugin = Plugin(entry.name, shown, *rest, state="found")
        with _quarantine(plugin):
            _check_metadata(plugin, [d.name for e, d in found if e.name == entry.name], core)
            twins = [p.name for p in plugins if p.module == entry.value and not p.problem]
            if twins:
                problem = f"its module is the plugin {twins[0]!r} already"
                raise _UnusableError(problem, "keep one of the names")
        plugins.append(plugin)
    return Registry(plugins)


def register(plugins: Iterable[Plugin]) -> pluggy.PluginManager:
    """Make a plugin manager of these plugins alone, each once, in the order of their names."""
    manager = pluggy.PluginManager("draftcore")
    manager.add_hookspecs(Specs)
    once = {id(plugin.instance): plugin for plugin in plugins}
    for plugin in sorted(once.values(), key=lambda plugin: plugin.name):
        manager.register(plugin.instance, plugin.name)
    return manager


def owners(hook: pluggy.HookCaller) -> list[str]:
    """Name the plugins that answer a hook themselves, rather than wrap its answer."""
    return [i.plugin_name for i in hook.get_hookimpls() if not (i.wrapper or i.hookwrapper)]


def _usable(plugins: Iterable[Plugin], kind: str, name: str) -> list[Plugin]:
    return [plugin for plugin in plugins if not plugin.problem and plugin.offer(kind, name)]


class _UnusableError(Exception):
    """The first check that failed: problem, fix and, unless it is `broken`, the state."""


@contextlib.contextmanager
def _quarantine(plugin: Plugin) -> Iterator[None]:
    """Keep the first problem with a plugin, and what was learnt of it before."""
    try:
        yield
    except _UnusableError as error:
        plugin.problem, plugin.fix, plugin.state = (*error.args, "broken")[:3]


def _check_metadata(plugin: Plugin, same: Sequence[str], core: str) -> None:
    if len(same) > 1:
        fix = "uninstall all but one of these, or rename it if it is a file"
        raise _UnusableError(f"{' and '.join(same)} have a plugin of this name", fix, "conflict")
    if not plugin.version:
        fix = f"pip install --force-reinstall {dists.pip_name(plugin.dist)}"
        raise _UnusableError(f"the metadata of {plugin.dist} cannot be read", fix)
    for need in dists.refused(plugin.requires, "draftcore", core) if core else ():
        problem, fix = f"requires {need}, and this is draftcore {core}", dists.install([need])
        raise _UnusableError(problem, fix, "incompatible")


def _judge(plugin: Plugin, trial: pluggy.PluginManager) -> None:
    """Import a plugin, register it on trial and check what it offers."""
    started = time.perf_counter()
    instance = plugin.instance = _call(plugin, EntryPoint(plugin.name, plugin.module, "").load)
    plugin.import_ms = round((time.perf_counter() - started) * 1e3, 1)
    if inspect.isclass(instance):
        fix = f"there: plugin = {instance.__name__}(); in the entry point: module:plugin"
        raise _UnusableError(f"{plugin.module} is a class, not a module or an instance", fix)
    if plugin.loose and instance.__file__ != plugin.dist:
        raise _UnusableError(f"{instance.__file__} is a module of that name", "rename the file")
    try:
        _register(plugin, trial)
        plugin.offers = _call(plugin, lambda: _describe(trial))
        for offer in plugin.offers:
            needed = NEEDED[offer.kind] + DISAGG * ("disagg" in offer.capabilities)
            if lacking := [name for name in needed if not owners(getattr(trial.hook, name))]:
                problem = f"offers the {offer.kind} {offer.name!r} without {', '.join(lacking)}"
                raise _UnusableError(problem + _unmarked(instance, lacking), SEE_HOOKS)
    finally:
        if trial.has_plugin(plugin.name):
            trial.unregister(name=plugin.name)
    plugin.state = "ready"


def _call(plugin: Plugin, function: Callable[[], Any]) -> Any:
    """Run a plugin's code, which may raise or exit; what it prints must stay out of --json."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        fix = dists.remedy(error, plugin.module, plugin.dist, plugin.requires)
        raise _UnusableError(f"{type(error).__name__}: {error}", fix) from None


def _register(plugin: Plugin, trial: pluggy.PluginManager) -> None:
    """Register the plugin; pluggy checks arguments, we check what it lets pass."""
    try:
        trial.register(plugin.instance, plugin.name)
    except Exception as error:  # nearly always PluginValidationError
        raise _UnusableError(str(error), SEE_HOOKS) from None
    hooks = trial.get_hookcallers(plugin.instance) or ()
    for hook in hooks:
        if not (hook.has_spec() or all(impl.optionalhook for impl in hook.get_hookimpls())):
            problem = f"unknown hook {hook.name!r}{nearest(hook.name, HOOKS)}"
            raise _UnusableError(problem, SEE_HOOKS)
    if not hooks:
        raise _UnusableError(f"registers no hook{_unmarked(plugin.instance, HOOKS)}", SEE_HOOKS)
    plugin.hooks = tuple(name for name in HOOKS if name in {hook.name for hook in hooks})


def _unmarked(instance: Any, names: Iterable[str]) -> str:
    """Say which functions have a hook's name, as @hookimpl above them is easily forgotten."""
    own = vars(instance if inspect.ismodule(instance) else type(instance))
    forgotten = ", ".join(name for name in names if callable(own.get(name)))
    return f"; put @hookimpl above {forgotten}" if forgotten else ""


def _describe(trial: pluggy.PluginManager) -> tuple[Offer, ...]:
    answers = trial.hook.describe()
    offers = tuple(offer for answer in answers for offer in answer)
    good = all(isinstance(offer, Offer) and offer.kind in NEEDED for offer in offers)
    if not good or len(answers) < len(owners(trial.hook.describe)):  # pluggy drops a None
        raise TypeError(f"describe() must return Offers of {', '.join(NEEDED)}, not {offers}")
    if sum(offer.kind == "algorithm" for offer in offers) > 1:
        raise TypeError("describe() returned several algorithms; a plugin offers one at most")
    return offers
