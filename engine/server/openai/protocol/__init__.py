"""What clients send and get: the bodies of the OpenAI routes."""
