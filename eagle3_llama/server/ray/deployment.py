"""The server as a Ray Serve deployment: replicas on one machine or on many.

    python -m eagle3_llama.server.ray --model target.gguf --eagle head.gguf --threads 4 --replicas 2
    serve run eagle3_llama.server.ray:build model=target.gguf eagle=head.gguf threads=4 max_replicas=4

Each replica runs the plain server's application with its own model and batcher. Ray's proxy accepts the
connections and passes each request to one replica. If the replica dies, the client gets an error; a stream
that has begun ends with its connection. Needs the extra [ray]. docs/scaling.md lists the differences from the
plain server.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...common.keywords import unknown
from ...common.model_names import is_name
from ...common.options import APP, CONTEXT
from ...common.settings import Range, check, option, option_name, require, settings_of, with_options
from ...common.synonyms import Command
from ...errors import EagleError, ErrorKind
from ..config_file import ConfigFile
from ..settings import ServerSettings
from .replica import NAME, Replica, ray_serve

if TYPE_CHECKING:
    from ray.serve import Application

SPARE = (
    16  # requests that a full replica still accepts: /health, /metrics, and those that it answers with 503
)
OVERTIME = 5.0  # seconds that Ray waits past the replica's own time limits
SESSIONS: Any = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


@dataclasses.dataclass(frozen=True)
class Scale:
    """The number of replicas, and what Ray reserves for each. Raises EagleError BAD_ARGUMENT.

    min_replicas, max_replicas: Ray scales so that each has about n_parallel requests. num_cpus: None takes
    --threads, or without it one replica per node. session_affinity: a replica's slots hold the conversation.
    """

    replicas: Annotated[int | None, "fixed number of replicas; default: 1", Range(1, 4096, "")] = None
    min_replicas: Annotated[
        int | None, "fewest replicas; their number then follows the load", Range(0, 4096, "")
    ] = None
    max_replicas: Annotated[int | None, "most replicas; with --min-replicas", Range(1, 4096, "")] = None
    num_cpus: Annotated[float | None, "cores reserved for a replica; default: --threads", Range(0, 4096)] = (
        None
    )
    num_gpus: Annotated[
        float | None, "GPUs reserved for a replica; default: 1 with --n-gpu-layers", Range(0, 4096)
    ] = None
    session_affinity: Annotated[
        bool, option("send requests with the same X-Session-Id to the same replica", metavar="")
    ] = False

    def __post_init__(self) -> None:
        check(self, option_name)
        both = self.replicas is not None and self.scales
        require(not both, "give --replicas, or --min-replicas and --max-replicas, not both")
        message = f"--min-replicas {self.least} is more than --max-replicas {self.most}"
        require(not self.scales or self.least <= self.most, message)

    @property
    def scales(self) -> bool:
        return self.min_replicas is not None or self.max_replicas is not None

    @property
    def least(self) -> int:
        return 1 if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return max(self.least, 1) if self.max_replicas is None else self.max_replicas


def build(args: dict[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`.

    args: fields of ServerSettings and Scale by name; values may be text. The key comes from api_key_file or
    EAGLE3_API_KEY. Ray Serve sets the address. Raises EagleError.
    """
    args = {name.replace("-", "_"): value for name, value in args.items()}
    message = "Ray Serve sets host and port: `serve start --http-host HOST --http-port PORT`, or http_options"
    require(not {"host", "port"} & args.keys(), message)
    if not {"api_key", "api_key_file"} & args.keys() and os.environ.get("EAGLE3_API_KEY"):
        args["api_key"] = os.environ["EAGLE3_API_KEY"]
    return application(*_settings(args))


def application(settings: ServerSettings, scale: Scale) -> Application:
    """The deployment, bound to its settings but not running yet."""
    message = (
        "replicas do not support --slot-save-path, because a request cannot choose its replica: leave it out"
    )
    require(settings.slot_save_path is None, message, ErrorKind.UNSUPPORTED)
    message = "Ray's proxy accepts the connections, not the replicas: leave --max-connections out"
    require(settings.max_connections is None, message, ErrorKind.UNSUPPORTED)
    serve = ray_serve()
    from ray.serve.config import RequestRouterConfig

    options: dict[str, Any] = {"num_replicas": scale.replicas or 1}
    if scale.scales:
        options = {
            "autoscaling_config": {
                "min_replicas": scale.least,
                "max_replicas": scale.most,
                "target_ongoing_requests": settings.n_parallel,
            }
        }
    if scale.session_affinity:
        options["request_router_config"] = RequestRouterConfig(request_router_class=SESSIONS)
    cpus = scale.num_cpus if scale.num_cpus is not None else settings.threads
    if cpus is None:
        options["max_replicas_per_node"] = 1  # a replica uses all cores of its node
    gpus = scale.num_gpus if scale.num_gpus is not None else float(settings.n_gpu_layers != 0)
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        ray_actor_options={"num_cpus": 1 if cpus is None else cpus, "num_gpus": gpus},
        max_ongoing_requests=settings.capacity + SPARE,
        max_queued_requests=settings.capacity,
        backpressure_config={"retry_after_s": 5},
        graceful_shutdown_timeout_s=settings.grace + OVERTIME,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        health_check_timeout_s=60.0,
        max_constructor_retry_count=2,
        logging_config={"enable_access_log": False},
        **options,
    )
    return deployment.bind(settings)


