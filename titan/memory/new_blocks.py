"""New blocks: those that were handed out, and whose content is undefined until they are cleared or written to as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from titan.core.kv_tensor import KVTensor, Role
from titan.kernels.interfaces import CacheOps


class NewBlocks:
    """Knows the new blocks, and zeros them before a pass: attention multiplies their content by zero weights.

    In the draft's cache they are cleared later, since a draft that rests is not fed them.

    Args:
        ops: clear blocks.
    """

    def __init__(self, ops: CacheOps) -> None:
        self._ops = ops
        self._block_ids: set[int] = set()  # not cleared yet
        self._new_to_draft: set[int] = set()  # not cleared yet in the draft's cache

    def add(self, block_ids: Iterable[int]) -> None:
        """Count these blocks as new."""
        self._block_ids.update(block_ids)

    def clear(self, tensors: Mapping[Role, KVTensor]) -> None:
        """Zero all new blocks in the target's cache; those in the draft's wait for `clear_in_draft`."""
        if self._block_ids:
            if "target" in tensors:
                self._ops.clear_blocks(tensors["target"], np.array(sorted(self._block_ids)))
            if "draft" in tensors:
                self._new_to_draft.update(self._block_ids)
            self._block_ids.clear()

    def clear_in_draft(self, tensors: Mapping[Role, KVTensor], block_ids: Iterable[int]) -> None:
        """Zero those of these blocks that are new to the draft's cache."""
        new = self._new_to_draft.intersection(block_ids) if self._new_to_draft and "draft" in tensors else ()
        if new:
            self._ops.clear_blocks(tensors["draft"], np.array(sorted(new)))
            self._new_to_draft.difference_update(new)

    def note_written(self, block_ids: Sequence[int]) -> None:
        """Let blocks that were copied to in every cache not be cleared any more."""
        self._block_ids.difference_update(block_ids)
        self._new_to_draft.difference_update(block_ids)

    def renumber(self, new_ids: Mapping[int, int]) -> None:
        """Replace the ids of all blocks, old id -> new id; those without a new one are forgotten."""
        self._block_ids = {new_ids[block_id] for block_id in self._block_ids if block_id in new_ids}
        self._new_to_draft = {new_ids[block_id] for block_id in self._new_to_draft if block_id in new_ids}

    def forget(self) -> None:
        """Count no block as new any more."""
        self._block_ids.clear()
        self._new_to_draft.clear()
