"""Checkpoints of anyone's from Linen to NNX and back, every leaf accounted for."""

from parity.migration.loading import Loaded, load_into, load_variables
from parity.migration.plans import Plan, plan

__all__ = ["Loaded", "Plan", "load_into", "load_variables", "plan"]