# -- settings from text -----------------------------------------------------------------------------------


def _settings(given: dict[str, Any]) -> tuple[ServerSettings, Scale]:
    """Both from values by name. Raises EagleError for an unknown name or a value of a wrong type."""
    if isinstance(given.get("cors_origin"), str):
        given = given | {"cors_origin": given["cors_origin"].split(",")}
    hints = typing.get_type_hints(ServerSettings) | typing.get_type_hints(Scale)
    for name in given:
        if name not in hints:
            raise unknown(name, hints)
    require("model" in given, "model is missing: model=target.gguf")
    values = {name: _typed(name, hints[name], value) for name, value in given.items()}
    files = [name for name, setting in settings_of(ServerSettings).items() if Path in setting.option_types]
    values |= {
        name: os.path.abspath(values[name])  # replicas start in folders of Ray's
        for name in files
        if values.get(name) and not is_name(values[name])
    }
    names = settings_of(Scale)
    scale = Scale(**{name: value for name, value in values.items() if name in names})
    return ServerSettings(**{name: value for name, value in values.items() if name not in names}), scale


def _typed(name: str, hint: Any, value: Any) -> Any:
    """ "4" as 4 where a number is wanted."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint).validate_python(str(value) if isinstance(value, Path) else value)
    except ValidationError as e:
        raise EagleError(ErrorKind.BAD_ARGUMENT, f"{name} is {value!r}: {e.errors()[0]['msg']}") from None


# -- the command ------------------------------------------------------------------------------------------


@with_options(ServerSettings, Scale)
def serve_replicas(
    config: ConfigFile = None,
    address: Annotated[str | None, "address of a Ray cluster, or auto; default: start Ray here"] = None,
    **given: Any,
) -> None:
    """Serve a model through OpenAI's API, with replicas that Ray starts."""
    settings, scale = _settings({name: value for name, value in given.items() if value is not None})
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # by default, Ray reports usage to its developers
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # by default, Ray drops log lines that look alike
    app, alone = application(settings, scale), address is None
    port = _port(settings) if alone or not settings.port else settings.port
    import ray

    ray.init(address="local", include_dashboard=False) if alone else ray.init(address=address)
    try:
        _run(app, settings, port, alone)
    finally:
        ray.shutdown()


def _run(app: Application, settings: ServerSettings, port: int, alone: bool) -> None:
    """Serves until SIGTERM or SIGINT, then drains. A second signal ends this process at once.

    alone: whether this process has started Ray, which then ends with it.
    """
    serve, told = ray_serve(), threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda sig, _: os._exit(128 + sig) if told.is_set() else told.set())
    seconds = 2 * settings.timeout + OVERTIME
    serve.start(http_options={"host": settings.host, "port": port, "request_timeout_s": seconds})
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as e:
        message = "no replica could be started: see Ray's output above for the reason"
        raise EagleError(ErrorKind.BAD_ARGUMENT, message) from e
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"serving {os.path.basename(settings.model)} at http://{shown}:{port}", flush=True)
    told.wait()
    try:
        serve.get_app_handle(NAME).broadcast("drain").results(
            timeout_s=settings.grace + OVERTIME, return_exceptions=True
        )
    finally:
        serve.shutdown() if alone else serve.delete(NAME)


def _port(settings: ServerSettings) -> int:
    """The port of the settings, or a free one for 0. Raises EagleError before Ray and the model load."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        with socket.create_server((settings.host, settings.port), family=family) as s:
            return s.getsockname()[1]
    except OSError as e:
        message = f"cannot listen on {settings.host}:{settings.port}: {e.strerror or e}"
        raise EagleError(ErrorKind.BAD_ARGUMENT, message) from e


def main() -> None:
    """Entry point. Prints an EagleError as one line and exits with code 2."""
    app = typer.Typer(add_completion=False, **APP)
    app.command(context_settings=CONTEXT, cls=Command)(serve_replicas)
    try:
        app(prog_name="python -m eagle3_llama.server.ray")
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
