"""A suite's tests cannot be lost in silence: they are switched off by xfail with a reason."""

import pytest
from draftcore_sdk.channels import ChannelSuite
from draftcore_sdk.stores import StoreSuite
from draftcore_sdk.suite import Suite

TEST = "test_get_after_free_raises_and_free_twice_is_harmless"


def refused(*bases: type, **members: object) -> str:
    """Make a test class; return what is said against it."""
    with pytest.raises(TypeError) as caught:
        type("TestMine", bases, members)
    return str(caught.value)


def test_a_replaced_standard_test_is_refused_with_the_way_to_do_it() -> None:
    text = refused(StoreSuite, **{TEST: lambda self, store: None})
    assert text.startswith(f"TestMine.{TEST} replaces a standard test")
    assert "@pytest.mark.xfail(reason=...)" in text.splitlines()[-1]


def test_a_standard_test_set_to_none_is_refused() -> None:
    assert TEST in refused(StoreSuite, **{TEST: None})


def test_xfail_without_a_reason_is_refused() -> None:
    @pytest.mark.xfail
    def bare(self: Suite, store: object) -> None: ...

    @pytest.mark.xfail(reason="")
    def empty(self: Suite, store: object) -> None: ...

    @pytest.mark.skip(reason="slow")
    def skipped(self: Suite, store: object) -> None: ...

    for test in (bare, empty, skipped):
        assert TEST in refused(StoreSuite, **{TEST: test})


def test_xfail_with_a_reason_is_allowed() -> None:
    class TestMine(StoreSuite):
        @pytest.mark.xfail(reason="frees by reference count")
        def test_get_after_free_raises_and_free_twice_is_harmless(self, store):
            super().test_get_after_free_raises_and_free_twice_is_harmless(store)

    assert TestMine.__name__ == "TestMine"


def test_a_mixin_replaces_no_standard_test_either() -> None:
    class Mixin:
        def test_a_heartbeat_is_heard(self) -> None: ...

    text = refused(Mixin, ChannelSuite)
    assert text.startswith("Mixin.test_a_heartbeat_is_heard replaces a standard test")


def test_a_subclass_of_a_subclass_is_guarded_too() -> None:
    class TestMine(StoreSuite):
        plugin = "mine"

    assert TEST in refused(TestMine, **{TEST: None})


def test_fixtures_and_further_tests_are_free() -> None:
    class TestMine(StoreSuite):
        plugin = "mine"

        @pytest.fixture
        def store_uri(self) -> str:
            return "mine:"

        def test_something_of_my_own(self) -> None: ...

    assert "test_something_of_my_own" in vars(TestMine)
