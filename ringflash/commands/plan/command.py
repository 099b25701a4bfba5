"""The command `ringflash plan`: will a training fit, how long is a step, and what can be changed?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from ringflash.comm.mesh import mesh_sizes
from ringflash.commands.console import console
from ringflash.commands.overlays import lay_over
from ringflash.commands.plan.job import GIB, GPUS, Machine, Rates, TrainingJob
from ringflash.commands.plan.memory import host_bytes, worst_moment
from ringflash.commands.plan.model_shape import ModelShape, model_of
from ringflash.commands.plan.ring import ring_of
from ringflash.commands.plan.search import CHANGES, cheapest_change, fastest_split, fewest_gpus, fits, longest_sequence
from ringflash.commands.plan.timing import step_time
from ringflash.huggingface.flops import FP8_PER_BF16, ChunkedAttention, count_visible_pairs, visible_pairs
from ringflash.huggingface.weights import merge_config, read_config
from ringflash.memory import Memory
from ringflash_kernels.api import IMPLS, check_backward, implementation, rounds

_UNITS = {"k": 1 << 10, "m": 1 << 20}
_RECIPE_KEYS = {  # keys that are also flags, as in training: key, help
    "model.memory.checkpointing": "what a layer keeps: none, attention_kept or full (docs/plan.md)",
    "model.memory.offload_checkpoints": "keep checkpoints on the host",
    "model.memory.mlp_tile_tokens": "tokens whose MLP is computed at a time, 0 is all",
    "model.memory.liger": "count Liger's kernels; auto counts them if the plan can",
    "model.impl": "hopper_fp8, hopper_fp8_scores and hopper_fp8_all are attention in FP8 (docs/fp8.md)",
    "model.float8": "recipe of torchao for linear layers in FP8",
    "trainer.precision": "bf16-mixed has weights in fp32, bf16-true in bf16",
    "trainer.accumulate_grad_batches": "sequences that a ring computes one after the other in a step",
}
MODEL_KEYS = {  # arguments of the recipes' CausalLM; those of the second line do not change a plan
    "model", "pretrained", "memory", "impl", "float8",
    "learning_rate", "warmup_steps", "decay_steps", "final_rate", "weight_decay", "betas", "seed",
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, the sequence, the machine, and the keys of a recipe."""
    words = "checkpoint directory or config.json; or a recipe (.yaml) and its overlays"
    parser.add_argument("files", type=Path, nargs="+", help=words)
    parser.add_argument("--seqlen", type=str, help="tokens of a sequence: 1048576, 1024k or 1m; null is the recipe's")
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs; null is as many as share a sequence in the recipe, else 8"
    )
    parser.add_argument("--gpus_per_host", type=int, default=8, help="GPUs of a host")
    parser.add_argument("--gpu", choices=list(GPUS), default="H200", help="kind of GPU")
    parser.add_argument("--cp", type=int, help="GPUs that share a sequence; null is the recipe's, else all")
    words = "fraction of the causal and windowed pairs that packed documents leave"
    parser.add_argument("--visible", type=float, default=1.0, help=words)
    for key, words in _RECIPE_KEYS.items():
        parser.add_argument(f"--{key}", type=Any, help=f"{words}; null is the recipe's")
    parser.add_class_arguments(Rates, "rates", help="assumptions, one by one or as a file; every plan prints them")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Print the plan and return 0 if the job fits, else 1."""
    flags = {name: options[name].as_dict() for name in ("model", "trainer")}
    recipe = lay_over(read_recipe(options.files), _without_none(flags))
    job, machine = _job_and_machine(recipe, options)
    plan = make_plan(job, machine)
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        _print(plan)
    return 0 if plan["fits"] else 1


def make_plan(job: TrainingJob, machine: Machine) -> dict[str, Any]:
    """Return everything that the command prints, in bytes, seconds and tokens."""
    time, ring, split = step_time(job, machine), ring_of(job, machine), fastest_split(job, machine)
    moment, memory = worst_moment(job, machine)
    plan: dict[str, Any] = {
        "job": asdict(job),
        "machine": asdict(machine),
        "transport": ring.transport,
        "network_bytes": job.model.num_layers * ring.network_bytes,
        "parameters": job.model.parameters,
        "memory_bytes": memory,
        "memory_at": moment,
        "host_memory_bytes": host_bytes(job, machine),
        "fits": fits(job, machine),
        "longest_sequence": longest_sequence(job, machine),
        "step_seconds": time.parts,
        "mfu": time.model_flops / (machine.gpu.peak_tflops * 1e12),
        "model_tflops_per_gpu": time.model_flops / 1e12,
        "tokens_per_second": job.seqlen * job.dp_size / time.step,
        "fastest_split": None,
    }
    if split is not None:
        speed = split.seqlen * split.dp_size / step_time(split, machine).step
        plan["fastest_split"] = {"cp": split.cp_size, "dp": split.dp_size, "tokens_per_second": speed}
    if not plan["fits"]:
        plan["remedy"] = _remedy(job, machine)
    return plan


def _remedy(job: TrainingJob, machine: Machine) -> dict[str, Any]:
    """Return what makes a job fit: the fewest GPUs without a change, and the cheapest change with its flags."""
    gpus = fewest_gpus(job, machine)
    remedy: dict[str, Any] = {"gpus": gpus, "cp": gpus and gpus // job.dp_size}
    cheapest = cheapest_change(job, machine)
    if cheapest is not None:
        names, changed = cheapest
        change = {key: value for name in names for key, value in CHANGES[name].items()}
        keys = {key.rpartition(".")[2]: key for key in _RECIPE_KEYS}
        flags = " ".join(f"--{keys[name]} {str(value).lower()}" for name, value in change.items())
        remedy |= {"changes": list(names), "seconds": step_time(changed, machine).step, "flags": flags}
        remedy["host_memory_bytes"] = host_bytes(changed, machine)
    return remedy


def read_recipe(paths: list[Path]) -> dict[str, Any]:
    """Return a recipe with others laid over it, or a recipe made of a configuration.

    Raises:
        ValueError: a file is no recipe and no configuration.
    """
    if paths[0].suffix not in (".yaml", ".yml"):
        if len(paths) > 1:
            raise ValueError(f"files must be one configuration or recipes, got {len(paths)} files; give one of them.")
        return {"model": {"model": read_config(paths[0]), "memory": {"checkpointing": "attention_kept"}}}
    recipe: dict[str, Any] = {}
    for path in paths:
        try:
            recipe = lay_over(recipe, dict(yaml.safe_load(path.read_text())))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ValueError(f"{path} must be a recipe, got {error}; see recipes/lightning.") from error
    return recipe


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given."""
    given = {key: value for key, value in tree.items() if value is not None}
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in given.items()}


