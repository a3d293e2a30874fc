"""`list-plugins --available` and `draftcore catalogue`: what could be installed, from a site on loopback."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

HERE = {
    "name": "draftcore-tools",
    "category": "samples",
    "suites": {"passed": 9, "date": "2026-11-26"},
}
OURS = {"name": "draftcore-gone", "category": "store", "version": "0.1.0", "offers": ["store gone"]}
SUITES = {"passed": 12, "failed": 1, "date": "2026-11-27", "a later key": True}
THEIRS = {
    "name": "draft-\x1b[2J",
    "category": "algo\x1b[2J",
    "home": "https://b.c",
    "suites": SUITES,
}
TABLE = r"""DIST            CATEGORY     VERSION  SUITES                           TO HAVE IT
draftcore-gone  store        0.1.0    not tried                        pip install draftcore-gone
draft-echo      algo\x1b[2J           12 passed, 1 failed, 2026-11-27  pip install draft-echo   # https://b.c
1 of 3 are installed: list-plugins shows them
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A docs site with a catalogue, and one that names what a shell would take for more than a name."""
    for name, theirs in (("catalogue", "draft-echo"), ("wrong", "x;rm"), ("odd", "X")):
        data = {"dists": [HERE, OURS, {**THEIRS, "name": theirs}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_the_site_that_the_core_names_has_and_is_not_here_is_listed_with_its_line(
    site: str, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "draftcore-0.1.0.dist-info" / "METADATA"
    info.parent.mkdir()
    info.write_text(f"Name: draftcore\nVersion: 0\nProject-URL: Catalogue, {site}/catalogue.json\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli("list-plugins", "--available").stdout == TABLE
    (here, ours, theirs) = json.loads(
        cli("catalogue", "--json", tmp_path / "catalogue.json").output
    )
    assert (here["suites"]["passed"], theirs["home"]) == (9, "https://b.c")
    assert [bool(dist["installed"]) for dist in (here, ours, theirs)] == [True, False, False]


@pytest.mark.parametrize(
    "place", ["SITE/wrong.json", "FOLDER/odd.json", "SITE/none.json", "FOLDER", "http://[", "x"]
)
def test_what_is_no_catalogue_is_refused_with_what_to_do(
    place: str, site: str, cli: Any, tmp_path: Path
) -> None:
    place = place.replace("SITE", site).replace("FOLDER", str(tmp_path))
    done = cli("catalogue", place)
    assert done.exit_code == 2
    assert f"cannot read a catalogue from {place}: " in done.stderr
    assert "name another file or address: draftcore catalogue PLACE" in done.stderr
