"""Any pair of modules: how it is called, and its tiers."""
