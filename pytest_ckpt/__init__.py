"""pytest-ckpt: benchmark and accept PyTorch Distributed Checkpoint (DCP) saves with pytest."""

__version__ = "0.1.0"
