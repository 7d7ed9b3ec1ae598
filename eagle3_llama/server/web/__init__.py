"""What speaks HTTP: the application and its page, connections, access, request bodies, errors and OpenAPI."""
