"""The agent engine: shell code is judged before it runs, runs in sandboxes, and several plans are tried at once."""
