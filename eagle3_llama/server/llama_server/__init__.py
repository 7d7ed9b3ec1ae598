"""The routes of llama.cpp's server: completions in its form, and slots."""
