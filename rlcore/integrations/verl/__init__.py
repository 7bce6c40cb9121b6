"""Adapters for verl, a class each; ``plugin`` is what verl loads by itself."""
