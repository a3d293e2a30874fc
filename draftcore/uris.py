"""URIs of stores and channels: `scheme:path?option=value`, and sizes such as `10GiB` in them.

    file:features   file:///mnt/features?max_bytes=200GiB
    scheme://host:port/path        where a scheme has servers

The path of a `file:` URI may be relative, which `urllib.parse` cannot say. Options are part of
the URI, so that one line names a store completely. `?`, `&` and `%` in a path are percent-encoded.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from draftcore.errors import UsageError, nearest

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
UNITS |= {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SECRET = re.compile(r"^[^:]*://[^/].*@|[?&][^=&]*(pass|pwd|secret|auth|token|user)", re.IGNORECASE)


@dataclass(frozen=True)
class Uri:
    """A parsed URI. `text` is as it was given."""

    text: str
    scheme: str
    path: str
    options: Mapping[str, str]
    host: str = ""  # HOST or HOST:PORT, for schemes that have servers

    def size(self, option: str) -> int | None:
        """Return an option in bytes, or None where the URI has no such option."""
        return parse_size(self.options[option]) if option in self.options else None


def parse_uri(text: str, *, known: Collection[str] = (), host: bool = False) -> Uri:
    """Split a URI and check its options.

    Raises UsageError for an option that is not `known` or given twice, for a host unless the scheme
    has them: `host=True`, and for a path that cannot be printed.
    """
    scheme, _, rest = text.partition(":")
    path, _, query = rest.partition("?")
    named = path[2:].partition("/")[0] if path.startswith("//") else ""
    if named and not host:
        problem = f"{text!r} names the host {named!r}, which {scheme} cannot reach"
        remedy = f"write {scheme}:FOLDER, or {scheme}:///FOLDER with three slashes"
        raise UsageError(f"{problem}\n  {remedy}")
    path = unquote(path.removeprefix(f"//{named}"))
    if not path.isprintable():
        raise UsageError(f"{text!r} names {path!r}, which cannot be printed\n  name another path")
    return Uri(text, scheme, path, parse_options(text, query, known), named)


def parse_options(text: str, query: str, known: Collection[str]) -> dict[str, str]:
    """Split `option=value&option=value`; raises UsageError for one that is not `known` or given twice."""
    options = dict[str, str]()
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            problem = f"{text!r} has the unknown option {name!r}{nearest(name, known)}"
            raise UsageError(f"{problem}\n  its options: {', '.join(sorted(known)) or 'none'}")
        if name in options:
            raise UsageError(f"{text!r} gives the option {name!r} twice\n  leave one of them")
        options[name] = value
    return options


def holds_secret(text: str) -> bool:
    """Say whether a URI holds `user:password@`, or an option that sounds like one of them."""
    return SECRET.search(text) is not None


def require_no_secret(key: str, uri: str) -> None:
    """Raise ValueError for a URI that holds `user:password@`, or an option that sounds like one of them.

    URIs are shown in messages, and stored in checkpoints and logs; what is refused here is shown too, so
    it is not repeated.
    """
    if holds_secret(uri):
        problem = "its URI holds a user name or a password, and URIs are shown and stored"
        remedy = "set it in the environment: the plugin's README names the variable"
        raise ValueError(f"{key}: {problem}\n    {remedy}")


def parse_size(text: str) -> int:
    """Return the bytes that `10GiB`, `1.5 GB` or `4096` stand for."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in UNITS:
        raise UsageError(f"{text!r} is not a size\n  write it like 500MiB, 10GiB or 4096")
    return int(float(match[1]) * UNITS[match[2]])


def format_size(nbytes: int) -> str:
    """Return a size for people, such as `1.5 GiB`."""
    power = min((max(int(nbytes), 1).bit_length() - 1) // 10, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{nbytes / 1024**power:.1f} {unit}" if power else f"{nbytes} B"
