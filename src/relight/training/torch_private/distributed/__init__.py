"""Private interfaces of torch.distributed: groups, c10d, DDP, FSDP2, DTensor, ZeRO, pipelines, checkpoints."""
