"""The server as replicas under Ray Serve: how they are deployed, and what runs in each of them."""

from .deployment import Scale, application, build, serve_replicas

__all__ = ["Scale", "application", "build", "serve_replicas"]
