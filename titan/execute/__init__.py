"""The target's batch of a step, and the memory that the largest passes take."""
