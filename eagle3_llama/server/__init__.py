"""An OpenAI-compatible server that decodes many requests in one batch, with speculative decoding.

    from eagle3_llama.server.http.app import create_app      # a FastAPI application for a batcher
    from eagle3_llama.server.settings import ServerSettings

Importing this package imports nothing else, because the child processes of sandbox/ import it too.
"""
