"""URIs of stores and channels, and sizes in them."""

import pytest

from draftcore.errors import UsageError
from draftcore.uris import format_size, holds_secret, parse_size, parse_uri


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:a/b", "a/b"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file:a%20b%3F", "a b?"),
        ("memory", ""),
        ("memory:", ""),
        ("memory://", ""),
    ],
)
def test_the_path_may_be_relative_absolute_or_absent(text: str, path: str) -> None:
    uri = parse_uri(text)
    assert (uri.scheme, uri.path) == (text.partition(":")[0], path)


def test_options_are_sizes_and_counts() -> None:
    uri = parse_uri("x:?limit_bytes=1.5GiB&limit_refs=7", known=["limit_bytes", "limit_refs"])
    assert uri.size("limit_bytes") == 3 << 29
    assert uri.count("limit_refs", 5) == 7
    assert parse_uri("x:").size("limit_bytes") is None
    assert parse_uri("x:").count("limit_refs", 5) == 5


def test_an_unknown_option_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"'max_byte' \(did you mean 'max_bytes'\?\)"):
        parse_uri("memory:?max_byte=3", known=["max_bytes"])


def test_a_host_is_refused_where_only_paths_make_sense() -> None:
    with pytest.raises(UsageError, match="names the host 'some'"):
        parse_uri("file://some/where")


@pytest.mark.parametrize(
    ("text", "host", "path"),
    [
        ("x://10.0.0.5:6379/run%207?n=1", "10.0.0.5:6379", "/run 7"),
        ("x://[::1]:50051", "[::1]:50051", ""),
        ("x:///run", "", "/run"),
        ("x:run", "", "run"),
        ("x://?n=1", "", ""),
    ],
)
def test_a_scheme_with_servers_takes_a_host(text: str, host: str, path: str) -> None:
    uri = parse_uri(text, known=["n"], host=True)
    assert (uri.host, uri.path) == (host, path)


@pytest.mark.parametrize("text", ["", "ten", "10 gigs", "-1", "1.5.2MiB"])
def test_a_size_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="500MiB, 10GiB or 4096"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
def test_a_count_that_is_none_is_explained(text: str) -> None:
    with pytest.raises(UsageError, match="whole number above zero"):
        parse_uri(f"x:?n={text}", known=["n"]).count("n", 5)


def test_sizes_are_shown_for_people() -> None:
    shown = [format_size(nbytes) for nbytes in (0, 1023, 1536, 5 << 30, 3000 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3000.0 TiB"]
    assert [parse_size(text) for text in ("4096", "2kB", "1.5 KiB")] == [4096, 2000, 1536]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("x://me:hunter2@host:6379?prefix=a", True),
        ("x://:hunter2@host", True),
        ("x://me:hun/ter2@host", True),
        ("x://host?prefix=a&Password=hunter2", True),
        ("x://host?auth_token=hunter2", True),
        ("x://host:6379/1?prefix=a&tls=on&key=me.pem", False),
        ("file:///mnt/me@work/features?max_bytes=1GiB", False),
        ("file:me@work/pass", False),
        ("auto", False),
    ],
)
def test_a_secret_in_a_uri_is_noticed(text: str, secret: bool) -> None:
    assert holds_secret(text) is secret
