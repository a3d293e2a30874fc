"""The hook of the launcher `ray`. Thin on purpose: ray takes a second to import."""

from __future__ import annotations

import os
import secrets
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
    if not (options.address or os.environ.get("RAY_ADDRESS")):  # a cluster for this run alone
        # Ray reads it when it is imported, and all that it starts then listens on 127.0.0.1 alone.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Else Ray makes a file of one, which others may read.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    from draftcore_ray.launcher import RayLauncher

    return RayLauncher(options)
