"""The command `ringflash verify`: does this model train over the ring as it does on one device?"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ringflash.comm.agreement import agree
from ringflash.commands.console import console
from ringflash.sequence.layout import check_seqlen
from ringflash.sequence.mask import SequenceMask
from ringflash.verify.report import Report, print_report, to_json
from ringflash.verify.session import Session, Settings
from ringflash.verify.subject import Factory, load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TIMEOUT = timedelta(minutes=30)  # the other ranks wait while rank 0 computes the whole sequence


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("target", type=str, help="folder with config.json, or package.module:factory (docs/verify.md)")
    add("--nproc", type=int | None, default=None, help="start this many local ranks; null if torchrun has started them")
    add("--seqlen", type=int, default=256, help="tokens of the whole sequence")
    add("--layers", type=int | None, default=None, help="decoder layers of a configuration's model; null is all")
    add("--cu_seqlens", type=list[int] | None, default=None, help="bounds of packed documents, as [0,100,256]")
    add("--parents", type=list[int] | None, default=None, help="documents that they continue, or -1, as [-1,0]")
    add("--bidirectional", type=list[bool] | None, default=None, help="documents that see all of themselves")
    add("--global_tokens", type=int, default=0, help="first tokens of each path that are seen beyond the window")
    add(
        "--window",
        type=int | None,
        default=None,
        help="keys that a query sees, its own included; null reads the model's",
    )
    add("--causal", type=bool, default=True, help="false for attention and windows in both directions")
    add("--dtype", type=str | None, default=None, help="float32 or bfloat16; null is float32 on CPUs, else bfloat16")
    add("--device", type=str | None, default=None, help="cpu or cuda; null is cuda if available")
    add("--impl", type=str | None, default=None, help="attention kernel of a configuration's model (docs/fp8.md)")
    add("--seed", type=int, default=0, help="seed of the tokens, and of parameters without a checkpoint")
    add("--json", action="store_true", help="print JSON instead of the table")


def run(options: Any) -> int:
    """Run the verification, in local ranks that it starts or in the ranks of torchrun.

    Returns:
        status: 0 if cp=N trains as cp=1 does, else 1.
    Raises:
        ValueError, RuntimeError: the verification could not be run as requested.
    """
    if "RANK" in os.environ and options.nproc is None:
        return _run_rank(options)
    if options.nproc is None or options.nproc < 2:
        raise ValueError(
            f"verify must run on two ranks or more, got {options.nproc or 1}; add --nproc 2, or start it by "
            "torchrun --nproc_per_node 2 -m ringflash verify ..."
        )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=options.nproc, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=uuid4().hex, max_restarts=0,
    )  # fmt: skip
    try:
        return elastic_launch(config, _run_started_rank)(options)[0]
    except SignalException as stopped:  # the launcher has already stopped the ranks
        raise SystemExit(128 + stopped.sigval) from stopped
    except ChildFailedError as error:
        raise RuntimeError(f"every rank must answer, got {error}; see its output above.") from error


def _run_started_rank(options: Any) -> int:
    """Return the status of a rank that `run` started; rank 0 prints an error, which is status 2."""
    try:
        return _run_rank(options)
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
        if os.environ["RANK"] == "0":
            print(f"ringflash verify: {error}", file=sys.stderr)
        return 2


def _run_rank(options: Any) -> int:
    if dist.is_initialized():  # keep the process group of the caller
        return _verdict(*_factory_and_settings(options), options.json)
    made, problem = None, None
    try:
        made = _factory_and_settings(options)
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as error:
        problem = error
    if problem is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise problem
    on_gpus = options.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=_TIMEOUT)
    try:
        agree(dist.group.WORLD, {}, problem)  # raises on all ranks; else the others would wait for a rank that has gone
        assert made is not None
        return _verdict(*made, options.json)
    finally:
        dist.destroy_process_group()


def _factory_and_settings(options: Any) -> tuple[Factory, Settings]:
    settings = _settings(options)
    return load(options.target, options.layers, options.seed, options.impl), settings


def _verdict(factory: Factory, settings: Settings, as_json: bool) -> int:
    group = dist.group.WORLD
    if group is None or group.size() < 2:
        raise ValueError("verify must run on two ranks or more, got 1; pass --nproc_per_node 2 to torchrun.")
    check_seqlen(settings.seqlen, group.size(), "zigzag")
    report = _session(factory, group, settings).run()
    _show(report, as_json)
    return 0 if report.passed else 1


def _session(factory: Factory, group: dist.ProcessGroup, settings: Settings) -> Session:
    """Return the session for a factory; Lightning's Trainer runs a LightningModule."""
    if "lightning" not in sys.modules:  # a factory of a LightningModule has imported it
        return Session(factory, group, settings)
    from lightning import LightningModule

    from ringflash.verify.lightning import LightningSession

    made, problem = None, None
    try:
        made = factory(group)
    except Exception as error:  # the model is the user's code
        problem = RuntimeError(
            f"the model must be built on every rank, got {type(error).__name__}: {error}; call the factory "
            "without verify."
        )
    agree(group, {}, problem)
    is_lightning = made is not None and isinstance(made.module, LightningModule)
    return (LightningSession if is_lightning else Session)(factory, group, settings)


def _show(report: Report, as_json: bool) -> None:
    if dist.get_rank() > 0:
        return
    if as_json:
        print(to_json(report), flush=True)
    else:
        print_report(report, console())


def _settings(options: Any) -> Settings:
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {kind!r}; leave it out for the machine's own.")
    name = options.dtype or ("bfloat16" if kind == "cuda" else "float32")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {tuple(DTYPES)}, got {name!r}; leave it out for the device's own.")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window must be 1 or more, got {options.window}; 1 is only the query's own key.")
    bounds, parents, both = (
        None if x is None else tuple(x) for x in (options.cu_seqlens, options.parents, options.bidirectional)
    )
    counts = (options.global_tokens,) * max(1, len(bounds or ()) - 1) if options.global_tokens else None
    SequenceMask(options.seqlen, options.causal, (-1, -1), bounds, parents, both, counts)  # raises unless they fit
    device = torch.device(kind)
    if kind == "cuda":
        ranks = int(os.environ["LOCAL_RANK"]) + 1
        if torch.cuda.device_count() < ranks:
            raise RuntimeError(
                f"device cuda must have a GPU for every rank, got {torch.cuda.device_count()} for {ranks} or more; "
                "start fewer ranks, or add --device cpu."
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return Settings(
        options.seqlen, DTYPES[name], device, options.cu_seqlens, options.window, options.seed, options.causal,
        options.parents, options.bidirectional, options.global_tokens,
    )  # fmt: skip
