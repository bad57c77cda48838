"""`roulant models`: what is on this host, and fetching more."""

from __future__ import annotations

from rich.table import Table

from deployments.cli.terminal import pull_progress, say, say_json, stderr, stdout
from deployments.home import roulant_home
from deployments.models import CATALOGUE, list_models, pull


def pull_model(name: str, *, as_json: bool) -> None:
    """Fetch a model and say where it is. Raises CliError."""
    with pull_progress() as progress:
        folder = pull(name, home=roulant_home(), progress=progress)
    if as_json:
        say_json({"name": folder.name, "path": str(folder)})
    else:
        say(str(folder))


def show_models(*, as_json: bool) -> None:
    """The pulled models with their sizes and sources."""
    models = list_models(roulant_home())
    if as_json:
        say_json([{"name": each.name, "num_bytes": each.num_bytes, "source": each.source} for each in models])
        return
    if not models:
        stderr().print(f"No model was pulled yet. Fetch one with: roulant models pull {next(iter(CATALOGUE))}")
        return
    table = Table("model", "MB", "source", box=None)
    for each in models:
        table.add_row(each.name, f"{each.num_bytes / 1e6:,.0f}", each.source)
    stdout().print(table)
