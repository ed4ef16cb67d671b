"""The agent engine: shell code is judged before it runs."""
