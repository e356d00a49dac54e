"""The command line: thin functions that parse, call and print."""
