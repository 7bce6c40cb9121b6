"""Tests that every inference executor passes: ``pytest --pyargs rlcore.conformance --inference-executor NAME``."""
