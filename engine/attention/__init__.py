"""Paged attention: one interface, a reference, and a backend for each device."""
