"""Scheduling: the requests of a step and their tokens, admission, preemption, and the end of a request."""
