"""Find the plugins, judge each one alone, and quarantine what cannot be used, with its remedy.

`load` reads metadata. A plugin is imported and judged when a run selects it or somebody lists all;
one that requires another draftcore is never imported, as pip checks that only when it installs. A
bad plugin fails nobody but who selects it (`find`, `named`): listing shows it with its problem.
pluggy's own loader is not used, because its first bad plugin ends the loop, or the process.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from importlib_metadata import EntryPoint

from draftcore.contracts.offers import Kind, Offer
from draftcore.errors import UsageError, closest, nearest, one_line, raised
from draftcore.plugins import catalog, dists
from draftcore.plugins.catalog import CORE
from draftcore.plugins.dists import Plugin
from draftcore.plugins.specs import NEEDED, bring, hooks, marked, mistake, of_algorithms

DISABLE = "DRAFTCORE_DISABLE"
SEE_HOOKS = "draftcore hooks   # every hook and its arguments"


class Registry:
    """What `load` found, sorted by plugin name. A plugin is judged when it is first asked for.

    A registry that is `verbose` names each plugin on stderr before it is imported. Who is `watching` observes
    the runs of this process, and is part of none: no checkpoint names it.
    """

    watching: tuple[Plugin, ...] = ()

    def __init__(self, installed: Iterable[Plugin]) -> None:
        self.installed, self.verbose = tuple(installed), False

    def judged(self, wanted: Callable[[Plugin], bool] = lambda plugin: True) -> tuple[Plugin, ...]:
        """Judge, and return, the plugins wanted by what their metadata says; by default all."""
        chosen = tuple(plugin for plugin in self.installed if wanted(plugin))
        for plugin in (plugin for plugin in chosen if plugin.state == "found"):
            if self.verbose:
                print(f"importing {plugin}", file=sys.stderr, flush=True)
            started = 0.0
            with _setting_aside(plugin, plugin.module):
                _check_metadata(plugin, self.installed)
                started = time.perf_counter()
                _check_code(plugin, self)
                plugin.state = "ready"
            plugin.import_ms = round((time.perf_counter() - started) * 1e3, 1) if started else 0.0
        return chosen

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        return self.judged()

    @property
    def ready(self) -> tuple[Plugin, ...]:
        return tuple(plugin for plugin in self.plugins if plugin.state == "ready")

    def bring(self, kind: Kind = "") -> None:
        """Load the hooks that installed dists bring, all or those of one kind, by their owners alone."""
        owner_of = catalog.owners("kind")
        for plugin in self.installed:
            for name, module in plugin.kinds.items():
                ours = owner_of.get(name, plugin.dist) == plugin.dist
                if ours and kind in ("", name) and not plugin.problem:
                    with _setting_aside(plugin, module):
                        _check_metadata(plugin, self.installed)
                        bring(module)

    def find(self, kind: Kind, name: str, plugin: str = "") -> Plugin:
        """Return the one plugin that offers (kind, name). Raises UsageError unless it is ready.

        A name that the catalog gives to one of our dists is that dist's: nothing else is imported for
        it, and another's offer of that name is taken only where `plugin` says so. Of other names loose
        files go first, then the entry point of that name, then all.
        """
        if kind not in NEEDED:
            self.bring(kind)
        if plugin:
            owner = self.named(plugin)
            if owner.offer(kind, name):
                return owner
            offers = ", ".join(map(str, owner.offers)) or "nothing"
            raise UsageError(f"{owner} offers no {kind} {name!r}\n  it offers: {offers}")
        ours = catalog.owners(kind).get(name)
        stages: list[Callable[[Plugin], bool]] = [lambda p: p.dist == ours]
        if ours is None:
            stages = [lambda p: p.loose, lambda p: p.name == name, lambda p: True]
        for stage in stages:
            if usable := [p for p in self.judged(stage) if not p.problem and p.offer(kind, name)]:
                break
        if len(usable) == 1:
            return usable[0]
        bad = [p for p in self.judged(stage) if p.problem]
        bad = [p for p in bad if p.offer(kind, name) or {name, ours} & {p.name, p.dist}]
        raise self._refusal(kind, name, usable or bad, sorted(self.offered(kind)))

    def named(self, name: str, kind: Kind = "plugin") -> Plugin:
        """Return the plugin of this name; for errors, its kind. Raises UsageError unless it is ready."""
        same = self.judged(lambda plugin: plugin.name == name)
        if len(usable := [plugin for plugin in same if not plugin.problem]) == 1:
            return usable[0]
        raise self._refusal(kind, name, same, [plugin.name for plugin in self.installed])

    def extras(self, names: Iterable[str]) -> tuple[Plugin, ...]:
        """Return the wrappers and observers of a run: those named, and every loose file.

        Raises UsageError for one that is named and neither watches nor wraps anything.
        """
        named = [self.named(name, "observer") for name in names]
        for plugin in named:
            of_offers = {h for o in plugin.offers if not o.implementation for h in NEEDED[o.kind]}
            if not {*plugin.hooks} - {"describe", "commands"} - of_offers:
                offers = ", ".join(map(str, plugin.offers)) or "nothing"
                problem = f"`plugins` names {plugin}, which has no observer and no wrapper"
                remedy = f"it offers {offers}: leave it out there, and choose an offer by its name"
                raise UsageError(f"{problem}\n  {remedy}")
        loose = (self.named(plugin.name) for plugin in self.installed if plugin.loose)
        return tuple(dict.fromkeys([*named, *loose]))

    def offered(self, kind: Kind) -> dict[str, frozenset[str]]:
        """Return the capabilities of the usable offers of a kind, by name, for a choice by capability.

        Asked are loose files, our own dists and what is imported already: nobody chose the others.
        """
        ours = set((owner := catalog.owners(kind)).values())
        asked = self.judged(lambda p: p.loose or p.dist in ours or p.state != "found")
        offers = [(p.dist, o) for p in asked if not p.problem for o in p.offers if o.kind == kind]
        return {o.name: o.capabilities for dist, o in offers if owner.get(o.name, dist) == dist}

    def offering(self, kind: Kind, capability: str) -> list[str]:
        """Return the names of the usable offers of a kind that have a capability."""
        return [name for name, has in self.offered(kind).items() if capability in has]

    def _refusal(
        self, what: str, name: str, same: Sequence[Plugin], known: Sequence[str]
    ) -> UsageError:
        """Say why those of this name cannot be used; of none, what is here and what to install."""
        if same:
            lines = [f"cannot use the {what} {name!r}"]
            for plugin in same:
                state = f"{'in ' * (plugin.state == 'conflict')}{plugin.state}"
                why = f": {plugin.problem}\n  {plugin.fix}" if plugin.problem else ""
                lines.append(f"  {plugin} is {state}{why}")
            if not same[0].problem:
                lines.append("  choose one: `plugin`, beside the name; or uninstall the others")
        else:
            hint, install = dists.advice(what, name, known)
            bad = [f"  quarantined: {p}: {p.problem}" for p in self.installed if p.problem]
            here = f"  installed: {', '.join(known) or 'none'}"
            lines = [f"there is no {what} {name!r}{hint}", here, *bad, f"  {install}"]
        return UsageError("\n".join(lines))


def load_plugins(files: Iterable[Path] = (), path: Sequence[str] | None = None) -> Registry:
    """Find the plugins installed on `path` (default: `sys.path`) and the one-file plugins `files`.

    Those whose names DRAFTCORE_DISABLE lists are not used. Raises UsageError for a file that is not
    there, and nothing for a plugin, however bad.
    """
    plugins = dists.installed(sys.path if path is None else path)
    plugins += map(dists.loose, dict.fromkeys(file.resolve() for file in files))
    disabled = {*os.environ.get(DISABLE, "").split(",")} - {""}
    foreign = [plugin for plugin in plugins if plugin.dist != CORE]
    for plugin in (plugin for plugin in foreign if plugin.name in disabled):
        plugin.state, plugin.problem, plugin.fix = "disabled", "left out", f"{DISABLE} names it"
    names = {plugin.name for plugin in foreign}
    for name in sorted(disabled - names):
        what = f"{DISABLE} names no plugin: {one_line(name)}{nearest(name, names)}"
        print("warning:", what, file=sys.stderr)
    return Registry(sorted(plugins, key=lambda plugin: (plugin.name, plugin.dist)))


class _UnusableError(Exception):
    """A check that failed: the plugin's problem, and maybe its fix and state."""


