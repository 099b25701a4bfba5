"""A job of ranks in new processes, one of which meets a fault in its rings, and what each rank leaves behind.

    job = Job(2, transport="copy_engine", fault="dies", device="cuda")
    codes, texts = job.finish()

The ranks begin with calls that succeed; then one of them dies, raises or sleeps, before its next call or, over the
shared memory of CPU processes, in the middle of one.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import ringflash
from ringflash.recurrent.messages import states_before
from ringflash_kernels import reference
from tests.helpers import shared_gpu
from tests.helpers.peer_memory import copy_engine, heads_in_shared_memory
from tests.helpers.ranks import Ranks, free_port

GOOD_STEPS = 3
RECURRENT = "recurrent"  # in place of a transport: states of a recurrence, over NCCL
FOR_EVER_S = 3600.0
LATE_S = 6.0  # longer than a process takes to end


class Task(NamedTuple):
    """A rank's instructions."""

    rank: int
    size: int
    port: int
    transport: str
    fault: str  # dies, raises, exits, sleeps, is late, or none
    device: str
    impl: str
    victim: int
    timeout_s: float


class Job:
    """Started at once.

    Args:
        size: ranks; on GPUs one each, as far as there are any.
        victim: the rank that meets the fault.
        timeout_s: for `ringflash.set_timeout`.
    """

    def __init__(
        self, size: int, *, transport: str, fault: str, device: str, impl: str, victim: int = 1, timeout_s: float
    ) -> None:
        self._ranks: list[Ranks] = []
        self.ended: list[int] = []  # ranks in the order in which `finish` saw them end
        environment = {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "False"}  # the store is of rank 0
        port = free_port()
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = shared_gpu.visible(size)
        for rank in range(size):
            task = Task(rank, size, port, transport, fault, device, impl, victim, timeout_s)
            leaves = fault == "none" or (fault == "raises" and rank == victim)  # its interpreter, in order
            processes = multiprocessing.get_context("spawn") if device == "cuda" or leaves else None
            arguments = "tests.helpers.faulty_job", json.dumps(task)
            self._ranks.append(Ranks(*arguments, num_ranks=1, processes=processes, **environment))

    def finish(self, limit_s: float) -> tuple[list[int | None], list[str]]:
        """Exit codes and all that was printed, by rank; a rank that does not end in time has no code and is killed."""
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = [None] * len(self._ranks)
        while None in codes and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [rank.statuses()[0] for rank in self._ranks]
            self.ended += [i for i, code in enumerate(codes) if code is not None and i not in self.ended]
        self.close()
        return codes, [rank.output() for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def main(task: Task) -> None:
    torch.set_num_threads(1)
    device = torch.device(task.device)
    if device.type == "cuda":
        device = shared_gpu.use_gpu(task.rank, task.size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{task.port}", rank=task.rank,
        world_size=task.size, timeout=timedelta(minutes=10),
    )  # fmt: skip
    ringflash.set_timeout(task.timeout_s)
    with ExitStack() as patches:
        if device.type == "cpu":
            for patch in _for_the_cpu(task.transport):
                patches.enter_context(patch)
        elif task.fault == "none":
            patches.enter_context(mock.patch("ringflash.comm.watchdog.thread._PERIOD_S", 0.005))
        step = _Step(task, device)
        for _ in range(GOOD_STEPS):
            want = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"rank {task.rank} has done {GOOD_STEPS} steps", flush=True)
        if task.fault == "none" and device.type == "cuda":
            step.with_graphs()
        elif task.fault != "none" and task.rank == task.victim:
            _plant(task, device)
        got = step()
        if task.fault == "is late" and task.rank != task.victim:
            return  # with calls in flight
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(got, want)
    print(f"rank {task.rank} has ended well", flush=True)
    if task.fault == "none":
        dist.barrier()  # rank 0 keeps the store
        dist.destroy_process_group()


def _for_the_cpu(transport: str) -> list[Any]:
    """Rings over shared memory, whose barriers do not give up before the watch; and a watch in a hurry."""
    return [
        copy_engine() if transport == "copy_engine" else heads_in_shared_memory(),
        mock.patch("tests.helpers.peer_memory.TIMEOUT_S", FOR_EVER_S),
        mock.patch("ringflash.comm.watchdog.store.ANSWER_S", 4.0),
        mock.patch("ringflash.comm.watchdog.thread.END_S", 8.0),
    ]


def _plant(task: Task, device: torch.device) -> None:
    """The fault: at once on GPUs, whose hosts do not wait; elsewhere in the first section of the next backward."""
    if device.type == "cuda":
        return _fail(task)

    def fail(*args: Any, **kwargs: Any) -> None:
        _fail(task)

    reference.ReferenceBackward.add = fail  # type: ignore[method-assign]


def _fail(task: Task) -> None:
    if task.fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.fault == "raises":
        raise ValueError("planted")
    if task.fault == "exits":  # as a program does that has handled an error
        sys.exit(3)
    if task.fault == "is late":
        return time.sleep(LATE_S)
    time.sleep(FOR_EVER_S)


class _Step:
    """A forward and backward, on the same values each time."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        head_dim, dtype = (128, torch.bfloat16) if device.type == "cuda" else (16, torch.float32)
        self.qkv = tuple(
            torch.zeros(1, 512 if device.type == "cuda" else 8, heads, head_dim, device=device, dtype=dtype)
            .normal_()
            .requires_grad_()
            for heads in (4, 2, 2)
        )

    def __call__(self) -> torch.Tensor:
        if self.task.transport == RECURRENT:
            q = self.qkv[0]
            out = q + states_before(q.sum(1), dist.group.WORLD).sum(0)[:, None]
            torch.autograd.grad(out, q, torch.ones_like(out))
            return out.detach()
        by_default = self.device.type == "cpu" and self.task.transport == "copy_engine"  # refused there by name
        transport = "auto" if by_default else self.task.transport
        out = ringflash.ring_attention(
            *self.qkv, group=dist.group.WORLD, transport=transport, impl=self.task.impl, deterministic=True
        )
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, self.qkv, torch.ones_like(out))
        return out.detach()

    def with_graphs(self) -> None:
        """Calls under way while something is captured, and calls that are captured, with the watch asking meanwhile."""
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        number = torch.zeros(1, device=self.device).add_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(2_000_000_000)  # the ring behind it is under way until then
            self()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin()
            number.add_(1)
            time.sleep(0.3)
            number.add_(1)
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        assert number.item() == 3.0

        with torch.cuda.stream(side):
            want = self()
        torch.cuda.synchronize()
        ring = torch.cuda.CUDAGraph()
        with torch.cuda.graph(ring, stream=side):
            captured = self()
            time.sleep(0.1)
        ring.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, want)
        for _ in range(50):
            self()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(Task(*json.loads(sys.argv[1])))
