"""The command `ringflash plan`: will a training fit, how long is a step, and what can be changed?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.table import Table

from ringflash.commands.plan.job import Checkpointing, Fp8Backward, Precision, TrainingJob
from ringflash.commands.plan.machine import GIB, GPUS, Machine, Rates
from ringflash.commands.plan.memory import worst_moment
from ringflash.commands.plan.read import model_of
from ringflash.commands.plan.search import (
    CHANGES,
    bytes_of_a_host,
    cheapest_change,
    fewest_gpus,
    fits,
    longest_sequence,
)
from ringflash.commands.plan.timing import step_time
from ringflash.console import console
from ringflash.flops import FP8_PER_BF16, ChunkedAttention, count_visible_pairs, visible_pairs
from ringflash.huggingface.weights import laid_over, read_config
from ringflash.memory import Memory

_MEMORY = [field.name for field in fields(Memory)]
_UNITS = {"k": 1 << 10, "m": 1 << 20}


_SWITCH: dict[str, Any] = {"type": bool, "nargs": "?", "const": True}
_OPTIONS: dict[str, dict[str, Any]] = {
    "seqlen": {"type": str, "help": "tokens of a sequence: 1048576, 1024k or 1m"},
    "gpus": {"type": int, "help": "GPUs in all; null is as many as the recipe has share a sequence, or 8"},
    "gpus_per_host": {"type": int, "default": 8, "help": "GPUs of a host"},
    "gpu": {"choices": list(GPUS), "default": "H200", "help": "kind of GPU"},
    "cp": {"type": int, "help": "GPUs that share a sequence; null is the recipe's, else all"},
    "window": {"type": int, "help": "keys to the left that a query sees; null is the model's own"},
    "visible": {
        "type": float, "default": 1.0, "help": "part of the causal and windowed pairs that packed documents leave",
    },
    "network_gbytes": {"type": float, "default": 50.0, "help": "GB/s of a GPU's NIC"},
    "host_gbytes": {"type": float, "default": 50.0, "help": "GB/s between GPU and host"},
    "host_memory_gib": {"type": float, "help": "GiB of a host's memory; null is not compared"},
    "precision": {
        "choices": list(get_args(Precision)),
        "help": "weights in fp32, or in bf16; null is the recipe's, else bf16-mixed",
    },
    "checkpointing": {
        "choices": list(get_args(Checkpointing)),
        "help": "what a layer keeps (docs/memory.md); null is the recipe's, else attention_kept",
    },
    "mlp_tile_tokens": {
        "type": int, "help": "tokens whose MLP is computed at a time, 0 is all; null is the recipe's, else 0",
    },
    "offload_checkpoints": _SWITCH | {"help": "keep checkpoints on the host; null is the recipe's, else false"},
    "liger": _SWITCH | {"help": "count Liger's kernels; null is the recipe's (auto counts as true), else false"},
    "accumulates": _SWITCH | {"help": "a step has several sequences in turn; null is the recipe's, else false"},
    "fp8_backward": {
        "choices": list(get_args(Fp8Backward)), "help": "attention in FP8 with this backward; null is the recipe's",
    },
    "offload_optimizer": _SWITCH | {"default": False, "help": "keep and step the optimizer on the host (DeepSpeed)"},
    "rates": {
        "type": dict[str, float], "default": {},
        "help": 'assumptions to replace, as {"products": 0.6}; the plan prints all',
    },
    "json": {"action": "store_true", "help": "print JSON"},
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, the sequence, the machine, and the options of the recipe."""
    words = "checkpoint directory or config.json; or a recipe (.yaml) and those laid over it, with a length"
    parser.add_argument("model", type=Path, nargs="+", help=words)
    for name, keywords in _OPTIONS.items():
        parser.add_argument(f"--{name}", **keywords)


def run(options: Namespace) -> int:
    """Print the plan and return 0 if the job fits, else 1."""
    named = _model(options.model)
    gpus = (named.cp_size or 8) if options.gpus is None else options.gpus
    job, machine = _job(options, named, gpus), _machine(options, gpus)
    if job.world_size != machine.num_gpus:
        raise ValueError(f"--cp must divide --gpus ({machine.num_gpus}), got {job.cp_size}; change one of them.")
    plan = make_plan(job, machine)
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        _print(plan)
    return 0 if plan["fits"] else 1


