"""Find the plugins, judge each one alone, and set aside what cannot be used, with its remedy.

Loading never fails: a bad plugin stays in the registry with its problem, so that listing shows it
and only *selecting* it (`Registry.find`, `Registry.named`) fails. pluggy's own loader is not used,
because its first bad plugin ends the loop, or the process. Odd: a plugin that requires another
draftcore is never imported; pip checks that requirement only once, when it installs.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pluggy
from importlib_metadata import EntryPoint

from draftcore.contracts.hooks import Specs
from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import UsageError, nearest
from draftcore.plugins import dists
from draftcore.plugins.dists import BUILT_IN, Dist

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


@dataclass(frozen=True)
class Plugin:
    """A plugin that was found; `problem` says why it is not ready, `fix` what mends that."""

    name: str
    dist: str
    version: str
    module: str
    origin: str = ""
    loose: bool = False
    state: Literal["ready", "broken", "conflict", "incompatible"] = "ready"
    problem: str = ""
    fix: str = ""
    offers: tuple[Offer, ...] = ()
    hooks: tuple[str, ...] = ()
    import_ms: float = 0.0
    instance: Any = field(default=None, repr=False, compare=False)

    def offer(self, kind: str, name: str) -> Offer | None:
        return next((o for o in self.offers if (o.kind, o.name) == (kind, name)), None)

    def __str__(self) -> str:
        return f"{self.name} ({self.dist.strip('()')} {self.version})"


@dataclass(frozen=True)
class Registry:
    """What `load` found, sorted by plugin name."""

    plugins: tuple[Plugin, ...]

    @property
    def ready(self) -> tuple[Plugin, ...]:
        return tuple(plugin for plugin in self.plugins if plugin.state == "ready")

    def find(self, kind: Kind, name: str) -> Plugin:
        """Return the one plugin that offers (kind, name). Raises UsageError unless it is ready."""
        able = [plugin for plugin in self.ready if plugin.offer(kind, name)]
        aside = [p for p in self.plugins if p.problem and (p.name == name or p.offer(kind, name))]
        known = sorted(o.name for p in self.ready for o in p.offers if o.kind == kind)
        return self._only(kind, name, able or aside, known)

    def offered(self, kind: Kind) -> dict[str, frozenset[str]]:
        """Return the capabilities of all usable offers of a kind, by name."""
        offers = (offer for plugin in self.ready for offer in plugin.offers)
        return {offer.name: offer.capabilities for offer in offers if offer.kind == kind}

    def named(self, name: str) -> Plugin:
        """Return the plugin of this name. Raises UsageError unless it is ready."""
        same = [plugin for plugin in self.plugins if plugin.name == name]
        return self._only("plugin", name, same, [plugin.name for plugin in self.ready])

    def extras(self, names: Iterable[str]) -> tuple[Plugin, ...]:
        """Return the wrappers and observers of a run: those named, and every loose file."""
        loose = [plugin.name for plugin in self.plugins if plugin.loose]
        return tuple(self.named(name) for name in dict.fromkeys([*names, *loose]))

    def _only(self, what: str, name: str, same: list[Plugin], known: list[str]) -> Plugin:
        if len(same) == 1 and not same[0].problem:
            return same[0]
        if same:
            lines = [
                f"  {p} is {'in ' * (p.state == 'conflict')}{p.state}"
                + f": {p.problem}\n  {p.fix}" * bool(p.fix)
                for p in same
            ]
            remedy = [] if same[0].fix else ["  uninstall all but one; a file: leave out --plugin"]
            raise UsageError("\n".join([f"cannot use the {what} {name!r}", *lines, *remedy]))
        aside = [f"\n  set aside: {p}: {p.problem}" for p in self.plugins if p.problem]
        raise UsageError(
            f"there is no {what} {name!r}{nearest(name, known)}\n"
            f"  installed: {', '.join(known) or 'none'}{''.join(aside)}\n"
            f"  choose one that is there, or install another: pip install draftcore-{name}"
        )

    def manifest(self, plugins: Iterable[Plugin]) -> list[dict[str, str]]:
        """Describe the plugins of a run, for its checkpoints and exports."""
        keys = ("name", "dist", "version", "origin")
        return [{key: getattr(plugin, key) for key in keys} for plugin in plugins]

    def missing(self, manifest: Iterable[Mapping[str, str]]) -> str:
        """Say which plugins of a manifest are not here in the same version; '' when all are."""
        return dists.missing(manifest, [plugin.name for plugin in self.ready])


def load(
    group: str = "draftcore", files: Iterable[Path] = (), path: Sequence[str] | None = None
) -> Registry:
    """Load the plugins installed on `path` (default: `sys.path`) and the one-file plugins `files`.

    Raises UsageError for a file that is not there, and nothing for a plugin, however bad.
    """
    found = list(dists.entry_points(group, sys.path if path is None else path))
    core = next((dist.version for _, dist in found if dist.name == "draftcore"), "")
    for file in dict.fromkeys(file.resolve() for file in files):
        found.append((EntryPoint(file.stem, file.stem, group), dists.loose(file)))
    judged: list[Plugin] = []
    for entry, dist in sorted(found, key=lambda pair: (pair[0].name, pair[1].name)):
        same = [d.name for e, d in found if e.name == entry.name]
        judged.append(_judge(entry, dist, same, core, judged))
    return Registry(tuple(judged))


def register(plugins: Iterable[Plugin]) -> pluggy.PluginManager:
    """Make a plugin manager of these plugins alone, in the order of their names."""
    manager = pluggy.PluginManager("draftcore")
    manager.add_hookspecs(Specs)
    for plugin in sorted(plugins, key=lambda plugin: plugin.name):
        manager.register(plugin.instance, plugin.name)
    return manager


def owners(hook: pluggy.HookCaller) -> list[str]:
    """Name the plugins that answer a hook themselves, rather than wrap its answer."""
    return [i.plugin_name for i in hook.get_hookimpls() if not (i.wrapper or i.hookwrapper)]


class _SetAsideError(Exception):
    """The first check that failed; what was learnt of the plugin before is kept."""

    def __init__(self, problem: str, fix: str, state: str = "broken") -> None:
        self.verdict: dict[str, Any] = {"problem": problem, "fix": fix, "state": state}


def _judge(
    entry: EntryPoint, dist: Dist, same: list[str], core: str, judged: list[Plugin]
) -> Plugin:
    shown = BUILT_IN if dist.name == "draftcore" else dist.name
    plugin = Plugin(entry.name, shown, dist.version, entry.value, dist.origin, dist.loose)
    try:
        _check_dist(dist, same, core)
        started = time.perf_counter()
        plugin = replace(plugin, instance=_call(entry.load, entry, dist))
        plugin = replace(plugin, import_ms=round((time.perf_counter() - started) * 1e3, 1))
        _check_instance(plugin, judged)
        manager = register(())
        plugin = replace(plugin, hooks=_register(plugin, manager))
        plugin = replace(plugin, offers=_call(lambda: _describe(manager), entry, dist))
        _check_offers(plugin, manager)
    except _SetAsideError as error:
        return replace(plugin, **error.verdict)
    return plugin


def _check_dist(dist: Dist, same: list[str], core: str) -> None:
    """Check all that can be known without importing the plugin."""
    if len(same) > 1:
        fix = "uninstall all but one of these, or rename it if it is a file"
        raise _SetAsideError(f"{' and '.join(same)} have a plugin of this name", fix, "conflict")
    if not dist.version:
        fix = f"pip install --force-reinstall {dist.name}"
        raise _SetAsideError(f"the metadata of {dist.name} cannot be read", fix)
    for need in dists.refused(dist, "draftcore", core) if core else ():
        problem, fix = f"requires {need}, and this is draftcore {core}", dists.install([need])
        raise _SetAsideError(problem, fix, "incompatible")


def _call(function: Callable[[], Any], entry: EntryPoint, dist: Dist) -> Any:
    """Run a plugin's code, which may raise or exit; what it prints must stay out of --json."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        fix = dists.mend(error, entry.value, dist)
        raise _SetAsideError(f"{type(error).__name__}: {error}", fix) from None


