"""The OpenAI-compatible HTTP server: app.py makes an ASGI application of a model, process.py serves it."""
