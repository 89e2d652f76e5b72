"""Creation of the scheduling policy from the user's option: a name, or a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titan.core.policy import SchedulingPolicy
from titan.schedule.policies.fair import FairPolicy
from titan.schedule.policies.fcfs import FcfsPolicy
from titan.schedule.policies.priority import PriorityPolicy

_POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = {"fcfs": FcfsPolicy, "priority": PriorityPolicy, "fair": FairPolicy}


def create_policy(policy: str | SchedulingPolicy) -> SchedulingPolicy:
    """Return the policy that a checked option stands for."""
    return _POLICIES[policy]() if isinstance(policy, str) else policy
