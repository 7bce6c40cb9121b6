"""Interfaces of other frameworks over rlcore's engines, so that programs written for them run unchanged."""
