"""`list-plugins --available` and `draftcore catalogue`: what could be installed, from a site on loopback."""

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

HERE = {"name": "draftcore-tools", "category": "samples", "suites": {"passed": 9}}
OURS = {"name": "draftcore-gone", "category": "store", "version": "0.1.0", "offers": ["store gone"]}
SUITES = {"passed": 12, "failed": 1, "date": "2026-11-27", "a later key": True}
THEIRS = {"name": "draft-echo", "category": "algo\x1b[2J", "home": "https://b.c", "suites": SUITES}
TABLE = r"""DIST            CATEGORY     VERSION  SUITES                           TO HAVE IT
draftcore-gone  store        0.1.0    not tried                        pip install draftcore-gone
draft-echo      algo\x1b[2J           12 passed, 1 failed, 2026-11-27  pip install draft-echo   # https://b.c
1 of 3 are installed: list-plugins shows them
"""
NONE = ["SITE/names.json", "FOLDER/names.json", "SITE/nothing", "FOLDER", "http://[", "x"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A docs site with a catalogue, and with one in which a name is more than that for a shell."""
    for file, theirs in (("catalogue", THEIRS), ("names", {**THEIRS, "name": "x;rm"})):
        (tmp_path / f"{file}.json").write_text(json.dumps({"dists": [HERE, OURS, theirs]}))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_the_site_that_the_core_names_has_and_is_not_here_is_listed_with_its_line(
    site: str, tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info := tmp_path / "draftcore-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Project-URL: Catalogue, {site}/catalogue.json\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli("list-plugins", "--available").stdout == TABLE
    dists = json.loads(cli("catalogue", "--json", tmp_path / "catalogue.json").stdout)
    assert [bool(dist["installed"]) for dist in dists] == [True, False, False]


@pytest.mark.parametrize("place", NONE)
def test_what_is_no_catalogue_is_refused_with_what_to_do(
    place: str, site: str, cli: Any, tmp_path: Path
) -> None:
    place = place.replace("SITE", site).replace("FOLDER", str(tmp_path))
    done = cli("catalogue", place)
    assert done.exit_code == 2
    assert f"cannot read a catalogue from {place}: " in done.stderr
    assert "name another file or address: draftcore catalogue PLACE" in done.stderr
