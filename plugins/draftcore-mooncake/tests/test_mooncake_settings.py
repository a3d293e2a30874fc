"""The URI: what it may say, what it refuses, and what it passes on to other processes."""

from pathlib import Path

import pytest
from draftcore_mooncake.settings import OWN_MASTER_BYTES, Settings

from draftcore.errors import UsageError


def test_a_uri_names_master_name_and_memory() -> None:
    found = Settings.parse("mooncake://10.0.0.5:50051/run%207?max_bytes=1GiB&buffers=64MiB")
    assert (found.address, found.name) == ("10.0.0.5:50051", "run 7")
    assert (found.max_bytes, found.buffers, found.patience) == (1 << 30, 64 << 20, 60)
    assert Settings.parse("mooncake://h:1?patience=7.5").patience == 7.5


@pytest.mark.parametrize("text", ["mooncake:", "mooncake", "mooncake://"])
def test_without_an_address_there_is_a_master_and_memory_of_our_own(text: str) -> None:
    found = Settings.parse(text)
    assert (found.address, found.name, found.max_bytes) == ("", "default", OWN_MASTER_BYTES)


def test_another_process_joins_without_lending() -> None:
    text = "mooncake://10.0.0.5:50051/run%207?max_bytes=1GiB&segment=10.0.0.5:12345"
    joining = Settings.parse(Settings.parse(text).joining())
    assert joining.max_bytes is None
    assert joining.segment_bytes == 0
    assert (joining.name, joining.segment) == ("run 7", "10.0.0.5:12345")
    assert Settings.parse(joining.joining()) == joining


def test_the_segment_has_room_for_more_than_the_samples() -> None:
    for text, least in (("1B", 16 << 20), ("100MiB", 101 << 20), ("64GiB", 65 << 30)):
        nbytes = Settings.parse(f"mooncake://h:1?max_bytes={text}").segment_bytes
        assert nbytes >= least
        assert nbytes % (16 << 20) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mooncake://master", "not HOST:PORT\n  write for example mooncake://master:50051"),
        ("mooncake://master:port/x", "not HOST:PORT"),
        ("mooncake://h:1?max_byte=3", "did you mean 'max_bytes'"),
        ("mooncake://h:1?protocol=udp", "there are tcp and rdma"),
        ("mooncake://h:1?protocol=rdma", "no RDMA device"),
        ("mooncake://h:1?devices=mlx5_0", "add protocol=rdma"),
        *(
            (f"mooncake://h:1?patience={text}", "number above zero")
            for text in ("", "0", "-1", "9" * 400)
        ),
    ],
)
def test_what_a_uri_cannot_say_is_refused(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("draftcore_mooncake.settings.INFINIBAND", tmp_path)
    with pytest.raises(UsageError) as caught:
        Settings.parse(text)
    assert said in str(caught.value)
