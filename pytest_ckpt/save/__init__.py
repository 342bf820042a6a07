"""Scenarios and engines: the only code that calls `torch.distributed.checkpoint`."""
