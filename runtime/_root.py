"""tilewright: attention kernels for LLM serving, found by a compiler's search and loaded without the compiler.

The public names are imported at first use, so that `import tilewright` is cheap and needs neither torch nor a compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "tilewright.runtime.paged": (
        "decode_attention",
        "extend_attention",
        "merge_state",
        "merge_states",
        "write_kv",
    ),
    "tilewright.runtime.plan": ("Plan", "plan_decode", "plan_extend"),
    "tilewright.runtime.plan_buffers": ("PlanBuffers",),
    "tilewright.runtime.lightning": ("lightning_decode", "lightning_extend"),
    "tilewright.runtime.backend": ("AttentionBackend", "PagedAttentionBackend"),
    "tilewright.runtime.lightning_backend": ("LightningAttentionBackend",),
    "tilewright.runtime.errors": (
        "Error",
        "IncompatibleModuleError",
        "IntegrityError",
        "MissingModuleError",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from tilewright.runtime.backend import AttentionBackend, PagedAttentionBackend
    from tilewright.runtime.errors import Error, IncompatibleModuleError, IntegrityError, MissingModuleError
    from tilewright.runtime.lightning import lightning_decode, lightning_extend
    from tilewright.runtime.lightning_backend import LightningAttentionBackend
    from tilewright.runtime.paged import decode_attention, extend_attention, merge_state, merge_states, write_kv
    from tilewright.runtime.plan import Plan, plan_decode, plan_extend
    from tilewright.runtime.plan_buffers import PlanBuffers

__all__ = [
    "AttentionBackend",
    "Error",
    "IncompatibleModuleError",
    "IntegrityError",
    "LightningAttentionBackend",
    "MissingModuleError",
    "PagedAttentionBackend",
    "Plan",
    "PlanBuffers",
    "decode_attention",
    "extend_attention",
    "lightning_decode",
    "lightning_extend",
    "merge_state",
    "merge_states",
    "plan_decode",
    "plan_extend",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
