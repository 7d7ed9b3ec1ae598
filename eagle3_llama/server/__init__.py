"""An OpenAI-compatible server for many requests at once, each drafted for: settings, the ASGI application, the process around it.

    from eagle3_llama.server.app import create_app          # a FastAPI application for a batcher
    from eagle3_llama.server.settings import ServerSettings

Importing this package loads nothing: children of sandbox.py import it too.
"""
