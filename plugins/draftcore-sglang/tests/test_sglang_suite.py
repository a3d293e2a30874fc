"""The standard tests of a capture, with sglang in this process."""

import pytest

from draftcore.testing.captures import CaptureSuite

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]


class TestSglang(CaptureSuite):
    plugin = "draftcore_sglang.plugin"
    name = "sglang"
    options = {"max_tokens": 512}
