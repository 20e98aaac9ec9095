"""Lowered programs in canonical form, and what they cost."""
