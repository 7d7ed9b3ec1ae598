"""Runs the choices of requests in threads, and limits how much runs and waits at once."""
