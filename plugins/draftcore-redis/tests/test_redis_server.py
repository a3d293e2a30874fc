"""The URI, what it refuses, and who may use a server: passwords, certificates, permissions."""

import logging
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from draftcore_redis.log import RedisLog
from draftcore_redis.plugin import channel
from draftcore_redis.server import Server

from draftcore.channels.logged import LoggedChannel
from draftcore.errors import DraftcoreError, UsageError

README = Path(__file__).parents[1] / "README.md"
SECRET = "hunter2-not-to-be-told"
QUICK = 9.0  # seconds within which a wrong setting is told: one timeout, on a busy machine


def opened(uri: str, role: str = "trainer") -> LoggedChannel:
    found = channel("redis", uri, "tests", role)
    assert found is not None
    return found


def log_of(end: LoggedChannel) -> RedisLog:
    (found,) = (value for value in vars(end).values() if isinstance(value, RedisLog))
    return found


def refused(uri: str) -> str:
    """Return the words with which a channel is refused, in time."""
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        opened(uri)
    assert time.monotonic() - began < QUICK
    text = str(caught.value)
    assert re.fullmatch(r"[^\n]+\n  [^\n]+", text), text
    return text


# ---------------------------------------------------------------- the URI


def test_a_uri_names_server_database_and_place() -> None:
    server, uri = Server.parse("redis://10.0.0.5:7000/3?prefix=run-7&patience=20&ttl=5")
    assert (server.address, server.database, server.prefix) == ("10.0.0.5:7000", 3, "run-7")
    assert (server.patience, server.tls, uri.seconds("ttl", 30)) == (20, None, 5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("redis:?prefix=x", "127.0.0.1:6379"),
        ("redis:///2?prefix=x", "127.0.0.1:6379"),
        ("redis://:7000?prefix=x", "127.0.0.1:7000"),
        ("redis://host?prefix=x", "host:6379"),
        ("redis://[::1]:7000?prefix=x", "[::1]:7000"),
    ],
)
def test_what_a_uri_leaves_out_is_the_usual(text: str, address: str) -> None:
    assert Server.parse(text)[0].address == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("redis://h", "name the run's place"),
        ("redis://h?prefix=", "cannot be the name of a prefix"),
        ("redis://h?prefix=a:b", "cannot be the name of a prefix"),
        ("redis://h?prefix=*", "cannot be the name of a prefix"),
        ("redis://h?prefix=a%0D%0Ab", "cannot be the name of a prefix"),
        ("redis://h:port?prefix=x", "not HOST:PORT"),
        ("redis://h:0?prefix=x", "not HOST:PORT"),
        ("redis://h:70000?prefix=x", "not HOST:PORT"),
        ("redis://a b?prefix=x", "not HOST:PORT"),
        ("redis://h/one?prefix=x", "which is no number"),
        ("redis://h?prefix=x&limit_ref=1", "did you mean 'limit_refs'"),
        ("redis://h?prefix=x&tls=yes", "write tls=on or tls=off"),
        ("redis://h?prefix=x&ca=ca.pem", "names ca without TLS\n  add tls=on"),
        ("redis://h?prefix=x&tls=on&cert=c.pem", "write both"),
        ("redis://h?prefix=x&tls=on&ca=/nowhere/ca.pem", "is no file"),
        ("redis://h?prefix=x&expire=5", "before a patience of 600 s ends"),
    ],
)
def test_what_a_uri_cannot_say_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Server.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}@h?prefix=x",
        f"redis://me:{SECRET}/?@h?prefix=x",
        f"redis://h?prefix=x&password={SECRET}",
        f"redis://h?PASS={SECRET}&prefix=x",
        f"redis://h?prefix=x&auth_token={SECRET}",
    ],
)
def test_a_uri_with_a_secret_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(UsageError, match="set DRAFTCORE_REDIS_USERNAME and DRAFTCORE") as caught:
        Server.parse(text)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["a:b", "*", "a b", "../x", "", "x" * 65, "a\r\nb"])
