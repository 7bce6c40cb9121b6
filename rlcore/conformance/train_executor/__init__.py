"""What every train executor does: ``pytest --pyargs rlcore.conformance --train-executor NAME``."""
