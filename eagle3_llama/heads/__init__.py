"""Head files: convert any layout to GGUF, describe a head, compare it with a reference, self-test it."""