def test_no_name_from_outside_becomes_another_key(place: str, name: str) -> None:
    with closing(RedisLog(Server.parse(place)[0], "me")) as log:
        for use in (lambda: log.append([(name, {})]), lambda: log.drop(name)):
            with pytest.raises(UsageError, match="cannot be the name of a mailbox"):
                use()


# ---------------------------------------------------------------- servers that cannot be used


def test_a_refused_connection_is_told_in_seconds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        text = refused(f"redis://127.0.0.1:{port}?prefix=x")
    assert text.startswith(
        f"Redis at 127.0.0.1:{port} does not answer: Connection refused\n  start"
    )


def test_an_unknown_host_is_told_in_seconds() -> None:
    assert "Redis at nowhere.invalid:6379 does not answer" in refused(
        "redis://nowhere.invalid?prefix=x"
    )


def test_a_database_that_is_not_there_is_told(place: str) -> None:
    assert "DB index is out of range" in refused(place.replace("?", "/99?"))


def test_a_server_that_may_forget_messages_is_refused(new_server: Callable[..., Any]) -> None:
    server = new_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    text = refused(f"redis://{server.address}?prefix=x")
    assert "its maxmemory-policy is allkeys-lru\n  set maxmemory-policy to noeviction" in text


def test_keys_of_something_else_are_refused(place: str) -> None:
    server, _ = Server.parse(place)
    with server.client() as client:
        client.set(f"{server.prefix}:head", '{"name": "of another program"}')
        assert "this is not the head of a channel" in refused(place)
        client.delete(f"{server.prefix}:head")
        client.rpush(f"{server.prefix}:head", "x")
    assert "refuses what a channel does: WRONGTYPE" in refused(place)


# ---------------------------------------------------------------- passwords and permissions


@pytest.fixture
def guarded(new_server: Callable[..., Any]) -> Any:
    return new_server("--requirepass", SECRET)


