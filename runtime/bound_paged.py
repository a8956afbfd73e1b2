"""Which kernels a planned call of paged attention starts, with which of its arguments: bound calls (bound_call.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tilewright.runtime.arguments import KV_DTYPE, dense_rows, gpu_rows
from tilewright.runtime.bound_call import Argument, Launch, Slot
from tilewright.runtime.dispatch import kernel
from tilewright.runtime.plan import Plan

if TYPE_CHECKING:
    from tilewright.runtime.paged_call import Call

# What a bound call takes, in this order; behind them the options as in run.
ARGUMENTS = (
    *("q", "k", "v", "k_buffer", "v_buffer", "out", "sinks", "key", "value", "loc"),
    *("req_to_token", "req_pool_indices", "seq_lens", "extend_seq_lens", "extend_start_loc", "kv_start", "kv_lens"),
)
_FLOATS = frozenset(ARGUMENTS[:9])


def bind(plan: Plan, call: Call, given: dict[str, Tensor | None], options: tuple[Any, ...], lse: Tensor) -> None:
    """Remember a call that has just run as a bound one of the plan, where the kernels read the arguments as they are.

    Args:
        plan: of the call.
        call: outcome of its checks.
        given: its arguments by name, the output among them.
        options: its other arguments.
        lse: scratch memory.
    """
    rows = gpu_rows if call.on_gpu else dense_rows
    read = ("q", "k", "v", "k_buffer", "v_buffer")
    used = [name for name in read if given[name] is not None and not (call.new_only and name.endswith("buffer"))]
    used += [name for name in ("key", "value") if given[name] is not None]
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if any(rows(tensors[name]) is not tensors[name] for name in used):
        return
    at = {name: Slot(number) for number, name in enumerate(ARGUMENTS)}
    work, device = call.work, tensors["q"].device
    sinks: Slot | Tensor = at["sinks"] if "sinks" in tensors else call.no_sinks
    fp8 = call.no_new is not None
    scales = options[-2:] if fp8 else ()
    keys: list[Slot | Tensor] = [at["k"], at["v"]] if call.new_only else [at["k_buffer"], at["v_buffer"]]
    if "extend_seq_lens" in tensors:
        keys += [at["k"], at["v"]] if "k" in tensors else call.no_new or keys
    attend = Launch(
        call.attend.run,
        (
            at["q"], *keys, at["req_to_token"], at["req_pool_indices"],
            at["kv_start"] if "kv_start" in tensors else plan.zeros, work.items, sinks, at["out"], lse, work.part_o,
            work.part_lse, call.scale_log2, call.cap_log2, call.scale_over_cap, call.window, call.lookahead,
            *scales,
        ),
        work.tasks,
    )  # fmt: skip
    launches, together = [attend], []
    apart = [("out", name) for name in used if "extend_seq_lens" in tensors or name == "q"]
    if "key" in tensors:
        write = kernel("write_kv", call.dtype, None, None, None, device, KV_DTYPE if fp8 else None).run
        launches.insert(0, Launch(write, (at["key"], at["k_buffer"], at["loc"], *scales[:1])))
        apart += [("k_buffer", "key"), ("k_buffer", "value")]
        if tensors["k_buffer"].data_ptr() == tensors["v_buffer"].data_ptr():
            together.append(("k_buffer", "v_buffer"))
        else:
            launches.insert(1, Launch(write, (at["value"], at["v_buffer"], at["loc"], *scales[1:])))
            apart += [("v_buffer", "key"), ("v_buffer", "value"), ("v_buffer", "k_buffer")]
    if work.rows is not None:
        merge = kernel("merge", call.dtype, None, None, None, device).run
        launches.append(Launch(merge, (work.part_o, work.part_lse, work.rows, sinks, at["out"], lse)))
    alignment = {name: 16 for name in used} | {"out": 4} if call.on_gpu else {}
    bound = call.attend.bind(
        [
            Argument(given[name], name not in _FLOATS, fp8 and name.endswith("buffer"), alignment.get(name, 1))
            for name in ARGUMENTS
        ],
        options,
        [(at[a].number, at[b].number) for a, b in apart],
        [(at[a].number, at[b].number) for a, b in together],
        launches,
    )
    if bound is not None:
        plan.bound.append(bound)
