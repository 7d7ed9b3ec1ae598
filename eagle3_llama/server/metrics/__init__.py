"""Counters for Prometheus, by its own names and by vLLM's."""