def make_plan(job: TrainingJob, machine: Machine) -> dict[str, Any]:
    """Return everything that the command prints, in bytes, seconds and tokens."""
    time, local = step_time(job, machine), job.seqlen * job.dp_size
    moment, memory = worst_moment(job, machine)
    job = job.on_hosts(machine.gpus_per_host)
    plan: dict[str, Any] = {
        "job": asdict(job),
        "machine": asdict(machine),
        "parameters": job.model.parameters,
        "memory_bytes": memory,
        "memory_at": moment,
        "host_memory_bytes": bytes_of_a_host(job, machine),
        "fits": fits(job, machine),
        "longest_sequence": longest_sequence(job, machine),
        "step_seconds": time.parts,
        "mfu": time.mfu,
        "model_tflops_per_gpu": time.model_tflops,
        "tokens_per_second": local / time.step,
        "assumptions": job.model.assumptions,
    }
    if not plan["fits"]:
        plan["remedy"] = _remedy(job, machine)
    return plan


def _remedy(job: TrainingJob, machine: Machine) -> dict[str, Any]:
    gpus = fewest_gpus(job, machine)
    remedy: dict[str, Any] = {"gpus": gpus, "cp": gpus and gpus // job.dp_size}
    cheapest = cheapest_change(job, machine)
    if cheapest is not None:
        names, changed = cheapest
        change = {key: value for name in names for key, value in CHANGES[name].items()}
        remedy |= {"changes": list(names), "seconds": step_time(changed, machine).step, **_flags(change)}
    return remedy


def _flags(change: dict[str, object]) -> dict[str, str]:
    """Return a change as flags of this command and of the recipes; AdamW on the host needs another recipe, no flag."""
    written = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in change.items()}
    below = {"precision": "trainer", **dict.fromkeys(_MEMORY, "model.memory")}
    return {
        "plan_flags": " ".join(f"--{name} {value}" for name, value in written.items()),
        "train_flags": " ".join(f"--{below[x]}.{x} {value}" for x, value in written.items() if x in below),
    }


class _Named(NamedTuple):
    """Content of the files on the command line; a configuration without a recipe sets only `config`."""

    config: dict[str, Any]
    seqlen: int | None = None
    memory: dict[str, Any] = {}
    cp_size: int | None = None
    precision: Precision | None = None
    fp8_backward: Fp8Backward | None = None


def _job(options: Namespace, named: _Named, gpus: int) -> TrainingJob:
    config = named.config
    names = (*_MEMORY, "accumulates")
    memory = named.memory | {name: options[name] for name in names if options[name] is not None}
    asked = _tokens(options.seqlen) if options.seqlen else named.seqlen
    if asked is None:
        raise ValueError("--seqlen must be given with a configuration, got none; a recipe has its own.")
    cp_size = (named.cp_size or gpus) if options.cp is None else options.cp
    shape, windows = model_of(config)
    if options.window is not None:
        if options.window < 0:
            raise ValueError(f"--window must be 0 or more, got {options.window}; leave it out for none.")
        windows = [options.window]
    liger = memory.get("liger")  # "auto" is planned as if Liger were installed
    memory["liger"] = shape.liger is not None if liger == "auto" else bool(liger)
    return TrainingJob(
        shape,
        asked,
        cp_size,
        max(1, gpus // max(1, cp_size)),
        visible_fraction=options.visible * visible_fraction(asked, windows),
        precision=options.precision or named.precision or "bf16-mixed",
        offload_optimizer=options.offload_optimizer,
        fp8_backward=options.fp8_backward or named.fp8_backward,
        **memory,
    )


def _model(paths: list[Path]) -> _Named:
    """Read a configuration, or a recipe and the recipes laid over it."""
    if paths[0].suffix not in (".yaml", ".yml"):
        if len(paths) > 1:
            raise ValueError(
                f"a configuration must come alone, got {len(paths)} files; only recipes are laid over others."
            )
        return _Named(read_config(paths[0]))
    try:
        recipe: dict[str, Any] = {}
        for path in paths:
            recipe = lay_over(recipe, dict(yaml.safe_load(path.read_text())))
        model, data = recipe["model"], recipe["data"]
        memory = {"checkpointing": "none", **model.get("memory", {})}
        pretrained = model.get("pretrained")
        config = laid_over(read_config(Path(pretrained)) if pretrained else {}, model.get("model") or {})
        trainer = recipe.get("trainer") or {}
        _check_memory(memory, paths[-1])
        memory["accumulates"] = (trainer.get("accumulate_grad_batches") or 1) > 1
        strategy, precision = trainer.get("strategy"), trainer.get("precision")
        chosen = strategy.get("init_args") if isinstance(strategy, dict) else None  # a strategy given by name has none
        cp_size = (chosen or {}).get("context_parallel_size")
        named = _Named(
            config, data.get("init_args", data).get("seqlen"), memory, cp_size if cp_size != "auto" else None,
            precision,
            model.get("fp8_backward", "bf16") if model.get("impl") in ("hopper_fp8", "reference_fp8") else None,
        )  # fmt: skip
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{paths[0]} must be a recipe with model.model and data, got {type(error).__name__}: {error}; "
            "see recipes/lightning."
        ) from error
    _check_numbers(named, paths[-1])
    _check_strategy(strategy, paths[-1])
    if named.precision not in (None, *get_args(Precision)):
        raise ValueError(
            f"precision must be one of {get_args(Precision)} for a plan, got {named.precision!r} in {paths[-1]}; lay a "
            "recipe with one of them over it."
        )
    return named


