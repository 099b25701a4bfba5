"""Repeated calls ask for what ordinary ones ask for, in the same order and on the same streams. CPU, one process.

The host code of the real kernels runs over streams and a launcher that only write a log. There, an address is an offset
in an input or in an allocation of the call, or that of memory that stays. Repeated calls ask from Python, or by lists
of commands of a driver whose functions write the same log.
"""

import ctypes
import gc
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock
from weakref import WeakValueDictionary

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.attention import gather_by_heads, schedule, sections
from ringflash.attention.gather_by_heads import GatherAttention
from ringflash.attention.inputs import BackwardInputs
from ringflash.attention.recording import recorder, repeated_launch, step_lists, tape
from ringflash.attention.recording.step_lists import RecordedStep, Role
from ringflash.attention.recording.steps import Repetition, allocate_together_step, allocator
from ringflash.attention.sections import Sections
from ringflash.comm import call_numbers, driver, event_pool
from ringflash.comm.call_numbers import CallNumber
from ringflash.comm.command_issuer import compiled
from ringflash.comm.driver_commands import record_command
from ringflash.comm.transport import copy_engine, gpu_areas
from ringflash.comm.watchdog import CallInFlight
from ringflash.sequence.mask import SequenceMask
from ringflash_kernels.api import needs_row_max, rounds
from ringflash_kernels.hopper import launcher
from ringflash_kernels.hopper.launcher import Launch, Launcher
from tests.emulator.host import cuda_properties

Inputs = tuple[torch.Tensor | None, ...]


class Log(TorchDispatchMode):
    """Requests of one call to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []
        self.stream: Any = "caller"
        self.num_records = 0
        self.numbers: dict[int, int] = {}  # of the last records of events, by their handles
        self.awaited: list[tuple[Any, ...]] = []  # words of the peers
        self.events: list[Any] = []
        self.unread: list[torch.Tensor] = []
        self.inputs: Inputs = ()
        self.allocated: list[tuple[int, int, StorageWeakRef | None, str]] = []

    def say(self, *line: Any) -> None:
        for index, (_first, size, alive, stream) in enumerate(self.allocated):
            if alive is not None and alive.expired():
                self.allocated[index] = -1, size, None, stream
                self.lines.append(("freed", stream, index))
        self.lines.append(line)

    def place(self, address: int) -> Any:
        """Return an address as an input or an allocation and the offset there, or itself."""
        offsets = [
            (address - x.data_ptr(), index)
            for index, x in enumerate(self.inputs)
            if x is not None and x.data_ptr() <= address < x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
        ]
        if offsets:
            return "input", min(offsets)
        for index, (first, size, alive, _) in enumerate(self.allocated):
            if alive is not None and 0 <= address - first < max(size, 1):
                return "allocated", index, address - first
        return address

    def launch(self, *args: Any) -> None:
        """Stand in for the function with which triton launches."""
        self.say("launch", *[self.value(x) for x in args])

    def value(self, x: Any) -> Any:
        if hasattr(x, "data_ptr"):
            return self.place(x.data_ptr())
        if hasattr(x, "block_shape"):
            return "box", self.place(x.base.data_ptr()), x.shape, x.strides, x.block_shape
        return self.place(x) if isinstance(x, int) else x

    def copy(self, stream: str, target: int, source: int, num_bytes: int) -> None:
        self.say("copy", stream, self.place(target), self.place(source), num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or "nan" in str(args[1:]) or "fill_.Tensor" in str(func):  # new memory of all tests
            return out
        if func is torch.ops.aten.copy_.default:
            self.copy(self.stream, args[0].data_ptr(), args[1].data_ptr(), args[0].nbytes)
            return out
        made = [x for x in (out,) if isinstance(x, torch.Tensor) and x is not args[0]]
        name = "empty" if func in recorder.ALLOCATIONS else str(func)
        on_host = bool(made) and made[0].dtype == torch.int64  # the words of the peers
        if not on_host:
            self.say(name, self.stream, *[(x.shape, x.stride(), x.dtype) for x in made])
            self.lines.append([self.value(x) for x in args] if func not in recorder.ALLOCATIONS else [])
        for x in made:
            self.allocated.append((x.data_ptr(), x.nbytes, StorageWeakRef(x.untyped_storage()), self.stream))
        return out


class Stream:
    """A stream that writes to the log of the present call."""

    def __init__(self, name: str = "stream", **_: object) -> None:
        self.name, self.cuda_stream, self.device_index = str(name), len(STREAMS), 0
        STREAMS.append(self.name)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """An event that writes to the log of the present call."""

    def __init__(self) -> None:
        self.cuda_event = next(HANDLES)
        ALIVE[self.cuda_event] = self

    def record(self, stream: Stream) -> None:
        LOGS[-1].events.append(self)
        record(self.cuda_event, stream.cuda_stream)

    def wait(self, stream: Stream) -> None:
        wait(stream.cuda_stream, self.cuda_event)


def record(event: int, stream: int) -> int:  # cuEventRecord
    log = LOGS[-1]
    log.say("record", STREAMS[stream])
    log.num_records += 1
    log.numbers[event] = log.num_records
    return 0 if event in ALIVE else 400


def wait(stream: int, event: int, flags: int = 0) -> int:  # cuStreamWaitEvent
    LOGS[-1].say("wait", STREAMS[stream], LOGS[-1].numbers[event])
    return 0


HANDLES = itertools.count(1000)
ALIVE = WeakValueDictionary[int, Event]()
STREAMS: list[str] = []  # names, by handle
LOGS: list[Log] = []  # the last one is that of the present call
CALLER = Stream("caller")


class Memory(copy_engine.CopyEngine):
    """Memory of rank 0 of 2, whose barriers and copies write to the log."""

    def __init__(self) -> None:
        gpu_areas.GpuAreas.__init__(self, torch.device("cpu"))
        self.rank, self.group = 0, cast(Any, None)
        self.peer: dict[str, torch.Tensor] = {}
        self._named_streams = {name: cast(Any, Stream(name)) for name in ("pull", "even", "odd", "begin", "end")}

    def reserve(self, name: str, num_bytes: int) -> None:
        if name not in self._areas or self._areas[name].numel() < num_bytes:
            self._retire(name)
            self._areas[name], self.peer[name] = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def view(self, name: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        area = (self.peer if rank else self._areas)[name]
        return area[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _pass_barrier(self, channel: int) -> None:
        LOGS[-1].say("barrier", LOGS[-1].stream, channel)


class Run:
    """triton's launcher of a kernel."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launch = lambda *every: LOGS[-1].launch(*every)

    def __call__(self, *every: Any) -> None:
        self.launch(*every)


