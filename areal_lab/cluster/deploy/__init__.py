"""Deployment files of a run: text computed from records; only `files.write_files` writes."""
