"""Speed and acceptance of modes against each other, on prompts of one's own."""
