"""The name that torch.compile puts into the names of a module's tensors."""

COMPILED = "_orig_mod"  # the attribute under which a compiled module keeps the module itself
