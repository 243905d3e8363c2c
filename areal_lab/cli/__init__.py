"""The command line: parse, call, print, exit code; the only package that imports `simulator`."""
