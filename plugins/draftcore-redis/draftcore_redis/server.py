"""The server that a channel's URI names: how to reach it, and what its errors mean for a run.

    redis://HOST[:PORT][/DATABASE]?prefix=my-draft&tls=on&ca=ca.pem&ttl=30&...

User name and password come from the environment, are read when a client is made, and are kept in
none of our objects. A URI is told in messages, logs and manifests: one that holds a secret is
refused, and the refusal does not repeat it.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from draftcore.channels import require_name
from draftcore.channels.logged import OPTIONS, Settings
from draftcore.errors import UsageError
from draftcore.uris import Uri, parse_uri

USERNAME, PASSWORD = "DRAFTCORE_REDIS_USERNAME", "DRAFTCORE_REDIS_PASSWORD"
OWN_OPTIONS = ("prefix", "tls", "ca", "cert", "key", "expire")
TIMEOUT = 5.0  # seconds to wait for an answer before asking again
EXPIRE = 7 * 24 * 3600.0  # seconds
OLDEST = (6, 2)  # the first that trims a stream by the number of its entries
ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])?(?::(\d{1,5}))?")
SECRET = re.compile(r"@|[?&][^=&]*(pass|pw|secret|auth|token|user)", re.IGNORECASE)
# Refusals that end without anybody's doing, or by what somebody may do while the run waits.
PASSING = (redis.ReadOnlyError, redis.OutOfMemoryError)
PASSING_WORDS = ("MISCONF", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
IN_PIPELINE = re.compile(r"Command # \d+ \(.*?\) of pipeline caused error: ", re.DOTALL)


class ServerAway(UsageError):  # noqa: N818  a state that a producer waits out
    """The server does not answer now, and may again."""


@dataclass(frozen=True)
class Server:
    """A parsed and checked URI; times in seconds. A run's keys go away `expire` after its end."""

    host: str
    port: int
    database: int
    prefix: str
    tls: dict[str, str] | None = field(default=None, hash=False)  # files by what they hold
    patience: float = Settings.patience
    expire: float = EXPIRE

    @classmethod
    def parse(cls, text: str) -> tuple[Server, Uri]:
        """Return the server and the URI. Raises UsageError, which never repeats a secret."""
        if SECRET.search(text):
            raise UsageError(
                "the channel's URI holds a user name or a password, and a URI is shown and stored\n"
                f"  take it out, and set {USERNAME} and {PASSWORD} in the environment"
            )
        uri = parse_uri(text, known=(*OPTIONS, *OWN_OPTIONS), host=True)
        if "prefix" not in uri.options:
            raise UsageError(
                f"the channel {text!r} does not say how its keys begin\n"
                "  name the run's place: redis://HOST:PORT?prefix=my-draft"
            )
        host, port = _address(uri)
        prefix = require_name("prefix", uri.options["prefix"])
        patience = uri.seconds("patience", Settings.patience)
        expire = uri.seconds("expire", EXPIRE)
        if expire < patience:
            raise UsageError(
                f"in {text!r} the keys expire after {expire:g} s, before a patience of "
                f"{patience:g} s ends\n  set expire higher, or patience lower"
            )
        return cls(host, port, _database(uri), prefix, _tls(uri), patience, expire), uri

    @property
    def address(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def client(self) -> redis.Redis:
        """Return a client, which connects when it is used, as often as it has to."""
        tls = self.tls or {}
        return redis.Redis(
            host=self.host,
            port=self.port,
            db=self.database,
            username=os.environ.get(USERNAME) or None,
            password=os.environ.get(PASSWORD) or None,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # how long to go on trying is the log's affair
            socket_timeout=TIMEOUT,
            socket_connect_timeout=TIMEOUT,
            socket_keepalive=True,
            socket_keepalive_options=_keepalive(),
            ssl=self.tls is not None,
            ssl_ca_certs=tls.get("ca"),
            ssl_certfile=tls.get("cert"),
            ssl_keyfile=tls.get("key"),
            ssl_cert_reqs="required",
            ssl_check_hostname=True,
        )

    def check(self) -> None:
        """Raise UsageError unless the server answers, is new enough and keeps what it is told.

        ServerAway is the UsageError where it may answer later.
        """
        client = self.client()
        try:
            about = client.info("server") | client.info("memory")
        except redis.RedisError as error:
            explained = self.explain(error)
            raise (ServerAway(str(explained)) if passes(error) else explained) from error
        finally:
            client.close()
        version = str(about["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise UsageError(
                f"Redis at {self.address} is of version {version}, too old for this channel\n"
                f"  it needs {'.'.join(map(str, OLDEST))} or newer"
            )
        policy = about["maxmemory_policy"]
        if about["maxmemory"] and policy != "noeviction":
            raise UsageError(
                f"Redis at {self.address} may forget a run's messages when its memory is full: its "
                f"maxmemory-policy is {policy}\n  set maxmemory-policy to noeviction"
            )

    # ------------------------------------------------------------ errors

    def explain(self, error: redis.RedisError) -> UsageError:
        """Say in a sentence and a remedy what a client's error means."""
        problem, remedy = self._meaning(error)
        return UsageError(f"{problem}\n  {remedy}")

    def _meaning(self, error: redis.RedisError) -> tuple[str, str]:
        at, wrong = f"Redis at {self.address}", _tls_error(error)
        if isinstance(wrong, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {at} is not to be trusted: {wrong.verify_message}",
                "name the authority that signed it with ca=FILE, and the host as its certificate does",
            )
        if wrong is not None:
            return (
                f"{at} and this process do not agree on TLS: {wrong.reason or wrong}",
                "leave out tls=on for a server without TLS; for one that asks for a certificate, add "
                "cert=FILE&key=FILE",
            )
        if isinstance(error, (redis.AuthenticationError, redis.exceptions.AuthorizationError)):
            return (
                f"{at} refuses the user name or the password",
                f"set {USERNAME} (where it is not 'default') and {PASSWORD} in the environment",
            )
        if isinstance(error, redis.exceptions.NoPermissionError):
            return (
                f"{at} does not permit what a channel does: {_words(error)}",
                f"grant the user the keys {self.prefix}:* and the commands in this plugin's README",
            )
        if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
            return (
                f"{at} does not answer: {_reason(error)}",
                "start it, correct the address in the channel's URI, or "
                + ("add tls=on if it speaks TLS" if self.tls is None else "leave out tls=on"),
            )
        refusal = f"{at} refuses what a channel does: {_words(error)}"
        return refusal, "mend that there, and start again"


def passes(error: redis.RedisError) -> bool:
    """Say whether what failed may succeed later, with nothing changed on this side."""
    final = (redis.AuthenticationError, redis.exceptions.AuthorizationError)
    if isinstance(error, final) or isinstance(_tls_error(error), ssl.SSLCertVerificationError):
        return False
    away = isinstance(error, (redis.ConnectionError, redis.TimeoutError, *PASSING))
    return away or _words(error).startswith(PASSING_WORDS)


def _words(error: redis.RedisError) -> str:
    """Return what the server said, without the command, which may hold a whole record."""
    return IN_PIPELINE.sub("", str(error), count=1)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    return next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLError)), None)