def _job_and_machine(recipe: dict[str, Any], options: Namespace) -> tuple[TrainingJob, Machine]:
    """Read the job and the machine from a recipe and the options.

    Raises:
        ValueError: the recipe lacks a key that a plan needs, or options contradict it.
    """
    try:
        model, trainer = recipe["model"], recipe.get("trainer") or {}
        if unknown := set(model) - MODEL_KEYS:
            raise ValueError(
                f"keys of model must be of {sorted(MODEL_KEYS)}, got {sorted(unknown)}; correct them, or plan a "
                "config.json, if the recipe trains a module of yours."
            )
        pretrained, data = model.get("pretrained"), recipe.get("data") or {}
        config = merge_config(read_config(Path(pretrained)) if pretrained else {}, model.get("model") or {})
        if not config:
            raise ValueError(
                f"{options.files[0]} must have model.model or model.pretrained, got neither; name the recipe that it "
                "overlays first."
            )
        memory = asdict(Memory(**(model.get("memory") or {})))
        strategy, accumulated = trainer.get("strategy"), trainer.get("accumulate_grad_batches") or 1
        seqlen = data.get("init_args", data).get("seqlen")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{options.files[0]} must be a recipe with model.model and data, got {type(error).__name__}: {error}; "
            "see recipes/lightning."
        ) from error
    arguments = _arguments_of(strategy)
    if (seqlen := _tokens(options.seqlen) if options.seqlen else seqlen) is None:
        raise ValueError("--seqlen must be given with a configuration, got none; a recipe has its own.")
    gpus, dp_size, cp_size = _sizes(arguments, options)
    shape, windows = model_of(config)
    impl: str = model.get("impl") or "auto"
    _check_impl(impl, shape)
    # "auto" is planned as if Liger were installed
    memory["liger"] = shape.liger is not None if memory["liger"] == "auto" else memory["liger"]
    job = TrainingJob(
        model=shape, seqlen=seqlen, cp_size=cp_size, dp_size=dp_size, impl=impl, float8=model.get("float8"),
        precision=trainer.get("precision") or "bf16-mixed", accumulates=accumulated > 1, **memory,
    )  # fmt: skip
    job = replace(job, visible_fraction=options.visible * visible_fraction(seqlen, windows))
    return job, Machine(GPUS[options.gpu], gpus, options.gpus_per_host, Rates(**options.rates))


