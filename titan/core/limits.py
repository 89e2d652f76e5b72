"""Limits that several parts of the engine share."""

from __future__ import annotations

MAX_NODES = 63
"""Maximum number of nodes in a draft tree: the ancestors of a node are the bits of one int64."""
