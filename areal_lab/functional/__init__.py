"""Pure maths on tensors."""