def _arguments_of(strategy: object) -> dict[str, Any]:
    """Return the arguments of a recipe's strategy, after checking that it is one that can be planned."""
    named: dict[str, Any] = strategy if isinstance(strategy, dict) else {"class_path": strategy}
    name, arguments = str(named.get("class_path")), named.get("init_args") or {}
    if "deepspeed" in name.lower():
        raise NotImplementedError(
            f"trainer.strategy must be ContextParallelStrategy for a plan, got {name}; for ZeRO-3, which shards "
            "weights as FSDP2 does, leave that recipe out. Lower stages keep whole weights, and cannot be planned."
        )
    if (copies := arguments.get("replicate_size", 1)) != 1:
        raise NotImplementedError(
            f"replicate_size must be 1 for a plan, got {copies}; plan one copy, on 1/{copies} of the GPUs, without it."
        )
    return arguments


def _sizes(arguments: dict[str, Any], options: Namespace) -> tuple[int, int, int]:
    """Return the number of GPUs, of sequences at a time, and of GPUs that share a sequence."""
    dp, cp = (arguments.get(f"{axis}_parallel_size", "auto") for axis in ("data", "context"))
    gpus = (8 if cp == "auto" else cp if dp == "auto" else dp * cp) if options.gpus is None else options.gpus
    if options.cp is not None:
        dp, cp = "auto", options.cp
    if isinstance(cp, int) and cp > 0 and dp == "auto" and gpus % cp:
        raise ValueError(f"--cp must divide --gpus ({gpus}), got {cp}; change one of them.")
    return gpus, *mesh_sizes(dp, cp, gpus)


def _check_impl(impl: str, shape: ModelShape) -> None:
    """Raise an error for a kernel that is unknown, or does not take the model's heads."""
    if impl not in ("auto", *IMPLS):
        raise ValueError(f"model.impl must be 'auto' or one of {IMPLS}, got {impl!r}; leave it out for 'auto'.")
    check_backward(impl, shape.head_dim, deterministic=False)
    if rounds(impl):
        sizes = shape.head_dim, shape.value_dim
        q, v = (torch.empty(1, 1, 1, size, dtype=torch.bfloat16, device="meta") for size in sizes)
        implementation("reference_fp8", q, q, v)  # takes the head_dims of hopper_fp8, on any device


def visible_fraction(
    seqlen: int, windows: Sequence[int | ChunkedAttention | None], bounds: Sequence[int] | None = None
) -> float:
    """Return the fraction of causal pairs that windows and chunks leave visible, averaged over the layers.

    Args:
        bounds: bounds of the documents in the sequence, from 0 to its length; None is one document.
    """
    return count_visible_pairs(windows, bounds or (0, seqlen)) / (len(windows) * visible_pairs(seqlen))


