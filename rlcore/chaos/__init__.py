"""Faults at random moments in real programs: ``rlcore chaos``, to be run on one's own machines before one trusts them.

A round is a program of its own with a trainer and a sampler, whose steps are each met by one fault. After every step
the promises of docs/trust.md are checked.
"""
