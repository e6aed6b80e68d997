"""The live view: a page, and the one stream of events that it draws."""
