"""Read a store's URI: `mooncake://[HOST:PORT][/NAME][?option=value&...]`.

HOST:PORT is a running master; without it the store starts one on loopback, for one machine. NAME
keeps the samples of several runs apart on one master.

Whoever says `max_bytes` lends that much memory; that alone decides the placement. So the URI for
other processes, `Settings.joining`, never has `max_bytes`. It names the lender's segment, as samples
are to go to the process that will read them. It has a short patience, as the process that gave it
may have begun again, with another master.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlencode

from draftcore.errors import UsageError
from draftcore.uris import Uri, parse_uri

OWN_MASTER_BYTES = 2 << 30
SEGMENT_UNIT = 16 << 20  # the engine refuses a segment below this
PROTOCOLS = ("tcp", "rdma")
JOINED_PATIENCE = 1.0  # seconds
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Settings:
    """A parsed and checked URI. Sizes are in bytes; `address` is '' for a master of our own."""

    address: str
    name: str = "default"
    max_bytes: int | None = None  # lent by this process; None lends nothing
    buffers: int = 1 << 30  # kept for samples on their way in and out
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""  # this machine's, as others reach it; '' finds it out
    segment: str = ""  # the segment that takes what is put here; '' leaves it to the master
    patience: float = 60.0  # seconds that a master may be away

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Raises UsageError for what is unknown, contradicts itself or is not on this machine."""
        uri = parse_uri(text, known=OPTIONS, host=True)
        address, options = _address(uri), uri.options
        found = cls(
            address=address,
            name=uri.path.strip("/") or cls.name,
            max_bytes=uri.size("max_bytes"),
            buffers=uri.size("buffers") or cls.buffers,
            protocol=options.get("protocol", cls.protocol),
            devices=options.get("devices", ""),
            host=options.get("host", ""),
            segment=options.get("segment", ""),
            patience=_number(uri, "patience", cls.patience),
        )
        found._check(text)
        return found if address else replace(found, max_bytes=found.max_bytes or OWN_MASTER_BYTES)

    @property
    def segment_bytes(self) -> int:
        """The memory to lend: room for seals and records too, in units that the engine takes."""
        if self.max_bytes is None:
            return 0
        wanted = self.max_bytes + self.max_bytes // 64 + SEGMENT_UNIT
        return -(-wanted // SEGMENT_UNIT) * SEGMENT_UNIT

    def joining(self) -> str:
        """Return the URI with which another process opens this store, lending no memory."""
        passed = replace(self, patience=JOINED_PATIENCE)
        said = {name: getattr(passed, name) for name in PASSED_ON}
        default = {name: getattr(Settings, name) for name in PASSED_ON}
        options = {name: value for name, value in said.items() if value != default[name]}
        query = f"?{urlencode(options, safe=':,/[]')}" if options else ""
        return f"mooncake://{self.address}/{quote(self.name)}{query}"

    def _check(self, text: str) -> None:
        if self.protocol not in PROTOCOLS:
            raise UsageError(
                f"{text!r} asks for the protocol {self.protocol!r}\n"
                f"  there are {' and '.join(PROTOCOLS)}"
            )
        if self.protocol == "rdma" and not (INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
            raise UsageError(
                f"{text!r} asks for rdma, but this machine has no RDMA device ({INFINIBAND})\n"
                "  load the device's driver, or leave out protocol=rdma"
            )
        if self.devices and self.protocol != "rdma":
            raise UsageError(f"{text!r} names devices without rdma\n  add protocol=rdma")


def _address(uri: Uri) -> str:
    host, colon, port = uri.host.rpartition(":")
    if uri.host and not (host and colon and port.isdecimal()):
        raise UsageError(
            f"{uri.text!r} names the master {uri.host!r}, which is not HOST:PORT\n"
            f"  write for example {uri.scheme}://{uri.host.strip(':')}:50051"
        )
    return uri.host


def _number(uri: Uri, option: str, default: float) -> float:
    """Return an option as a number above zero, or the default."""
    text = uri.options.get(option, str(default))
    if re.fullmatch(r"\d{1,15}(\.\d{1,15})?", text) is None or float(text) == 0:
        raise UsageError(
            f"{option}={text} in {uri.text!r} is not a number above zero\n"
            f"  for example {option}={default:g}"
        )
    return float(text)


OPTIONS = tuple(name for name in Settings.__dataclass_fields__ if name not in ("address", "name"))
PASSED_ON = ("protocol", "devices", "segment", "patience")
