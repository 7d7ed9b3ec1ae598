"""Many requests at once over the slots of one context."""

from .batcher import Batcher, BatchSettings, RequestCancelled, RequestLlama

__all__ = ["BatchSettings", "Batcher", "RequestCancelled", "RequestLlama"]
