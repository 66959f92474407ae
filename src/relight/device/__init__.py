"""All that relight knows of devices. Other rooms ask for abilities; no other room names a kind of device.

`accelerator.py` is the interface, `host.py`, `cuda.py` and `generic.py` implement it, `choose.py` finds the one of a
process or a tensor. The rest needs no torch: `visible.py` counts devices, `nvidia.py` reads their health, `pinning.py`
registers host memory in processes that have torch.
"""