def launch(kernel: Launcher, variant: Any, num_programs: int, *args: Any, **constants: Any) -> None:
    """Stand in for `Launcher.__call__`."""
    head = num_programs, 1, 1, STREAMS.index(LOGS[-1].stream), id(kernel)
    made = Launch(Run(), head, (*args, *constants.values()))
    made.repeat(made.args)
    if launcher.observer.tell is not None:
        launcher.observer.tell(made)


def compare_later(
    group: Any, event: Any, number: CallNumber, words: torch.Tensor, senders: list[int], _: object
) -> None:
    """Stand in for `call_numbers.compare_later`."""
    LOGS[-1].unread.append(words)
    LOGS[-1].awaited.append((LOGS[-1].numbers[event.cuda_event], LOGS[-1].place(words.data_ptr()), number, senders))


def is_param(x: Any) -> bool:
    """True for what the driver passes to a kernel: a number, an address or a descriptor."""
    return type(x) is int or (type(x) is tuple and x[0] == "box")


class FakeDriver(driver.Driver):
    """A driver that writes to the log of the present call. A captured launch writes to a log of its own."""

    error = 0  # of copies

    def __init__(self) -> None:
        self.launches = list[Any]()
        self._library = SimpleNamespace(cuGetErrorString=self.explain)
        stands_in = record, wait, self.write, self.copy, self.launch, self.replace
        numbers = 2, 3, 4, 4, 11, 2
        self.kept = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * count)(function)
            for function, count in zip(stands_in, numbers, strict=True)
        ]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self.kept]
        self.functions = (ctypes.c_void_p * len(addresses))(*addresses)
        self.issue = compiled()

    def write(self, stream: int, address: int, word: int, flags: int) -> int:
        LOGS[-1].say("aten.fill_.Scalar", STREAMS[stream])
        LOGS[-1].lines.append([LOGS[-1].place(address), word])
        return 0

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> int:
        LOGS[-1].copy(STREAMS[stream], target, source, num_bytes)
        return self.error

    def explain(self, error: int, text: Any) -> None:
        text._obj.value = f"as {error}".encode()

    def replace(self, at: int, address: int) -> int:
        ctypes.c_uint64.from_address(at).value = address
        return 0

    @contextmanager
    def _captured(self, launch: Callable[[Any], object]) -> Iterator[Any]:
        log = Log()
        LOGS.append(log)
        log.place = lambda address: address  # type: ignore[method-assign]
        launch(CALLER)
        LOGS.pop()
        self.launches.append(log.lines[0])
        given = [x for x in log.lines[0] if is_param(x)]
        params = [(ctypes.c_uint64 * 16)(x[1] if isinstance(x, tuple) else x) for x in given]
        self.sizes = [128 if isinstance(x, tuple) else 8 for x in given]
        self.kept += params
        found = (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))
        yield driver._NodeParams(function=len(self.launches), params=found)

    def _sizes(self, node: Any) -> list[int]:
        return self.sizes

    def launch(self, function: int, *others: int) -> int:
        *_, stream, params, _ = others
        log, template = LOGS[-1], list(self.launches[function - 1])
        numbers = [place for place, x in enumerate(template) if is_param(x)]
        for place, param in zip(numbers, (ctypes.c_uint64 * len(numbers)).from_address(params), strict=True):
            x, got = template[place], log.place(ctypes.c_int64.from_address(param).value)
            template[place] = ("box", got, *x[2:]) if isinstance(x, tuple) else got
        if template[0] == "barrier":
            template[1] = STREAMS[stream]
        else:
            template[4] = stream
        log.say(*template)
        return 0


