"""What every source of training data must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `source_uri` to data of at least two rows.
"""

import pytest
from draftcore_data.conversations import BadRow, parse_row
from draftcore_data.source import Source

from draftcore.errors import UsageError
from draftcore_sdk.suite import Suite, opened


class SourceSuite(Suite):
    """Standard tests of a source: rows that can be read again, and a key that says so."""

    @pytest.fixture
    def source_uri(self) -> str:
        pytest.skip("only its author can say where data lies: override source_uri, or give --uri")

    def opened_at(self, uri: str) -> Source:
        found: Source = opened(self.plugin, "source", self.name, self.options, uri=uri)
        return found

    def test_rows_are_the_same_whenever_they_are_asked_for(self, source_uri: str) -> None:
        source = self.opened_at(source_uri)
        rows = list(source.rows())
        assert len(rows) >= 2
        assert rows == list(source.rows()) == list(self.opened_at(source_uri).rows())

    def test_each_row_has_a_place_of_its_own_and_can_be_understood(self, source_uri: str) -> None:
        rows = list(self.opened_at(source_uri).rows())
        assert len({place for place, _ in rows}) == len(rows)
        read = [parse_row(place, row) for place, row in rows]
        assert [str(row) for row in read if isinstance(row, BadRow)] == []

    def test_the_key_is_the_same_for_the_same_rows(self, source_uri: str) -> None:
        source = self.opened_at(source_uri)
        assert source.key()
        assert source.key() == self.opened_at(source_uri).key()

    def test_what_is_not_there_is_refused_with_its_name(self, source_uri: str) -> None:
        name = f"{source_uri.partition('?')[0]}-that-is-not-there"
        with pytest.raises(UsageError, match="that-is-not-there"):
            list(self.opened_at(name).rows())