def _check_memory(memory: dict[str, Any], path: Path) -> None:
    unknown = sorted(set(memory) - set(_MEMORY))
    if unknown:
        raise ValueError(f"memory must have the keys of recipes/lightning, got {unknown[0]!r} in {path}; remove it.")
    if memory.get("liger") not in (None, True, False, "auto"):
        raise ValueError(f"liger must be true, false or auto, got {memory['liger']!r} in {path}; correct it.")


def _check_strategy(strategy: object, path: Path) -> None:
    name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
    if isinstance(name, str) and "deepspeed" in name.lower():
        raise NotImplementedError(
            f"trainer.strategy must be ContextParallelStrategy for a plan, got {name} in {path}; ZeRO below stage 3 "
            "keeps weights whole on every GPU. Leave that recipe out for stage 3, which shards them as FSDP2 does."
        )


def _check_numbers(named: _Named, path: Path) -> None:
    numbers = {"seqlen": named.seqlen, "context_parallel_size": named.cp_size}
    for name, value in (numbers | {"mlp_tile_tokens": named.memory.get("mlp_tile_tokens")}).items():
        if value is not None and not isinstance(value, int):
            raise ValueError(f"{name} must be an integer, got {value!r} in {path}; write it in digits.")


def lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two recipes: values of `above` win, mappings are merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = lay_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def visible_fraction(
    seqlen: int, windows: Sequence[int | ChunkedAttention | None], bounds: Sequence[int] | None = None
) -> float:
    """Return the fraction of causal pairs that windows and chunks leave visible, averaged over the layers.

    Args:
        bounds: bounds of the documents in the sequence, from 0 to its length; None is one document.
    """
    if not seqlen:
        return 1.0  # a later check rejects this length
    return count_visible_pairs(windows, bounds or (0, seqlen)) / (len(windows) * visible_pairs(seqlen))


def _tokens(text: str) -> int:
    unit = _UNITS.get(text[-1:].lower(), 1)
    number = text[:-1] if unit > 1 else text
    if not number.isdecimal():
        raise ValueError(f"--seqlen must be a number of tokens, got {text!r}; write 1048576, 1024k or 1m.")
    return int(number) * unit


def _machine(options: Namespace, gpus: int) -> Machine:
    known = {field.name for field in fields(Rates)}
    unknown = sorted(set(options.rates) - known)
    if unknown:
        raise ValueError(f"--rates must name {', '.join(sorted(known))}, got {', '.join(unknown)}; remove it.")
    return Machine(
        GPUS[options.gpu], gpus, options.gpus_per_host, options.network_gbytes, options.host_gbytes,
        replace(Rates(), **options.rates), _host_memory(options.host_memory_gib),
    )  # fmt: skip


