"""The search (docs/architecture.md): `tune.py` is the loop, `command.py` the command."""

import sys
import types

# MetaSchedule imports TVM's tensor intrinsics by name; parsing them takes minutes under load and none is used here.
sys.modules.setdefault("tvm.s_tir.tensor_intrin", types.ModuleType("tvm.s_tir.tensor_intrin"))
