"""Who runs in a step, who may join, when a request ends."""
