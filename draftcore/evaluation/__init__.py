"""Acceptance measured by real speculative decoding, and its reports."""