def _tokens(text: str) -> int:
    unit = _UNITS.get(text[-1:].lower(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal():
        raise ValueError(f"--seqlen must be a number of tokens, got {text!r}; write 1048576, 1024k or 1m.")
    return int(number) * unit


def _print(plan: dict[str, Any]) -> None:
    """Print a plan: memory, time, speed, the longest sequence, and the verdict."""
    out, job, machine = console(), plan["job"], plan["machine"]
    limit, model = machine["gpu"]["memory_bytes"], job["model"]
    out.print(
        f"{plan['parameters'] / 1e9:.2f} B parameters, {job['seqlen']:,} tokens over {job['cp_size']} of "
        f"{machine['num_gpus']} {machine['gpu']['name']}, {job['precision']}, checkpointing {job['checkpointing']}, "
        f"{'with' if job['liger'] else 'without'} Liger"
        + (f", transport {plan['transport']}" if plan["transport"] else "")
    )
    memory = {name: value / GIB for name, value in plan["memory_bytes"].items()}
    out.print(
        _table(f"memory of a GPU at {plan['memory_at']}", "GiB", memory, f"in all, of {limit / GIB:.1f}"),
        _table("time of a step", "s", plan["step_seconds"], "step"),
    )
    in_fp8 = rounds(job["impl"]) or job["float8"]
    of_fp8 = f", {100 * plan['mfu'] / FP8_PER_BF16:.0f}% of the FP8 peak" if in_fp8 else ""
    out.print(
        f"{plan['tokens_per_second']:,.0f} tokens/s, {plan['model_tflops_per_gpu']:.0f} model TFLOP/s a GPU, "
        f"MFU {100 * plan['mfu']:.0f}%{of_fp8} (attention's backward counts as twice its forward, recomputation not)"
    )
    if machine["num_gpus"] > machine["gpus_per_host"]:
        out.print("no run over several hosts has been measured: these times rest on assumed rates (docs/hosts.md)")
    if plan["host_memory_bytes"]:
        out.print(f"memory of a host for offloaded checkpoints: {plan['host_memory_bytes'] / GIB:.0f} GiB")
    if plan["network_bytes"]:
        out.print(f"K, V and gradients that a NIC receives in a step: {plan['network_bytes'] / GIB:.1f} GiB")
    out.print(f"longest sequence that fits: {plan['longest_sequence']:,} tokens")
    if (split := plan["fastest_split"]) and split["cp"] != job["cp_size"]:
        out.print(
            f"fastest split of these GPUs that fits: --cp {split['cp']}, {split['dp']} sequences in a step, "
            f"{split['tokens_per_second']:,.0f} tokens/s"
        )
    for line in _verdict(plan):
        out.print(line)
    if (computed := model["computed_parameters"] / model["matmul_parameters"]) > 1.01:
        out.print(
            f"its code computes experts also for tokens that are not sent to them: {computed:.1f} times the products "
            "that MFU counts"
        )
    out.print("assumed: " + ", ".join(f"{name} {value:g}" for name, value in machine["rates"].items()))


def _table(title: str, unit: str, parts: dict[str, float], total: str) -> Table:
    """Return a table of parts and their sum."""
    table = Table(title, unit)
    for name, value in parts.items():
        table.add_row(name, f"{value:.2f}")
    table.add_section()
    table.add_row(total, f"{sum(parts.values()):.2f}")
    return table


def _verdict(plan: dict[str, Any]) -> list[str]:
    """Return the lines that say if the job fits, and what makes it fit."""
    if plan["fits"]:
        return ["[green]It fits.[/]"]
    remedy, lines = plan["remedy"], ["[red]It does not fit.[/]"]
    if "changes" in remedy:
        changes = ", and ".join(remedy["changes"])
        kept = remedy["host_memory_bytes"]
        of_host = f", and needs {kept / GIB:.0f} GiB of a host's memory" if kept else ""
        lines.append(f"cheapest change: {changes}; a step then takes {remedy['seconds']:.1f} s{of_host}")
        lines.append(f"  to plan or train with it, add: {remedy['flags']}")
    if remedy["gpus"]:
        lines.append(
            f"without a change it fits over {remedy['gpus']} GPUs: --gpus {remedy['gpus']} --cp {remedy['cp']}"
        )
    if len(lines) == 1:
        shorter = "shorten the sequence" if plan["longest_sequence"] else "take more GPUs, or a smaller model"
        lines.append(f"no change known here makes it fit; {shorter}")
    return lines
