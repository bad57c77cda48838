"""One service for all end-to-end tests: the real model, and a simulated one for many requests at once."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from deployments.config import EngineSection, ModelSection, RoulantConfig, load_config
from deployments.config_terms import KeySection, TenantSection
from deployments.home import roulant_home
from deployments.local import LocalService
from deployments.models import DEFAULT_MODEL, pull
from engine.config import Dtype, ExecutorKind

LOCAL_CONFIG = Path(__file__).parents[2] / "deployments" / "configs" / "local.yaml"
SIMULATED_MODEL = "simulated"
CRAMPED_MODEL = "cramped"
CRAMPED_SLOTS = 4
CRAMPED_KV_TOKENS = 4800


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A service that runs, and its keys."""

    url: str
    session_id: int
    api_key: str
    admin_key: str
    trial_key: str
    neighbour_key: str
    """Of a tenant without limits, who is not the one of `api_key`."""

    def client(self, key: str | None = None) -> OpenAI:
        """The official client; it does not try again by itself, so that tests see what the service says."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key or self.api_key, max_retries=0, timeout=60.0)

    def http(self, key: str | None = None) -> httpx.Client:
        """A plain client with the key in place."""
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key or self.api_key}"}, timeout=60.0)


def simulated_model() -> ModelSection:
    """The default model's tokenizer with made-up tokens: no weights, thousands of tokens a second."""
    engine = EngineSection(executor=ExecutorKind.SIMULATED, num_kv_blocks=2048)
    return ModelSection(id=SIMULATED_MODEL, model=DEFAULT_MODEL, num_cpus=0, engine=engine)


def cramped_model() -> ModelSection:
    """A simulated model that is soon full: memory for little more than its slots."""
    engine = EngineSection(
        executor=ExecutorKind.SIMULATED,
        max_num_seqs=CRAMPED_SLOTS,
        block_size=16,
        num_kv_blocks=CRAMPED_KV_TOKENS // 16,
    )
    return ModelSection(id=CRAMPED_MODEL, model=DEFAULT_MODEL, num_cpus=0, engine=engine)


def in_float32(model: ModelSection) -> ModelSection:
    """`model` in the precision in which its greedy answers do not depend on who shares the batch."""
    return model.model_copy(update={"engine": model.engine.model_copy(update={"dtype": Dtype.FLOAT32})})


def with_neighbour(config: RoulantConfig) -> RoulantConfig:
    """`config` with a tenant more."""
    key = KeySection(tenant="neighbour", file="neighbour", env="ROULANT_NEIGHBOUR_KEY")
    return config.model_copy(
        update={"tenants": (*config.tenants, TenantSection(id="neighbour")), "keys": (*config.keys, key)}
    )


def on_any_port(config: RoulantConfig, *models: ModelSection) -> RoulantConfig:
    """`config` with other models, on a free port."""
    return config.model_copy(update={"models": models, "http": config.http.model_copy(update={"port": 0})})


@pytest.fixture(scope="session")
def default_model() -> str:
    """The default model, on this host."""
    pull(DEFAULT_MODEL, home=roulant_home())
    return DEFAULT_MODEL


@pytest.fixture(scope="session")
def running(default_model: str) -> Iterator[Running]:
    """The service. Its keys are this run's own, so that nobody's are shown or spent."""
    keys = {name: f"rk-test-{secrets.token_hex(8)}" for name in ("API", "ADMIN", "TRIAL", "NEIGHBOUR")}
    config = load_config(LOCAL_CONFIG)
    models = (*map(in_float32, config.models), simulated_model(), cramped_model())
    service = LocalService(on_any_port(with_neighbour(config), *models))
    with pytest.MonkeyPatch.context() as patch:
        for name, key in keys.items():
            patch.setenv(f"ROULANT_{name}_KEY", key)
        try:
            service.start()
            assert service.session_id is not None
            yield Running(
                url=service.url,
                session_id=service.session_id,
                api_key=keys["API"],
                admin_key=keys["ADMIN"],
                trial_key=keys["TRIAL"],
                neighbour_key=keys["NEIGHBOUR"],
            )
        finally:
            service.stop()


@pytest.fixture(autouse=True)
def _proxies_do_not_see_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is not meant for a service on this host."""
    for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
        monkeypatch.delenv(name)
