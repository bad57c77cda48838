"""From a configuration to a Serve application: an ingress, a deployment for each model, the admission actor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application

from cluster.api import Lane, Tenant
from deployments.admission_actor import AdmissionActorLink, AdmissionSettings
from deployments.config import ModelSection, RoulantConfig, load_config
from deployments.config_terms import KeySection
from deployments.home import roulant_home, secret
from deployments.ingress import Ingress, IngressSettings, ModelListing
from deployments.models import model_path
from deployments.replica import ModelReplica, ReplicaSettings, max_ongoing_requests
from router.api import Caller, hash_key

INGRESS_ONGOING_REQUESTS = 4096
"""Waiting requests hold a seat in the ingress too, so this is above any queue's bound."""
DRAIN_S = 15.0
HEALTH_CHECK_PERIOD_S = 2.0


class BuildArguments(BaseModel):
    """Arguments of `build` in a Serve configuration file."""

    model_config = ConfigDict(extra="forbid")

    config: str
    """Path of a Roulant configuration on the head node."""


def build(arguments: BuildArguments) -> Application:
    """For Serve configuration files: ``import_path: deployments.app:build``. Raises ConfigFileError, ModelError."""
    return build_app(load_config(Path(arguments.config)))


def build_app(config: RoulantConfig, *, loopback_only: bool = False) -> Application:
    """The whole application. The keys that it needs are read from, or made in, this host's Roulant home.

    Raises ModelError if a model is not on this host.
    """
    link = admission_link(config)
    folders = {model.id: model_path(model.source, roulant_home()) for model in config.models}
    models = {
        model.id: _model_deployment(model, folders[model.id], link, loopback_only=loopback_only)
        for model in config.models
    }
    settings = IngressSettings(
        models=tuple(_listing(model, folders[model.id]) for model in config.models),
        callers=_callers(config),
        max_body_bytes=config.http.max_body_bytes,
        loopback_only=loopback_only,
    )
    ingress = serve.deployment(
        name="ingress",
        num_replicas=config.ingress.replicas,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
        max_ongoing_requests=INGRESS_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.2,
    )(Ingress)
    return ingress.bind(settings, link, models)


def admission_link(config: RoulantConfig) -> AdmissionActorLink:
    """How to reach the admission actor of a service with this configuration."""
    return AdmissionActorLink(
        AdmissionSettings(
            directory=config.directory(),
            policy=config.admission.queue_policy(),
        )
    )


def _model_deployment(
    model: ModelSection, folder: Path, link: AdmissionActorLink, *, loopback_only: bool
) -> Application:
    deployment = serve.deployment(
        name=_deployment_name(model.id),
        num_replicas=model.replicas,
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        max_ongoing_requests=max_ongoing_requests(model.engine.max_num_seqs),
        max_constructor_retry_count=2,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.2,
    )(ModelReplica)
    settings = ReplicaSettings(
        model=model.id, engine=model.engine.engine_config(str(folder)), loopback_only=loopback_only
    )
    return deployment.bind(settings, link.report)


def _deployment_name(model_id: str) -> str:
    return "model-" + re.sub(r"[^A-Za-z0-9._-]", "-", model_id)


def _listing(model: ModelSection, folder: Path) -> ModelListing:
    config_file = folder / "config.json"
    trained_for: int = json.loads(config_file.read_text())["max_position_embeddings"]
    return ModelListing(
        id=model.id,
        aliases=model.aliases,
        folder=str(folder),
        max_model_len=model.engine.max_model_len or trained_for,
        created=int(config_file.stat().st_mtime),
    )


def _callers(config: RoulantConfig) -> Mapping[str, Caller]:
    """Who may call, by the digest of the key."""
    tenants = {section.id: section.tenant() for section in config.tenants}
    return {hash_key(secret(key.file, key.env)): _caller(key, tenants[key.tenant]) for key in config.keys}


def _caller(key: KeySection, tenant: Tenant) -> Caller:
    return Caller(
        tenant=tenant.id,
        key_id=key.id,
        models=None if tenant.models is None else frozenset(tenant.models),
        max_lane=tenant.max_priority,
        default_lane=max(Lane.STANDARD, tenant.max_priority),
        is_admin=key.admin,
    )
