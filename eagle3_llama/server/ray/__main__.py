"""`python -m eagle3_llama.server.ray` takes the options of `eagle3-llama serve`, and those of replicas."""

from .deployment import main

main()
