"""What JSON schemas come to: terms that llama.cpp's converter enforces, and what it passes over."""
