"""A step as a transaction: everything that it changes before the barrier can be undone, and then repeated.

pattern      learns where in a step the barrier may stand (pure)
needs        notices when a step last needed other ranks
data_access  notices changes through `Tensor.data`, which no version counter shows
changes      tells which tensors a step has changed
images       copies of tensors, optimizers and objects, from before they change
step_images  copies of everything that a step may change
image_plan   learns which tensors must be copied, and when
transaction  puts these together for one step
"""
