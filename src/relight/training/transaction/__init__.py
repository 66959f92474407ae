"""A step as a transaction: everything that it changes before the barrier can be undone, and then repeated.

pattern      learns where in a step the barrier may stand (pure)
images       copies of tensors, optimizers and objects, from before they change
data_access  notices changes through `Tensor.data`, which no version counter shows
transaction  puts these together for one step
"""
