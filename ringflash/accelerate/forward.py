"""A causal language model's forward on whole batches, which are equal on all ranks of a group."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from inspect import signature
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringflash import huggingface
from ringflash import loss as token_loss
from ringflash.accelerate.rows import BatchRows, TokenTypes, read_rows, share_rows, shift_rows
from ringflash.accelerate.trl import FusedHead, fused_head_of, score_batch
from ringflash.comm.agreement import raising_together
from ringflash.huggingface.head_checks import find_loss_error, forward_of_object
from ringflash.huggingface.options import NAME, inputs_of
from ringflash.huggingface.spans import number_spans
from ringflash.huggingface.validation import find_noise_error, without_peft
from ringflash.sequence.layout import shard_sequence
from ringflash.sequence.padding import IGNORE_INDEX, pad_sequence

# The loss of each forward since the last backward, at most two: `compare_loss` compares the only one.
_losses: deque[Tensor] = deque(maxlen=2)

_READ = {"attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch", "cu_seq_lens_q"}
_TYPES = {"token_type_ids", "mm_token_type_ids"}
_BOUNDS = {"cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}  # repeat position_ids or cu_seq_lens_q
_REDUNDANT = {*_BOUNDS, "use_cache", "return_dict"}  # arguments that repeat others, or on which no loss depends


def put_on_ring(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace the forward of a transformers model, also in PEFT's wrapper, by a `RingForward`. May be called again.

    Raises:
        ValueError, NotImplementedError: as `ringflash.huggingface.set_group` and `CausalLMWithLoss`.
        RuntimeError: the model is on the ring of another group.
    """
    causal: Any = without_peft(model)
    if (ring := _ring_within(vars(causal).get("forward"))) is not None:
        if ring.group is not group:
            raise RuntimeError("model must be prepared for one group of ranks, got a second group; make a new model.")
        causal.forward = ring
        return
    own = forward_of_object(causal)
    head = None if own is None else fused_head_of(own)
    if own is not None and head is None:
        raise NotImplementedError(
            f"forward must be the method of {type(causal).__name__}, got a function that was set on the object, which "
            "the ring's forward would replace; remove it, or compute the loss from ringflash.log_probs."
        )
    huggingface.register()
    if hasattr(causal, "set_attn_implementation"):
        causal.set_attn_implementation(NAME)
    huggingface.set_group(causal, group)
    huggingface.CausalLMWithLoss(causal, group)  # checks the head
    inputs_of(causal).takes_whole_batches = True
    causal.forward = RingForward(causal, group, head)


def _ring_within(forward: Any) -> RingForward | None:
    """Return the `RingForward` inside the wrappers that accelerate adds at each preparation for mixed precision."""
    while forward is not None and not isinstance(forward, RingForward):
        forward = getattr(forward, "__wrapped__", getattr(forward, "__func__", None))
    return forward


