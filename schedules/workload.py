"""The one identity of a kernel: what it computes, in which types, for which static sizes. Standard library only."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

# Raised when the meaning or the argument list of any kernel changes: older records and artifacts are then refused.
DEFINITION_REVISION = 1

OPERATORS = ("paged_decode", "paged_extend", "merge", "write_kv", "lightning_decode", "lightning_extend")
DTYPES = ("bf16", "fp16", "f32")
# Types of a KV pool that is not in `dtype` -> their part of a name.
KV_DTYPES = {"fp8_e4m3": "kvfp8"}


class WorkloadError(ValueError):
    """A workload that cannot exist; the message names the field, what it got and what it takes."""


@dataclass(frozen=True, order=True)
class Workload:
    """One kernel to be searched for, built, stored and called.

    Static (part of the identity): operator, dtype, GQA group size, head dims. Dynamic (symbolic in the module):
    batch, tokens, slots, strides, number of KV heads, lengths and the value of every option.

    Attributes:
        operator: one of OPERATORS.
        dtype: of q, k, v and out: "bf16", "fp16" or "f32"; accumulation and state are always f32.
        group: query heads per KV head (paged operators), None = symbolic.
        head_dim_qk: D of q and k, None = symbolic (the general module) or not part of the operator.
        head_dim_vo: D of v and out, None likewise.
        kv_dtype: of the KV pool where it is another than `dtype` (paged_decode, paged_extend, write_kv): "fp8_e4m3"
            with a scale for keys and one for values; None = dtype.
        tree: a mask among the new tokens (paged_extend): speculative verification of a tree of drafts.
    """

    operator: str
    dtype: str
    group: int | None = None
    head_dim_qk: int | None = None
    head_dim_vo: int | None = None
    kv_dtype: str | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise WorkloadError(f"operator: got {self.operator!r}, expected one of {', '.join(OPERATORS)}")
        if self.dtype not in DTYPES:
            raise WorkloadError(f"dtype: got {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        for field in ("group", "head_dim_qk", "head_dim_vo"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise WorkloadError(f"{field}: got {value!r}, expected a positive integer or None")
        dims = (self.head_dim_qk is None, self.head_dim_vo is None)
        if dims[0] != dims[1]:
            raise WorkloadError(
                "head_dim_qk and head_dim_vo: give both (a specialised kernel) or neither (the general one)"
            )
        if not self.operator.startswith("paged") and self.group is not None:
            raise WorkloadError(f"group: {self.operator} has none")
        if self.operator.startswith("paged") and (self.group is None) != dims[0]:
            raise WorkloadError("group and head dims: give all (a specialised kernel) or none (the general one)")
        if self.operator in ("merge", "write_kv") and not dims[0]:
            raise WorkloadError(f"head dims: {self.operator} takes every head dim, give none")
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise WorkloadError(f"kv_dtype: got {self.kv_dtype!r}, expected None or one of {', '.join(KV_DTYPES)}")
        if self.kv_dtype is not None and self.operator not in ("paged_decode", "paged_extend", "write_kv"):
            raise WorkloadError(f"kv_dtype: {self.operator} has no KV pool")
        if self.tree and self.operator != "paged_extend":
            raise WorkloadError(f"tree: {self.operator} has no mask among new tokens, paged_extend has")

    @property
    def general(self) -> bool:
        """Whether every size is symbolic: serves every call of its operator and dtype, untuned."""
        return self.head_dim_qk is None and self.operator not in ("merge", "write_kv")

    @property
    def name(self) -> str:
        """Readable and file-safe: "merge-f32", "paged_decode-bf16-g4-d128", "paged_extend-bf16-kvfp8-general-tree"."""
        parts = [self.operator, self.dtype]
        if self.kv_dtype is not None:
            parts.append(KV_DTYPES[self.kv_dtype])
        if self.general:
            parts.append("general")
        if self.group is not None:
            parts.append(f"g{self.group}")
        if self.head_dim_qk is not None:
            parts.append(
                f"d{self.head_dim_qk}" + ("" if self.head_dim_vo == self.head_dim_qk else f"v{self.head_dim_vo}")
            )
        if self.tree:
            parts.append("tree")
        return "-".join(parts)

    @property
    def key(self) -> str:
        """sha256 of the sorted JSON of the fields and the definition revision."""
        fields = asdict(self)
        # Younger than the first records: where they say nothing new, a workload keeps the key that it had.
        fields = {name: value for name, value in fields.items() if value or name not in ("kv_dtype", "tree")}
        text = json.dumps(fields | {"revision": DEFINITION_REVISION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @staticmethod
    def parse(name: str) -> Workload:
        """The workload whose `name` this is.

        Raises:
            WorkloadError: no workload has that name.
        """
        try:
            operator, dtype, *rest = name.split("-")
            group = qk = vo = kv_dtype = None
            kv_dtypes = {part: name for name, part in KV_DTYPES.items()}
            for part in rest:
                if part in kv_dtypes:
                    kv_dtype = kv_dtypes[part]
                elif part.startswith("g") and part != "general":
                    group = int(part[1:])
                elif part.startswith("d"):
                    first, _, second = part[1:].partition("v")
                    qk, vo = int(first), int(second or first)
            workload = Workload(operator, dtype, group, qk, vo, kv_dtype, "tree" in rest)
        except WorkloadError:
            raise
        except ValueError as error:
            raise WorkloadError(f"workload name: got {name!r}, expected e.g. 'paged_decode-bf16-g4-d128'") from error
        if workload.name != name:
            raise WorkloadError(f"workload name: got {name!r}, did you mean {workload.name!r}?")
        return workload
