"""What every reproduction has: its records, a command line, a page and packaged results."""
