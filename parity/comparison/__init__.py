"""Both frontends side by side: what each costs."""
