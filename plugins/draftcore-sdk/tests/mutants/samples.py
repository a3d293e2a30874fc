"""Wrong samples: rendered conversations, and what each does otherwise."""

from draftcore_sdk.samples import SamplesSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import dataclasses
import itertools

from draftcore.contracts.run import Prompts
from draftcore_data.rows import Conversations

COUNT = itertools.count()

class Rows:
    def __init__(self, rendered):
        self.rendered = rendered

    def __getattr__(self, name):
        return getattr(self.rendered, name)

    @property
    def summary(self):
        return dataclasses.replace(self.rendered.summary, **self.said())

    def said(self):
        return {}

class Mine(Conversations):
    def samples(self, part, date="", limit=0):
        return Rows(super().samples(part, date, limit))

== Offer("samples", "{name}", options="draftcore_data.options:DataOptions")
== samples(name, run, options): Mine(run, options)
"""

WRONG = """
== names_rows_anew: test_rows_and_digest_are_the_same_whenever_they_are_opened
Rows.feature_ids: return tuple(f"{next(COUNT)}" for _ in self.lengths)
== has_one_digest: test_other_rows_have_another_digest
Rows.said(): return {"fingerprint": "mine"}
== numbers_its_rows: test_other_rows_have_another_digest
Rows.feature_ids: return tuple(map(str, range(len(self.lengths))))
== cuts_its_masks: test_tokens_and_masks_are_as_long_as_said
Rows.loss_mask(row): return self.rendered.loss_mask(row)[:-1]
== has_rows_without_an_answer: test_tokens_and_masks_are_as_long_as_said
Rows.loss_mask(row): return self.rendered.loss_mask(row) & False
== learns_all_that_it_counts: test_the_summary_counts_its_rows
Rows.said(): return {"loss_tokens": self.rendered.summary.tokens}
== counts_no_token: test_the_summary_counts_its_rows
Rows.said(): return {"token_counts": {}}
== reads_all: test_a_limit_is_kept
Mine.samples(part, date="", limit=0): return super().samples(part, date)
== asks_all: test_a_limit_is_kept
Mine.prompts(limit=0): return super().prompts()
== asks_in_text: test_prompts_are_token_ids_that_leave_room_to_answer
Mine.prompts(limit=0): return Prompts(["why?"])
== lies_nowhere: test_where_rows_lie_has_a_name_and_what_lies_nowhere_is_refused
Mine.__init__(run, options):
    super().__init__(run, options)
    self.train = self.train or "somewhere"
== has_no_name: test_where_rows_lie_has_a_name_and_what_lies_nowhere_is_refused
Mine.__init__(run, options):
    super().__init__(run, options)
    self.eval = None
"""

MUTANTS = Mutants(SamplesSuite, one_file(RIGHT), wrong(WRONG))
