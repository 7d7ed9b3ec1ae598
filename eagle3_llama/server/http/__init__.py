"""HTTP without any API: the application, its page, connections, access, bodies, OpenAPI."""
