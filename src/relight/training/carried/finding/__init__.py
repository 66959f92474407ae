"""Finds what a script carries, by its code and by values, and explains what cannot be carried."""
