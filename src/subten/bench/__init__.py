"""How fast the kernels are, beside what else a user could run: `python -m subten.bench`."""
