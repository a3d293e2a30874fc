"""What every prompt set must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and the fixture `prompts_uri` where the set's name alone is not enough.
"""

from collections.abc import Sequence

import pytest
from draftcore_bench.prompts import Prompt

from draftcore.errors import UsageError
from draftcore_sdk.suite import Suite, offer_of, opened


class PromptsSuite(Suite):
    """Standard tests of a prompt set: the same questions whoever asks, each of a category."""

    @pytest.fixture
    def prompts_uri(self) -> str:
        offer = offer_of(self.plugin, "prompts", self.name)
        if {"hub", "place"} & offer.capabilities:
            pytest.skip("only its author can say where it is: override prompts_uri, or give --uri")
        return offer.name

    def opened_at(self, uri: str) -> Sequence[Prompt]:
        found: Sequence[Prompt] = opened(self.plugin, "prompts", self.name, self.options, uri=uri)
        return found

    def test_the_prompts_are_the_same_whenever_they_are_asked_for(self, prompts_uri: str) -> None:
        assert list(self.opened_at(prompts_uri)) == list(self.opened_at(prompts_uri)) != []

    def test_each_prompt_has_a_category_and_ends_with_a_question(self, prompts_uri: str) -> None:
        for number, prompt in enumerate(self.opened_at(prompts_uri), start=1):
            assert prompt.category, f"prompt {number} has no category"
            last = prompt.messages[-1]
            assert last["role"] == "user", f"prompt {number} ends with a turn of {last['role']}"
            assert last["content"], f"prompt {number} asks nothing"

    def test_a_place_that_is_not_there_is_refused_with_its_name(self, prompts_uri: str) -> None:
        name = prompts_uri.partition(":")[0]
        with pytest.raises(UsageError, match="that-is-not-there"):
            list(self.opened_at(f"{name}:that-is-not-there"))
