"""The DeepSpeed engine of one rank: how it is set up, and the few operations that an update is made of.

Invariants
- The gradient that an optimizer step applies is the sum over all ranks and micro-batches of what `backward` computes
  there. DeepSpeed averages over ranks; `backward` multiplies by their number, which cancels that exactly. Ranks that
  share rows all pass the same loss, and each computes its own part of the gradient.
- Masters, accumulation and reductions are float32 whatever the compute dtype. DeepSpeed's defaults are the model's
  dtype for accumulation and bfloat16 for reductions, so both are set.
- A step whose gradient norm is not finite is not applied, at any stage.
- At stage 1 gradients are reduced once an optimizer step, after its last micro-batch. At 2 and 3, where no rank has
  room for all of them, they are reduced after each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.config.schema import LearnerConfig
from rlhf.learners import offload
from rlhf.learners.rate import matrix_rate
from rlhf.models.arrangement import Arrangement
from rlhf.models.distributed import GATHERING, register_borrowed
from rlhf.models.load import DTYPES
from rlhf.models.operations import Operations
from rlhf.models.sequence import SequenceGroup

# Elements, not bytes. DeepSpeed allocates a buffer of this size, and its default of 5e8 is 2 GB in float32.
REDUCE_BUCKET_ELEMENTS = 50_000_000


def deepspeed_config(learner: LearnerConfig, dtype: str, disk: Path | None = None) -> dict[str, Any]:
    """The DeepSpeed configuration of a learner that computes in `dtype`, with a folder for what is offloaded to disk.

    The accumulation count is 1 and stays unused: micro-batches vary in number from step to step, so the boundary is
    set by hand. Batch sizes are required keys without an effect here.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.max_grad_norm,
        # Without the overflow check, stages 1 and 2 apply a NaN gradient in bfloat16.
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            **offload.sections(learner, disk),
            "stage": learner.zero_stage,
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "overlap_comm": False,
            **GATHERING,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


class ZeroEngine:
    """A model under DeepSpeed ZeRO. All methods are collective: every rank calls them in the same order."""

    def __init__(
        self,
        learner: LearnerConfig,
        dtype: str,
        world_size: int,
        device: torch.device,
        build: Callable[[], nn.Module],
        sequence: SequenceGroup | None = None,
        disk: Path | None = None,
    ) -> None:
        """`build` loads the model; at stage 3 its `from_pretrained` loads straight into shards.

        With a `sequence` group the model gets this rank's pieces of the group's rows. `disk` is the folder for what is
        offloaded to it.
        """
        import deepspeed

        self._settings = learner
        self._dtype = DTYPES[dtype]
        self._world_size = world_size
        self.stage = learner.zero_stage
        self.device = device
        settings = deepspeed_config(learner, dtype, disk)
        # from_pretrained finds this object; it has to live until the load is done.
        partitioned = None
        if self.stage == 3:
            from transformers.integrations import HfDeepSpeedConfig

            partitioned = HfDeepSpeedConfig(settings)
        self.model: Any = build()
        del partitioned
        if self.stage == 3:
            register_borrowed(self.model)
        trained: list[Any] = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if disk is not None:
            offload.check_room(disk, sum(parameter.ds_tensor.ds_numel for parameter in trained))
        self._optimizer = torch.optim.AdamW(
            trained, lr=learner.learning_rate, weight_decay=learner.weight_decay, fused=True
        )
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.model, optimizer=self._optimizer, config=settings, dist_init_required=False
        )

        self.arrangement = Arrangement.of(self.model, sequence)
        self.operations = Operations.of(self.model)
        # Called before an optimizer step changes weights and optimizer state.
        self.before_change: Callable[[], None] = lambda: None

    @cached_property
    def matrix_rate(self) -> float:
        """FLOP/s of large matrix products on this rank, in the dtype that it computes in.

        Measured once, when it is first asked for: after an update and not at the start, when the engines start on the
        same cores. The ranks ask together, so that they share a machine as they do in an update.
        """
        return matrix_rate(self.device, self._dtype)

    def forward(self, *inputs: Any) -> Any:
        """The model's own forward pass."""
        return self.deepspeed(*inputs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; `last` says that the optimizer step's micro-batches end here."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self._world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Apply the accumulated gradient, scaled down to the maximal norm, and return its global norm before that.

        A norm that is not finite is the same on every rank and means that nothing was applied.
        """
        self.before_change()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self.deepspeed.step()
        return math.inf if self.deepspeed.optimizer.overflow else float(self.deepspeed.get_global_grad_norm())

    def discard_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        optimizer = self.deepspeed.optimizer
        optimizer.zero_grad()
        if self.stage < 3:
            # Stages 1 and 2 keep reduced gradients in tables that `zero_grad` leaves alone. Stage 3 has buffers that
            # `zero_grad` marks as to be overwritten.
            for table in ("averaged_gradients", "all_grad_tensors"):
                held = getattr(optimizer, table, {})
                held.update(dict.fromkeys(held))

    def apply_settings(self) -> None:
        """Set what a loaded checkpoint has brought its own values of back to the configuration's."""
        self.deepspeed.optimizer.clip_grad = self._settings.max_grad_norm
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._settings.weight_decay

    def own_step_counts(self) -> None:
        """Give each optimizer state its own step count, beside its parameter, as a fused optimizer needs it.

        DeepSpeed's conversion leaves them on the CPU, and several states with one tensor, which each would advance.
        """
        for parameter, state in self._optimizer.state.items():
            state["step"] = state["step"].clone().to(parameter.device)

    def gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank: a collective at stage 3, nothing elsewhere."""
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)  # type: ignore[no-any-return]
