"""The command line: commands that belong together share a file."""
