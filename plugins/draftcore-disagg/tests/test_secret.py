"""The secret of a run's processes: nobody else reads or guesses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftcore_disagg.secret import secret

from draftcore.errors import UsageError


def test_a_secret_is_made_once_and_one_that_can_be_guessed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAFTCORE_SECRET", raising=False)
    assert secret(tmp_path) == secret(tmp_path)
    assert len(secret(tmp_path)) == 64
    for short in ("", "a", "fifteen letters"):
        (tmp_path / "secret").write_text(short)
        with pytest.raises(UsageError, match=f"holds {len(short)} characters"):
            secret(tmp_path)
        monkeypatch.setenv("DRAFTCORE_SECRET", short)
        with pytest.raises(UsageError, match="DRAFTCORE_SECRET holds"):
            secret(tmp_path)
        monkeypatch.delenv("DRAFTCORE_SECRET")
