"""The door of the router: the HTTP application and what it must be given."""

from __future__ import annotations

from router.auth import Caller, KeyRing, hash_key
from router.catalog import Catalog, ServedModel
from router.http_app import OperatorViews, Wiring, build_http_app
from router.service import Admission, Replicas, Service

__all__ = [
    "Admission",
    "Caller",
    "Catalog",
    "KeyRing",
    "OperatorViews",
    "Replicas",
    "ServedModel",
    "Service",
    "Wiring",
    "build_http_app",
    "hash_key",
]
