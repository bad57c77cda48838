"""The door of the router: the HTTP application and what it must be given."""

from __future__ import annotations

from router.auth import Caller, KeyRing, hash_key
from router.catalog import Catalog, ServedModel
from router.errors import ApiError, Fault
from router.headers import echoed_request_id
from router.http_app import OperatorViews, Wiring, build_http_app
from router.service import Admission, Replicas, Service

__all__ = [
    "Admission",
    "ApiError",
    "Caller",
    "Catalog",
    "Fault",
    "KeyRing",
    "OperatorViews",
    "Replicas",
    "ServedModel",
    "Service",
    "Wiring",
    "build_http_app",
    "echoed_request_id",
    "hash_key",
]