def use_driver(monkeypatch: pytest.MonkeyPatch, known: FakeDriver | None) -> None:
    """Let calls find this driver, or none."""
    for module in (recorder, repeated_launch, step_lists, driver):
        monkeypatch.setattr(module, "driver", lambda: known)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams, launches and copies that only write to the log."""
    cuda = SimpleNamespace(Stream=Stream, set_stream=lambda x: setattr(LOGS[-1], "stream", x.name))
    monkeypatch.setattr(gpu_areas, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu_areas, "current_stream", lambda _: CALLER)
    monkeypatch.setattr(Launcher, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(
        copy_engine.Copies,
        "__call__",
        lambda copies, stream: [LOGS[-1].copy(stream.name, *each) for each in zip(*copies._arrays, strict=True)],
    )
    monkeypatch.setattr(step_lists, "new_event", lambda _: Event())
    monkeypatch.setattr(event_pool, "new_event", lambda _: Event())
    monkeypatch.setattr(call_numbers, "compare_later", compare_later)
    with cuda_properties(132):
        yield


def inputs(shapes: list[tuple[int, ...]], one_storage: bool) -> list[torch.Tensor]:
    """Return tensors of the same strides, side by side in one storage or not."""
    heads = sum(shape[2] for shape in shapes)
    rows = [torch.zeros(*shapes[0][:2], heads, 128, dtype=torch.bfloat16) for _ in shapes]
    firsts = accumulate((shape[2] for shape in shapes), initial=0)
    return [
        rows[0 if one_storage else index][..., first : first + shape[2], : shape[3]]
        for index, (shape, first) in enumerate(zip(shapes, firsts, strict=False))
    ]


class Case(NamedTuple):
    """A kind of call."""

    impl: str = "hopper"
    dims: tuple[int, int] = (128, 128)
    num_sections: int = 3
    num_blocks: int = 1
    deterministic: bool = False
    window: tuple[int, int] = (-1, -1)
    parts: bool = False


CASES = {
    "one section": Case(num_sections=1), "sections": Case(num_sections=5), "blocks": Case(num_blocks=2),
    "in order": Case(dims=(96, 96), deterministic=True), "wide": Case(dims=(256, 256)), "window": Case(window=(3, 0)),
    "narrow values": Case(dims=(192, 128)), "in two parts": Case(parts=True),
    "fp8": Case("hopper_fp8_all"), "fp8, blocks": Case("hopper_fp8_scores", (64, 64), 2, 2),
}  # fmt: skip


class Calls:
    """Forwards and backwards of one form."""

    def __init__(self, case: Case) -> None:
        rows, multiple = (256, 128) if rounds(case.impl) else (8, 1)
        mask = SequenceMask(2 * rows, True, case.window)
        self.case, self.rows, self.memory = case, rows, Memory()
        self.blocks: tuple[schedule.KeyBlock, ...] = (schedule.plan_single_block(mask, 2, 0, "zigzag", multiple),)
        if case.num_blocks > 1:
            self.blocks = schedule.plan_blocks(mask, 2, 0, "zigzag", (1,) * case.num_blocks, multiple)

    def log(
        self,
        number: int,
        *,
        repeat: bool,
        one_storage: bool = False,
        gradient: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Any]:
        """Make a forward and a backward, and return their lines.

        Args:
            gradient: makes dout from out.
        """
        case, (k_dim, v_dim), count = self.case, self.case.dims, self.case.num_sections
        shapes = [(1, self.rows, n * count, dim) for n, dim in ((2, k_dim), (1, k_dim), (1, v_dim), (2, v_dim))]
        q, k, v, dout = (x.detach() for x in inputs(shapes, one_storage))
        row_max = torch.zeros(1, 2 * count, self.rows) if needs_row_max(case.impl) else None
        heads, lines = (1,) * count, list[Any]()
        call = GatherAttention(
            self.blocks, self.memory, case.impl, 1.0, case.deterministic, CallNumber(number), rounds(case.impl)
        )
        watched = [CallInFlight(0, 0, name, 0.0) for name in ("forward", "backward")]
        with (
            mock.patch.object(sections, "choose_sections", lambda *_: Sections(heads, heads)),
            mock.patch.object(sections, "PUBLISHED_BYTES", 0 if case.parts else 1 << 40),
            mock.patch.object(gather_by_heads, "can_repeat", lambda *_: repeat),
            mock.patch.object(gather_by_heads, "watching", lambda *_: watched[len(lines) > 0]),
        ):
            out, lse = lines_of(lines, call.forward, q, k, v, row_max)
            dout = dout if gradient is None else gradient(out)
            saved = dout, torch.zeros_like(lse), q, k, v, out, lse, row_max
            lines_of(lines, lambda *given: call.backward(BackwardInputs(*given)), *saved)
        return lines + [
            (LOGS[index - 2].numbers[event.cuda_event], what, values)
            for index, call_in_flight in enumerate(watched)
            for event, what, values in call_in_flight.markers
        ]


def apart(lines: list[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
    """Return the requests to the device, and what was allocated and freed, with the number of requests before it.

    Memory is listed by stream, because torch gives a stream only what this stream has freed. What it frees between two
    allocations is sorted.
    """
    requests, memory = list[Any](), dict[str, list[tuple[int, Any, int]]]()
    for line in lines:
        if line and line[0] in ("freed", "empty"):
            of_stream = memory.setdefault(line[1], [])
            num_before = sum(each[0] == "empty" for _, each, _ in of_stream)
            of_stream.append((2 * num_before + (line[0] == "empty"), line, len(requests)))
        elif line:
            requests.append(line)
    in_order = [sorted(memory[stream], key=lambda entry: (entry[0], str(entry[1]))) for stream in sorted(memory)]
    return requests, [entry[1:] for of_stream in in_order for entry in of_stream]


def lines_of(lines: list[Any], call: Callable[..., tuple[torch.Tensor, ...]], *given: torch.Tensor | None) -> Any:
    """Make a call, and append its lines."""
    log = Log()
    log.inputs = given
    LOGS.append(log)
    with log:
        results = call(*given)
    log.say("results", *[(log.place(x.data_ptr()), x.shape, x.stride(), x.dtype) for x in results], *log.awaited)
    lines += log.lines
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_c", [False, True])
def test_a_repeated_call_asks_for_the_same(name: str, in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, FakeDriver() if in_c else None)
    calls = Calls(CASES[name])
    for _ in range(2):  # the areas grow
        calls.log(1, repeat=False)
    ordinary = calls.log(7, repeat=False)
    calls.log(3, repeat=True)
    recorded = calls.log(7, repeat=True)
    with mock.patch.object(GatherAttention, "_run", mock.Mock(side_effect=AssertionError("not repeated"))):
        repeated = calls.log(7, repeat=True), calls.log(7, repeat=True, one_storage=CASES[name].num_blocks == 1)
    assert recorded == ordinary and len(ordinary) > 30
    requests, memory = apart(ordinary)
    for got in repeated:
        assert got == ordinary or in_c
        same, moved = apart(got)
        assert same == requests and [line for line, _ in moved] == [line for line, _ in memory]
        for (line, place), (_, now) in zip(memory, moved, strict=True):
            assert now <= place if line[0] == "empty" else now >= place


@pytest.fixture
def without_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory that is not filled: a list would end before each fill."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))


@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_list_is_allocated_together(name: str, without_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests are the same, and each address stands for the same memory in all of them."""
    use_driver(monkeypatch, FakeDriver())
    calls = Calls(CASES[name])
    for _ in range(2):  # the areas grow
        calls.log(1, repeat=False)
    ordinary = calls.log(7, repeat=False)
    for _ in range(2):
        calls.log(3, repeat=True)
    repeated = calls.log(7, repeat=True)
    (requests, memory), (same, fewer) = apart(ordinary), apart(repeated)
    assert numbered(same, {}) == numbered(requests, {})
    assert len(fewer) < len(memory) or name != "fp8"


