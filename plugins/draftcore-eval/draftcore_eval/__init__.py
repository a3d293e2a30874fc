"""Acceptance measured by real speculative decoding (`decode`), and its report (`report`).

From Python: `from draftcore_eval.api import evaluate`.
"""
