"""A resource server of NeMo Gym: products."""
