"""Acceptance measured by real speculative decoding (`decode`), and its report (`report`)."""
