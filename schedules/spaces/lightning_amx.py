"""Lightning attention for x86 with AMX: the vector schedules, as products are f32 and tiles multiply bf16."""

from tilewright.schedules.spaces.lightning_x86 import space

__all__ = ["space"]
