"""The command line: parse, call, print, exit code; the one room that knows `simulator`."""
