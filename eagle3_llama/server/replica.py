"""What runs in a process of Ray Serve's: the plain server's application over a batcher of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import EagleError, ErrorKind
from .settings import ServerSettings, is_loopback

NAME = "eagle3-llama"  # of the application and of its one deployment


def ray_serve() -> Any:
    try:
        from ray import serve
    except ModuleNotFoundError as e:
        raise EagleError(ErrorKind.LIBRARY, f"replicas need {e.name}: pip install 'eagle3-llama[ray]'") from e
    return serve


class Replica:
    """One model with its slots, in a process of Ray's. Public methods are called by Ray, or by broadcast()."""

    def __init__(self, settings: ServerSettings) -> None:
        from ..batching.batcher import Batcher, BatchSettings
        from .run import keep_memory_flat, log_to_stderr

        keep_memory_flat()
        self.settings = settings
        self.batcher = Batcher(BatchSettings(**settings.batch()))
        self.id = ray_serve().get_replica_context().replica_id.unique_id
        log_to_stderr()

    def __serve_build_asgi_app__(self) -> Any:
        """Called once, in the replica's event loop."""
        from .app import create_app

        app = create_app(self.settings, self.batcher)
        self.server = app.state.server
        self.own_metrics, self.server.metrics = self.server.metrics, EveryReplica(self)
        app.add_middleware(Door, replica=self.id, keyed=self.settings.api_key is not None)
        return app

    def check_health(self) -> None:
        """Raises when no request can be served any more; Ray then starts another replica."""
        if not self.batcher.alive():
            raise RuntimeError("the batcher's thread has ended")

    def metrics(self) -> tuple[str, list[Any]]:
        """This replica's id and its families of metrics."""
        return self.id, list(self.own_metrics.registry.collect())

    async def drain(self) -> None:
        """As SIGTERM does in the plain server: new requests are told 503, running ones have `grace` seconds."""
        await self.server.gate.drain(self.settings.grace)

    def __del__(self) -> None:
        """Ray calls it when the replica has been drained."""
        if (batcher := getattr(self, "batcher", None)) is not None:
            batcher.close(0.0)


class Door:
    """ASGI middleware: X-Replica in answers, and no way in from outside without a key, whatever address Ray's proxy listens on.

    X-Request-Id is left to the proxy, which hands it to the replica too."""

    def __init__(self, app: Any, replica: str, keyed: bool) -> None:
        self.app, self.header, self.keyed = app, (b"x-replica", replica.encode()), keyed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*(h for h in message["headers"] if h[0] != b"x-request-id"), self.header],
                }
            await send(message)

        app = self.app
        if scope["type"] == "http" and not self.keyed and not is_loopback((scope.get("server") or ("",))[0]):
            from .access import error_response
            from .errors import ApiError

            said = (
                "this server has no key, so only this machine may ask: set EAGLE3_API_KEY where it is started"
            )
            app = error_response(ApiError(403, said, code="no_key"))
        await app(scope, receive, named if scope["type"] == "http" else send)


class EveryReplica:
    """Metrics of all replicas, each sample with the label `replica`: a scrape reaches any one of them, which asks the others."""

    SECONDS = 5.0  # for their answers; a replica that is slower, or has just died, is left out

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def text(self) -> bytes:
        """The exposition format. Runs in a thread."""
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
