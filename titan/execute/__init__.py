"""The target's batch of a step, and the memory profile of the largest pass."""
