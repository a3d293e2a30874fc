"""Wrong readers of images: one by the target's own processor, and what each does otherwise."""

from draftcore_sdk.images import ImageSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
from draftcore_data.images import OwnProcessor

from draftcore.contracts.capture import RowError

class Reader(OwnProcessor):
    def __reduce__(self):
        return Reader, (self.path, self.source)

== Offer("images", "{name}")
== image_processor(name, target): Reader(target.path, target.source)
"""

WRONG = """
== leaves_spans_where_they_were: test_images_are_written_where_their_tokens_stand_and_spans_move
Reader.write(text, spans, uris):
    found, _, ids, images = super().write(text, spans, uris)
    return found, spans, ids, images
== keeps_one_token_for_an_image: test_images_are_written_where_their_tokens_stand_and_spans_move
Reader.write(text, spans, uris): return text, spans, *super().write(text, spans, uris)[2:]
== knows_an_image_by_its_path: test_the_target_sees_its_image_and_none_that_was_changed
Reader.inputs(token_ids, images):
    now = self.write("<|image|>" * len(images), [], [one.uri for one in images])[3]
    return super().inputs(token_ids, now)
== sees_the_first_image_only: test_the_target_sees_its_image_and_none_that_was_changed
SEEN = {}

Reader.inputs(token_ids, images):
    given = super().inputs(token_ids, images)
    given["pixel_values"] = SEEN.setdefault(images[0].uri, given["pixel_values"])
    return given
== hides_what_is_wrong: test_an_image_that_cannot_be_read_is_named
Reader.write(text, spans, uris):
    try:
        return super().write(text, spans, uris)
    except RowError:
        raise RowError("something is wrong") from None
== is_told_apart_by_its_address: test_another_process_reads_as_this_one
class Reader(Reader):
    __repr__ = object.__repr__
"""

MUTANTS = Mutants(ImageSuite, one_file(RIGHT), wrong(WRONG))
