"""Keys: who is calling, and what the key lets them ask for.

Only SHA-256 digests of keys are held. A lookup by digest takes the same time whatever part of a guess is right, so
comparing needs no further care. Keys are random, so a fast hash is enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.api import Lane
from router.errors import ApiError, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who a key belongs to. `models` None = all. `max_lane` is the highest priority the key may ask for."""

    tenant: str
    key_id: str
    models: frozenset[str] | None = None
    max_lane: Lane = Lane.INTERACTIVE
    default_lane: Lane = Lane.STANDARD
    is_admin: bool = False

    def __post_init__(self) -> None:
        if self.default_lane < self.max_lane:
            raise ValueError(
                f"key {self.key_id}: its default priority {self.default_lane.name.lower()} is above the highest "
                f"that it may use, {self.max_lane.name.lower()}"
            )

    def lane(self, priority: str | None) -> Lane:
        """The lane of a request that asks for `priority`, None: the key's default. A key may go lower, not higher."""
        if priority is None:
            return self.default_lane
        lane = Lane[priority.upper()]
        if lane < self.max_lane:
            highest = self.max_lane.name.lower()
            message = f"priority: this key may not use {priority!r}; its highest is {highest!r}"
            raise ApiError(Fault.PRIORITY_NOT_ALLOWED, message, param="priority")
        return lane

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model with this id (not: this alias)."""
        return self.models is None or model in self.models


def hash_key(key: str) -> str:
    """The digest under which a key is kept."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """The keys in force, by digest. `replace` swaps the whole set at once; readers see the old or the new one."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        self._callers = dict(callers)

    def replace(self, callers: Mapping[str, Caller]) -> None:
        """Put another set of keys in force."""
        self._callers = dict(callers)

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Every failure is the same 401, which does not repeat the key."""
        scheme, _, key = (authorization or "").partition(" ")
        caller = self._callers.get(hash_key(key.strip()))
        if caller is None or scheme.lower() != "bearer":
            message = "no valid API key; send one in the header 'Authorization: Bearer <key>'"
            raise ApiError(Fault.INVALID_API_KEY, message)
        return caller
