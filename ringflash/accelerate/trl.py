"""TRL's fused head over a ring: values of every token of a batch, from which its trainers compute their losses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash import loss as token_loss
from ringflash.accelerate.rows import BatchRows
from ringflash.huggingface import CausalLMWithLoss
from ringflash.sequence.layout import unshard_sequence
from ringflash.sequence.padding import IGNORE_INDEX
from ringflash.sequence.trees import values_at

_OUTPUTS = {"log_probs", "entropy", "is_top1", "mean_logits"}


def put_on_ring_with_head(trainer: type, put: Callable[[Any], None]) -> None:
    """Put each model on the ring when TRL's trainer gives it a fused head, as it does to every model that scores.

    accelerate does not see all of these models: under FSDP and DeepSpeed TRL shards reference models by functions of
    its own, and it computes reference log-probabilities in advance with a model that is not prepared.

    Args:
        trainer: class of the trainer; the modules of its bases are changed, each once.
        put: puts a model on the ring if there is one.
    """
    for base in trainer.__mro__:
        module: Any = sys.modules[base.__module__]
        add = getattr(module, "add_fused_lm_head", None)
        if add is not None and not hasattr(add, "puts_on_ring"):
            module.add_fused_lm_head = _with_ring(add, put)


def _with_ring(add: Callable[..., None], put: Callable[[Any], None]) -> Callable[..., None]:
    """Return TRL's `add_fused_lm_head`, which then also puts the model on the ring."""

    @wraps(add)
    def add_fused_lm_head(model: Any, *args: Any, **options: Any) -> None:
        add(model, *args, **options)
        put(model)

    add_fused_lm_head.puts_on_ring = True  # type: ignore[attr-defined]
    return add_fused_lm_head


class FusedHead(NamedTuple):
    """Arguments that a trainer gave `trl.trainer.utils.add_fused_lm_head`."""

    temperature: float
    outputs: tuple[str, ...]
    cast_lm_head_to_fp32: bool


def fused_head_of(forward: Callable[..., Any]) -> FusedHead | None:
    """Return the head that TRL gave a model by replacing its forward; None if it did not.

    Raises:
        NotImplementedError: a value that a ring does not compute.
    """
    function: Any = getattr(forward, "__func__", forward)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    bound = {name: cell.cell_contents for name, cell in cells if name in FusedHead._fields}
    if set(bound) != set(FusedHead._fields):
        return None
    head = FusedHead(**bound)
    if unknown := set(head.outputs) - _OUTPUTS:
        raise NotImplementedError(
            f"outputs must be some of {sorted(_OUTPUTS)}, got {sorted(unknown)}; leave use_weighting out."
        )
    return head


