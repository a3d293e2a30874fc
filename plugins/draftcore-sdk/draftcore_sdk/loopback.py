"""A network of loopback alone, for tests whose servers listen on all interfaces."""

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@contextmanager
def only_loopback() -> Iterator[None]:
    """Move this process, and what it starts, into such a network where it may; and back."""
    libc = ctypes.CDLL(None)
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    if libc.unshare(CLONE_NEWNET) == 0:
        with socket.socket() as any_socket:
            ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    yield
    libc.setns(before, CLONE_NEWNET)
    os.close(before)
