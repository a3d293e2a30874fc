"""The reader of exports shares code with the backbone's reader, and none with what it checks."""

from pathlib import Path

import draftcore_domino
import pytest
from draftcore_domino.options import DominoOptions
from draftcore_sdk.exports import ROPES, imports_of_ours, largest_gap


def test_the_reader_shares_no_code_with_what_it_checks() -> None:
    package = Path(draftcore_domino.__file__).parent
    shared = {"draftcore_tools.served", "draftcore_dflash.served", "draftcore.contracts.serving"}
    assert imports_of_ours(package / "served.py") == shared


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_read_as_it_was_trained(rope: str, tmp_path: Path) -> None:
    options = DominoOptions(num_layers=2, block_size=4, gru_hidden_dim=12, emb_dim=6)
    assert largest_gap("draftcore_domino.plugin", options, rope, "sglang", tmp_path) < 1e-3
