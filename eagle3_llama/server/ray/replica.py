"""The program in each process of Ray Serve: the plain server's application with its own model and batcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...common import extras
from ..settings import ServerSettings, is_loopback

NAME = "eagle3-llama"  # name of the application and of its only deployment


def ray_serve() -> Any:
    try:
        from ray import serve
    except ModuleNotFoundError as e:
        raise extras.missing("replicas need", "ray", e) from e
    return serve


class Replica:
    """One model with its slots, in a process of Ray. Ray or broadcast() calls the public methods."""

    def __init__(self, settings: ServerSettings) -> None:
        from ...batching.batcher import Batcher, BatchSettings
        from ..http.process import keep_memory_flat, log_to_stderr

        keep_memory_flat()
        self.settings = settings
        self.batcher = Batcher(BatchSettings(**settings.batch()))
        self.id = ray_serve().get_replica_context().replica_id.unique_id
        log_to_stderr()

    def __serve_build_asgi_app__(self) -> Any:
        """The application. Ray calls this once, in the replica's event loop."""
        from ..http.app import create_app

        app = create_app(self.settings, self.batcher)
        self.server = app.state.server
        self.own_metrics, self.server.metrics = self.server.metrics, EveryReplica(self)
        app.add_middleware(Door, replica=self.id, keyed=bool(self.settings.api_keys))
        return app

    def check_health(self) -> None:
        """Raises if the replica cannot answer requests any more. Ray then replaces it."""
        if not self.batcher.alive():
            raise RuntimeError("the batcher's thread has ended")

    def metrics(self) -> tuple[str, list[Any]]:
        """This replica's id and its metric families."""
        return self.id, list(self.own_metrics.registry.collect())

    async def drain(self) -> None:
        """Refuses new requests with 503 and waits `grace` seconds for the running ones, as after SIGTERM."""
        await self.server.gate.drain(self.settings.grace)

    def __del__(self) -> None:
        """Closes the batcher. Ray calls this after draining."""
        if (batcher := getattr(self, "batcher", None)) is not None:
            batcher.close(0.0)


class Door:
    """ASGI middleware: adds X-Replica to answers, and without a key refuses requests from other machines.

    Ray's proxy, which may listen on any address, sets X-Request-Id and passes it to the replica.
    """

    def __init__(self, app: Any, replica: str, keyed: bool) -> None:
        self.app, self.header, self.keyed = app, (b"x-replica", replica.encode()), keyed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [h for h in message["headers"] if h[0] != b"x-request-id"]
                message = {**message, "headers": [*headers, self.header]}
            await send(message)

        app = self.app
        if scope["type"] == "http" and not self.keyed and not is_loopback((scope.get("server") or ("",))[0]):
            from ..errors import ApiError
            from ..http.access import error_response

            message = (
                "without an API key, only this machine may send requests: set EAGLE3_API_KEY and restart"
            )
            app = error_response(ApiError(403, message, code="no_key"), scope["path"])
        await app(scope, receive, named if scope["type"] == "http" else send)


class EveryReplica:
    """The metrics of all replicas, each sample with the label `replica`.

    A scrape reaches one replica, which asks the others.
    """

    SECONDS = 5.0  # time limit for their answers; slower replicas are left out

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Runs in a thread."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import Metric

        families: dict[str, Any] = {}
        for replica, metrics in self._ask():
            for m in metrics:
                family = families.setdefault(m.name, Metric(m.name, m.documentation, m.type))
                family.samples += [s._replace(labels={**s.labels, "replica": replica}) for s in m.samples]
        return families.values()

    def _ask(self) -> Iterable[tuple[str, list[Any]]]:
        try:
            handle = ray_serve().get_deployment_handle(NAME)
            found = handle.broadcast("metrics").results(timeout_s=self.SECONDS, return_exceptions=True)
        except Exception:
            found = []
        return dict([self.replica.metrics(), *(x for x in found if not isinstance(x, BaseException))]).items()
