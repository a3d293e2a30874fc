"""What there is to install: reads the project's catalogue, and says which of it is not here.

The catalogue is `catalogue.json` of the docs site. Its address stands in one place, `[project.urls]` of
the core's pyproject.toml, and comes with the core's metadata. A core that was installed from a checkout
has that of the checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from pydantic import BaseModel, Field, ValidationError

from draftcore import install_line
from draftcore.errors import UsageError, one_line, raised
from draftcore.files import regular

LABEL = "Catalogue, "  # of the address in the metadata
LARGEST = 4 << 20  # bytes
HEADER = ("DIST", "CATEGORY", "VERSION", "SUITES", "TO HAVE IT")


class Suites(BaseModel):
    """What the conformance suites said: by `check-plugin`, or in the session of an engine."""

    date: str = ""
    version: str = ""
    passed: int = 0
    failed: int = 0
    session: str = ""
    problem: str = ""

    def __str__(self) -> str:
        failed = f", {self.failed} failed" * bool(self.failed)
        passed = f"session {self.session}" if self.session else f"{self.passed} passed{failed}"
        said = self.problem or passed
        return f"{said}, {self.date}" if self.date else "not tried"


class Published(BaseModel):
    """A distribution of the catalogue; keys that a later catalogue has more are not read."""

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")  # it stands in a line for a shell
    category: str
    version: str = ""
    summary: str = ""
    home: str = ""
    offers: list[str] = []
    suites: Suites = Suites()

    @property
    def installed(self) -> str:
        """The version that is here, or ''."""
        try:
            return version(self.name)
        except PackageNotFoundError:
            return ""


class Catalogue(BaseModel):
    """All of it, in the order in which it is shown."""

    dists: list[Published]

    def lines(self) -> Iterator[str]:
        """Yield a table of what is not installed, and how many are."""
        missing = [dist for dist in self.dists if not dist.installed]
        rows: list[tuple[str, ...]] = [HEADER]
        for dist in missing:
            home = f"   # {one_line(dist.home, 200)}" * bool(dist.home)
            cells = dist.name, dist.category, dist.version, str(dist.suites)
            rows.append((*(one_line(cell, 60) for cell in cells), install_line(dist.name) + home))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows if missing else ():
            yield "  ".join(map(str.ljust, row, widths)).rstrip()
        yield f"{len(self.dists) - len(missing)} of {len(self.dists)} are installed: list-plugins shows them"


def where(registry: Any) -> str:
    """Return the address of the catalogue that belongs to the installed core."""
    urls = metadata("draftcore").get_all("Project-URL") or []
    if sites := [url.removeprefix(LABEL) for url in urls if url.startswith(LABEL)]:
        return str(sites[0])
    origins = [plugin.origin for plugin in registry.plugins if plugin.dist == "draftcore"]
    for origin in origins:
        file = Path(origin.removeprefix("editable: ") or "/", "docs", "catalogue.json")
        if file.is_file():
            return str(file)
    raise UsageError(
        "this core names no site with a catalogue, and was not installed from a checkout\n"
        "  name a file or an address: draftcore catalogue PLACE"
    )


def read(place: str) -> Catalogue:
    """Read a catalogue from a file, or by http. Raises UsageError for what is none."""
    try:
        if place.startswith(("http://", "https://")):
            with urlopen(place, timeout=30) as reply:
                data = reply.read(LARGEST)
        else:
            data = regular(Path(place)).read_bytes()
        return Catalogue.model_validate_json(data)
    except ValidationError as error:
        why = one_line(error.errors()[0]["msg"])
    except (OSError, ValueError) as error:  # ValueError: an address that is none
        why = raised(error)
    raise UsageError(
        f"cannot read a catalogue from {place}: {why}\n"
        "  name another file or address: draftcore catalogue PLACE"
    )
