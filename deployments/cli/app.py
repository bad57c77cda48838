"""The commands of `roulant`, one function each; what they do lives in the modules beside this one.

Exit codes: 0 fine, 1 failed (stderr says why), 2 wrong use, 130 interrupted. Heavy imports happen inside the commands,
so that `--help` answers at once.
"""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer

from deployments.cli.terminal import CliError, complain
from deployments.models import DEFAULT_MODEL
from engine.config import Dtype, KvDtype

INTERRUPTED = 130

app = typer.Typer(
    help="Serve language models to many tenants.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="The models on this host.", no_args_is_help=True)
app.add_typer(models_app, name="models")

UrlOption = Annotated[
    str | None, typer.Option("--url", help="Address of the service (default: $ROULANT_URL, else this host, port 8000)")
]
AdminKeyOption = Annotated[
    str | None, typer.Option("--key", help="Admin key (default: $ROULANT_ADMIN_KEY, else this host's own)")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs")]


def main() -> None:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except CliError as error:
        complain(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@app.command(epilog="Example: roulant serve --port 9000")
def serve(
    config: Annotated[Path | None, typer.Argument(help="YAML file (default: the local configuration)")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of the configuration's")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port, instead of the configuration's; 0: any free one")
    ] = None,
) -> None:
    """Start Ray, the models and the HTTP front on this machine; Ctrl-C drains and stops all of it.

    A model that Roulant knows how to fetch is fetched first when it is not here.
    """
    from deployments.cli.serve import run_service

    run_service(config, host=host, port=port)


@app.command(epilog="Example: roulant chat smollm2-135m-instruct --message 'What is the capital of France?'")
def chat(
    model: Annotated[str, typer.Argument(help="Name of the model, as the service lists it")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, print the answer, leave")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy")] = None,
    url: UrlOption = None,
    key: Annotated[str | None, typer.Option(help="API key (default: $ROULANT_API_KEY, else this host's own)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Talk to a model of a running service; the answer appears as it is written.

    Without --message: a conversation. Ctrl-C stops an answer, Ctrl-D or an empty line ends it.
    """
    from deployments.cli.chat import Conversation, converse, say_once
    from deployments.cli.client import api_client

    if as_json and message is None:
        raise typer.BadParameter("--json needs --message")
    with api_client(url, key) as client:
        conversation = Conversation(
            client=client, model=model, system=system, max_tokens=max_tokens, temperature=temperature
        )
        if message is None:
            converse(conversation)
        else:
            say_once(conversation, message, as_json=as_json)


@app.command(epilog="Example: roulant status --json")
def status(
    url: UrlOption = None,
    key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Is the service ready, what does it serve, and who is waiting? Exits with 1 when it is not ready."""
    from deployments.cli.client import admin_client
    from deployments.cli.status import show_status

    with admin_client(url, key) as client:
        show_status(client, as_json=as_json)


@app.command(epilog="Example: roulant explain chatcmpl-0f3a...")
def explain(
    request_id: Annotated[str, typer.Argument(help="The id of the answer, as the client was told it")],
    url: UrlOption = None,
    key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why does a request that is in an engine run, or wait? Exits with 1 when no engine holds it."""
    from deployments.cli.client import admin_client
    from deployments.cli.status import show_explanation

    with admin_client(url, key) as client:
        show_explanation(client, request_id, as_json=as_json)


@models_app.command("pull", epilog="Example: roulant models pull smollm2-135m-instruct")
def models_pull(
    name: Annotated[str, typer.Argument(help="A known name, or a hub id such as owner/name")] = DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model, check it, and keep it under $ROULANT_HOME. Does nothing when it is already here and whole."""
    from deployments.cli.models import pull_model

    pull_model(name, as_json=as_json)


@models_app.command("list", epilog="Example: roulant models list --json")
def models_list(as_json: JsonOption = False) -> None:
    """The models that were pulled to this host."""
    from deployments.cli.models import show_models

    show_models(as_json=as_json)


@models_app.command("size", epilog="Example: roulant models size smollm2-135m-instruct --memory 4 --context 2048")
def models_size(
    model: Annotated[str, typer.Argument(help="Name of a pulled model, a folder, or a path to a config.json")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel devices that share the model")] = 1,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Precision of weights and KV cache")
    ] = "bfloat16",
    kv_dtype: Annotated[KvDtype, typer.Option(help="Precision of the KV cache; auto: that of the weights")] = (
        KvDtype.AUTO
    ),
    memory: Annotated[
        float | None, typer.Option(min=0, help="GiB on each device for weights and KV cache: say what fits")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and output in a request (default: the model's most)")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a model takes and how many requests fit beside it, from its config.json alone.

    Exits with 1 when --memory does not hold the weights and one request.
    """
    from deployments.cli.size import Question, show_size

    if memory is not None and not math.isfinite(memory):
        raise typer.BadParameter("--memory is a number of GiB")
    question = Question(tp=tp, dtype=Dtype(dtype), kv_dtype=kv_dtype, memory_gib=memory, context=context)
    show_size(model, question, as_json=as_json)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    # Unwinds the stack, so that children are ended and files put away; `serve` has a handler of its own.
    sys.exit(128 + signal.SIGTERM)
