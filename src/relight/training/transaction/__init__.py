"""A step as a transaction: everything that it changes before the barrier can be undone, and then repeated.

pattern      learns where in a step the barrier may stand (pure)
images       copies of tensors, optimizers and objects, from before they change
attributes   the log of what is assigned to modules, and what of it is state
data_access  notices changes through `Tensor.data`, which no version counter shows
transaction  puts these together for one step
"""
