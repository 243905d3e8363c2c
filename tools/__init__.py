"""Programs that generate committed files: kernel tables and reference pages."""
