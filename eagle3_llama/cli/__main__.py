"""`python -m eagle3_llama.cli` runs `eagle3-llama`."""

from .main import main

if __name__ == "__main__":
    main()
