"""Turns the body of a request into calls of llama-cpp-python: chat formats, tools, grammars, prompts."""
