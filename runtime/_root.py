"""tilewright: attention kernels for LLM serving, found by a compiler's search and loaded without the compiler."""

__version__ = "0.1.0"
