"""Servers capture rows with images, whose data and tokens they are sent: beside transformers' features.

A chunk has 8 tokens, so that prefill is cut within an image, and the prefix cache is on.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from draftcore_hf.capture import LocalCapture
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.serving import Serving
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture
from draftcore_shm.store import ShmStore
from seeing import FAMILIES, REQUEST, batch_about, opened, seeing_qwen

from draftcore.errors import UsageError

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    start_server: Callable[..., Serving],
    sink: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str]]:
    """A target and the URL of its server."""
    folder = seeing_qwen(tmp_path_factory.mktemp("target"), request.param)
    given = f"--model-path={folder}", "--chunked-prefill-size=8"
    server = start_server(*given, DRAFTCORE_SINK=sink, DRAFTCORE_LAYERS="0,2,5")
    yield folder, server.url
    assert server.alive
    server.kill()


def capture_of(target: TransformersTarget, url: str) -> closing[ServerCapture]:
    options = ServerOptions(servers=(url,), patience=30)
    return closing(ServerCapture(target, REQUEST, options))


def test_rows_with_images_go_into_the_runs_store_as_transformers_has_them(
    served: tuple[Path, str], store: ShmStore, tmp_path: Path
) -> None:
    """Also a second time, when the server has seen them. Measured in fp32: 4e-6 at most."""
    target = opened(served[0])
    asked = batch_about(tmp_path, target)
    (expected,) = LocalCapture(target, REQUEST).features([asked])
    text = [{"token_ids": torch.tensor(tokens)} for tokens in asked.token_ids]
    with capture_of(target, served[1]) as capture:
        for _ in range(2):
            refs = capture.deliver(asked, text, "made so", store)
            for ref, features, tokens in zip(refs, expected.features, asked.token_ids, strict=True):
                with store.get(ref) as handle:
                    assert handle.tensors["token_ids"].tolist() == list(tokens)
                    for name, value_TH in features.items():
                        found_TH = handle.tensors[name]
                        torch.testing.assert_close(found_TH, value_TH, rtol=0, atol=2e-5)
            store.free(refs)


@pytest.mark.usefixtures("store")
def test_a_server_that_reads_images_as_other_tokens_is_refused(
    served: tuple[Path, str], tmp_path: Path
) -> None:
    """As where its files have another size of images than the run's."""
    family = opened(served[0]).config.model_type
    target = opened(seeing_qwen(tmp_path / "other", family, largest=2))
    asked = batch_about(tmp_path, target)
    with (
        capture_of(target, served[1]) as capture,
        pytest.raises(
            UsageError, match=r"row [49] .*reads other tokens(.|\n)*capture\.name=sglang"
        ),
    ):
        list(capture.features([asked]))
