"""Child processes for chat templates, schemas and grammars, and limits on the size of texts."""
