"""Scripts in the shapes that people publish, and a fuzzer that composes them."""
