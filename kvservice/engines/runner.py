"""The forward pass of an engine: one ragged step of a model, with its K/V in the daemon."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kvservice.client import Session, Step
from kvservice.engines.compiled import Backend, CompiledLayers
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import forward, install, pool_options
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.training import refuse_training


class ModelRunner:
    """Runs the steps of a session on a causal language model of the library, which it installs.

    The step's tokens are concatenated in one row without padding, and the head computes only the logits that are asked
    for. Tensors stay on the model's device if the session's transport takes them there.

    Raises InvalidArgumentError for models that the integration does not support, and if the session's pool has another
    shape or dtype than the model; FailedPreconditionError for models in training mode.

    compiled: use compiled layers. To compile them takes about half a minute at the first step; `backend` is torch's. In
    float32 on the CPU, compiled layers use copies of the weights (see `blocked_linear`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kv: Session,
        *,
        compiled: bool = False,
        backend: str | Backend = "inductor",
    ) -> None:
        model = library_model(model)
        refuse_training(model, prompts=True)
        wanted = pool_options(model.config, model.dtype)
        found = {name: getattr(kv.info, name) for name in wanted}
        if found != wanted:
            raise InvalidArgumentError(f"needs a pool of {wanted}, but the daemon's is {found}", field="model")
        self.model = install(model)
        self.kv = kv
        self._compiled = CompiledLayers(model, backend) if compiled else None

    @torch.inference_mode()
    def run(self, step: Step, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute a step. Its K/V are in the daemon afterwards, and the step is committed.

        token_ids: int64 `[num_tokens]`, in the order of the step's sequences. rows: int64 `[m]`, indices into these
        tokens; m may be 0. Returns the logits of these tokens, `[m, vocabulary]`, in the model's dtype.

        Raises the errors of `kvservice.integrations.transformers.forward`.
        """
        with self._compiled.in_use() if self._compiled else nullcontext():
            return forward(self.model, step, token_ids, rows=rows)
