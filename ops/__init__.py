"""Operators and products: a reference and an implementation per device in each file."""
