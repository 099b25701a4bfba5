"""A causal language model whose forward returns its loss, so that the logits of all tokens never exist together."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import loss as token_loss
from ringflash.comm.group import Group, resolve
from ringflash.huggingface.head_checks import find_bypassed_error, find_loss_error
from ringflash.huggingface.head_probe import check_head, weight_of
from ringflash.huggingface.options import inputs_of
from ringflash.huggingface.rank_errors import raise_together
from ringflash.huggingface.router_loss import has_router_loss, router_coefficient_of, router_logits_of, router_loss
from ringflash.huggingface.validation import check_adapters, without_peft


class CausalLMWithLoss(nn.Module):
    """A causal language model whose forward returns `ringflash.loss.cross_entropy`, computed chunk by chunk.

    With `output_router_logits` in its configuration, a model of experts adds router_aux_loss_coef * the balancing loss
    of the whole sequence. That loss is added in full to each call's loss, and covers all tokens, also those without
    labels; padding is left out if `prepare_batch` was given an attention_mask.

    Shard this module, not the model in it, with FSDP2: the output embedding is then gathered where it is read.

    Args:
        model: a transformers model with .model and .lm_head, such as LlamaForCausalLM; also with PEFT's adapters in it,
            or in its PeftModel, but none on .lm_head (`modules_to_save` may name it).
        group: as given to `set_group`.
        chunk_tokens: as for `cross_entropy`.
    Attributes:
        router_loss: the balancing loss of the last forward, without its coefficient and gradient; its mean over the
            ranks is that of the sequence.
    Raises:
        NotImplementedError: logits other than hidden @ lm_head.weight.T times a number; a balancing loss of another
            form than transformers'; PEFT adapters that do more than change layers.
    """

    router_loss: Tensor | None = None

    def __init__(self, model: nn.Module, group: Group, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        causal = without_peft(model)
        self.logit_scale = check_head(causal)
        self.model, self.group, self.chunk_tokens = model, resolve(group), chunk_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # a process group cannot be copied
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Call the model's method of this name, for Trainer with TrainingArguments(gradient_checkpointing=True)."""
        self.model.gradient_checkpointing_enable(**options)  # type: ignore[operator]

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Call the model's method of this name, which Trainer calls from transformers 5.23 on."""
        self.model.activation_checkpointing_enable(**options)  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        *,
        per_token: bool = False,
        temperature: float | None = None,
        **batch: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return this rank's scalar loss; arguments as `prepare_batch` returns them.

        Args:
            per_token: return `ringflash.loss.score_tokens` instead.
            temperature: return `ringflash.loss.token_log_probs` of logits / temperature instead.
            batch: as `decode`.
        """
        self._check_bypassed(loss=temperature is None and not per_token)
        hidden, weight, balance = self.decode(input_ids, position_ids, **batch)
        if temperature is not None:
            return token_loss.token_log_probs(
                hidden, weight, shift_labels, chunk_tokens=self.chunk_tokens,
                logit_scale=self.logit_scale / temperature,
            )  # fmt: skip
        if per_token:
            return token_loss.score_tokens(
                hidden, weight, shift_labels, chunk_tokens=self.chunk_tokens, logit_scale=self.logit_scale
            )
        loss = token_loss.cross_entropy(
            hidden, weight, shift_labels, group=self.group, num_tokens=num_items_in_batch,
            chunk_tokens=self.chunk_tokens, logit_scale=self.logit_scale,
        )  # fmt: skip
        return loss if balance is None else loss + self.router_coefficient * balance

    def decode(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        use_cache: bool = False,
        checksum: Tensor | None = None,
        is_token: Tensor | None = None,
        length: int | None = None,
        columns: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return this rank's hidden states, the output embedding, and the balancing loss of experts if there is one.

        Args: as `prepare_batch` returns them, and
            length: length of the sequence without the layout's padding, for rotations that depend on it.
            columns: (1, seqlen_local), the positions that layers would count in the user's batch (Llama 4).
            inputs_embeds: (batch, seqlen_local, hidden_size), shard of the embeddings; input_ids must then be None.
        """
        causal: Any = without_peft(self.model)
        inputs, rest = self._checked_inputs(causal, position_ids.device), {}
        if inputs is not None:
            inputs.next_length, inputs.next_model = length, causal
            rest = {"columns": columns} if inputs.counts_positions else {}
        types = {"token_type_ids": token_type_ids, "mm_token_type_ids": mm_token_type_ids}
        rest |= {name: x for name, x in (types | {"inputs_embeds": inputs_embeds}).items() if x is not None}
        outputs = causal.model(
            input_ids=input_ids, use_cache=use_cache, position_ids=position_ids, cu_seqlens=cu_seqlens,
            checksum=checksum, is_token=is_token, **rest,
        )  # fmt: skip
        balance = None
        if has_router_loss(causal):
            logits = router_logits_of(causal, outputs)
            balance = router_loss(logits, causal.num_experts, causal.num_experts_per_tok, self.group, is_token)
            self.router_loss = balance.detach()
        if (unshard := getattr(causal.lm_head, "unshard", None)) is not None:
            unshard()  # a unit of FSDP2, which gathers it in its forward, and that never runs
        return outputs.last_hidden_state, weight_of(causal.lm_head), balance

    @property
    def router_coefficient(self) -> float:
        """Coefficient of the balancing loss of experts."""
        return router_coefficient_of(without_peft(self.model))

    @torch.compiler.disable(reason="hooks are listed")
    def _check_bypassed(self, loss: bool) -> None:
        """Note an error (without a ring, raise it) for what a forward of the model would call and this one does not.

        Args:
            loss: the loss is computed here, and not by the caller.
        """
        causal = without_peft(self.model)
        inputs = _forward_inputs_of(causal)
        if inputs is not None and inputs.takes_whole_batches:  # inside the model's own forward
            return
        error = find_bypassed_error(causal)
        if error is None and loss:
            error = find_loss_error(causal)
        if inputs is not None and inputs.options.group is not None:
            inputs.note("bypassed", error)
        elif error is not None:
            raise error

    @torch.compiler.disable(reason="groups and a number that was measured are compared")
    def _checked_inputs(self, causal: nn.Module, device: torch.device) -> Any:
        """Return the notes that `set_group` made for the model or its decoder; None if it was not called.

        An error is noted there, for the first layer to raise on every rank. A model without a ring raises it here.
        """
        inputs = _forward_inputs_of(causal)
        ring, error = None if inputs is None else inputs.options.group, None
        try:
            check_adapters(self)  # some may have been added since, also around this module
            self._check_head_unchanged(causal)
            self._check_group(ring)
        except (ValueError, NotImplementedError) as found:
            error = found
        if inputs is not None and ring is not None:
            inputs.note("loss", error)
        elif error is not None:
            raise_together(self.group, error, device)
        return inputs

    def _check_head_unchanged(self, causal: nn.Module) -> None:
        """Reject a configuration that was edited after this module was made."""
        if (scale := check_head(causal)) != self.logit_scale:
            raise NotImplementedError(
                f"the scale of the logits must stay {self.logit_scale:g}, got {scale:g} from a configuration that was "
                "edited since; make the CausalLMWithLoss after the edit."
            )

    def _check_group(self, ring: dist.ProcessGroup | None) -> None:
        """Reject a loss over another group than the attention's, which would have another scale, or be the shard's."""
        ranks = [[] if x is None else dist.get_process_group_ranks(x) for x in (ring, self.group)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"group must be the one that set_group gave the model, {_name(ranks[0])}, got {_name(ranks[1])}; call "
                "set_group and CausalLMWithLoss with one group."
            )


def _forward_inputs_of(causal: nn.Module) -> Any:
    return next((x for m in causal.modules() if (x := inputs_of(m)) is not None), None)


def _name(ranks: list[int]) -> str:
    return f"ranks {ranks}" if ranks else "none"