def _reason(error: BaseException) -> str:
    """Return the system's words for a failure, where there are any."""
    words = (cause.strerror for cause in _causes(error) if isinstance(cause, OSError))
    return next(filter(None, words), None) or str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# ---------------------------------------------------------------- pieces of a URI


def _address(uri: Uri) -> tuple[str, int]:
    match = ADDRESS.fullmatch(uri.host)
    if match is None or not 0 < int(match[2] or 6379) < 2**16:
        raise UsageError(
            f"{uri.text!r} names the server {uri.host!r}, which is not HOST:PORT\n"
            f"  write for example {uri.scheme}://10.0.0.5:6379?prefix=my-draft"
        )
    return (match[1] or "127.0.0.1").strip("[]"), int(match[2] or 6379)


def _database(uri: Uri) -> int:
    text = uri.path.strip("/") or "0"
    if re.fullmatch(r"\d{1,5}", text, re.ASCII) is None:
        raise UsageError(
            f"{uri.text!r} names the database {text!r}, which is no number\n"
            f"  write for example {uri.scheme}://10.0.0.5:6379/1?prefix=my-draft"
        )
    return int(text)


def _tls(uri: Uri) -> dict[str, str] | None:
    files = {what: uri.options[what] for what in ("ca", "cert", "key") if what in uri.options}
    asked = uri.options.get("tls", "off")
    if asked not in ("on", "off"):
        raise UsageError(f"{uri.text!r} has tls={asked}\n  write tls=on or tls=off")
    if asked == "off":
        if files:
            raise UsageError(f"{uri.text!r} names {' and '.join(files)} without TLS\n  add tls=on")
        return None
    if ("cert" in files) != ("key" in files):
        raise UsageError(
            f"{uri.text!r} names one of a client's certificate and its key\n"
            "  write both: cert=FILE&key=FILE"
        )
    found = {what: Path(name).expanduser() for what, name in files.items()}
    for what, path in found.items():
        if not path.is_file():
            raise UsageError(f"{what}={path} in {uri.text!r} is no file\n  correct the path")
    return {what: str(path) for what, path in found.items()}


def _keepalive() -> dict[int, int]:
    """Have the system give up what is not acknowledged, so that it cannot arrive much later."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
    return {} if option is None else {option: int(1000 * TIMEOUT)}
