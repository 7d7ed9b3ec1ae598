"""From the body of a request to a prompt, and from tokens to a message."""