def _check_instance(plugin: Plugin, judged: list[Plugin]) -> None:
    instance = plugin.instance
    if inspect.isclass(instance):
        fix = f"there: plugin = {instance.__name__}(); in the entry point: module:plugin"
        raise _SetAsideError(f"{plugin.module} is a class, not a module or an instance", fix)
    if plugin.loose and instance.__file__ != plugin.dist:
        raise _SetAsideError(f"{instance.__file__} is a module of that name", "rename the file")
    for twin in (other.name for other in judged if other.instance is instance):
        raise _SetAsideError(f"its module is the plugin {twin!r} already", "keep one of the names")


def _register(plugin: Plugin, manager: pluggy.PluginManager) -> tuple[str, ...]:
    """Register the plugin; pluggy checks arguments, we check what it lets pass."""
    try:
        manager.register(plugin.instance, plugin.name)
    except Exception as error:  # nearly always PluginValidationError
        raise _SetAsideError(str(error), SEE_HOOKS) from None
    hooks = manager.get_hookcallers(plugin.instance) or ()
    for name in (hook.name for hook in hooks if not hook.has_spec()):
        if not all(impl.optionalhook for impl in getattr(manager.hook, name).get_hookimpls()):
            raise _SetAsideError(f"unknown hook {name!r}{nearest(name, HOOKS)}", SEE_HOOKS)
    if not hooks:
        raise _SetAsideError(f"registers no hook{_unmarked(plugin, HOOKS)}", SEE_HOOKS)
    return tuple(name for name in HOOKS if name in {hook.name for hook in hooks})


def _unmarked(plugin: Plugin, names: Iterable[str]) -> str:
    """Say which functions have a hook's name, as @hookimpl above them is easily forgotten."""
    own = vars(plugin.instance if inspect.ismodule(plugin.instance) else type(plugin.instance))
    forgotten = ", ".join(name for name in names if callable(own.get(name)))
    return f"; put @hookimpl above {forgotten}" if forgotten else ""


def _describe(manager: pluggy.PluginManager) -> tuple[Offer, ...]:
    answers = manager.hook.describe()
    offers = tuple(offer for answer in answers for offer in answer)
    good = all(isinstance(offer, Offer) and offer.kind in NEEDED for offer in offers)
    if not good or len(answers) < len(owners(manager.hook.describe)):  # pluggy drops a None
        raise TypeError(f"describe() must return Offers of {', '.join(NEEDED)}, not {offers}")
    if sum(offer.kind == "algorithm" for offer in offers) > 1:
        raise TypeError("describe() returned several algorithms; a plugin offers one at most")
    return offers


def _check_offers(plugin: Plugin, manager: pluggy.PluginManager) -> None:
    for offer in plugin.offers:
        needed = NEEDED[offer.kind] + DISAGG * ("disagg" in offer.capabilities)
        if lacking := [name for name in needed if not owners(getattr(manager.hook, name))]:
            problem = f"offers the {offer.kind} {offer.name!r} without {', '.join(lacking)}"
            raise _SetAsideError(problem + _unmarked(plugin, lacking), SEE_HOOKS)
