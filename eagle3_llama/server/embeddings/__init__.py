"""OpenAI's embeddings."""
