"""The command line: eagle3-llama, its chat in the terminal, and the demo."""
