"""What speaks HTTP and knows no API: the application, its page, connections, access, bodies, OpenAPI."""
