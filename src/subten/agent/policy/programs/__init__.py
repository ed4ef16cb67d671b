"""What programs do to files and which other commands they run, program by program."""
