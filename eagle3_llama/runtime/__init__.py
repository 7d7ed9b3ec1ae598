"""The native library from Python: finding and loading it, sessions, what drafting costs, counters."""
