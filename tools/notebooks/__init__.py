"""Everything around the notebooks: the gallery, exports that need no network, thumbnails."""
