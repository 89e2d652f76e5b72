"""The target's batch of a step, the seconds of its passes, and the memory profile of the largest one."""
