"""Heads as files: converting any layout to GGUF, looking into one, comparing it with a reference, the self-test."""