def test_a_wrong_or_missing_password_is_told_in_seconds_and_not_repeated(
    guarded: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = SECRET.replace("not", "NOT")
    for password in (None, wrong):
        if password:
            monkeypatch.setenv("DRAFTCORE_REDIS_PASSWORD", password)
        text = refused(f"redis://{guarded.address}?prefix=x")
        assert "refuses the user name or the password" in text
        assert "DRAFTCORE_REDIS_PASSWORD in the environment" in text
        assert "hunter2" not in text + caplog.text


def test_the_password_is_nowhere_to_be_seen(
    guarded: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither in what objects say of themselves, nor in messages, logs and keys."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("DRAFTCORE_REDIS_PASSWORD", SECRET)
    uri = f"redis://{guarded.address}?prefix=x&patience=1"
    trainer, producer = opened(uri), opened(uri, "producer")
    trainer.offer([])
    assert producer.claim("one") is None
    log = log_of(trainer)
    seen = [repr(vars(end)) for end in (trainer, producer, log, log.server)]
    seen += [repr(value) for value in vars(log).values()] + [trainer.uri]
    with log.server.client() as client:
        seen += [repr(key) for key in client.keys("*")] + [repr(client.get("x:head"))]
    guarded.kill()
    with pytest.raises(DraftcoreError) as caught:
        log.head()
    seen += [repr(caught.value), repr(caught.value.__cause__), caplog.text]
    for end in (producer, trainer):
        end.close()
    seen += [*capfd.readouterr(), caplog.text]
    assert "does not answer" in caplog.text
    assert not [text for text in seen if SECRET in text]


def test_the_permissions_that_the_readme_names_are_enough_and_needed(
    new_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server()
    lines = README.read_text(encoding="utf-8").splitlines()
    (rule,) = [line for line in lines if line.startswith("ACL SETUSER")]
    with server.client() as client:
        client.execute_command(*rule.replace("PASSWORD", SECRET).split())
    monkeypatch.setenv("DRAFTCORE_REDIS_USERNAME", "draftcore")
    monkeypatch.setenv("DRAFTCORE_REDIS_PASSWORD", SECRET)
    uri = f"redis://{server.address}?prefix=draftcore-run7&ttl=0.4"
    trainer, producer = opened(uri), opened(uri, "producer")
    trainer.offer([])
    assert producer.claim("one", wait=1) is None
    log_of(trainer).trim()
    for end in (producer, trainer):
        end.close()
    text = refused(uri.replace("draftcore-run7", "elsewhere"))
    assert "does not permit what a channel does" in text
    assert "grant the user the keys elsewhere:*" in text


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ca` and `other`; `server` and `client` are signed by the first."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "other"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        run(folder, openssl, "req", "-x509", *new, "-subj", f"/CN={name}", *files)
    for name, names in (("server", "IP:127.0.0.1"), ("elsewhere", "IP:10.9.9.9"), ("client", "")):
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
        extra = ("-addext", f"subjectAltName={names}") if names else ()
        run(folder, openssl, "req", "-x509", *new, *signer, "-subj", f"/CN={name}", *extra, *files)
    return folder


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def tls_server(
    new_server: Callable[..., Any], server_binary: str, certificates: Path
) -> Callable[..., Any]:
    def start(name: str = "server", clients: str = "no") -> Any:
        files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca-cert": "ca.pem"}
        settings = [f"--tls-{what}-file={certificates / file}" for what, file in files.items()]
        pairs = [part for setting in settings for part in setting.split("=", 1)]
        return new_server(*pairs, "--tls-auth-clients", clients, tls=True)

    if b"libssl" not in Path(server_binary).read_bytes():
        pytest.skip("this redis-server is built without TLS")

    return start


def test_a_channel_over_tls_with_a_clients_certificate(
    tls_server: Callable[..., Any], certificates: Path
) -> None:
    server = tls_server(clients="yes")
    uri = f"redis://{server.address}?prefix=x&tls=on&ca={certificates}/ca.pem"
    text = refused(uri)
    assert "do not agree on TLS" in text
    assert "cert=FILE&key=FILE" in text
    uri += f"&cert={certificates}/client.pem&key={certificates}/client.key"
    trainer, producer = opened(uri), opened(uri, "producer")
    trainer.offer([])
    assert producer.claim("one", wait=1) is None
    for end in (producer, trainer):
        end.close()


@pytest.mark.parametrize(
    ("certificate", "authority", "said"),
    [
        ("server", "", "self-signed certificate in certificate chain|unable to get local issuer"),
        ("server", "other.pem", "unable to get local issuer|certificate verify failed|self-signed"),
        ("elsewhere", "ca.pem", "certificate is not valid for '127.0.0.1'"),
    ],
)
def test_a_wrong_certificate_is_told_in_seconds(
    tls_server: Callable[..., Any],
    certificates: Path,
    certificate: str,
    authority: str,
    said: str,
) -> None:
    server = tls_server(certificate)
    ca = f"&ca={certificates / authority}" if authority else ""
    text = refused(f"redis://{server.address}?prefix=x&tls=on{ca}")
    assert text.startswith(f"the certificate of Redis at {server.address} is not to be trusted: ")
    assert re.search(said, text)


def test_tls_on_one_side_only_is_told_in_seconds(
    place: str, tls_server: Callable[..., Any]
) -> None:
    assert "leave out tls=on" in refused(f"{place}&tls=on")
    assert "add tls=on" in refused(f"redis://{tls_server().address}?prefix=x")


def test_a_certificate_that_goes_bad_ends_the_wait_at_once(
    tls_server: Callable[..., Any], certificates: Path
) -> None:
    server = tls_server()
    uri = f"redis://{server.address}?prefix=x&tls=on&ca={certificates}/ca.pem"
    with closing(RedisLog(Server.parse(uri)[0], "me")) as log:
        assert log.head() is None
        server.kill()
        server.settings = tuple(part.replace("server.", "elsewhere.") for part in server.settings)
        server.start()
        with pytest.raises(UsageError, match="is not to be trusted"):
            log.head()
