"""What every package may use: files, the GGUF reader, names of settings, options of commands, progress."""
