"""Measuring what a KV format does to a model, through the path that serves requests."""
