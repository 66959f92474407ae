"""The name that torch.compile puts into the names of a module's tensors. Seen in torch 2.13."""

COMPILED = "_orig_mod"  # the attribute under which a compiled module keeps the module itself
