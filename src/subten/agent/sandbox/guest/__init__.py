"""What runs inside a sandbox. Its modules import nothing but Python's standard library: they are copied into guests."""
