"""Several frontends over one core: what they tell each other."""
