"""The connection: its bounds, its keys, its errors, and what is seen of each request."""
