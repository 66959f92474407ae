"""Values at places: named ones, and those that functions of Python read and set."""
