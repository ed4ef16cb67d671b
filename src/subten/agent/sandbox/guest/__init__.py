"""What runs inside a sandbox: it is copied there, so it imports nothing but Python's standard library."""
