"""Scheduling policies, one per file; `titan.core.policy` says what they decide."""
