"""A problem for the tests of the search on a GPU: nothing is built, and three points go wrong as kernels can there.

A module of its own, because the workers import it.
"""

import math
from dataclasses import dataclass

from tilewright.schedules.spaces import Space

GOOD, WRONG, OUT_OF_BOUNDS, HANGS = range(4)
FAILURES = {"wrong result": 1, "failed": 1, "timed out": 1}


@dataclass(frozen=True)
class GpuToy:
    target: str
    key: str = "1" * 64
    name: str = "gpu-toy"
    description: str = "a product, several times over"

    def fingerprint(self):
        return "1"

    def space(self):
        return Space(
            choices={"times": (9, 6, 3), "fault": (GOOD, WRONG, OUT_OF_BOUNDS, HANGS)},
            default={"times": 9, "fault": GOOD},
            legal=lambda n: n["fault"] == GOOD or n["times"] == 6,
            module=lambda n: None,
            plan=dict,
        )

    def measured(self, shared):
        return GpuToyCase(0)

    def verified(self, shared):
        return [GpuToyCase(1)]


class GpuToyCase:
    device = "cuda"
    flops, bytes = 2.0 * 2048**3, 6.0 * 2048**2

    def __init__(self, seed):
        import torch

        draw = torch.Generator("cuda").manual_seed(seed)
        self.a, self.b = (
            torch.randn((2048, 2048), generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.c = torch.empty_like(self.a)
        self.far = torch.full((1,), 1 << 20, device="cuda")
        self.expected = (self.a @ self.b).double()

    def bind(self, root, plan):
        import torch

        def call():
            for _ in range(plan["times"]):
                torch.matmul(self.a, self.b, out=self.c)
            if plan["fault"] == WRONG:
                self.c.zero_()
            if plan["fault"] == OUT_OF_BOUNDS:
                self.c.view(-1)[: 1 << 10].index_select(0, self.far)
            if plan["fault"] == HANGS:
                torch.cuda._sleep(1 << 50)

        return call

    def poison(self):
        self.c.fill_(math.nan)

    def error(self):
        return float((self.c - self.expected).abs().max()) / 1e-3
