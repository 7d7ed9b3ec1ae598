"""The native library in Python: loading it, the engine, measured costs, parameters, statistics."""