def count_groups_of_rings(args: Any, cp_size: int) -> None:
    """Count rings, not ranks, in the batches for which GRPO and RLOO generate completions.

    TRL would otherwise draw prompts for every rank of a ring, and train on one in cp_size of them. It gathers rewards
    of all ranks, each completion cp_size times, so that only groups that are whole on a rank have the right mean.

    Args:
        args: of TRL's trainer; generation_batch_size is set.
    Raises:
        ValueError: groups of num_generations that batches of a ring divide.
        NotImplementedError: rewards scaled by their deviation over all groups; a quantile of the entropies of all.
    """
    per_rank = args.per_device_train_batch_size * args.steps_per_generation
    in_eval = args.num_generations_eval or args.num_generations
    for name, got, group in (
        ("per_device_train_batch_size * steps_per_generation", per_rank, args.num_generations),
        ("per_device_eval_batch_size", args.per_device_eval_batch_size if args.do_eval else 0, in_eval),
    ):
        if got % group:
            raise ValueError(
                f"{name} must be a multiple of the {group} generations of a prompt, which a ring holds together, got "
                f"{got}; change one of them."
            )
    over_all = {
        "scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum", "normalize_advantages": True,
    }  # fmt: skip
    for name, value in over_all.items():
        if getattr(args, name, None) == value:
            raise NotImplementedError(
                f"{name} must not be {value!r} with cp_backend='ringflash': TRL would count each completion once for "
                "every rank of a ring. Scale rewards within groups."
            )
    if (quantile := getattr(args, "top_entropy_quantile", 1.0)) < 1:
        raise NotImplementedError(
            f"top_entropy_quantile must be 1 with cp_backend='ringflash', got {quantile}: TRL takes the quantile over "
            "all ranks, and would count each token once for every rank of a ring; leave it out."
        )
    args.generation_batch_size = per_rank * (args.world_size // cp_size)


def share_rollouts(trainer: Any, group: dist.ProcessGroup) -> None:
    """Give all ranks of a ring the completions, the shuffling and the rewards of its first rank.

    TRL seeds each rank otherwise. A judge that samples gives each rank other rewards: the ring would then train on the
    mean of its ranks' advantages.

    Args:
        trainer: of TRL, for GRPO or RLOO.
    """
    generate, calculate, first = trainer._generate, trainer._calculate_rewards, dist.get_global_rank(group, 0)

    def _generate(prompts: list[Any]) -> Any:
        made = [generate(prompts), torch.get_rng_state()]  # TRL shuffles next
        dist.broadcast_object_list(made, first, group)
        torch.set_rng_state(made[1])
        return made[0]

    def _calculate_rewards(*args: Any) -> Tensor:
        of_ranks = calculate(*args).unflatten(0, (trainer.accelerator.num_processes, -1))
        return of_ranks[:: group.size()].repeat_interleave(group.size(), 0).flatten(0, 1)

    trainer._generate, trainer._calculate_rewards = _generate, _calculate_rewards


def score_batch(
    head: FusedHead,
    with_loss: CausalLMWithLoss,
    shard: dict[str, Any],
    rows: BatchRows,
    labels: Tensor,
    group: dist.ProcessGroup,
) -> Any:
    """Return TRL's output of a model with a fused head, whole on every rank.

    Each rank's gradient is cp_size times its share, if every rank computes the same loss from the output.

    Args:
        shard: of `rows`, as `prepare_batch` returns it.
        labels: (batch, seqlen), shifted.
    Returns:
        output: FusedCausalLMOutput; per-token values as labels.
    """
    from trl.trainer.utils import FusedCausalLMOutput

    mine, _ = shard.pop("shift_labels"), shard.pop("num_items_in_batch")
    hidden, weight, balance = with_loss.decode(**shard)
    if head.cast_lm_head_to_fp32:
        hidden, weight = hidden.float(), weight.float()
    scale, indices, places = with_loss.logit_scale / head.temperature, rows.indices, rows.places

    def whole(values: Tensor) -> Tensor:
        values = unshard_sequence(values, group, 1)
        if places is not None:
            values = values_at(values, places)
        values = values.flatten(0, 0 if indices is None else 1)
        if indices is None:
            return values[:, : labels.shape[1]]
        return values.new_zeros(labels.numel()).index_copy(0, indices, values[: len(indices)]).view_as(labels)

    autocast = torch.is_autocast_enabled(hidden.device.type) and not head.cast_lm_head_to_fp32
    with torch.autocast(hidden.device.type, enabled=autocast):
        log_probs, entropy = token_loss.token_log_probs(hidden, weight, mine, logit_scale=scale)
        scores = {"log_probs": whole(log_probs)}
        if "entropy" in head.outputs:
            scores["entropy"] = whole(entropy)
        if "is_top1" in head.outputs:
            scores["is_top1"] = whole(token_loss.score_tokens(hidden, weight, mine, logit_scale=scale)[1].long()).bool()
        if "mean_logits" in head.outputs:
            with torch.no_grad():
                means = (hidden @ weight.mean(0)).to(log_probs.dtype) * scale
                scores["mean_logits"] = whole(means.masked_fill(mine == IGNORE_INDEX, 0.0))
    mask = labels != IGNORE_INDEX
    loss = -scores["log_probs"].sum() / mask.sum().clamp(min=1)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=balance, **scores)
