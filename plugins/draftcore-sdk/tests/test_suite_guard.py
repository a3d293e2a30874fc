"""A suite's tests cannot be lost in silence: they are switched off by xfail with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.stores import StoreSuite

TEST = "test_get_after_free_raises_and_free_twice_is_harmless"


class Mine(StoreSuite):
    plugin = "mine"


class Mixin:
    def test_a_heartbeat_is_heard(self) -> None: ...


def marked(mark: Callable[..., Any] = lambda test: test) -> object:
    """An override of a standard test that does nothing, with this mark."""

    def override(self: object, store: object) -> None: ...

    return mark(override)


@pytest.mark.parametrize("suite", [StoreSuite, Mine], ids=["a suite", "a subclass of its subclass"])
@pytest.mark.parametrize(
    "test",
    [
        marked(),
        None,
        marked(pytest.mark.xfail),
        marked(pytest.mark.xfail(reason="")),
        marked(pytest.mark.skip(reason="slow")),
    ],
    ids=["replaced", "set to None", "xfail without a reason", "an empty reason", "skipped"],
)
def test_a_standard_test_that_is_lost_is_refused(suite: type, test: object) -> None:
    with pytest.raises(TypeError) as caught:
        type("Other", (suite,), {TEST: test})
    assert str(caught.value).startswith(f"Other.{TEST} replaces a standard test")
    assert "@pytest.mark.xfail(reason=...)" in str(caught.value).splitlines()[-1]


def test_a_mixin_replaces_no_standard_test_either() -> None:
    with pytest.raises(TypeError, match=r"^Mixin.test_a_heartbeat_is_heard replaces a standard"):
        type("Other", (Mixin, ChannelSuite), {})


def test_xfail_with_a_reason_fixtures_and_further_tests_are_free() -> None:
    free = {
        TEST: marked(pytest.mark.xfail(reason="frees by reference count")),
        "store_uri": "another fixture",
        "test_something_of_my_own": marked(),
    }
    assert free.keys() <= vars(type("Other", (StoreSuite,), free)).keys()
