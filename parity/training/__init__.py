"""Runs of training as the command line describes them."""
