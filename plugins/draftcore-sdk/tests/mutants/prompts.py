"""Wrong prompt sets: two questions, and what each does otherwise."""

from draftcore_sdk.prompts import PromptsSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import itertools

from draftcore.errors import UsageError
from draftcore_bench.prompts import Prompt

COUNT = itertools.count()

class Questions:
    def ask(self, uri):
        if uri != "{name}":
            raise UsageError(f"there is no {uri}")
        return [Prompt("chat", ({"role": "user", "content": text},)) for text in ("why?", "how?")]

== Offer("prompts", "{name}")
== prompts(name, uri): Questions().ask(uri)
"""

WRONG = """
== draws_anew: test_the_prompts_are_the_same_whenever_they_are_asked_for
Questions.ask(uri): return super().ask(uri)[next(COUNT) :]
== answers_itself: test_each_prompt_has_a_category_and_ends_with_a_question
"role": "user" => "role": "assistant"
== reads_anything: test_a_place_that_is_not_there_is_refused_with_its_name
if uri != "{name}": => if not uri:
"""

MUTANTS = Mutants(PromptsSuite, one_file(RIGHT), wrong(WRONG))
