"""Generate the reference pages of `docs/`; a test compares them with what is committed."""
