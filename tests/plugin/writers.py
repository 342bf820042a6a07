"""Test files with writers that fail, as source: the ranks import them from the project they are written into."""

WRITERS = """
import errno, os, signal, time
from pathlib import Path
from torch.distributed.checkpoint.filesystem import FileSystemWriter

RANK = os.environ.get("RANK")

class Full(FileSystemWriter):
    def write_data(self, plan, planner):
        if RANK == "1":
            Path(self.path, "half").write_bytes(bytes(1000))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_data(plan, planner)

class Killed(FileSystemWriter):
    def write_data(self, plan, planner):
        if RANK == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)

class Hanging(FileSystemWriter):
    def write_data(self, plan, planner):
        if RANK == "1":
            Path(self.path, "half").write_bytes(bytes(1000))
            Path("saving").touch()
            time.sleep(600)
        return super().write_data(plan, planner)

def full(path):
    return Full(path)

def killed(path):
    return Killed(path)

def hanging(path):
    return Hanging(path)

def plain(path):
    return FileSystemWriter(path)
"""
