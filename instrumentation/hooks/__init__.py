"""Hooks: behaviour brought into other programs from outside, at the import of their modules."""
