"""URIs of stores and channels, and sizes in them."""

import pytest

from draftcore.errors import UsageError
from draftcore.uris import format_size, holds_secret, parse_size, parse_uri


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("file:a/b", "", "a/b"),
        ("file:/a/b", "", "/a/b"),
        ("file:///a/b", "", "/a/b"),
        ("file:a%20b%3F", "", "a b?"),
        ("memory", "", ""),
        ("memory://?n=1", "", ""),
        ("x://10.0.0.5:6379/run%207?n=1", "10.0.0.5:6379", "/run 7"),
        ("x://[::1]:50051", "[::1]:50051", ""),
    ],
)
def test_a_path_may_be_relative_absolute_or_absent_and_follow_a_host(
    text: str, host: str, path: str
) -> None:
    uri = parse_uri(text, known=["n"], host=True)
    assert (uri.text, uri.scheme, uri.host, uri.path) == (text, text.partition(":")[0], host, path)


def test_an_option_may_be_a_size() -> None:
    assert parse_uri("x:?limit=1.5GiB", known=["limit"]).size("limit") == 3 << 29
    assert parse_uri("x:").size("limit") is None


def test_an_unknown_option_and_a_host_where_there_are_only_paths_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'max_byte' \(did you mean 'max_bytes'\?\)"):
        parse_uri("memory:?max_byte=3", known=["max_bytes"])
    with pytest.raises(UsageError, match="names the host 'some'"):
        parse_uri("file://some/where")
    with pytest.raises(UsageError, match="gives the option 'n' twice"):
        parse_uri("memory:?n=3&n=4", known=["n"])
    with pytest.raises(UsageError, match="cannot be printed"):
        parse_uri("file:a%00b")


@pytest.mark.parametrize("text", ["", "ten", "10 gigs", "-1", "1.5.2MiB", "9" * 400])
def test_a_size_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="500MiB, 10GiB or 4096"):
        parse_size(text)


def test_sizes_are_shown_for_people() -> None:
    shown = [format_size(nbytes) for nbytes in (0, 1023, 1536, 5 << 30, 3000 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3000.0 TiB"]
    assert [parse_size(text) for text in ("4096", "2kB", "1.5 KiB")] == [4096, 2000, 1536]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("x://me:hunter2@host:6379?prefix=a", True),
        ("x://me:hun/ter2@host", True),
        ("x://host?prefix=a&Password=hunter2", True),
        ("x://host?auth_token=hunter2", True),
        ("x://host:6379/1?prefix=a&tls=on&key=me.pem", False),
        ("file:///mnt/me@work/features?max_bytes=1GiB", False),
        ("file:me@work/pass", False),
    ],
)
def test_a_secret_in_a_uri_is_noticed(text: str, secret: bool) -> None:
    assert holds_secret(text) is secret
