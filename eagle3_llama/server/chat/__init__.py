"""From the body of a request to its answer: chat templates, tools, grammars, prompts, and text of tokens."""
