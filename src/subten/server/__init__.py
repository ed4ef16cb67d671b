"""The OpenAI-compatible HTTP server. `create_app` makes an ASGI application of a model, `run` serves it."""
