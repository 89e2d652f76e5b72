"""An order of a model's tokens, by which a draft gets the vocabulary that it shares with a target."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenOrder(NamedTuple):
    """An order of a model's tokens other than its checkpoint's: a token's id is then its place in it."""

    token_ids: Tensor  # int64 [vocab_size], in the checkpoint
    num_outputs: int  # the first tokens, which alone have logits
