"""Targets by transformers, and the capture that runs them in this process."""
