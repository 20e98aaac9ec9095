"""Memory of training steps on accelerators that are not there."""
