"""What every source of training data must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `source_uri` to data of at least two rows.
"""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from draftcore_data.conversations import BadRow, parse_row
from draftcore_data.source import Source

from draftcore.errors import UsageError
from draftcore_sdk.suite import Suite, opened, path_of

SMALL = 4 << 20  # bytes that are copied


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

    def test_the_key_is_the_same_for_the_same_rows_alone(
        self, source_uri: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Others are those of a copy of text files, in which letters change, and neither size nor time."""
        source = self.opened_at(source_uri)
        assert source.key()
        assert source.key() == self.opened_at(source_uri).key()
        text, folder = source_uri.partition(":")[2].partition("?")[0], path_of(source_uri)
        files = [file for file in (folder, *folder.rglob("*")) if file.is_file()] if folder else []
        if folder is None or not 0 < sum(file.stat().st_size for file in files) < SMALL:
            return
        copy = tmp_path_factory.mktemp("rows") / folder.name
        (shutil.copytree if folder.is_dir() else shutil.copy2)(folder, copy)
        uri = source_uri.replace(text, str(copy), 1)
        source = self.opened_at(uri)
        key, rows = source.key(), list(source.rows())
        for file in (copy, *copy.rglob("*")):
            change_a_letter(file)
        with suppress(Exception):  # of what can be read no more
            source = self.opened_at(uri)
            if list(source.rows()) != rows and source.key() == key:
                pytest.fail("rows of another letter have the same key: those before are trained on")

    def test_what_is_not_there_is_refused_with_its_name(self, source_uri: str) -> None:
        name = f"{source_uri.partition('?')[0]}-that-is-not-there"
        with pytest.raises(UsageError, match="that-is-not-there"):
            list(self.opened_at(name).rows())


def change_a_letter(file: Path) -> None:
    """Change the last letter that ends a word or a quote, and nothing that the file system says of it."""
    with suppress(ValueError, OSError):  # what is no file, or has no letter
        data, stat = file.read_bytes(), file.stat()
        *_, last = re.finditer(r'[a-zA-Z](?="|\s)', data.decode("latin-1"))
        at = last.start()
        file.write_bytes(data[:at] + data[at : at + 1].swapcase() + data[at + 1 :])
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