def _host_memory(gib: float | None) -> int | None:
    if gib is not None and not gib > 0:
        raise ValueError(f"--host_memory_gib must be positive, got {gib}; leave it out where it is not known.")
    return None if gib is None else int(gib * GIB)


def _print(plan: dict[str, Any]) -> None:
    out, job, machine = console(), plan["job"], plan["machine"]
    gpu = machine["gpu"]
    out.print(
        f"{plan['parameters'] / 1e9:.2f} B parameters, {job['seqlen']:,} tokens over {job['cp_size']} of "
        f"{machine['num_gpus']} {gpu['name']}, {job['precision']}, checkpointing {job['checkpointing']}, "
        f"{'with' if job['liger'] else 'without'} Liger"
        + (f", heads exchanged among the {job['exchanging']} GPUs of a host (by_host)" if job["exchanging"] > 1 else "")
    )
    out.print(_memory_table(plan), _time_table(plan))
    out.print(
        f"{plan['tokens_per_second']:,.0f} tokens/s, {plan['model_tflops_per_gpu']:.0f} model TFLOP/s a GPU, "
        f"MFU {100 * plan['mfu']:.0f}%{_of_fp8_peak(plan)} "
        f"(backward attention counted as twice the forward, nothing computed again)"
    )
    if plan["host_memory_bytes"]:
        known = machine["host_memory_bytes"]
        of_known = "" if known is None else f" of {known / GIB:.0f}"
        out.print(f"kept in the memory of a host, in addition: {plan['host_memory_bytes'] / GIB:.0f} GiB{of_known}")
    out.print(f"longest sequence that fits: {plan['longest_sequence']:,} tokens")
    for line in _verdict(plan):
        out.print(line)
    for assumption in plan["assumptions"]:
        out.print(f"assumed: {assumption}")
    out.print("assumed: " + ", ".join(f"{name} {value:g}" for name, value in machine["rates"].items()))


def _of_fp8_peak(plan: dict[str, Any]) -> str:
    in_fp8 = plan["job"]["fp8_backward"] is not None
    return f", {100 * plan['mfu'] / FP8_PER_BF16:.0f}% of the FP8 peak" if in_fp8 else ""


def _memory_table(plan: dict[str, Any]) -> Table:
    table = Table(f"memory of a GPU at {plan['memory_at']}", "GiB")
    for name, value in plan["memory_bytes"].items():
        table.add_row(name, f"{value / GIB:.1f}")
    table.add_section()
    limit = plan["machine"]["gpu"]["memory_bytes"]
    table.add_row(f"in all, of {limit / GIB:.1f}", f"{sum(plan['memory_bytes'].values()) / GIB:.1f}")
    return table


def _time_table(plan: dict[str, Any]) -> Table:
    table = Table("time of a step", "s")
    for name, value in plan["step_seconds"].items():
        table.add_row(name, f"{value:.2f}")
    table.add_section()
    table.add_row("step", f"{sum(plan['step_seconds'].values()):.2f}")
    return table


def _verdict(plan: dict[str, Any]) -> list[str]:
    if plan["fits"]:
        return ["[green]It fits.[/]"]
    remedy, lines = plan["remedy"], ["[red]It does not fit.[/]"]
    if "changes" in remedy:
        changes = ", and ".join(remedy["changes"])
        lines.append(f"cheapest change: {changes}; a step then takes {remedy['seconds']:.1f} s")
        lines.append(f"  to plan it, add:  {remedy['plan_flags']}")
        if remedy["train_flags"]:
            lines.append(f"  to train so, add: {remedy['train_flags']}")
    if remedy["gpus"]:
        lines.append(f"unchanged it fits over {remedy['gpus']} GPUs: --gpus {remedy['gpus']} --cp {remedy['cp']}")
    if len(lines) == 1:
        remedy = (
            "shorten the sequence"
            if plan["longest_sequence"]
            else "no sequence does: take more GPUs, or a smaller model"
        )
        lines.append(f"no change known here makes it fit; {remedy}")
    return lines
