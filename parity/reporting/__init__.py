"""A verdict, what decides it, and the formats it is written in."""
