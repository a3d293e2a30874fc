"""A suite's tests cannot be lost in silence: they are switched off by xfail with a reason."""

import pytest
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.stores import StoreSuite

TEST = "test_get_after_free_raises_and_free_twice_is_harmless"


class Mine(StoreSuite):
    plugin = "mine"


class Mixin:
    def test_a_heartbeat_is_heard(self) -> None: ...


def override(*marks: pytest.MarkDecorator) -> object:
    """A test that does nothing, in a standard one's place, with these marks."""

    def test(self: object, store: object) -> None: ...

    for mark in marks:
        mark(test)
    return test


@pytest.mark.parametrize("suite", [StoreSuite, Mine], ids=["a suite", "a subclass of its subclass"])
@pytest.mark.parametrize(
    "test",
    [
        pytest.param(override(), id="replaced"),
        pytest.param(None, id="set to None"),
        pytest.param(override(pytest.mark.xfail), id="xfail without a reason"),
        pytest.param(override(pytest.mark.xfail(reason="")), id="an empty reason"),
        pytest.param(override(pytest.mark.skip(reason="slow")), id="skipped"),
    ],
)
def test_a_standard_test_that_is_lost_is_refused(suite: type, test: object) -> None:
    with pytest.raises(
        TypeError, match=rf"^Other.{TEST} replaces .*\n.*@pytest.mark.xfail\(reason"
    ):
        type("Other", (suite,), {TEST: test})


def test_a_mixin_replaces_no_standard_test_either() -> None:
    with pytest.raises(TypeError, match=r"^Mixin.test_a_heartbeat_is_heard replaces a standard"):
        type("Other", (Mixin, ChannelSuite), {})


def test_xfail_with_a_reason_fixtures_and_further_tests_are_free() -> None:
    excused = override(pytest.mark.xfail(reason="frees by reference count"))
    free = {TEST: excused, "store_uri": "another fixture", "test_something_of_my_own": override()}
    assert free.keys() <= vars(type("Other", (StoreSuite,), free)).keys()
