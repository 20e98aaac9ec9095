"""Checkpoints of anyone's from Linen to NNX and back, every leaf accounted for."""
