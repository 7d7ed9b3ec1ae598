"""Benchmarks: compares the speed and acceptance rate of decoding modes on the user's prompts."""
