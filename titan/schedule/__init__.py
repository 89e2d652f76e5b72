"""Which requests run in a step, which may join, and when a request ends."""
