"""The command line: eagle3-llama, the chat on a terminal, the demonstration."""
