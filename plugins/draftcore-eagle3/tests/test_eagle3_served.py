"""The reader of exports: on its own legs, and right about every shape of RoPE and head."""

from pathlib import Path

import draftcore_eagle3
import pytest
from draftcore_eagle3 import plugin
from draftcore_eagle3.options import Eagle3Options

from draftcore.served import UnservableError
from draftcore.testing.exports import ROPES, imports_of_ours, largest_gap


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_eagle3.__file__).parent
    assert imports_of_ours(package / "served.py") == {"draftcore.served"}


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, server: str, tmp_path: Path) -> None:
    options = Eagle3Options(num_attention_heads=6, num_key_value_heads=3, num_drafts=3)
    assert largest_gap("draftcore_eagle3.plugin", options, rope, server, tmp_path) < 1e-3


def test_an_unknown_kind_of_draft_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Eagle3DraftModel"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnservableError, match="LlamaForCausalLMEagle3"):
        plugin.read_export(tmp_path, "sglang")