class RingForward:
    """Forward of one model: cut the batch, run this rank's shard, and return the loss of the whole batch.

    Every rank returns the loss of one process. Each rank's gradient is cp_size times its share. A backend that averages
    gradients over all ranks turns them into the gradient of one process.

    Attributes:
        min_shared: least tokens of a common beginning that is computed once for TRL's trainers; 0 for none.
        __signature__: signature of the model's own forward; Trainer chooses the columns of a data set by it.
    """

    min_shared = 0

    def __init__(self, causal: nn.Module, group: dist.ProcessGroup, fused_head: FusedHead | None = None) -> None:
        self._model, self.group = ref(causal), group  # a reference cycle would keep the model's memory
        self._fused_head = fused_head
        self.__signature__ = signature(causal.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> RingForward:
        copied: Any = deepcopy(self._model(), memo)
        return RingForward(copied, self.group, self._fused_head)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`, also as the method that accelerate's unwrap_model(keep_fp32_wrapper=False) makes of this."""
        return self.forward(*args[bool(args) and args[0] is self._model() :], **kwargs)

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """Return a ModelOutput with the loss only: logits of a whole sequence never exist together.

        Args:
            input_ids: (batch, seqlen), int64.
            kwargs: attention_mask, position_ids and cu_seq_lens_q: as `read_rows` takes them.
                labels: (batch, seqlen), not shifted, as in transformers; or shift_labels, shifted.
                token_type_ids, mm_token_type_ids: types of the tokens, for a model that makes spans of them.
                num_items_in_batch: divisor of the sum of the tokens' losses, default the number of labelled tokens.
                fused_lm_head: return `score_batch` for TRL's trainers, whose prompts may be padded on the left.
        Raises:
            ValueError, NotImplementedError: on every rank of the group.
        """
        causal: Any = self._model()
        if inputs_of(causal).options.group is None:  # inside generate
            return type(causal).forward(causal, input_ids, **kwargs)
        if "checksum" in kwargs:  # a shard of prepare_batch
            return huggingface.CausalLMWithLoss(causal, self.group)(input_ids=input_ids, **kwargs)
        fused = kwargs.pop("fused_lm_head", False)
        rows = self._agree_on_rows(causal, input_ids, kwargs, fused)
        with_loss = huggingface.CausalLMWithLoss(causal, self.group)
        if fused:
            return self._score(with_loss, rows, **kwargs)
        loss = self._loss(with_loss, rows, kwargs.get("num_items_in_batch"))
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast(loss=loss) if kwargs.get("return_dict", True) is not False else (loss,)

    @torch.compiler.disable(reason="ranks compare their batches, and cut them by the values")
    def _agree_on_rows(self, causal: Any, input_ids: Tensor | None, kwargs: dict[str, Any], fused: bool) -> BatchRows:
        """Read the batch, and raise on every rank of the ring if it is refused or has another shape on some rank.

        Args:
            fused: the batch is for TRL's fused head, which computes log-probabilities.
        """
        content: dict[str, object] = {}
        remedy = "give a ring's ranks the same batches (docs/accelerate.md)"
        with raising_together(self.group, content, causal.device, remedy=remedy):
            if fused and self._fused_head is None:
                raise NotImplementedError(
                    "model must have TRL's fused head to take fused_lm_head, got a model without it; let TRL's trainer "
                    "prepare the model."
                )
            rows = _read(causal, input_ids, kwargs, fused)
            if fused and self.min_shared:
                if getattr(causal.config, "output_router_logits", False):
                    raise NotImplementedError(
                        "output_router_logits must be False with share_prefixes, got True: the balancing loss would "
                        "count shared tokens once; leave share_prefixes out."
                    )
                if inputs_of(causal).counts_positions:
                    raise NotImplementedError(
                        f"share_prefixes must be False for {type(causal).__name__}, got True: its layers count "
                        "positions themselves (Llama 4), and would count those of the packed row; leave it out."
                    )
                rows = share_rows(rows, self.min_shared)
            content["batch of accelerate"] = [*rows.input_ids.shape]
        return rows

    def _loss(self, with_loss: huggingface.CausalLMWithLoss, rows: BatchRows, num_items: Tensor | int | None) -> Tensor:
        """Return the loss of the whole batch, the same on every rank; NaN without a label, as transformers' is.

        Args:
            num_items: divisor of the summed losses (Trainer's `num_items_in_batch`); None for the labels of this batch.
        """
        batch = shard_rows(rows, self.group)
        labels, count = batch.pop("shift_labels"), batch.pop("num_items_in_batch")
        hidden, weight, balance = with_loss.decode(**batch)
        loss = token_loss.cross_entropy(
            hidden, weight, labels, group=self.group, num_tokens=count, logit_scale=with_loss.logit_scale
        )
        if num_items is None:
            empty = (rows.labels == IGNORE_INDEX).all()
        else:
            divisor = torch.as_tensor(num_items, device=loss.device)
            empty = divisor == 0
            loss = loss * count / divisor.masked_fill(empty, 1)  # in the loss's dtype
        loss = loss.masked_fill(empty, math.nan)  # NaN as transformers' loss is, with gradients of 0
        if balance is not None:
            loss = loss + with_loss.router_coefficient * balance
        loss = _mean_of_ranks(loss, self.group)
        if torch.is_grad_enabled():
            _note(loss)
        return loss

    def _score(
        self,
        with_loss: huggingface.CausalLMWithLoss,
        rows: BatchRows,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Return TRL's output of a batch: per-token values of the whole rows, on every rank."""
        assert self._fused_head is not None
        shifted = shift_labels if labels is None else shift_rows(labels)
        assert shifted is not None
        output = score_batch(self._fused_head, with_loss, shard_rows(rows, self.group), rows, shifted, self.group)
        if "aux_loss" in output:
            output["aux_loss"] = _mean_of_ranks(output.aux_loss, self.group)
        if shift_labels is None:  # TRL leaves out the last token, which has no label
            for name in output.keys() - {"loss", "aux_loss"}:
                output[name] = output[name][:, :-1]
        return output


@torch.compiler.disable(reason="kept for the backward")
def _note(loss: Tensor) -> None:
    _losses.append(loss.detach().clone())  # a trainer may change it in place


def compare_loss(loss: Tensor, num_processes: int, cp_size: int) -> bool:
    """Compare the loss that a trainer returns with its forward's, which it must multiply by the number of rings.

    Returns:
        compared: False if the loss cannot be compared, because there were several forwards or it is not finite.
    Raises:
        ValueError: it has been multiplied by the number of processes; on every rank.
    """
    of_forward = [*_losses]
    _losses.clear()
    if len(of_forward) != 1:
        return False
    factor = (loss.detach() / of_forward[0]).item()
    if abs(factor - num_processes) <= 4 * torch.finfo(loss.dtype).eps * num_processes:
        raise ValueError(
            f"compute_loss must multiply the loss of the forward by the number of rings ({num_processes // cp_size}), "
            f"as Trainer.compute_loss does, got the loss times the number of processes ({num_processes}), which makes "
            f"loss and gradients {cp_size} times too large; call super().compute_loss, or divide by cp_size."
        )
    return math.isfinite(factor)


def _read(causal: Any, input_ids: Tensor | None, kwargs: dict[str, Any], left_padding: bool) -> BatchRows:
    """Return the rows of a batch.

    Raises:
        ValueError: as `read_rows`.
        NotImplementedError: no labels; arguments that are not read; noise in the embeddings; another loss function.
    """
    given = {name: x for name, x in kwargs.items() if x is not None and x is not False}
    configured = bool(getattr(causal.config, "output_router_logits", False))
    asked = kwargs.get("output_router_logits")
    if asked is not None and bool(asked) != configured:
        raise NotImplementedError(
            f"output_router_logits must be {configured}, as in the model's configuration, got {asked}; change the "
            "configuration before the model is prepared, or, with TRL, pass router_aux_loss_coef=0."
        )
    given.pop("output_router_logits", None)
    unknown = sorted(set(given) - _READ - _REDUNDANT - _TYPES)
    if unknown:
        raise NotImplementedError(
            f"a batch must have only input_ids, labels, attention_mask, position_ids and token types, got also "
            f"{unknown}; leave them out."
        )
    if (bounds := _BOUNDS & set(given)) and not {"position_ids", "cu_seq_lens_q"} & set(given):
        raise NotImplementedError(
            f"documents must be given by position_ids that restart, or cu_seq_lens_q, got only {sorted(bounds)}; add "
            "position_ids."
        )
    if input_ids is None or "labels" not in given and "shift_labels" not in given:
        raise NotImplementedError(
            f"input_ids and labels must be given, got {sorted(given)}: on a ring a forward returns the loss, and "
            "logits of the sequence never exist together. Leave out label_smoothing_factor, compute_loss_func and "
            "compute_metrics; for log-probabilities see ringflash.log_probs, for answers generate."
        )
    if (error := find_noise_error(causal)) is not None:
        raise error
    if not left_padding:  # TRL computes its own losses
        if (error := find_loss_error(causal)) is not None:
            raise error
    labels = given["shift_labels"] if "shift_labels" in given else shift_rows(given["labels"])
    return read_rows(
        input_ids, labels, given.get("attention_mask"), given.get("position_ids"), given.get("cu_seq_lens_q"),
        left_padding, _read_types(causal, given),
    )  # fmt: skip


def _read_types(causal: Any, given: dict[str, Any]) -> TokenTypes | None:
    """Return the token types of a batch and the spans that they make; None if the batch has none."""
    names = sorted(_TYPES & set(given))
    if not names:
        return None
    if len(names) > 1:
        raise NotImplementedError(f"a batch must have one kind of token types, got {names}; leave one out.")
    (name,) = names
    values: Tensor = given[name]
    spans, of_both = number_spans(causal, name, values), number_spans(causal, name, values.new_tensor([[0, 1]]))
    if spans is None or of_both is None:  # they change nothing
        spans, of_both = torch.full_like(values, -1), values.new_tensor([[-1, -1]])
    return TokenTypes(name, values, spans, int(of_both[0, 0] >= 0))


@torch.compiler.disable(reason="the number of documents depends on the values")
def shard_rows(rows: BatchRows, group: dist.ProcessGroup) -> dict[str, Any]:
    """Pad a batch for the layout, and return this rank's shard for `CausalLMWithLoss.decode`, with its labels."""
    size = group.size()
    ids, labels, bounds, _ = pad_sequence(rows.input_ids, rows.labels, rows.cu_seqlens, cp_size=size)
    padded = ids.shape != rows.input_ids.shape
    mask = pad_sequence(torch.ones_like(rows.input_ids), cp_size=size).tokens if padded else None
    positions = "global" if bounds is None else "document"
    types: dict[str, Any] = {}
    if rows.types is not None:
        values = pad_sequence(rows.types.values, cp_size=size, pad_token_id=rows.types.text).tokens
        types = {rows.types.name: values}
    shard = huggingface.prepare_batch(
        ids, group=group, labels=labels, cu_seqlens=bounds, attention_mask=mask, position_ids=positions, **types
    )
    columns = None
    if rows.columns is not None:
        columns = shard_sequence(pad_sequence(rows.columns, cp_size=size).tokens, group)
    return {**shard, "length": rows.length, "columns": columns}


@torch.compiler.disable(reason="a process group is called")
def _mean_of_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean over the ranks, the same to the bit on each, with the gradient of this rank's own value."""
    mean = x.detach().clone()
    dist.all_reduce(mean, group=group)
    return (x - x.detach()) + mean / group.size()
