"""The documentation site: assemble its pages, and build them with Zensical."""
