"""Utilities for every package: files, the GGUF reader, setting names, command-line options, progress."""
