"""Scripts of the library in other shapes: the same computation, with its state and its blocks elsewhere."""
