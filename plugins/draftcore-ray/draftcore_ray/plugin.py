"""The hook of the launcher `ray`. Thin on purpose: ray takes a second to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl
from draftcore.contracts.offers import Offer

if TYPE_CHECKING:
    from draftcore_disagg.launcher import Launcher

    from draftcore_ray.options import RayOptions


@hookimpl
def describe() -> Sequence[Offer]:
    return [Offer("launcher", "ray", options="draftcore_ray.options:RayOptions")]


@hookimpl
def launcher(name: str, options: RayOptions) -> Launcher:
    from draftcore_ray.launcher import RayLauncher

    return RayLauncher(options)
