"""Tests that every train executor passes: ``pytest --pyargs rlcore.conformance --train-executor NAME``."""