def numbered(lines: Any, numbers: dict[Any, int]) -> Any:
    """Return lines with a number for each address of an allocation, in the order in which they appear in their pass."""
    if not isinstance(lines, (tuple, list)):
        return lines
    if lines and lines[0] == "allocated":
        return "allocated", numbers.setdefault(tuple(lines), len(numbers))
    made = [numbered(x, numbers) for x in lines]
    if lines and lines[0] == "results":
        numbers.clear()
    return made


def test_parts_of_an_allocation_do_not_overlap() -> None:
    now = Repetition((None,), CallNumber(1), CallInFlight(0, 0, "forward", 0.0), 4, 0)
    allocate_together_step({1: 1000, 3: 512, 2: 4}, allocator("cpu"))(now)
    memory = now.tensors[1]
    assert memory is not None and memory.nbytes == 2048 and now.addresses[1] == memory.data_ptr()
    assert [address - now.addresses[1] for address in now.addresses[2:]] == [1536, 1024]


def test_a_pass_in_fp8_is_one_list(without_nan: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels write the zeros of sums, and its memory is one allocation."""
    use_driver(monkeypatch, FakeDriver())
    calls = Calls(CASES["fp8"])
    for _ in range(5):
        calls.log(1, repeat=True)
    made = [entry for entry, _ in calls.memory._cache._entries.values() if isinstance(entry, tape.Tape)]
    assert [sum(step.__qualname__.startswith("issue_step") for step in each.steps) for each in made] == [1, 1]


def test_dout_may_share_the_memory_of_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's commands then have the same address twice, and later calls two."""
    use_driver(monkeypatch, FakeDriver())
    calls = Calls(CASES["fp8"])
    for _ in range(2):
        calls.log(1, repeat=False)
    ordinary = calls.log(7, repeat=False, gradient=torch.zeros_like)
    for _ in range(2):
        calls.log(3, repeat=True, gradient=torch.Tensor.detach)
    with mock.patch.object(Run, "__call__", mock.Mock(side_effect=AssertionError("launched from Python"))):
        repeated = calls.log(7, repeat=True, gradient=torch.zeros_like)
    assert apart(repeated)[0] == apart(ordinary)[0]


def test_a_tensor_that_is_given_twice_is_not_recorded() -> None:
    """Later calls may give two."""
    made = tape.Tape(())
    x = torch.zeros(1)
    for _ in range(3):
        made.record(Memory(), (x, x), lambda tensors: (tensors[0] + tensors[1],))
    assert not made.steps


@pytest.mark.parametrize(
    "issue",
    [
        lambda x: (x.view(1),),  # a result that is an input
        lambda x: torch.stack([x, x]).unbind(),  # tensors in a list
        lambda x: (x.max(0).values,),  # two results
        lambda x: (torch.empty(1, device="meta"),),  # memory of another device
    ],
)
def test_what_cannot_be_repeated_is_not_recorded(issue: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    LOGS.append(Log())
    made = tape.Tape(())
    for _ in range(3):
        made.record(Memory(), (torch.zeros(1),), lambda tensors: issue(*tensors))
    assert made.calls == 3 and not made.steps


def test_a_repetition_leaves_the_inputs_of_other_calls() -> None:
    """An input that a backward will read must not count writes of later calls, even if they write nothing."""

    def issue(tensors: tuple[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (x,) = tensors
        x[1:].fill_(2)
        x[:0].fill_(2)
        return (x.clone(),)

    LOGS.append(Log())
    made, given = tape.Tape(()), [torch.zeros(2) for _ in range(3)]
    for x in given[:2]:
        made.record(Memory(), (x,), issue)
    (got,) = made.repeat(Memory(), (given[2],), CallNumber(1), CallInFlight(0, 0, "forward", 0.0))
    assert got.tolist() == [0, 2] and given[1]._version == 2


def test_a_recorded_call_keeps_no_tensor() -> None:
    """Not even until garbage is collected."""
    LOGS.append(Log())
    made, alive = tape.Tape(()), list[StorageWeakRef]()
    gc.disable()
    try:
        for _ in range(2):
            x = torch.zeros(2)
            (got,) = made.record(Memory(), (x,), lambda tensors: (tensors[0] + 1,))
            alive += [StorageWeakRef(each.untyped_storage()) for each in (x, got)]
        del x, got
        assert made.steps and all(each.expired() for each in alive)
    finally:
        gc.enable()


def test_without_a_driver_python_issues_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "Driver", mock.Mock(side_effect=FileNotFoundError("no gcc")))
    with pytest.warns(UserWarning, match="Python issues the work of calls, .* got FileNotFoundError: no gcc"):
        assert driver.driver.__wrapped__() is None


def test_an_error_of_the_driver_joins_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, known := FakeDriver())
    calls = Calls(Case())
    for _ in range(5):
        calls.log(1, repeat=True)
    known.error = 700
    with mock.patch.object(Memory, "join") as join, pytest.raises(RuntimeError, match="CUDA error 700: as 700"):
        calls.log(1, repeat=True)
    assert join.called and LOGS[-1].stream == "caller" and not LOGS[-1].awaited


@pytest.mark.parametrize("failing", [0, 5, 11, 17])
def test_an_error_in_a_repeated_call_joins_streams(failing: int) -> None:
    calls = Calls(Case())
    for _ in range(5):
        calls.log(1, repeat=True)
    tapes = [made for made, _ in calls.memory._cache._entries.values() if isinstance(made, tape.Tape)]
    forward = next(made for made in tapes if made.steps)
    forward.steps[failing] = mock.Mock(side_effect=MemoryError("no memory left"))
    with mock.patch.object(Memory, "join") as join, pytest.raises(MemoryError):
        calls.log(1, repeat=True)
    assert join.called and LOGS[-1].stream == "caller"


def test_a_list_ends_where_a_stream_allocates_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that another stream has freed is not given to it: sections whose queries are rounded are one list."""
    monkeypatch.setattr(step_lists, "driver", FakeDriver)
    even, odd = streams = [cast(Any, Stream(name)) for name in ("even", "odd")]
    names = {role: mock.Mock(__qualname__=role.name) for role in Role}
    section = {
        stream: [
            RecordedStep(Role.ALLOCATE, names[Role.ALLOCATE], stream, num_bytes=1 << 40),
            RecordedStep(Role.WORK, names[Role.WORK], stream, [record_command(stream.cuda_stream, 1)]),
            RecordedStep(Role.DROP, names[Role.DROP], stream),
        ]
        for stream in streams
    }
    recorded = [*section[even], *section[odd], *section[even]]
    steps = step_lists.repeated_steps(recorded, set(), Memory(), even, allocator("cpu"))
    got = [step.__qualname__.partition(".")[0] for step in steps]
    both = ["ALLOCATE", "enter_step", "ALLOCATE", "issue_step", "DROP", "DROP"]
    assert got == [*both, "enter_step", "ALLOCATE", "issue_step", "DROP"]
