"""Wrong sources: three rows, and what each does otherwise."""

from draftcore_sdk.sources import SourceSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import itertools

from draftcore.errors import UsageError

TURNS = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
COUNT = itertools.count()

class Source:
    def __init__(self, uri):
        if not uri.endswith(":mine"):
            raise UsageError(f"there is no {uri}")

    def key(self):
        return "three rows"

    def rows(self):
        return [(f"mine:{at}", {"messages": TURNS, "id": at}) for at in range(3)]

== Offer("source", "{name}")
== source(name, uri): Source(uri)
"""
BODY = """
    plugin = "{name}"

    @pytest.fixture
    def source_uri(self):
        return "{name}:mine"
"""

WRONG = """
== deals_anew: test_rows_are_the_same_whenever_they_are_asked_for
Source.rows():
    found = super().rows()
    return found[next(COUNT) % 3 :] + found[: next(COUNT) % 3]
== has_one_place: test_each_row_has_a_place_of_its_own_and_can_be_understood
Source.rows(): return [("mine", row) for _, row in super().rows()]
== speaks_a_shape_of_its_own: test_each_row_has_a_place_of_its_own_and_can_be_understood
Source.rows(): return [(place, row["messages"]) for place, row in super().rows()]
== has_a_new_key_each_time: test_the_key_is_the_same_for_the_same_rows_alone
Source.key(): return str(next(COUNT))
== opens_anything: test_what_is_not_there_is_refused_with_its_name
Source.__init__(uri): pass
"""

MUTANTS = Mutants(SourceSuite, one_file(RIGHT), wrong(WRONG), BODY)
