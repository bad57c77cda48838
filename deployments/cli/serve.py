"""`roulant serve`: fetch what is missing, start a service on this host, and say how to use it."""

from __future__ import annotations

import json
import shlex
from importlib.resources import as_file, files
from pathlib import Path

from deployments.cli.client import admin_client
from deployments.cli.status import memory_lines
from deployments.cli.terminal import CliError, pull_progress, say, stderr
from deployments.config import ConfigFileError, RoulantConfig, load_config
from deployments.config_terms import KeySection
from deployments.home import roulant_home, secret
from deployments.local import LocalService, ServiceError, serve_until_stopped
from deployments.models import CATALOGUE, ModelError, pull

QUESTION = "What is the capital of France?"


def run_service(config_file: Path | None, *, host: str | None, port: int | None) -> None:
    """Run until SIGINT or SIGTERM, then leave nothing behind. Raises CliError."""
    config = with_address(read_config(config_file), host=host, port=port)
    fetch_missing_models(config)
    try:
        serve_until_stopped(config, ready=lambda service: _is_ready(config, service), report=_report)
    except (ServiceError, ModelError) as error:
        raise CliError(str(error)) from error


def read_config(config_file: Path | None) -> RoulantConfig:
    """The configuration in a file; None: the one for this machine that comes with Roulant. Raises CliError."""
    try:
        if config_file is not None:
            return load_config(config_file)
        with as_file(files("deployments") / "configs" / "local.yaml") as path:
            return load_config(path)
    except (ConfigFileError, OSError) as error:
        raise CliError(str(error)) from error


def with_address(config: RoulantConfig, *, host: str | None, port: int | None) -> RoulantConfig:
    """`config` listening elsewhere; None leaves what it says."""
    changes = {name: value for name, value in {"host": host, "port": port}.items() if value is not None}
    return config.model_copy(update={"http": config.http.model_copy(update=changes)})


def fetch_missing_models(config: RoulantConfig) -> None:
    """Pull those models of `config` that Roulant knows where to get. Raises CliError."""
    for model in config.models:
        if model.source in CATALOGUE:
            with pull_progress() as progress:
                pull(model.source, home=roulant_home(), progress=progress)


def _is_ready(config: RoulantConfig, service: LocalService) -> None:
    admin = next((key for key in config.keys if key.admin), None)
    if admin is not None:  # without an operator nobody may ask
        with admin_client(service.url, secret(admin.file, admin.env)) as client:
            for line in memory_lines(client):
                _report(line)
    announce(config, service)


def announce(config: RoulantConfig, service: LocalService) -> None:
    """Print how to use the service. The last line is for programs that wait for it."""
    key = first_key(config)
    say("")
    say(f"address:  {service.url}/v1")
    if key is not None:
        api_key = secret(key.file, key.env)
        say(f"API key:  {api_key}   (tenant {key.tenant}; those of the others are in {roulant_home() / 'keys'})")
        say("")
        say(curl_command(service.url, api_key, config.models[0].id))
        say("")
    say(f"status:   roulant status --url {service.url}")
    say(f"chat:     roulant chat {config.models[0].id} --url {service.url}")
    say("stop:     Ctrl-C")
    say(f"ready: {service.url}")


def first_key(config: RoulantConfig) -> KeySection | None:
    """The first key that is a tenant's and not the operator's."""
    return next((key for key in config.keys if not key.admin), None)


def curl_command(url: str, api_key: str, model: str) -> str:
    """A question to the service, as one line for any POSIX shell."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    words = ["curl", "-sS", f"{url}/v1/chat/completions"]
    words += ["-H", f"Authorization: Bearer {api_key}", "-H", "Content-Type: application/json"]
    return shlex.join([*words, "-d", json.dumps(body)])


def _report(step: str) -> None:
    stderr().print(step, style="dim", markup=False, soft_wrap=True)
