"""Wrong engines: the one that `new-plugin` writes, and what each does otherwise."""

from draftcore_sdk.engines import EngineSuite
from draftcore_sdk.new_plugin import render

from mutants import Mutants, wrong

WRONG = """
== counts_the_prefill: test_alone_the_targets_own_tokens_come_one_a_round
-            return Answer(tuple(tokens), len(tokens) - 1)
+            return Answer(tuple(tokens), len(tokens))
== goes_on: test_alone_the_targets_own_tokens_come_one_a_round
-        if self.runner is None:
+        if self.runner is None:
+            max_new_tokens = max(max_new_tokens, 8)
== reads_other_layers: test_with_a_draft_tokens_are_the_same_and_rounds_our_decoders
-        draft.module.eval()
+        draft.module.eval().fc.weight.data[:, :96] = draft.module.fc.weight.data[:, 96:].repeat(1, 2)
== says_what_was_proposed: test_with_a_draft_tokens_are_the_same_and_rounds_our_decoders
-        accepted = tuple(sum(count > k for count in found.accepted) for k in positions)
+        accepted = tuple(k for k in positions)
== loads_nothing: test_a_draft_that_is_loaded_drafts
-            self.load_draft(serving.export)
+            self.load_draft(serving.export)
+            self.load_draft = lambda export: None
== serves_without: test_a_folder_without_a_draft_is_an_error_that_names_it
-        if serving.export:
+        if serving.export and (serving.export / "config.json").exists():
== leaves_a_process: test_nothing_that_was_started_lives_on_when_it_is_closed
-        self.runner: EagerRunner | None = None
+        import subprocess
+        self.left = subprocess.Popen(["sleep", "60"])
+        self.runner: EagerRunner | None = None
"""

FILES = render("{name}", "engine").items()
RIGHT = {path: text for path, text in FILES if path.startswith("draftcore_{name}/")}
BODY = 'plugin = "draftcore_{name}.plugin"'
MUTANTS = Mutants(EngineSuite, RIGHT, wrong(WRONG), BODY)
