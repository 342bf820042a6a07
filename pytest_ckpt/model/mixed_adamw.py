"""AdamW for 16-bit weights, with a float32 master copy and float32 moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, overload

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw


class MixedAdamW(Optimizer):
    """AdamW that steps a float32 `master` of each weight and rounds the result into the weight.

    State of a parameter: `step` (0-dim float32, on the CPU), and `master`, `exp_avg` and `exp_avg_sq` in
    float32 with the parameter's shape and placement; sharded parameters (DTensor) have sharded state. A step
    adds float32 temporaries for one parameter at a time.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step for every parameter with a gradient; return what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["master"] = weight.detach().to(torch.float32, copy=True)
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                adamw(
                    [state["master"]],
                    [weight.grad.to(torch.float32)],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [state["step"]],
                    amsgrad=False,
                    beta1=beta1,
                    beta2=beta2,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                weight.copy_(state["master"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state; state tensors stay float32, and are adopted uncopied if possible."""
        # Optimizer.load_state_dict casts state to the type of the weight: that would round the master.
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        weights = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, weight in zip(saved, weights, strict=True):
            if key in state_dict["state"]:
                self.state[weight] = {
                    name: value if name == "step" else value.to(device=weight.device, dtype=torch.float32)
                    for name, value in state_dict["state"][key].items()
                }
