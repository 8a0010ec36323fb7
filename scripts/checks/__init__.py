"""Checks of the package and reports about them."""
