"""The routes that show what becomes of texts and chats: prompts, tokens, their numbers."""
