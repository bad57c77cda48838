"""Names for computed blocks: equal names mean equal keys and values.

A block's keys and values depend on all tokens up to its end, on the weights and on the adapter. So its name is a hash
chained over the blocks before it, and begins with who may share it: the owner is a tenant, or nobody in particular
where tenants share. SHA-256, because a tenant chooses its tokens and must not be able to hit upon another block's name.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_name(owner: str, adapter: str = "") -> bytes:
    """What the first block of an owner's prompts is chained to."""
    digest = hashlib.sha256()
    for part in (owner.encode(), adapter.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.digest()


def block_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the block that holds `token_ids` and follows the block named `parent`."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()
