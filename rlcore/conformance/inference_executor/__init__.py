"""What every inference executor does: ``pytest --pyargs rlcore.conformance --inference-executor NAME``."""
