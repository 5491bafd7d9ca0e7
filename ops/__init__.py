"""Operators and products; each file has a reference and an implementation per device."""
