"""The DeepSpeed engine of one rank: how it is set up, and the few operations that an update is made of.

Invariants
- The gradient that an optimizer step applies is the sum over all ranks and micro-batches of what was passed to
  `backward`. DeepSpeed averages over ranks; `backward` multiplies by their number, which cancels that exactly.
- Masters, accumulation and reductions are float32 whatever the compute dtype. DeepSpeed's defaults are the model's
  dtype for accumulation and bfloat16 for reductions, so both are set.
- A step whose gradient norm is not finite is not applied, at any stage.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf.config.schema import Config
from rlhf.models.batch import PaddedBatch
from rlhf.models.load import load_causal_lm
from rlhf.models.policy import PolicyModel

# Elements, not bytes. DeepSpeed allocates a buffer of this size, and its default of 5e8 is 2 GB in float32.
REDUCE_BUCKET_ELEMENTS = 50_000_000
# Stage 3 keeps smaller parameters whole on every rank. 10,000 covers norms and biases and leaves every matrix sharded.
PERSISTENT_ELEMENTS = 10_000


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The DeepSpeed configuration of a policy learner.

    The accumulation count is 1 and stays unused: micro-batches vary in number from step to step, so the boundary is
    set by hand. Batch sizes are required keys without an effect here.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.policy.max_grad_norm,
        # Without the overflow check, stages 1 and 2 apply a NaN gradient in bfloat16.
        "bf16": {"enabled": config.model.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.policy.zero_stage,
            "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def join_process_group(
    rank: int, world_size: int, master: tuple[str, int], device: Literal["cpu", "cuda"], deadline_s: float
) -> None:
    """Join the ranks' process group, gloo or NCCL, whose every operation has the deadline; once a process.

    torch.distributed comes first and DeepSpeed adopts it: DeepSpeed's own call binds the group to a device, which
    makes a second NCCL group hang.
    """
    os.environ["DS_ACCELERATOR"] = device
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", 0)):
        os.environ[name] = str(value)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = master[0], str(master[1])
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logger.setLevel("WARNING")
    # DeepSpeed calls collectives by names that torch has deprecated; nothing a user could do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if device == "cpu":
        # DeepSpeed asks this table which of its C++ operators can be built and would spend a minute of g++ on a
        # shared-memory all-reduce. None of them is needed here, so the answer is none.
        deepspeed.ops.__compatible_ops__ = {}
    timeout = timedelta(seconds=deadline_s)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"tcp://{master[0]}:{master[1]}",
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)


class ZeroEngine:
    """A policy model under DeepSpeed ZeRO. All methods are collective: every rank calls them in the same order."""

    def __init__(self, config: Config, world_size: int, device: torch.device) -> None:
        import deepspeed

        self._world_size = world_size
        self._temperature = config.rollout.sampling.temperature
        self.stage = config.policy.zero_stage
        self.device = device
        settings = deepspeed_config(config)
        # from_pretrained finds this object and loads straight into shards; it has to live until the load is done.
        partitioned = None
        if self.stage == 3:
            from transformers.integrations import HfDeepSpeedConfig

            partitioned = HfDeepSpeedConfig(settings)
        self.module = load_causal_lm(config.model.path, config.model.dtype)
        del partitioned
        model = PolicyModel(self.module)
        if self.stage == 3:
            for parameter in model.head.borrowed:
                deepspeed.zero.register_external_parameter(model.head, parameter)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.policy.learning_rate,
            weight_decay=config.policy.weight_decay,
            fused=True,
        )
        self.deepspeed, *_ = deepspeed.initialize(
            model=model, optimizer=self._optimizer, config=settings, dist_init_required=False
        )

    def forward(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N] of the response tokens at the sampling temperature."""
        return self.deepspeed(batch, self._temperature)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; `last` says that the optimizer step's micro-batches end here."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self._world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Apply the accumulated gradient, scaled down to the maximal norm, and return its global norm before that.

        A norm that is not finite is the same on every rank and means that nothing was applied.
        """
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

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters under their names in the checkpoint; each once, so without a tied output head."""
        return list(self.module.named_parameters())

    def tied_head(self) -> tuple[str, nn.Parameter] | None:
        """Name and parameter of an output head that is the embedding's tensor, or None."""
        names = dict(self.module.named_parameters(remove_duplicate=False))
        unique = dict(self.named_parameters())
        return next(((name, parameter) for name, parameter in names.items() if name not in unique), None)

    def gather(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within the block the parameters are whole on every rank: a collective at stage 3, nothing elsewhere."""
        if self.stage != 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=None)  # type: ignore[no-any-return]