@contextlib.contextmanager
def _setting_aside(plugin: Plugin, module: str) -> Iterator[None]:
    """Keep what a plugin's module raises as its problem, unless it has one; what it prints goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # as stdout may be read by a program
            yield
            return
    except _UnusableError as error:
        problem, fix, state = error.args + ("", SEE_HOOKS, "broken")[len(error.args) :]
    except BaseException as error:  # the plugin's own code may raise anything, or exit
        where = traceback.extract_tb(error.__traceback__)[-1].line or ""
        if isinstance(error, KeyboardInterrupt) and "raise" not in where.split():  # it was Ctrl-C
            says = f"while looking at {plugin}; {DISABLE}={plugin.name} leaves it out"
            print(says, file=sys.stderr)
            raise
        problem, fix, state = raised(error), dists.remedy(error, plugin, module), "broken"
    if not plugin.problem:
        plugin.problem, plugin.fix, plugin.state = one_line(problem, 999), one_line(fix), state


def _check_metadata(plugin: Plugin, installed: Iterable[Plugin]) -> None:
    if plugin.dist == CORE and plugin.module.partition(".")[0] != CORE:
        raise _UnusableError("a distribution of the core's name, and not the core", "uninstall it")
    if not plugin.version:
        raise ImportError("its METADATA is missing or damaged", name=CORE)  # to install again
    same = [other.dist for other in installed if other.name == plugin.name]
    if len(same) > 1 and plugin.dist not in catalog.dists():
        fix = "uninstall all but one of these, or rename it if it is a file"
        raise _UnusableError(f"{' and '.join(same)} have a plugin of this name", fix, "conflict")
    core = next((p.version for p in installed if p.dist == CORE == p.module.partition(".")[0]), "")

    def version_of(name: str) -> str:
        return core if name == CORE and core else dists.version_of(name)

    if needs := dists.unmet(plugin.requires, version_of):
        names = [re.sub(r"[^\w.-].*", "", need) for need in needs]
        here = ", ".join(f"{name} {version_of(name) or 'none'}" for name in names)
        state = "incompatible" if CORE in names else "broken"
        problem = f"requires {', '.join(needs)}; here: {here}"
        raise _UnusableError(problem, dists.install_line(*needs), state)


def _check_code(plugin: Plugin, registry: Registry) -> None:
    """Import a plugin, and check what it implements and offers."""
    instance = plugin.instance = EntryPoint(plugin.name, plugin.module, "draftcore").load()
    if inspect.isclass(instance):
        fix = f"there: plugin = {instance.__name__}(); in the entry point: module:plugin"
        raise _UnusableError(f"{plugin.module} is a class, not a module or an instance", fix)
    if plugin.loose and instance.__file__ != plugin.dist:
        raise _UnusableError(f"{instance.__file__} is a module of that name", "rename the file")
    for kind in plugin.kinds:
        registry.bring(kind)
    found = list(marked(instance))
    if (named := {hook for _, hook, _ in found}) - hooks().keys():
        registry.bring()
    if not found:
        raise _UnusableError(f"registers no hook{_unmarked(instance, hooks())}")
    for _, hook, impl in found:
        if (hook in hooks() or not impl.optionalhook) and (wrong := mistake(hook, impl.argnames)):
            raise _UnusableError(wrong)
        if impl.wrapper and not inspect.isgeneratorfunction(impl.function):
            raise _UnusableError(f"the wrapper {hook} has no yield")
    plugin.hooks = tuple(name for name in hooks() if name in named)
    _check_offers(plugin, registry, [hook for _, hook, impl in found if not impl.wrapper])


def _check_offers(plugin: Plugin, registry: Registry, answered: Collection[str]) -> None:
    """Ask a plugin what it offers, and check that it answers the hooks of that."""
    offers = _returned(plugin, "describe", Offer)
    verbs = _returned(plugin, "commands", click.Command)
    for kind in {offer.kind for offer in offers} - NEEDED.keys():
        registry.bring()
        if kind not in NEEDED:
            hint, fix = dists.advice("kind", kind, NEEDED)
            raise _UnusableError(f"describe() offers the unknown kind {kind!r}{hint}", fix)
    plugin.verbs = {verb.name: verb for verb in verbs}
    if sum(offer.kind == "algorithm" and not offer.implementation for offer in offers) > 1:
        fix = "write each as a class, and name it by Offer(..., implementation='module:Class')"
        raise _UnusableError("describe() returned several algorithms written as functions", fix)
    plugin.offers = (*offers, *(Offer("verb", name) for name in plugin.verbs))
    for offer in plugin.offers:
        if offer.implementation:
            _check_class(offer.implementation)
        elif missing := missing_hooks(offer, answered):
            problem = f"offers the {offer.kind} {offer.name!r} without {', '.join(missing)}"
            raise _UnusableError(problem + _unmarked(plugin.instance, missing))


def _check_class(path: str) -> None:
    """Check the methods of an algorithm's class as they are written: to import it takes torch's import."""
    module, _, name = path.partition(":")
    spec: Any = find_spec(module)
    source = spec.loader.get_source(module) if spec else None
    for part in ast.parse(source or "", module).body:
        methods = part.body if isinstance(part, ast.ClassDef) and part.name == name else ()
        for method in (m for m in methods if isinstance(m, ast.FunctionDef) and m.name[0] != "_"):
            needed = method.args.args[1 : len(method.args.args) - len(method.args.defaults)]
            near = closest(method.name, of_algorithms(), 0.8)  # a hook, or one mistyped
            if near and (wrong := mistake(method.name, [argument.arg for argument in needed])):
                raise _UnusableError(f"{name}: {wrong}")


def _returned(plugin: Plugin, hook: str, kind: type) -> tuple[Any, ...]:
    """Ask a plugin for its offers, or its verbs, and check that each of them can be listed."""
    answer = getattr(plugin.instance, hook)() if hook in plugin.hooks else ()
    right = isinstance(answer, Sequence) and all(isinstance(one, kind) for one in answer)
    if right and all(map(_can_be_listed, answer)):
        return tuple(answer)
    fix = f"return a list of {kind.__name__}s"
    raise _UnusableError(f"{hook}() returned {one_line(answer)}", fix)


def _can_be_listed(item: Any) -> bool:
    """Say whether the texts of an offer, or a verb, can be printed on a line."""
    verb = isinstance(item, click.Command)
    paths = () if verb else (item.options, item.implementation, *item.capabilities)
    more = [item.get_short_help_str()] if verb else item.lacks().split("\n")
    text = "".join([item.name, *paths, *more])
    return one_line(text, 9999) == text


def missing_hooks(offer: Offer, answered: Collection[str]) -> list[str]:
    """Name the hooks that an offer of this kind and these capabilities needs beside those answered."""
    needed = NEEDED[offer.kind] + ("build_disagg_draft_input",) * ("disagg" in offer.capabilities)
    return [name for name in needed if name not in answered]


def _unmarked(instance: Any, names: Iterable[str]) -> str:
    """Say what has a hook's name: functions, if @hookimpl is forgotten above them; a package's module."""
    members = vars(instance if inspect.ismodule(instance) else type(instance))
    if modules := [name for name in names if inspect.ismodule(members.get(name))]:
        return f"; the module {modules[0]} took its place: rename it, or move the hooks"
    forgotten = ", ".join(name for name in names if callable(members.get(name)))
    return f"; put @hookimpl above {forgotten}" if forgotten else ""
